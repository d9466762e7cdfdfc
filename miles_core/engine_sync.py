"""One push of weights to some members of a pool, in the order of docs/architecture.md section 7.

    out of rotation -> running requests drained, cut or held -> pause -> transport.push (begin, data, flush, commit)
    -> the committed version is asked for -> resume, out of rotation -> fixed prompts re-scored -> version -> rotation

Every wait is finite. Whatever goes wrong with a member, in whatever phase, leaves that member dirty, and its error
says which engine and which phase; the others go on. Nothing stays locked, so that the next attempt starts afresh.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from miles_core.engine_members import Fleet, Member, bounded
from miles_core.interfaces import WeightTransport
from miles_core.types import EngineSync, SyncReport

PushMode = Literal["drain", "abort", "retract", "in_place"]
Probe = tuple[np.ndarray, np.ndarray, float]
"""(token ids int32[T], expected logprobs float32[T], largest mean absolute difference in nats)."""


@dataclass(frozen=True, slots=True)
class PushSettings:
    """Limits of a push: `phase_s` for each control message, `push_s` for the transport, `drain_s` for requests that are
    waited for; a request that has been cut `max_cuts` times is waited for too."""

    phase_s: float
    push_s: float
    drain_s: float
    max_cuts: int


class PhaseFailed(Exception):
    """One member failed in one phase; becomes an `EngineSync`."""

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(reason)
        self.phase = phase


async def hold(member: Member, mode: PushMode, limits: PushSettings) -> None:
    """Stops a member that has left rotation. Raises PhaseFailed with the phase "drain" or "pause"."""
    member.epoch += 1
    if mode == "abort":
        ids = [ticket.id for ticket in member.slots.values() if ticket.cuts < limits.max_cuts]
        if ids:
            await _phase("abort", member, member.replica.abort(ids), limits.phase_s)
    if mode in ("abort", "drain"):
        try:
            await bounded(member.idle.wait(), limits.drain_s)
        except TimeoutError as error:
            late = ", ".join(sorted(member.slots))
            raise PhaseFailed("drain", f"{member.id} still runs {late} after {limits.drain_s:g} s") from error
    await _phase("pause", member, member.replica.pause("abort" if mode == "drain" else mode), limits.phase_s)


async def push_members(
    fleet: Fleet,
    members: Sequence[Member],
    transport: WeightTransport,
    version: int,
    probes: Sequence[Probe] | None,
    mode: PushMode,
    limits: PushSettings,
) -> SyncReport:
    """Brings `members` to `version`; those that make it are ready when this returns, the others dirty."""
    outcome: dict[str, EngineSync] = {}
    for member in members:
        member.state = "syncing"
        member.verdict = asyncio.get_running_loop().create_future()

    def fail(member: Member, phase: str, reason: str) -> None:
        outcome[member.id] = EngineSync(engine=member.id, ok=False, phase=phase, error=reason)
        member.failed_pushes += 1
        fleet.set_dirty(member, f"version {version}, {phase}: {reason}")

    async def each(group: Sequence[Member], work: Callable[[Member], Coroutine[Any, Any, None]]) -> list[Member]:
        results = await asyncio.gather(*(work(m) for m in group), return_exceptions=True)
        for member, error in zip(group, results, strict=True):
            if isinstance(error, PhaseFailed):
                fail(member, error.phase, str(error))
            elif isinstance(error, BaseException):
                raise error
        return [m for m, error in zip(group, results, strict=True) if error is None and m.state == "syncing"]

    try:
        held = await each(members, lambda m: hold(m, mode, limits))
        report = await _transfer(held, transport, version, limits.push_s)
        loaded = []
        for member, sync in zip(held, report.engines, strict=True):
            if sync.ok and member.state == "syncing":
                outcome[member.id] = sync
                loaded.append(member)
            else:
                fail(member, sync.phase or "push", sync.error or member.reason or "failed without saying why")
        for member in _disagreeing(loaded, report.engines):
            fail(member, "verify", "its weights' hash differs from the other engines'")
        loaded = [m for m in loaded if m.state == "syncing"]
        good = await each(loaded, lambda m: _verify(m, version, probes, mode, limits))
        if good:
            fleet.version, fleet.initial = version, False
            for member in good:
                fleet.set_ready(member)
    finally:
        for member in members:
            if member.state == "syncing":  # this push was itself cancelled
                fleet.set_dirty(member, f"the push of version {version} was interrupted")
            if member.verdict is not None and not member.verdict.done():
                member.verdict.set_result(None)
            member.verdict = None
            if member.state == "dirty":  # ill, or gone? Who is gone is replaced.
                fleet.spawn(fleet.bury_if_gone(member))
    return replace(report, engines=[outcome[m.id] for m in members])


async def _transfer(held: Sequence[Member], transport: WeightTransport, version: int, limit_s: float) -> SyncReport:
    """The transport's report with exactly one entry per held member, in their order."""
    report = SyncReport(version=version, num_bytes=0, seconds=0.0, num_buckets=0)
    if not held:
        return report
    error = "the transport did not report on it"
    try:
        report = await bounded(transport.push(version, [m.replica for m in held]), limit_s)
    except TimeoutError as timeout:
        error = f"the transport did not finish: {timeout}"
    except Exception as failure:
        error = str(failure) or type(failure).__name__
    known = {sync.engine: sync for sync in report.engines}
    entries = [known.get(m.id) or EngineSync(engine=m.id, ok=False, phase="push", error=error) for m in held]
    return replace(report, engines=entries)


async def _verify(
    member: Member, version: int, probes: Sequence[Probe] | None, mode: PushMode, limits: PushSettings
) -> None:
    health = await _phase("verify", member, member.replica.health(), limits.phase_s)
    if health.get("version") != version:
        raise PhaseFailed("verify", f"{member.id} says that it holds version {health.get('version')}, not {version}")
    member.incarnation = member.replica.incarnation
    await _phase("resume", member, member.replica.resume(), limits.phase_s)
    if not probes or (mode == "in_place" and member.slots):
        return
    scored = await _phase("score", member, member.replica.score([p[0] for p in probes]), limits.phase_s)
    for i, ((_, expected, tolerance), got) in enumerate(zip(probes, scored, strict=True)):
        gap = float(np.mean(np.abs(got["logprobs"][1:] - expected[1:]))) if len(expected) > 1 else 0.0
        if not gap <= tolerance:  # also when it is NaN
            raise PhaseFailed(
                "score",
                f"{member.id} and the trainer differ by {gap:.4g} nats on fixed prompt {i} "
                f"(transport.tolerance is {tolerance:g}): the engine does not compute what the trainer computes",
            )


async def _phase(name: str, member: Member, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    try:
        return await bounded(work, limit_s)
    except Exception as error:
        text = str(error) or type(error).__name__
        raise PhaseFailed(name, text if member.id in text else f"{member.id}: {text}") from error


def _disagreeing(members: Sequence[Member], entries: Sequence[EngineSync]) -> list[Member]:
    """Members whose state hash is not that of the strict majority; all of them where there is none."""
    hashes = {sync.engine: sync.state_hash for sync in entries if sync.state_hash}
    votes = Counter(hashes[m.id] for m in members if m.id in hashes)
    if len(votes) < 2:
        return []
    winner, count = votes.most_common(1)[0]
    right = winner if 2 * count > votes.total() else None
    return [m for m in members if m.id in hashes and hashes[m.id] != right]


@asynccontextmanager
async def repairing(fleet: Fleet, resync: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Calls `resync` whenever a member becomes dirty; leaving waits for one under way."""
    busy = asyncio.Lock()

    async def repair() -> None:
        while True:
            await fleet.dirty.wait()
            fleet.dirty.clear()
            async with busy:
                await resync()

    fleet.dirty.set()
    task = fleet.spawn(repair())
    try:
        yield
    finally:
        async with busy:
            task.cancel()
        if task.done() and not task.cancelled():
            task.result()  # only a bug ends it


def merge_reports(first: SyncReport, second: SyncReport) -> SyncReport:
    """One report of a push and its second attempt: an engine's last result counts."""
    last = {sync.engine: sync for sync in (*first.engines, *second.engines)}
    return replace(
        first,
        num_bytes=first.num_bytes + second.num_bytes,
        seconds=first.seconds + second.seconds,
        num_buckets=max(first.num_buckets, second.num_buckets),
        hashes=first.hashes or second.hashes,
        engines=list(last.values()),
    )
