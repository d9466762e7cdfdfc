"""Checkpoints: complete or absent.

A checkpoint is written into a temporary folder beside its final place and renamed last, so that a folder named
`step-<n>` is complete by construction; its manifest lists every file with its size, which catches what a file system
lost. Old checkpoints are deleted only after a newer one is in place. The driver's part is JSON plus one `.npz` (read
without pickle); the trainer's part is its own, under `trainer/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import ConfigError, RunFailed

FORMAT = 1
MANIFEST = "manifest.json"
_HASHED_BELOW = 1 << 20
"""Files smaller than this carry a hash in the manifest; larger ones only their size."""


def fault_point(name: str) -> None:
    """Called after every write and rename of a save. Tests set MILES_FAULT="<name>:<n>" to die at the n-th call."""
    if "MILES_FAULT" in os.environ:
        from miles_core.testing.faults import hit

        hit(name)


@dataclass(slots=True)
class Found:
    """The checkpoint to resume from, and those that were passed over, each with its reason."""

    path: Path | None
    step: int = 0
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


async def save(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    save_trainer: Callable[[Path], Awaitable[None]],
    keep: int,
) -> Path:
    """Writes `state` (JSON types and numpy arrays, nested) and the trainer's files, then deletes older checkpoints.

    Returns the checkpoint's folder. Raises RunFailed when the disk is full or read-only; nothing that was there before
    is lost then.
    """
    final = folder_of(run_dir, step)
    work = final.with_name(f"tmp-{final.name}-{os.getpid()}")
    try:
        shutil.rmtree(work, ignore_errors=True)
        (work / "trainer").mkdir(parents=True)
        await save_trainer(work / "trainer")
        fault_point("checkpoint")
        write_state(work, state)
        _write_json(work / MANIFEST, {"format": FORMAT, "step": step, "files": _list_files(work)})
        _replace(work, final)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise RunFailed(
            f"could not save the checkpoint of step {step} under {run_dir}: {error.strerror or error}",
            "earlier checkpoints are untouched; make room or choose another folder with --out, then go on with --resume",
        ) from error
    for old in _complete_steps(run_dir)[:-keep]:
        shutil.rmtree(folder_of(run_dir, old), ignore_errors=True)
        fault_point("checkpoint")
    return final


def find(run_dir: Path) -> Found:
    """The newest complete checkpoint of a run folder. Leftovers of interrupted saves are named in `skipped`."""
    root = run_dir / "checkpoints"
    found = Found(path=None)
    if not root.is_dir():
        return found
    for folder in sorted(root.iterdir(), reverse=True):
        if folder.name.startswith("tmp-"):
            found.skipped.append((folder, "the save was interrupted"))
        elif folder.name.startswith("step-"):
            problem = problem_of(folder)
            if problem:
                found.skipped.append((folder, problem))
            elif found.path is None:
                found.path, found.step = folder, int(folder.name.removeprefix("step-"))
    return found


def problem_of(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be used, or None."""
    manifest_path = folder / MANIFEST
    if not manifest_path.is_file():
        return "it has no manifest"
    try:
        manifest = json.loads(manifest_path.read_text("utf-8"))
        files = dict(manifest["files"])
        written = manifest.get("format")
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its manifest cannot be read"
    if written != FORMAT:
        return f"its format is {written}, this version reads {FORMAT}"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if "sha256" in entry and _sha256(path) != entry["sha256"]:
            return f"{name} was changed after it was written"
    return None


def clean(run_dir: Path) -> None:
    """Removes what interrupted saves left; called once a run has taken the folder over."""
    for folder in (run_dir / "checkpoints").glob("tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    arrays: dict[str, np.ndarray] = {}
    document = _take_out_arrays(state, arrays)
    with open(folder / "arrays.npz", "wb") as file:
        np.savez(file, **arrays)
        _sync(file)
    fault_point("checkpoint")
    _write_json(folder / "state.json", document)


def read_state(folder: Path) -> dict[str, Any]:
    """The driver's state as `save` was given it. Raises ConfigError naming the file when it cannot be read."""
    try:
        document = json.loads((folder / "state.json").read_text("utf-8"))
        with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
            return _put_back_arrays(document, arrays)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the checkpoint {folder} cannot be read: {error}") from error


def _take_out_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {"$array": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(k): _take_out_arrays(v, arrays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_take_out_arrays(v, arrays) for v in value]
    return value


def _put_back_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$array"}:
            return arrays[value["$array"]]
        return {k: _put_back_arrays(v, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_put_back_arrays(v, arrays) for v in value]
    return value


def _write_json(path: Path, document: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=False, allow_nan=False)
        _sync(file)
    fault_point("checkpoint")


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(work: Path, final: Path) -> None:
    if final.exists():  # the same step again, after a resume from an older checkpoint
        stale = final.with_name(f"tmp-old-{final.name}-{os.getpid()}")
        final.rename(stale)
        fault_point("checkpoint")
        work.rename(final)
        fault_point("checkpoint")
        shutil.rmtree(stale, ignore_errors=True)
    else:
        work.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    fault_point("checkpoint")


def _list_files(folder: Path) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        files[path.relative_to(folder).as_posix()] = {"bytes": size} | (
            {"sha256": _sha256(path)} if size < _HASHED_BELOW else {}
        )
    return files


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete_steps(run_dir: Path) -> list[int]:
    return sorted(
        int(p.name.removeprefix("step-")) for p in (run_dir / "checkpoints").glob("step-*") if (p / MANIFEST).is_file()
    )
