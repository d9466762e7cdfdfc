"""The driver's end: who is in the group, and both ends of every transfer at once.

A collective blocks until all have joined, so the transport announces a transfer to the engines and pulls the sender for
it at the same time. A group lives as long as its members do: an engine that does not take part breaks it for all, those
that were well too, and the next push forms a new one without it. Nothing waits for ever: the source gives up after its
time-out, and closing its end of the group makes the engines' end fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from miles_core.engine_members import bounded
from miles_core.errors import ConfigError, MilesError, WeightSyncFailed
from miles_core.interfaces import EngineReplica, WeightTransport
from miles_core.types import EngineSync, SendPlan, SyncReport, WeightMessage
from miles_core.worker import place

if TYPE_CHECKING:
    from miles_core.engines import EnginePool
    from miles_core.trainers import TrainerGroup

ABORT_LIMIT_S = 10.0
"""How long an engine of a broken group may take to leave it."""
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class _End:
    """One engine during a push: the first of its ranks in the group, and whether it takes part in the collectives."""

    engine: EngineReplica
    result: EngineSync
    rank: int = 0
    ranks: int = 1
    joined: bool = True
    started: float = field(default_factory=time.monotonic)

    def fail(self, phase: str, error: str, *, joined: bool = False) -> None:
        """`joined`: it took part and what it got is wrong; the group stands."""
        self.result.ok, self.result.phase, self.result.error = False, phase, error
        self.result.seconds = time.monotonic() - self.started
        self.joined = joined


class BroadcastTransport(WeightTransport):
    """`timeout_s` bounds each phase: one control message, one transfer; `join_timeout_s` the forming of a group."""

    def __init__(
        self, *, bucket_bytes: int, timeout_s: float, join_timeout_s: float, backend: str, host: str, checksum: bool
    ) -> None:
        self.bucket_bytes, self.timeout_s, self.join_timeout_s = bucket_bytes, timeout_s, join_timeout_s
        self.backend, self.host, self.checksum = backend, host, checksum
        self._trainer: TrainerGroup | None = None
        self._places: list[dict[str, Any]] = []
        self._group = ""
        self._members: list[tuple[str, str]] = []
        """(engine, incarnation) in the group now; empty when there is none."""
        self._lock = asyncio.Lock()

    async def connect(self, trainer: TrainerGroup, pool: EnginePool) -> None:
        for engine in pool.replicas:
            self._check(engine)
        self._trainer = trainer
        self._places = await trainer.workers.call("@place", timeout_s=self.timeout_s)

    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        """Raises only for the trainer's own failures. An engine that breaks the group fails all of them: whoever calls
        tries again with those that are left."""
        assert self._trainer is not None, "connect() comes first"
        async with self._lock:
            started = time.monotonic()
            report = SyncReport(version=version, num_bytes=0, seconds=0.0, num_buckets=0)
            ends = [_End(engine, EngineSync(engine=engine.id, ok=True, phase="connect")) for engine in engines]
            report.engines = [end.result for end in ends]
            await asyncio.gather(*(self._ask(end) for end in ends))
            await self._tell(ends, WeightMessage(kind="begin", version=version))
            well = [end for end in ends if end.result.ok]
            if well:
                try:
                    await self._send(version, well, report)
                except BaseException:
                    await self._break(well, version)
                    raise
            for kind in ("flush", "commit"):
                await self._tell(ends, WeightMessage(kind=kind, version=version))
            await asyncio.gather(*(self._abort(end, version) for end in ends if not end.result.ok))
            if any(not end.result.ok for end in well):
                self._members = []  # an abort leaves the group
            report.seconds = time.monotonic() - started
            return report

    # --- Transfer ---

    async def _ask(self, end: _End) -> None:
        """How many ranks of the group the engine is, and whether it has the channel at all."""
        try:
            self._check(end.engine)
            end.ranks = int((await bounded(end.engine.health(), self.timeout_s)).get("ranks", 1))
        except Exception as error:
            end.fail("connect", str(error) or type(error).__name__)

    async def _send(self, version: int, ends: list[_End], report: SyncReport) -> None:
        members = [(end.engine.id, end.engine.incarnation) for end in ends]
        fresh = members != self._members
        self._group = f"miles-{secrets.token_hex(4)}" if fresh else self._group
        self._members = []  # until this send has gone through
        size = 1
        for end in ends:
            end.rank, size = size, size + end.ranks
        await self._trainer.send_open(self._plan(version, ends, size, fresh), timeout_s=self.timeout_s)
        announced: list[WeightMessage] = []
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
                    report.hashes = (*report.hashes, message.sha)
        await self._trainer.send_close(timeout_s=2 * self.timeout_s)

    def _plan(self, version: int, ends: list[_End], size: int, fresh: bool) -> SendPlan:
        nodes = {p["node"] for p in self._places} | {self._place(end.engine)["node"] for end in ends}
        host = self.host or (LOOPBACK if len(nodes) == 1 else self._places[0]["host"])
        options = {
            "group": self._group,
            "world_size": size,
            "fresh": fresh,
            "backend": self.backend,
            "host": host,
            "timeout_s": self.timeout_s,
            "join_timeout_s": self.join_timeout_s,
            "checksum": self.checksum,
        }
        return SendPlan(
            version=version,
            bucket_bytes=self.bucket_bytes,
            transport="nccl-sync",
            options=options,
            timeout_s=2 * self.timeout_s,
        )

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
        gone = [end.result.engine for end in ends if not end.joined]
        return (f"{', '.join(gone)} failed" if gone else ""), messages

    # --- Engines ---

    async def _break(self, ends: list[_End], version: int, problem: str = "the trainer failed") -> None:
        self._members = []
        for end in ends:
            if end.result.ok:
                end.fail(end.result.phase, f"the group broke: {problem}")
        await asyncio.gather(*(self._abort(end, version) for end in ends))

    async def _abort(self, end: _End, version: int) -> None:
        """Tells an engine to leave the group and that the update is off; it may be too ill to hear."""
        limit = min(ABORT_LIMIT_S, self.timeout_s)
        message = WeightMessage(kind="abort", version=version, incarnation=end.engine.incarnation, timeout_s=limit)
        with contextlib.suppress(Exception):
            await bounded(end.engine.receive(message), limit)

    async def _tell(self, ends: list[_End], message: WeightMessage) -> None:
        """One message to all `ends` at once; who fails is noted with the phase. An engine whose bytes were wrong stays in
        the collectives, which need it, and hears of nothing else."""
        data = message.kind in ("broadcast", "join")
        phase = f"bucket {message.bucket}" if message.kind == "broadcast" else message.kind

        async def one(end: _End) -> None:
            body = {**message.body, "rank": end.rank} if message.kind == "join" else message.body
            own = replace(message, body=body, incarnation=end.engine.incarnation, timeout_s=self.timeout_s)
            well = end.result.ok
            end.result.phase = phase if well else end.result.phase
            try:
                answer = await bounded(end.engine.receive(own), self.timeout_s) or {}
            except TimeoutError:
                end.fail(phase, f"no answer to {phase} within {self.timeout_s:g} s")
            except Exception as error:
                end.fail(phase, str(error) if isinstance(error, MilesError) else f"{type(error).__name__}: {error}")
            else:
                _judge(end, message, phase, answer)

        await asyncio.gather(*(one(end) for end in ends if (end.joined if data else end.result.ok)))

    def _check(self, engine: EngineReplica) -> None:
        if "weights/broadcast" not in engine.capabilities:
            can = ", ".join(sorted(c for c in engine.capabilities if c.startswith("weights/"))) or "none"
            raise ConfigError(
                f'{engine.id} cannot take weights through the transport "nccl-sync": it offers no weights/broadcast (it '
                f"has: {can})",
                "choose a transport for one of its channels: transport.use",
            )

    @staticmethod
    def _place(engine: EngineReplica) -> dict[str, Any]:
        return getattr(engine, "place", None) or place()


def _judge(end: _End, message: WeightMessage, phase: str, answer: dict[str, Any]) -> None:
    """Notes what an engine's answer says against it. Not every engine can hash what a collective brought."""
    end.result.seconds = time.monotonic() - end.started
    if message.kind == "broadcast" and message.sha and answer.get("sha") not in (None, "", message.sha):
        end.fail(phase, f"{phase} arrived as {str(answer['sha'])[:12]}, not {message.sha[:12]}", joined=True)
    if message.kind == "commit":
        end.result.state_hash = answer.get("state_hash", "")
        if answer.get("version") != message.version:
            end.fail(phase, f"committed version {answer.get('version')} instead of {message.version}")
