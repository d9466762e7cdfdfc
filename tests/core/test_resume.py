"""A run that is killed goes on as if nothing had happened (cases C1, C2, C3): at max_lag = 0 the final weights equal those
of the uninterrupted run bit for bit, and each sample is in exactly one step of the surviving history."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.core import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(config, run folder) of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    config = runs.write_config(folder)
    done = runs.run(config, folder / "out")
    assert done.returncode == 0, done.stdout
    return config, runs.run_dir(folder / "out")


def finish(config: Path, out: Path) -> Path:
    """Resumes until the run is complete."""
    folder = runs.run_dir(out)
    done = runs.run(config, out, "--resume", str(folder))
    assert done.returncode == 0, done.stdout
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    assert runs.weights(folder) == runs.weights(whole)
    assert runs.trained(folder) == runs.trained(whole)
    everything = [tuple(s) for samples in runs.trained(folder).values() for s in samples]
    assert len(everything) == len(set(everything)) == 8 * 4 * 4  # steps x groups x samples


def test_the_same_seed_gives_the_same_run(whole: tuple[Path, Path], tmp_path: Path) -> None:
    config, first = whole
    assert runs.run(config, tmp_path / "out").returncode == 0
    assert_same(runs.run_dir(tmp_path / "out"), first)


# Saves after steps 2, 4, 6, 8: 5 fault points each (trainer, arrays, state, manifest, rename); keep = 2, so the third
# and the fourth also delete one old folder: 5 + 5 + 6 + 6 = 22.
@pytest.mark.parametrize("nth", range(1, 23))
def test_C1_killed_at_every_write_and_rename(whole: tuple[Path, Path], tmp_path: Path, nth: int) -> None:
    config, first = whole
    died = runs.run(config, tmp_path / "out", MILES_FAULT=f"checkpoint:{nth}")
    assert died.returncode == -signal.SIGKILL, died.stdout
    assert_same(finish(config, tmp_path / "out"), first)


@pytest.mark.parametrize("trial", range(20))
def test_C3_killed_at_a_random_time(whole: tuple[Path, Path], tmp_path: Path, trial: int) -> None:
    config, first = whole
    out = tmp_path / "out"
    # A run of 8 steps takes about 1.5 s from here on; a loaded machine only moves the deaths to earlier places.
    died = runs.run(config, out, kill_after=random.Random(trial).uniform(0.0, 1.5))
    assert died.returncode in (0, -signal.SIGKILL), died.stdout
    assert_same(runs.run_dir(out) if died.returncode == 0 else finish(config, out), first)


def test_C2_resume_of_a_complete_run_says_so(whole: tuple[Path, Path]) -> None:
    config, folder = whole
    done = runs.run(config, folder.parent, "--resume", str(folder))
    assert done.returncode == 0
    assert "already complete: 8 steps" in done.stdout


def test_sigterm_saves_and_resumes_exactly(whole: tuple[Path, Path], tmp_path: Path) -> None:
    config, first = whole
    out = tmp_path / "out"
    process = subprocess.Popen(
        runs.command(config, out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=runs.environment()
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "everything is saved" in output
    assert_same(finish(config, out), first)


def test_resume_with_another_config_is_refused(whole: tuple[Path, Path]) -> None:
    config, folder = whole
    done = runs.run(config, folder.parent, "--resume", str(folder), "--set", "seed=4")
    assert done.returncode == 2
    assert "seed: 3 before, 4 now" in done.stdout
