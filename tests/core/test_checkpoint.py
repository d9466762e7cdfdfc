"""Checkpoints are complete or absent, whatever kills the process that writes them (cases C1, C2 and the store of C5)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from miles_core import checkpoint
from miles_core.errors import ConfigError, RunFailed

WRITER = """
import asyncio, sys
from pathlib import Path
import numpy as np
from miles_core import checkpoint

async def trainer(folder):
    (folder / "weights.bin").write_bytes(bytes([step]) * 1000)

for step in (1, 2, 3):
    state = {"step": step, "buffer": [{"tokens": np.full(3, step, dtype=np.int32)}]}
    asyncio.run(checkpoint.save(Path(sys.argv[1]), step, state, trainer, keep=1))
"""


async def _trainer(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 100)


def _save(run_dir: Path, step: int, keep: int = 2) -> Path:
    return asyncio.run(checkpoint.save(run_dir, step, {"step": step}, _trainer, keep))


def test_state_comes_back_with_its_arrays(tmp_path: Path) -> None:
    state = {"cursor": 3, "groups": [{"tokens": np.arange(5, dtype=np.int32), "label": "ä\u2028"}], "none": None}
    folder = asyncio.run(checkpoint.save(tmp_path, 7, state, _trainer, keep=2))
    back = checkpoint.read_state(folder)
    assert back["cursor"] == 3 and back["none"] is None and back["groups"][0]["label"] == "ä\u2028"
    np.testing.assert_array_equal(back["groups"][0]["tokens"], np.arange(5))
    assert back["groups"][0]["tokens"].dtype == np.int32


def test_old_checkpoints_go_only_after_a_newer_one_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


# 3 saves: 4 fault points for the first (trainer, arrays, state, manifest) + 1 rename = 5; the second and third also
# delete one old folder = 6 each; 17 in all, and the 18th never comes.
@pytest.mark.parametrize("nth", range(1, 18))
def test_C1_killed_after_every_write_and_rename(tmp_path: Path, nth: int) -> None:
    environment = os.environ | {"MILES_FAULT": f"checkpoint:{nth}"}
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    found = checkpoint.find(tmp_path)
    # The rename of save k is fault point 5, 11 - 1 = 10 (second save: 6..9 writes, 10 rename), 16 (third).
    complete = sum(nth >= rename for rename in (5, 10, 16))
    assert found.step == complete
    if complete:
        state = checkpoint.read_state(found.path)
        assert state["step"] == complete
        np.testing.assert_array_equal(state["buffer"][0]["tokens"], np.full(3, complete))
        assert (found.path / "trainer/weights.bin").read_bytes() == bytes([complete]) * 1000
    for folder, reason in found.skipped:
        assert folder.name.startswith("tmp-") and "interrupted" in reason


def test_C1_all_saves_complete_without_a_fault(tmp_path: Path) -> None:
    environment = os.environ | {"MILES_FAULT": "checkpoint:18"}
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], env=environment, timeout=60, check=True)
    assert checkpoint.find(tmp_path).step == 3


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: shutil.rmtree(f) or f.mkdir(), "no manifest"),
        (lambda f: (f / "trainer/weights.bin").unlink(), "trainer/weights.bin is missing"),
        (lambda f: (f / "trainer/weights.bin").write_bytes(b"w" * 99), "99 bytes instead of 100"),
        (lambda f: (f / "trainer/weights.bin").write_bytes(b"x" * 100), "changed after it was written"),
        (lambda f: (f / "arrays.npz").unlink(), "arrays.npz is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest cannot be read"),
        (lambda f: (f / "manifest.json").write_text(json.dumps({"format": 99, "files": {}})), "format is 99"),
    ],
)
def test_C1_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, damage, says: str) -> None:
    _save(tmp_path, 1)
    damage(_save(tmp_path, 2))
    found = checkpoint.find(tmp_path)
    assert found.step == 1
    assert [(p.name, says in reason) for p, reason in found.skipped] == [("step-000002", True)]


def test_C1_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    _save(tmp_path, 1)

    async def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match="No space left on device"):
        asyncio.run(checkpoint.save(tmp_path, 2, {"step": 2}, full, keep=1))
    assert checkpoint.find(tmp_path).step == 1
    assert not list((tmp_path / "checkpoints").glob("tmp-*"))


def test_no_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path).path is None


def test_an_unreadable_state_names_the_folder(tmp_path: Path) -> None:
    folder = _save(tmp_path, 1)
    (folder / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="step-000001"):
        checkpoint.read_state(folder)
