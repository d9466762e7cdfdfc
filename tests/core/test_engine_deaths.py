"""An engine's worker that dies while nobody calls it is replaced at once, not at the next request."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.core import runs
from tests.core.held import hold


def worker_of(parent: int) -> int | None:
    """A process below `parent` that hosts an engine."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            below = int(stat.read_text().rpartition(")")[2].split()[1]) == parent
            if below and "miles_core.worker" in (stat.parent / "cmdline").read_text():
                return int(stat.parent.name)
        except (OSError, ValueError):
            continue
    return None


def test_X1_the_death_of_an_idle_engine_is_seen_without_a_request(tmp_path: Path):
    config = runs.write_config(tmp_path)
    file, more = hold(config)
    file.touch()  # the engine answers the first step's requests, and then the run waits for rewards
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [*runs.command(config, tmp_path / "out", *more), "--set", "engine.process=true"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=runs.environment())
        try:
            wait_for(Path(f"{file}.seen").exists)
            time.sleep(0.5)
            os.kill(worker_of(process.pid), signal.SIGKILL)
            wait_for(lambda: "engine-0 is replaced" in log.read_text())
            file.unlink()
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
    assert "engine-0 is dead: SIGKILL" in log.read_text()


def wait_for(condition, within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
