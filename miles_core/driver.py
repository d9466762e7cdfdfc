"""From a resolved config to a finished run: run folder, signals, session, loop, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from miles_core import checkpoint
from miles_core.config import ResolvedRun, compare_payloads
from miles_core.errors import ConfigError, Interrupted, RuntimeMissing
from miles_core.loop import MODEL_FOLDER, Loop, RunResult
from miles_core.session import Session
from miles_core.view import RunView

CONFIG_FILE = "config.toml"
PAYLOAD_FILE = "run.json"
MIN_FREE_BYTES = 64 << 20


def new_run_dir(out: Path, name: str) -> Path:
    """A fresh folder `<out>/<name>-<date>-<time>`.

    Raises RuntimeMissing before anything expensive starts when it cannot be created or written, or is nearly full.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        folder = out / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RuntimeMissing(
                f"cannot create a run folder under {out}: {error.strerror or error}", "choose another place with --out DIR"
            ) from error
        check_writable(folder)
        return folder
    raise RuntimeMissing(f"cannot find a free run folder name under {out}")


def check_writable(folder: Path) -> None:
    """Raises RuntimeMissing when `folder` is read-only or has less than MIN_FREE_BYTES left."""
    try:
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"miles")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RuntimeMissing(
            f"cannot write to the run folder {folder}: {error.strerror or error}", "choose another place with --out DIR"
        ) from error
    if free < MIN_FREE_BYTES:
        raise RuntimeMissing(
            f"the run folder {folder} has {free / 1e6:.0f} MB free, and a run needs at least {MIN_FREE_BYTES / 1e6:.0f} MB",
            "make room or choose another place with --out DIR",
        )


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the folder for this process: two runs in one folder would mix their lines and delete each other's checkpoints.
    Raises ConfigError when another process holds it. The lock is on the folder itself, leaves no file behind, and goes with
    the process, however that ends; where a file system knows no locks, there is none."""
    try:
        folder = os.open(run_dir, os.O_RDONLY)
    except OSError:  # find_resumable says what is wrong with it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is running in {run_dir}", "wait for it, or stop it first") from None
        yield
    finally:
        os.close(folder)


def find_resumable(run_dir: Path, view: RunView) -> checkpoint.Found:
    """The newest complete checkpoint of `run_dir`; says which ones were passed over and why."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {run_dir}", "name the folder of an earlier run after --resume")
    found = checkpoint.find(run_dir)
    for folder, reason in found.skipped:
        view.note(f"passing over {folder.name}: {reason}", "warning")
    if found.path is None:
        view.note(f"{run_dir} has no complete checkpoint; the run starts from the beginning", "warning")
    return found


def check_same_run(run: ResolvedRun, run_dir: Path) -> list[str]:
    """What differs between `run` and the run that wrote `run_dir`, one line each; [] when nothing does."""
    path = run_dir / PAYLOAD_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no {PAYLOAD_FILE}")
    try:
        before = json.loads(path.read_text("utf-8"))
        return compare_payloads(before, run.payload(masked=True))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged: {type(error).__name__}: {error}",
            "a run can be resumed from the folder that it wrote itself; start a new run",
        ) from error


def write_run_files(run: ResolvedRun, run_dir: Path) -> None:
    """The resolved config for people (`config.toml`, which `miles run` accepts) and for `--resume` (`run.json`)."""
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / CONFIG_FILE).write_text(run.dump(), "utf-8")
    (run_dir / PAYLOAD_FILE).write_text(json.dumps(run.payload(masked=True), ensure_ascii=False, indent=1), "utf-8")


async def drive(run: ResolvedRun, run_dir: Path, view: RunView, resume: checkpoint.Found | None = None) -> RunResult:
    """Runs to the end. Raises Interrupted (saved), or whatever made the run fail; everything is closed either way."""
    if resume and resume.path and resume.step >= run.config.steps and _has_all(run, run_dir):
        view.ended("already complete", {"run_dir": str(run_dir), "steps": resume.step, "seconds": 0.0})
        return RunResult(step=resume.step, run_dir=run_dir, already_complete=True)
    stop = asyncio.Event()
    session = Session(run, run_dir, view)
    reason, began = "failed", time.monotonic()
    loop: Loop | None = None
    try:
        first_step = resume.step if resume and resume.path else 0
        session.announce(first_step)
        with _stop_on_signals(stop, view):
            await _open(session, stop)
            checkpoint.clean(run_dir)
            loop = Loop(session, stop)
            session.rewind_trackers(first_step)
            if resume and resume.path:
                await loop.restore(resume.path)
            run.host.observe("miles_run_start", config=run.config, run_dir=run_dir)
            result = await loop.run()
        reason = "already complete" if result.already_complete else "done"
        session.finish(reason, result, time.monotonic() - began)
        return result
    except Interrupted:
        reason = "interrupted"
        raise
    finally:
        if reason in ("failed", "interrupted"):
            session.finish(reason, loop.result() if loop else None, time.monotonic() - began)
        await session.close(reason)


def _has_all(run: ResolvedRun, run_dir: Path) -> bool:
    """Whether everything that a finished run leaves is there."""
    return not run.config.checkpoint.save_model or (run_dir / MODEL_FOLDER).is_dir()


async def _open(session: Session, stop: asyncio.Event) -> None:
    opening = asyncio.ensure_future(session.open())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not opening.done():
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        raise Interrupted("stopped on request before the first step; there was nothing to save")
    opening.result()


@contextlib.contextmanager
def _stop_on_signals(stop: asyncio.Event, view: RunView) -> Iterator[None]:
    """SIGTERM and the first SIGINT ask the run to save and stop; a second SIGINT interrupts at once."""
    loop = asyncio.get_running_loop()

    def ask(name: str) -> None:
        view.note(f"{name}: the run will save and stop", "warning")
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    installed = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, ask, number.name)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
