"""Weights by gloo broadcast: one trainer rank is the source, every engine receives each bucket.

A collective blocks until all have joined, so the transport announces a transfer to the engines and pulls the sender for
it at the same time. A group lives as long as its members do: any failure breaks it for all of them, those that were
well too, and the next push forms a new one without the dead. Nothing waits for ever: the source gives up after its
time-out, and closing its end of the group makes the engines' end fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from miles_core.engine_members import bounded
from miles_core.errors import ConfigError, MilesError, WeightSyncFailed
from miles_core.interfaces import EngineReplica, WeightSender, WeightTransport
from miles_core.types import Bucket, EngineSync, SendPlan, SyncReport, WeightMessage

if TYPE_CHECKING:
    from miles_core.engines import EnginePool
    from miles_core.trainers import TrainerGroup

HOST = "127.0.0.1"
ABORT_LIMIT_S = 10.0
"""How long an engine of a broken group may take to leave it."""


# --- Rank side -------------------------------------------------------------------------------------------------------


class GlooSender(WeightSender):
    """The source is the rank whose buckets have tensors; it must be the same one for a whole send. The plan's options:
    group (a name), num_engines, fresh (whether the group is to be formed), timeout_s of one transfer. That limit must
    be shorter than the driver's for the same pull: a source that the driver has given up on blocks the next attempt.

    Yields, on the source: [join], then one "broadcast" per bucket; the pull after each performs what it announced. The
    other ranks yield None as often, so that all end together.
    """

    def __init__(self) -> None:
        self._name = ""
        self._group: Any = None
        self._limit = datetime.timedelta(0)

    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        self._limit = datetime.timedelta(seconds=plan.options["timeout_s"])
        bucket = next(buckets)
        source = bool(bucket.tensors)
        if plan.options["fresh"]:
            yield from self._form(plan) if source else (None,)
        elif source and self._name != plan.options["group"]:
            raise WeightSyncFailed(f"the source has left the group {plan.options['group']}")
        while bucket is not None:
            if bool(bucket.tensors) is not source:
                raise WeightSyncFailed(
                    f"bucket {bucket.index} comes from another rank than the first; a group has one source"
                )
            yield self._message(plan, bucket) if source else None
            if source:
                self._broadcast(bucket)
            bucket = next(buckets, None)

    def _form(self, plan: SendPlan) -> Iterator[WeightMessage]:
        import torch.distributed as dist

        self.close()
        name, size = plan.options["group"], plan.options["num_engines"] + 1
        store = dist.TCPStore(HOST, 0, size, is_master=True, timeout=self._limit, wait_for_workers=False)
        body = {"host": HOST, "port": store.port, "group": name, "world_size": size}
        yield WeightMessage(kind="join", version=plan.version, body=body)
        # the prefixes under which torch's own helper, and SGLang around it, look for their peers
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        try:
            self._group = dist.ProcessGroupGloo(store, 0, size, self._limit)
        except Exception as error:
            raise WeightSyncFailed(f"group {name} did not form within {self._limit}: {error}") from error
        self._name = name

    def _message(self, plan: SendPlan, bucket: Bucket) -> WeightMessage:
        body = {"group": self._name, "nbytes": bucket.nbytes}
        return WeightMessage(
            kind="broadcast", version=plan.version, bucket=bucket.index, tensors=bucket.tensors, sha=bucket.sha, body=body
        )

    def _broadcast(self, bucket: Bucket) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._limit
        try:
            self._group.broadcast([bucket.data], options).wait()
        except Exception as error:
            self.close()
            raise WeightSyncFailed(f"broadcast of bucket {bucket.index} failed: {error}") from error

    def close(self) -> None:
        """Leaves the group; whoever still waits in it is told by the closed connection."""
        self._group, self._name = None, ""


# --- Driver side -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _End:
    engine: EngineReplica
    rank: int
    result: EngineSync
    started: float = field(default_factory=time.monotonic)

    def fail(self, phase: str, error: str) -> None:
        self.result.ok, self.result.phase, self.result.error = False, phase, error
        self.result.seconds = time.monotonic() - self.started


class GlooTransport(WeightTransport):
    """`timeout_s` bounds each phase: one control message, one transfer."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._trainer: TrainerGroup | None = None
        self._group = ""
        self._members: list[tuple[str, str]] = []
        """(engine, incarnation) in the group now; empty when there is none."""

    async def connect(self, trainer: TrainerGroup, pool: EnginePool) -> None:
        for engine in pool.replicas:
            if "weights/broadcast" not in engine.capabilities:
                raise ConfigError(f"{engine.id} cannot receive a broadcast; it offers {sorted(engine.capabilities)}")
        self._trainer = trainer

    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        """Raises only for the trainer's own failures. An engine that breaks the group fails all of them: whoever calls
        tries again with those that are left."""
        assert self._trainer is not None, "connect() comes first"
        started = time.monotonic()
        report = SyncReport(version=version, num_bytes=0, seconds=0.0, num_buckets=0)
        results = [EngineSync(engine=engine.id, ok=True, phase="begin") for engine in engines]
        report.engines = results
        ends = [_End(engine, rank, result) for rank, (engine, result) in enumerate(zip(engines, results, strict=True), 1)]
        await self._tell(ends, WeightMessage(kind="begin", version=version))
        ends = [end for end in ends if end.result.ok]
        for rank, end in enumerate(ends, 1):
            end.rank = rank
        if ends:
            try:
                await self._send(version, ends, report)
            except BaseException:
                await self._break(ends, version)
                raise
        for kind in ("flush", "commit"):
            await self._tell([end for end in ends if end.result.ok], WeightMessage(kind=kind, version=version))
        report.seconds = time.monotonic() - started
        return report

    async def _send(self, version: int, ends: list[_End], report: SyncReport) -> None:
        members = [(end.engine.id, end.engine.incarnation) for end in ends]
        fresh = members != self._members
        self._group = f"miles-{secrets.token_hex(4)}" if fresh else self._group
        self._members = []  # until this send has gone through
        options = {"group": self._group, "num_engines": len(ends), "fresh": fresh, "timeout_s": self.timeout_s}
        plan = SendPlan(version=version, bucket_bytes=self.bucket_bytes, transport="gloo", options=options)
        await self._trainer.send_open(plan, timeout_s=self.timeout_s)
        hashes, announced = [], []
        while True:
            problem, messages = await self._pull(ends, announced)
            if problem:
                await self._break(ends, version, problem)
                break
            if messages is None:
                self._members = members
                break
            announced = [message for message in messages if message is not None]
            for message in announced:
                if message.kind == "broadcast":
                    report.num_buckets, report.num_bytes = report.num_buckets + 1, report.num_bytes + message.body["nbytes"]
                    hashes.append(message.sha)
        await self._trainer.send_close(timeout_s=self.timeout_s)
        report.hashes = tuple(hashes)

    async def _pull(self, ends: list[_End], announced: list[WeightMessage]) -> tuple[str, Any]:
        """Both ends of the announced transfer at once. (what broke it or "", the sender's next messages)."""
        tells = [asyncio.ensure_future(self._tell(ends, message)) for message in announced]
        try:
            messages = await self._trainer.send_next(timeout_s=2 * self.timeout_s)
        except WeightSyncFailed as error:
            # the source has left the group, so the engines' end fails by itself
            await asyncio.gather(*tells)
            return str(error), None
        except BaseException:
            for tell in tells:
                tell.cancel()
            raise
        await asyncio.gather(*tells)
        failed = [end.result.engine for end in ends if not end.result.ok]
        return (f"{', '.join(failed)} failed" if failed else ""), messages

    async def _break(self, ends: list[_End], version: int, problem: str = "the trainer failed") -> None:
        self._members = []
        for end in ends:
            if end.result.ok:
                end.fail(end.result.phase, f"the group broke: {problem}")
        limit = min(ABORT_LIMIT_S, self.timeout_s)
        message = WeightMessage(kind="abort", version=version, timeout_s=limit)

        async def abort(end: _End) -> None:
            with contextlib.suppress(Exception):
                await bounded(end.engine.receive(replace(message, incarnation=end.engine.incarnation)), limit)

        await asyncio.gather(*(abort(end) for end in ends))

    async def _tell(self, ends: list[_End], message: WeightMessage) -> None:
        """One message to all `ends` at once; who fails is noted with the phase."""
        phase = f"bucket {message.bucket}" if message.kind == "broadcast" else message.kind

        async def one(end: _End) -> None:
            body = {**message.body, "rank": end.rank} if message.kind == "join" else message.body
            own = replace(message, body=body, incarnation=end.engine.incarnation, timeout_s=self.timeout_s)
            end.result.phase = phase
            try:
                answer = await bounded(end.engine.receive(own), self.timeout_s)
            except TimeoutError:
                end.fail(phase, f"no answer to {phase} within {self.timeout_s:g} s")
            except Exception as error:
                end.fail(phase, str(error) if isinstance(error, MilesError) else f"{type(error).__name__}: {error}")
            else:
                if message.kind == "commit" and answer.get("version") != message.version:
                    end.fail(phase, f"committed version {answer.get('version')} instead of {message.version}")
                end.result.seconds = time.monotonic() - end.started

        await asyncio.gather(*(one(end) for end in ends))
