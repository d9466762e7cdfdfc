"""Whole runs with `launcher.use = "ray"`, each in a process of its own: the same weights as without, whatever dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_support import gone

from tests.core import runs
from tests.core.held import hold
from tests.core.runs import run, run_dir, trained, weights, write_config

pytestmark = pytest.mark.usefixtures("ray_here")
LAUNCHER = f"""
[launcher]
use = "ray"
[launcher.ray]
num_cpus = 1
object_store_bytes = {80 << 20}
"""


@pytest.fixture(scope="module")
def held(ray_here, tmp_path_factory) -> tuple[Path, Path, list[str]]:
    """A config of eight steps with two engines, the file that makes it wait, and further arguments."""
    path = write_config(tmp_path_factory.mktemp("config"), LAUNCHER)
    text = path.read_text().replace("plugins = []", 'plugins = ["ray-launcher"]')
    path.write_text(text.replace('engine.use = "toy"', 'engine.use = "toy"\nengine.replicas = 2'))
    return (path, *hold(path))


@pytest.fixture(scope="module")
def local(held, tmp_path_factory) -> tuple[str, dict]:
    """Weights and trained samples of an undisturbed run in one process."""
    config, _, more = held
    out = tmp_path_factory.mktemp("local")
    result = run(config, out, *more, "--set", "launcher.use=local")
    assert result.returncode == 0, result.stdout
    return weights(run_dir(out)), trained(run_dir(out))


class Run:
    """A run in a process, with its console in a file."""

    def __init__(self, held: tuple[Path, Path, list[str]], out: Path, **env: str) -> None:
        config, self.file, more = held
        out.mkdir()
        self.out, self.console = out, out.with_suffix(".log")
        with self.console.open("w") as console:
            self.process = subprocess.Popen(
                runs.command(config, out, *more), stdout=console, stderr=console, env=runs.environment(**env)
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.unlink(missing_ok=True)
        self.process.kill()
        self.process.wait()

    @property
    def folder(self) -> Path:
        return run_dir(self.out)

    def text(self) -> str:
        return self.console.read_text()

    def wait_for(self, condition: Callable[[], Any], within_s: float = 90.0) -> None:
        until = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None and time.monotonic() < until, self.text()
            time.sleep(0.02)

    def pause_after(self, steps: int) -> None:
        """Waits until so many steps have been trained, and then until rewards of a later one are held."""
        self.wait_for(lambda: sum(len(f.read_text().splitlines()) for f in self.out.glob("*/trained.jsonl")) >= steps)
        self.hold()

    def hold(self) -> None:
        seen = Path(f"{self.file}.seen")
        seen.unlink(missing_ok=True)
        self.file.touch()
        self.wait_for(seen.exists)

    def pid_of(self, worker: str) -> int:
        log = (self.folder / f"logs/{worker}.log").read_text()
        return int(re.findall(rf"^{worker}: process (\d+)", log, re.MULTILINE)[-1])

    def end(self) -> tuple[str, dict]:
        self.file.unlink(missing_ok=True)
        assert self.process.wait(120) == 0, self.text()
        return weights(self.folder), trained(self.folder)


def test_X1_an_engine_killed_in_mid_run_is_replaced_and_the_weights_are_the_same(held, local, cluster, tmp_path):
    with Run(held, tmp_path / "out", RAY_ADDRESS=cluster) as run:
        run.pause_after(2)
        first = run.pid_of("engine-1")
        os.kill(first, signal.SIGKILL)
        run.file.unlink()  # the run goes on with one engine, and pauses again until there are two
        run.hold()
        run.wait_for(lambda: "engine-1 is replaced" in run.text())
        assert run.end() == local  # each (prompt, index) once, and nothing else
        assert re.search(r"engine-1 is dead: .*process \d+ on node", run.text()), run.text()
        assert str(run.folder / "logs/engine-1.log") in run.text().replace("\n", "")
        assert run.pid_of("engine-1") != first


def test_X1_a_killed_trainer_ends_the_run_with_its_name_and_its_log(held, cluster, tmp_path):
    with Run(held, tmp_path / "out", RAY_ADDRESS=cluster) as run:
        run.pause_after(1)
        pid = run.pid_of("trainer-0")
        os.kill(pid, signal.SIGKILL)
        run.file.unlink()
        assert run.process.wait(60) == 1, run.text()
        assert re.search(rf"trainer 0 died during .*process {pid} on node", run.text()), run.text()
        assert str(run.folder / "logs/trainer-0.log") in run.text().replace("\n", "")
        assert gone(run.pid_of("engine-0"))


def test_a_killed_driver_leaves_no_actor_in_a_cluster_that_goes_on(held, cluster, tmp_path):
    with Run(held, tmp_path / "out", RAY_ADDRESS=cluster) as run:
        run.pause_after(1)
        actors = [run.pid_of(worker) for worker in ("trainer-0", "engine-0", "engine-1")]
        run.process.kill()
        assert all(gone(pid) for pid in actors)


def test_a_cluster_of_its_own_ends_with_a_killed_driver_and_with_a_run_and_resume_continues_exactly(held, local, tmp_path):
    config, _, more = held
    env = {"RAY_ADDRESS": ""}
    with Run(held, tmp_path / "out", **env) as first:
        first.pause_after(3)
        processes = [*ray_processes(first.process.pid), first.pid_of("engine-0"), first.pid_of("trainer-0")]
        assert len(processes) > 3
        first.process.kill()
        assert all(gone(pid) for pid in processes)
    folder = first.folder
    result = run(config, tmp_path / "out", *more, "--resume", str(folder), **env)
    assert result.returncode == 0, result.stdout
    assert (weights(folder), trained(folder)) == local
    assert gone(first.pid_of("engine-0"))


def ray_processes(parent: int) -> list[int]:
    """Processes of a Ray cluster that a driver started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            below = int(stat.read_text().rpartition(")")[2].split()[1]) == parent
            if below and "/ray/" in (stat.parent / "cmdline").read_text():
                found.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    return found
