"""The built-in weight transport `direct`: buckets to engines on the same machine, without a collective.

An engine that lives in the trainer rank's own process gets a handle on the very buffer; others map a shared-memory
file under /dev/shm, which exists only while a push runs. The bytes are opaque to all of this module.

For an engine's `receive`: `data, sha = open_bucket(message)` of every "ipc" message, copy out of `data` before
returning (the sender reuses it), and return `{"sha": sha}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.errors import ConfigError, MilesError, RuntimeMissing, WeightSyncFailed, WorkerDied
from miles_core.interfaces import EngineReplica, WeightSender, WeightTransport
from miles_core.processes import CallTimeout
from miles_core.types import Bucket, EngineSync, SendPlan, SyncReport, WeightMessage

if TYPE_CHECKING:
    from miles_core.engines import EnginePool
    from miles_core.trainers import TrainerGroup

SHM = Path("/dev/shm")
ABORT_LIMIT_S = 5.0
"""How long an engine that failed may take to acknowledge that the update was given up."""


# --- Buffers ---------------------------------------------------------------------------------------------------------

_published: dict[str, Any] = {}
_lock = threading.Lock()
_counter = itertools.count()


def publish(data: Any) -> str:
    """A key under which this process, and no other, finds `data` again."""
    key = f"{os.getpid()}-{next(_counter)}"
    with _lock:
        _published[key] = data
    return key


def release(key: str) -> None:
    """Forgets a key; unknown ones are fine."""
    with _lock:
        _published.pop(key, None)


def resolve(body: Any) -> Any:
    """The buffer that an "ipc" body names: the published object itself (an array or a tensor of uint8), or a read-only
    uint8[nbytes] array mapped from shared memory. It is valid until the message is acknowledged.

    Raises WeightSyncFailed when it is not there, for example because engine and trainer are on different machines.
    """
    if "handle" in body:
        with _lock:
            found = _published.get(body["handle"])
        if found is None:
            raise WeightSyncFailed(f"bucket {body['handle']} is not in this process, or was given up by the sender")
        return found
    try:
        with (SHM / body["shm"]).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightSyncFailed(f"cannot map {SHM / body['shm']}: {error}") from error
    if len(mapped) < body["nbytes"]:
        raise WeightSyncFailed(f"{SHM / body['shm']} has {len(mapped)} bytes, but the bucket has {body['nbytes']}")
    return np.frombuffer(mapped, np.uint8, count=body["nbytes"])


def open_bucket(message: WeightMessage) -> tuple[Any, str]:
    """(bytes of the bucket, their SHA-256 as received, or "" when the sender did not hash)."""
    data = resolve(message.body)
    return data, (hash_bytes(data) if message.sha else "")


def hash_bytes(data: Any) -> str:
    """Hex SHA-256 of a buffer, array or tensor."""
    return hashlib.sha256(as_bytes(data)).hexdigest()


def hash_folder(folder: Path) -> str:
    """Hex SHA-256 over names and bytes of a folder's safetensors files, in the order of their names: what the message
    "path" carries, and what an engine answers it with."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            total.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def as_bytes(data: Any) -> np.ndarray:
    """uint8[nbytes], without a copy where the data is in this process's memory and contiguous. Tensors are told by
    their methods, so that nothing has to be imported for them."""
    if hasattr(data, "detach"):
        data = data.detach().cpu().contiguous().numpy()
    if not isinstance(data, np.ndarray):
        return np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


class SharedSegment:
    """One file in shared memory that grows to the largest bucket of a push and is gone afterwards."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = SHM / name
        self._map: mmap.mmap | None = None

    def write(self, data: np.ndarray) -> None:
        """Copies uint8[n] to its start. Raises RuntimeMissing with sizes when there is no room: reserving the pages
        first turns a fatal SIGBUS into an error."""
        if self._map is None or len(self._map) < data.nbytes:
            self._reserve(data.nbytes)
        np.frombuffer(self._map, np.uint8, count=data.nbytes)[:] = data

    def close(self) -> None:
        self._map = None
        self.path.unlink(missing_ok=True)

    def _reserve(self, nbytes: int) -> None:
        self.close()
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, max(nbytes, 1))
                self._map = mmap.mmap(fd, max(nbytes, 1))
            finally:
                os.close(fd)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise _no_room(nbytes, error) from error


def _no_room(nbytes: int, error: OSError) -> RuntimeMissing:
    if error.errno == errno.ENOSPC:
        free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
        return RuntimeMissing(
            f"shared memory is full: a bucket needs {nbytes / 1e6:.1f} MB, and {SHM} has {free / 1e6:.1f} MB free",
            "lower transport.bucket_bytes, or enlarge it (containers: docker run --shm-size=2g)",
        )
    return RuntimeMissing(
        f"shared memory does not work here: {SHM}: {error.strerror or error}",
        "run the engine in the driver's process (engine.process = false), or choose another transport",
    )


# --- Rank side -------------------------------------------------------------------------------------------------------


class DirectSender(WeightSender):
    """Offers each bucket in the ways that the plan asks for: options {"handles", "files", "hash": bool, "prefix": str}.

    Where all engines take handles the driver does not ask for hashes: no byte moves, so there is nothing to compare.
    """

    def __init__(self) -> None:
        self._segment: SharedSegment | None = None

    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        handle = ""
        files = plan.options.get("files", True)
        if files:
            self._segment = SharedSegment(f"{plan.options.get('prefix', 'miles')}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            for bucket in buckets:
                if not bucket.tensors:
                    yield None
                    continue
                body: dict[str, Any] = {}
                if plan.options.get("handles", False):
                    body["handle"] = handle = publish(bucket.data)
                raw = as_bytes(bucket.data) if files or (plan.options.get("hash", True) and not bucket.sha) else None
                if files:
                    self._segment.write(raw)
                    body["shm"] = self._segment.name
                sha = bucket.sha or (hash_bytes(raw) if plan.options.get("hash", True) else "")
                body["nbytes"] = bucket.nbytes if raw is None else raw.nbytes
                yield WeightMessage(
                    kind="ipc", version=plan.version, bucket=bucket.index, tensors=bucket.tensors, sha=sha, body=body
                )
                release(handle)
        finally:
            release(handle)
            self.close()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


# --- Driver side -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _End:
    """One engine during a push."""

    engine: EngineReplica
    result: EngineSync
    local: bool
    started: float = field(default_factory=time.monotonic)

    def message(self, message: WeightMessage, timeout_s: float) -> WeightMessage:
        """`message` for this engine alone: only the channel that it can open, and its incarnation."""
        body = dict(message.body)
        body.pop("shm" if self.local else "handle", None)
        return replace(message, body=body, incarnation=self.engine.incarnation, timeout_s=timeout_s)


class DirectTransport(WeightTransport):
    """Pulls one bucket at a time from the trainer and hands it to all engines at once; see `WeightTransport.push`.

    `hash_handles`: hash buckets also where only a handle is passed. `bucket_bytes` bounds the memory of a push,
    `timeout_s` each of its phases: every single wait for a rank or an engine.
    """

    def __init__(self, *, bucket_bytes: int, timeout_s: float, hash_handles: bool = False) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.hash_handles = hash_handles
        self._prefix = f"miles-{secrets.token_hex(6)}"
        self._lock = asyncio.Lock()
        self._trainer: TrainerGroup | None = None
        self._places: list[dict[str, Any]] = []

    async def connect(self, trainer: TrainerGroup, pool: EnginePool) -> None:
        self._trainer = trainer
        self._places = await trainer.workers.call("@place", timeout_s=self.timeout_s)
        for engine in pool.replicas:
            self._check(engine)

    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        """Raises what the trainer raises when a rank fails or hangs; the engines have then been told to give up."""
        assert self._trainer is not None, "connect() comes first"
        async with self._lock:
            started = time.monotonic()
            report = SyncReport(version=version, num_bytes=0, seconds=0.0, num_buckets=0)
            ends = [self._end(engine) for engine in engines]
            report.engines = [end.result for end in ends]
            try:
                await self._send(version, ends, report)
            except BaseException as error:
                if not isinstance(error, WorkerDied | CallTimeout):
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        await self._trainer.send_close(timeout_s=self.timeout_s)
                await asyncio.gather(*(self._abort(end, version) for end in ends))
                raise
            finally:
                self._sweep()
            for phase in ("flush", "commit"):
                message = WeightMessage(kind=phase, version=version)
                await self._deliver(ends, phase, message, _check_commit if phase == "commit" else None)
            await asyncio.gather(*(self._abort(end, version) for end in ends if not end.result.ok))
            report.seconds = time.monotonic() - started
            return report

    async def close(self) -> None:
        self._sweep()

    async def _send(self, version: int, ends: list[_End], report: SyncReport) -> None:
        """begin and all data. The export is drained to its end even when no engine is left, since it is collective."""
        trainer, hashes = self._trainer, []
        plan = self._plan(version, ends)
        await self._deliver(ends, "begin", WeightMessage(kind="begin", version=version))
        await trainer.send_open(plan, timeout_s=self.timeout_s)
        while (messages := await trainer.send_next(timeout_s=self.timeout_s)) is not None:
            for message in filter(None, messages):
                report.num_buckets += 1
                report.num_bytes += message.body["nbytes"]
                hashes.append(message.sha)
                await self._deliver(ends, f"bucket {message.bucket}", message, _check_sha)
        await trainer.send_close(timeout_s=self.timeout_s)
        report.hashes = tuple(hashes)

    def _plan(self, version: int, ends: list[_End]) -> SendPlan:
        files = any(not end.local for end in ends)
        options = {"handles": any(end.local for end in ends), "files": files, "prefix": self._prefix}
        options["hash"] = files or self.hash_handles
        return SendPlan(
            version=version, bucket_bytes=self.bucket_bytes, transport="direct", options=options, timeout_s=self.timeout_s
        )

    async def _deliver(
        self, ends: list[_End], phase: str, message: WeightMessage, check: Callable[..., None] | None = None
    ) -> None:
        """One message to every engine that is still well, at once; who fails is noted with the phase and left out."""

        async def one(end: _End) -> None:
            end.result.phase = phase
            try:
                answer = await asyncio.wait_for(end.engine.receive(end.message(message, self.timeout_s)), self.timeout_s)
                if check is not None:
                    check(end, message, answer or {})
            except TimeoutError:
                end.result.ok, end.result.error = False, f"no answer to {phase} within {self.timeout_s:g} s"
            except Exception as error:
                text = str(error) if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"
                end.result.ok, end.result.error = False, text
            end.result.seconds = time.monotonic() - end.started

        await asyncio.gather(*(one(end) for end in ends if end.result.ok))

    async def _abort(self, end: _End, version: int) -> None:
        """Tells an engine that the update is off; it may be too ill to hear."""
        message = end.message(WeightMessage(kind="abort", version=version), ABORT_LIMIT_S)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(end.engine.receive(message), min(ABORT_LIMIT_S, self.timeout_s))

    def _end(self, engine: EngineReplica) -> _End:
        """Raises nothing: an engine that cannot be reached is one that failed in the phase "connect"."""
        result = EngineSync(engine=engine.id, ok=True, phase="connect")
        local = all(p["pid"] == os.getpid() for p in self._places) and _place(engine)["pid"] == os.getpid()
        try:
            self._check(engine)
        except ConfigError as error:
            result.ok, result.error = False, str(error)
        return _End(engine, result, local)

    def _check(self, engine: EngineReplica) -> None:
        if "weights/ipc" not in engine.capabilities:
            can = ", ".join(sorted(c for c in engine.capabilities if c.startswith("weights/"))) or "none"
            raise ConfigError(
                f'{engine.id} cannot take weights through the transport "direct": it offers no weights/ipc (it has: {can})',
                "choose a transport for one of its channels: transport.use",
            )
        here = _place(engine)
        for rank, there in enumerate(self._places):
            if here["node"] != there["node"]:
                raise ConfigError(
                    f'the transport "direct" needs trainer and engines to share memory, but {engine.id} is on '
                    f"{here['host']} and trainer rank {rank} on {there['host']}",
                    "choose a transport that crosses machines: transport.use",
                )

    def _sweep(self) -> None:
        """Removes what a killed rank left in shared memory."""
        for path in SHM.glob(f"{self._prefix}-*"):
            path.unlink(missing_ok=True)


def _place(engine: EngineReplica) -> dict[str, Any]:
    from miles_core.worker import place

    return getattr(engine, "place", None) or place()


def _check_sha(end: _End, message: WeightMessage, answer: dict[str, Any]) -> None:
    if message.sha and answer.get("sha") != message.sha:
        raise WeightSyncFailed(
            f"bucket {message.bucket} was sent as SHA-256 {message.sha[:12]} and arrived as {str(answer.get('sha'))[:12]}"
        )


def _check_commit(end: _End, message: WeightMessage, answer: dict[str, Any]) -> None:
    if answer.get("version") != message.version:
        raise WeightSyncFailed(f"committed version {answer.get('version')} instead of {message.version}")
    end.result.state_hash = answer.get("state_hash", "")
