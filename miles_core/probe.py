"""Imports one plugin in a process of its own, so that one that hangs, exits or crashes harms nobody.

The child is given the parent's import path, writes its verdict to a file (plugins print what they like at import), and is
killed with everything that it started when the time is up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from miles_core.discovery import PluginInfo


def probe(info: PluginInfo, timeout_s: float) -> tuple[str, str]:
    """("ok", ""), or "broken" or "hangs" with a one-line reason."""
    with tempfile.TemporaryDirectory(prefix="miles-probe-") as folder:
        verdict, errors = Path(folder, "verdict.json"), Path(folder, "stderr")
        job = {
            "path": sys.path,
            "verdict": str(verdict),
            "info": {"name": info.name, "module": info.module, "dist": info.dist, "version": info.version}
            | {"missing": info.missing, "install": info.install},
        }
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "miles_core.probe"],  # -P: the current folder may shadow what is installed
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                child.communicate(json.dumps(job).encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return "hangs", f"importing {info.module} was still running after {timeout_s:g} s, and was killed"
            except BrokenPipeError:
                pass  # it died before it read its job; its exit code says how
            finally:
                _kill(child)
        if verdict.is_file():
            answer = json.loads(verdict.read_text(encoding="utf-8"))
            return answer["state"], answer["reason"]
        last = errors.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return "broken", f"importing {info.module} {_ending(child.returncode)}" + (f": {last}" if last else "")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError):  # all gone already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ending(code: int) -> str:
    return (
        f"ended the process with {signal.Signals(-code).name}" if code < 0 else f"ended the process with exit code {code}"
    )


def main() -> None:
    """The child."""
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    from miles_core.plugins import PluginHost

    info = PluginInfo(**job["info"])
    host = PluginHost([info])
    host.load(info, needed=False)
    state = "ok" if info.state == "loaded" else "broken"
    # Whole or absent: the parent takes a missing file for a crash.
    partial = Path(job["verdict"] + ".partial")
    partial.write_text(json.dumps({"state": state, "reason": info.reason}), encoding="utf-8")
    partial.rename(job["verdict"])
    os._exit(0)  # a thread that the plugin left running must not turn "ok" into "hangs"


if __name__ == "__main__":
    main()
