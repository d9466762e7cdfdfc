"""EnginePool: routing, requeueing and re-syncing of requests, written once and used by every engine.

A replica knows nothing of its siblings; the pool decides who serves what. A request waits in one queue until a ready
replica has room. It prefers the replica that serves its session, or that has seen the same context (whose prefix is
cached there), unless that one is much more loaded. A request that fails or takes too long goes to another replica;
after `max_attempts` its sample is data, with status "error" or "timeout" and the reasons. The answer of a replaced
incarnation is dropped: each request is answered exactly once.

What a push does with running requests is its mode. "drain" waits for them. "abort" ends them, and they start again
under the new weights; one that has been cut `max_cuts` times is waited for, so that no long answer is cut for ever.
"retract" and "in_place" leave them in the engine, which tags every token with its version. With `partial=False` an
answer never mixes versions: whatever was cut is discarded. With `partial=True` a cut answer goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from miles_core.engine_members import Fleet, Member, MemberInfo, OnEvent, Ticket, bounded, forget
from miles_core.engine_sync import PhaseFailed, Probe, PushMode, PushSettings, hold, merge_reports, push_members, repairing
from miles_core.errors import ContractError, EngineFailed, RunFailed, WeightSyncFailed, WorkerDied
from miles_core.generations import Job, check_generation, join_generations
from miles_core.interfaces import EngineReplica, WeightTransport
from miles_core.types import GenerateRequest, Generation, Status, SyncReport

PUSH_MODES: dict[str, PushMode] = {"wait": "drain", "abort_requeue": "abort", "continue": "retract"}
"""`rollout.on_stale` -> mode of `EnginePool.sync`; "continue" also wants `EnginePool(partial=True)`."""

MAX_PUSHES = 2
"""How often one version is sent to an engine that fails to take it; then it waits for the next version."""


class EnginePool:
    """All replicas of one model.

    `timeout_s` bounds a request on one engine, `sync_timeout_s` one control message, `push_timeout_s` (four times that
    by default) a whole push. `replace(replica)` may start a replica in place of a dead one, or return None.
    `version` is that of a resumed run: its engines are dirty until the first push.
    """

    def __init__(
        self,
        replicas: Sequence[EngineReplica],
        *,
        timeout_s: float = 600.0,
        max_attempts: int = 3,
        sync_timeout_s: float = 300.0,
        push_timeout_s: float | None = None,
        partial: bool = False,
        max_cuts: int = 1,
        version: int = 0,
        replace: Callable[[EngineReplica], Awaitable[EngineReplica | None]] | None = None,
        max_replacements: int = 3,
        on_event: OnEvent | None = None,
    ) -> None:
        push_s = push_timeout_s or 4 * sync_timeout_s
        self.timeout_s, self.max_attempts, self.partial = timeout_s, max_attempts, partial
        self._limits = PushSettings(sync_timeout_s, push_s, timeout_s + sync_timeout_s, max_cuts)
        self._fleet = Fleet(
            version=version,
            wait_s=timeout_s + push_s,
            call_s=min(sync_timeout_s, timeout_s),
            replace=replace,
            max_replacements=max_replacements,
            on_event=on_event,
        )
        for replica in replicas:
            self._fleet.enlist(replica)
        self.counts = self._fleet.counts
        """Totals: requests, requeued, timeouts, cut, cut_tokens, deaths, replacements, tokens, cached_tokens, ..."""
        self._jobs: dict[str, Job] = {}
        self._num_calls = 0
        self._lock = asyncio.Lock()
        self._last: tuple[WeightTransport, Sequence[Probe] | None] | None = None

    @property
    def version(self) -> int:
        """The weight version that ready engines serve."""
        return self._fleet.version

    # --- Membership --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts every replica. Raises what the first failed one raised: a run that asked for N replicas does not begin
        with fewer."""
        for error in await asyncio.gather(*map(self._fleet.start, self._fleet.members.values()), return_exceptions=True):
            if error is not None:
                raise error

    async def add(self, replica: EngineReplica) -> None:
        """Starts a further replica. Before the first push it serves at once; later it is dirty until the next one."""
        await self._fleet.start(self._fleet.enlist(replica))

    async def remove(self, engine_id: str) -> None:
        """Takes a replica out of rotation, lets it finish for at most `timeout_s`, and closes it."""
        member = self._fleet.members[engine_id]
        if member.state != "dead":
            member.state = "draining"
            with suppress(TimeoutError):
                await bounded(member.idle.wait(), self.timeout_s)
        self._fleet.members.pop(engine_id, None)
        member.evict()
        await asyncio.gather(bounded(member.replica.close(), self._limits.phase_s), return_exceptions=True)
        self._fleet.dispatch()

    def report_death(self, engine_id: str, reason: str) -> None:
        """For launchers that see a worker end before a request does."""
        self._fleet.die(self._fleet.members[engine_id], reason)

    def members(self) -> list[MemberInfo]:
        return [m.info() for m in self._fleet.members.values()]

    @property
    def replicas(self) -> list[EngineReplica]:
        """Those that are alive, in the order in which they joined."""
        return [m.replica for m in self._fleet.members.values() if m.state != "dead"]

    async def close(self) -> None:
        """Ends every request and replica; safe to call twice."""
        await self._fleet.close([m.replica for m in self._fleet.members.values()])

    # --- Requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples for `request` on some replica. A request that no replica could serve returns finish="error" or
        "timeout" with the reasons. Raises RunFailed when every engine is dead, ContractError for a malformed request or
        answer."""
        if request.params.max_new_tokens < 1 or len(request.token_ids) < 1:
            raise ContractError(
                f"request {request.id} has {len(request.token_ids)} prompt tokens and asks for "
                f"{request.params.max_new_tokens} new ones; both must be at least 1"
            )
        if request.id in self._jobs:
            raise ContractError(f"request {request.id} is already running; every request needs an id of its own")
        context = blake2b(np.asarray(request.token_ids, dtype=np.int32).tobytes(), digest_size=16).digest()
        homes = (context,) if request.session is None else (request.session, context)
        job = self._jobs[request.id] = Job(request, Ticket(request.id, homes))
        self.counts["requests"] += 1
        try:
            while (answer := await self._attempt(job)) is None:
                pass
            return answer
        finally:
            del self._jobs[request.id]

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Ends these requests (all when None): their `generate` returns what there is, with finish="aborted"."""
        wanted = set(self._jobs) if ids is None else set(ids)
        running: dict[Member, list[str]] = {}
        for job in (self._jobs[i] for i in wanted if i in self._jobs):
            job.aborted = True
            self._fleet.withdraw(job.ticket)
            for member in self._fleet.members.values():
                if job.ticket.id in member.calls:
                    running.setdefault(member, []).append(job.ticket.id)
        await asyncio.gather(*(self._abort_on(member, names) for member, names in running.items()))

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        """`EngineReplica.score` on some ready replica, tried like a request. Raises EngineFailed when none could."""
        self._num_calls += 1
        ticket, failures = Ticket(f"score#{self._num_calls}"), []
        for _ in range(self.max_attempts):
            member = await self._fleet.assign(ticket)
            try:
                member.calls[ticket.id] = call = asyncio.ensure_future(member.replica.score(token_ids, topk))
                return await bounded(call, self.timeout_s)
            except (EngineFailed, WorkerDied, TimeoutError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore
                    raise
                failures.append(f"{member.id}: {error or 'evicted'}")
                ticket.avoid.add(member.id)
                await self._fleet.check(member, str(error))
            finally:
                member.calls.pop(ticket.id, None)
                self._fleet.release(member, ticket)
        raise EngineFailed("no engine could score", *failures)

    async def _attempt(self, job: Job) -> Generation | None:
        """The answer, or None: try again."""
        if job.aborted:
            return job.ended("aborted", "aborted on request")
        if len(job.failures) >= self.max_attempts:
            self.counts[f"finish_{job.finish}"] += 1
            return job.ended(job.finish, f"gave up after {len(job.failures)} attempts: " + "; ".join(job.failures))
        if job.so_far is not None and len(job.so_far.token_ids) >= job.request.params.max_new_tokens:
            return job.ended("length", "")  # cut just as it was complete
        job.tries += 1
        job.ticket.id = self._call_id(job)
        try:
            member = await self._fleet.assign(job.ticket)
        except asyncio.CancelledError:
            if job.aborted and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                return None
            raise
        if member.state != "ready":  # it left rotation between the grant and now
            self._fleet.release(member, job.ticket)
            return None
        incarnation = member.incarnation
        try:
            answer = await self._call(job, member)
        except ContractError:
            raise
        except TimeoutError as error:
            return await self._failed(job, member, str(error), "timeout")
        except WorkerDied as error:
            self._fleet.die(member, str(error))
            return await self._failed(job, member, str(error))
        except Exception as error:
            reason = str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"
            return await self._failed(job, member, reason)
        return await self._judge(job, member, incarnation, answer)

    def _call_id(self, job: Job) -> str:
        """The id that the engine sees: of its own for each attempt, since a late abort of an earlier one, perhaps of a
        caller that gave up, must not hit it."""
        self._num_calls += 1
        free = job.tries == 1 and not any(job.request.id in m.slots for m in self._fleet.members.values())
        return job.request.id if free else f"{job.request.id}#{self._num_calls}"

    async def _judge(self, job: Job, member: Member, incarnation: str, answer: Generation | None) -> Generation | None:
        """Whether an answer counts: not from a dead, dirty or replaced engine, nor from weights nobody has verified."""
        if answer is not None and member.verdict is not None:
            await asyncio.wait({member.verdict})  # it arrived while weights were being loaded
        if member.state == "dead":
            return await self._failed(job, member, member.reason)
        if answer is None or member.state == "dirty":
            self.counts["requeued"] += 1
            return None
        stale = self._fleet.members.get(member.id) not in (member, None) or answer.incarnation not in ("", incarnation)
        if stale:
            self.counts["dropped_old_incarnation"] += 1
            return await self._failed(job, member, f"it was replaced; incarnation {answer.incarnation} is gone")
        check_generation(answer, member.id, self.version)
        if answer.finish in ("error", "timeout"):
            return await self._failed(job, member, answer.reason or answer.finish, answer.finish)
        if answer.finish == "aborted" and not job.aborted:
            if member.epoch == job.ticket.epoch:
                return await self._failed(job, member, f"the engine aborted it: {answer.reason or 'no reason given'}")
            return self._cut(job, answer)
        whole = join_generations(job.so_far, answer) if job.so_far else answer
        if not self.partial and len({span.version for span in whole.versions}) > 1:
            self.counts["mixed_discarded"] += 1  # the engine went on under new weights, but one version was asked for
            return None
        member.served += 1
        self.counts["tokens"] += len(answer.token_ids)
        self.counts["cached_tokens"] += answer.cached_tokens
        return replace(whole, id=job.request.id)

    def _cut(self, job: Job, answer: Generation) -> None:
        """A pause ended this answer early."""
        job.ticket.cuts += 1
        self.counts["cut"] += 1
        if self.partial:
            job.so_far = join_generations(job.so_far, answer) if job.so_far else answer
        else:
            self.counts["cut_tokens"] += len(answer.token_ids)

    async def _failed(self, job: Job, member: Member, reason: str, finish: Status = "error") -> None:
        """Books a failed attempt, and finds out whether the member is alive before anything is sent to it again."""
        reason = reason if member.id in reason else f"{member.id}: {reason}"
        job.failures.append(reason)
        job.finish = finish
        job.ticket.avoid.add(member.id)
        self.counts["requeued"] += 1
        self._fleet.event("requeued", member.id, f"{job.request.id}: {reason}")
        if member.state == "ready":
            await self._fleet.check(member, reason)

    async def _call(self, job: Job, member: Member) -> Generation | None:
        """The member's answer, or None when the member was evicted. Raises TimeoutError after `timeout_s`."""
        ticket, request = job.ticket, job.rest()
        # A ticket of its own per attempt: the slot stays taken until the engine has let go of the request.
        held = replace(ticket)
        member.slots[ticket.id] = held
        call = member.calls[ticket.id] = asyncio.ensure_future(member.replica.generate(request))
        try:
            done, _ = await asyncio.wait({call}, timeout=self.timeout_s)
        except asyncio.CancelledError:
            self._fleet.spawn(self._take_back(member, held, call))
            raise
        if not done:
            self.counts["timeouts"] += 1
            await self._take_back(member, held, call)
            raise TimeoutError(f"no answer within {self.timeout_s:g} s")
        member.calls.pop(ticket.id, None)
        self._fleet.release(member, held)
        return None if call.cancelled() else call.result()

    async def _take_back(self, member: Member, ticket: Ticket, call: asyncio.Future[Any]) -> None:
        await self._abort_on(member, [ticket.id])
        forget(call)
        member.calls.pop(ticket.id, None)
        self._fleet.release(member, ticket)

    async def _abort_on(self, member: Member, names: list[str]) -> None:
        if member.state == "dead":
            return
        try:
            await bounded(member.replica.abort(names), self._fleet.call_s)
        except Exception as error:
            self._fleet.die(member, f"it did not acknowledge an abort: {error or type(error).__name__}")

    # --- Control -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PushMode = "drain") -> None:
        """Stops sampling on all ready engines; requests wait. An engine that cannot is dirty afterwards."""
        self._fleet.paused = True
        members = [m for m in self._fleet.members.values() if m.state == "ready"]
        results = await asyncio.gather(*(hold(m, mode, self._limits) for m in members), return_exceptions=True)
        for member, error in zip(members, results, strict=True):
            if isinstance(error, PhaseFailed):
                self._fleet.set_dirty(member, f"{error.phase}: {error}")
            elif error is not None:
                raise error

    async def resume(self) -> None:
        """Ends a `pause`."""
        await self._all("resume", lambda replica: replica.resume())
        self._fleet.paused = False
        self._fleet.dispatch()

    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        """Releases device memory of every engine that is not dead; pause first."""
        await self._all("sleep", lambda replica: replica.sleep(tags), also_dirty=True)

    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        await self._all("wake", lambda replica: replica.wake(tags), also_dirty=True)

    async def _all(self, phase: str, call: Callable[[EngineReplica], Awaitable[None]], *, also_dirty: bool = False) -> None:
        states = ("ready", "dirty") if also_dirty else ("ready",)
        members = [m for m in self._fleet.members.values() if m.state in states]
        calls = (bounded(call(m.replica), self._limits.phase_s) for m in members)
        for member, error in zip(members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if error is not None:
                self._fleet.set_dirty(member, f"{phase}: {error or type(error).__name__}")

    async def sync(
        self,
        transport: WeightTransport,
        version: int,
        probes: Sequence[Probe] | None = None,
        *,
        mode: PushMode = "drain",
    ) -> SyncReport:
        """Pushes `version` to every living engine; see `engine_sync` for the order. Engines that fail are tried once
        more at once, and again at the next push; until then they are dirty.

        Returns the report, with one entry per engine. Raises WeightSyncFailed, naming engines and phases, when none
        serves `version` afterwards; a second attempt is possible.
        """
        if version < self.version:
            raise ContractError(f"version {version} cannot follow version {self.version}; versions only grow")
        async with self._lock:
            self._last = (transport, probes)
            members = [m for m in self._fleet.members.values() if m.state in ("ready", "dirty")]
            if not members:
                raise RunFailed(f"no engine is left to receive version {version}", *self._fleet.describe())
            for member in members:
                member.failed_pushes = 0
            self._fleet.dirty.clear()
            report = await push_members(self._fleet, members, transport, version, probes, mode, self._limits)
            self._fleet.paused = False
            self._fleet.dispatch()
            if any(m.state == "dirty" for m in members):
                report = merge_reports(report, await self._repair(version, transport, probes, members))
        if not any(m.state == "ready" for m in self._fleet.members.values()):
            lines = [f"{e.engine}, phase {e.phase}: {e.error}" for e in report.engines if not e.ok]
            raise WeightSyncFailed(f"no engine received weight version {version}", *lines)
        return report

    async def resync(self) -> SyncReport | None:
        """Sends the pool's version again to dirty engines alone; the others serve on. None when there are none, or
        nothing has been pushed yet. The trainer must be idle and hold the weights of the last push."""
        async with self._lock:
            if self._last is None:
                return None
            transport, probes = self._last
            self._fleet.dirty.clear()
            report = await self._repair(self.version, transport, probes, list(self._fleet.members.values()))
            return report if report.engines else None

    async def _repair(
        self, version: int, transport: WeightTransport, probes: Sequence[Probe] | None, members: Sequence[Member]
    ) -> SyncReport:
        dirty = [m for m in members if m.state == "dirty" and m.failed_pushes < MAX_PUSHES]
        self.counts["resyncs"] += len(dirty)
        return await push_members(self._fleet, dirty, transport, version, probes, "abort", self._limits)

    def repairing(self) -> AbstractAsyncContextManager[None]:
        """While the trainer is idle and holds the weights of the last push - that is, around the wait for a batch -
        engines that become dirty, or join, are re-synced as they turn up. Leaving waits for a re-sync under way."""
        return repairing(self._fleet, self.resync)
