"""The driver's end: a folder per version, complete before any engine hears of it.

The old version stays whole, on disk and in the engines, until every rank has written the new one: a send that is
interrupted costs nothing but its unfinished folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.engine_members import bounded
from miles_core.errors import ConfigError, MilesError, RuntimeMissing, WeightSyncFailed, WorkerDied
from miles_core.interfaces import EngineReplica, WeightTransport
from miles_core.processes import CallTimeout
from miles_core.transport import hash_folder
from miles_core.types import EngineSync, SendPlan, SyncReport, WeightMessage

if TYPE_CHECKING:
    from miles_core.engines import EnginePool
    from miles_core.trainers import TrainerGroup

ABORT_LIMIT_S = 10.0
"""How long an engine that failed may take to acknowledge that the update was given up."""


class DiskTransport(WeightTransport):
    """`timeout_s` bounds each phase of a push, `bucket_bytes` a file. `keep` versions stay in `folder`."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float, folder: Path | str, keep: int) -> None:
        self.bucket_bytes, self.timeout_s, self.keep = bucket_bytes, timeout_s, keep
        self.folder = Path(folder).absolute()
        self._trainer: TrainerGroup | None = None
        self._lock = asyncio.Lock()

    async def connect(self, trainer: TrainerGroup, pool: EnginePool) -> None:
        """Raises ConfigError for an engine that cannot load a folder, RuntimeMissing when the folder cannot be written."""
        for engine in pool.replicas:
            self._check(engine)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".writable").write_bytes(b"")
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise RuntimeMissing(
                f"weights cannot be written to {self.folder}: {error}", "transport.disk-sync.folder"
            ) from error
        self._trainer = trainer

    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        """Raises what the trainer raises when a rank fails, hangs or finds no room on the disk; the engines have not been
        told of anything then."""
        assert self._trainer is not None, "connect() comes first"
        async with self._lock:
            started = time.monotonic()
            report = SyncReport(version=version, num_bytes=0, seconds=0.0, num_buckets=0)
            report.engines = [EngineSync(engine=engine.id, ok=True, phase="connect") for engine in engines]
            ends = list(zip(engines, report.engines, strict=True))
            for engine, result in ends:
                try:
                    self._check(engine)
                except ConfigError as error:
                    result.ok, result.error = False, str(error)
            folder = await self._write(version, report)
            sha = await asyncio.to_thread(hash_folder, folder)
            await self._tell(ends, WeightMessage(kind="begin", version=version))
            report.hashes = (sha,)
            body = {"path": str(folder), "nbytes": report.num_bytes}
            await self._tell(ends, WeightMessage(kind="path", version=version, sha=sha, body=body))
            for kind in ("flush", "commit"):
                await self._tell(ends, WeightMessage(kind=kind, version=version))
            await asyncio.gather(*(self._abort(engine, version) for engine, result in ends if not result.ok))
            await asyncio.to_thread(self._clean, folder)
            report.seconds = time.monotonic() - started
            return report

    async def close(self) -> None:
        """What was written stays: it is the last version."""

    # --- Trainer's side ---

    async def _write(self, version: int, report: SyncReport) -> Path:
        """The finished folder of this version. Its unfinished one is removed when a rank fails."""
        trainer, limit = self._trainer, self.timeout_s
        final = self.folder / f"version-{version:06d}"
        work = final.with_name(f"{final.name}.tmp")
        for old in (final, work):
            await asyncio.to_thread(shutil.rmtree, old, True)
        work.mkdir(parents=True)
        plan = SendPlan(
            version=version,
            bucket_bytes=self.bucket_bytes,
            transport="disk-sync",
            options={"folder": str(work)},
            timeout_s=limit,
        )
        try:
            await trainer.send_open(plan, timeout_s=limit)
            while (messages := await trainer.send_next(timeout_s=limit)) is not None:
                for message in filter(None, messages):
                    report.num_buckets += 1
                    report.num_bytes += message.body["nbytes"]
            await trainer.send_close(timeout_s=limit)
        except BaseException as error:
            if not isinstance(error, WorkerDied | CallTimeout):
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    await trainer.send_close(timeout_s=limit)
            shutil.rmtree(work, ignore_errors=True)
            raise
        if not report.num_buckets:
            raise WeightSyncFailed(f"no trainer rank published weights for version {version}")
        os.replace(work, final)
        return final

    def _clean(self, newest: Path) -> None:
        """Removes all but the newest and the `keep` - 1 before it."""
        others = sorted(path for path in self.folder.glob("version-*") if path != newest)
        for path in others[: max(0, len(others) - self.keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)

    # --- Engines' side ---

    def _check(self, engine: EngineReplica) -> None:
        if "weights/path" not in engine.capabilities:
            can = ", ".join(sorted(c for c in engine.capabilities if c.startswith("weights/"))) or "none"
            raise ConfigError(
                f'{engine.id} cannot take weights through the transport "disk-sync": it offers no weights/path (it has: '
                f"{can})",
                "choose a transport for one of its channels: transport.use",
            )

    async def _tell(self, ends: list[tuple[EngineReplica, EngineSync]], message: WeightMessage) -> None:
        """One message to every engine that is still well, at once; who fails is noted with the phase and left out."""

        async def one(engine: EngineReplica, result: EngineSync) -> None:
            result.phase = message.kind
            own = replace(message, incarnation=engine.incarnation, timeout_s=self.timeout_s)
            began = time.monotonic()
            try:
                answer = await bounded(engine.receive(own), self.timeout_s) or {}
                check_answer(message, answer)
                result.state_hash = answer.get("state_hash", "")
            except TimeoutError:
                result.ok, result.error = False, f"no answer to {message.kind} within {self.timeout_s:g} s"
            except Exception as error:
                text = str(error) if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"
                result.ok, result.error = False, text
            result.seconds += time.monotonic() - began

        await asyncio.gather(*(one(engine, result) for engine, result in ends if result.ok))

    async def _abort(self, engine: EngineReplica, version: int) -> None:
        """Tells an engine that the update is off; it may be too ill to hear."""
        limit = min(ABORT_LIMIT_S, self.timeout_s)
        message = WeightMessage(kind="abort", version=version, incarnation=engine.incarnation, timeout_s=limit)
        with contextlib.suppress(Exception):
            await bounded(engine.receive(message), limit)


def check_answer(message: WeightMessage, answer: dict[str, object]) -> None:
    """Raises WeightSyncFailed for other bytes than were written, and for another version than was sent."""
    if message.kind == "path" and answer.get("sha") != message.sha:
        raise WeightSyncFailed(
            f"the folder was written as SHA-256 {message.sha[:12]} and read as {str(answer.get('sha'))[:12] or 'nothing'}"
        )
    if message.kind == "commit" and answer.get("version") != message.version:
        raise WeightSyncFailed(f"committed version {answer.get('version')} instead of {message.version}")
