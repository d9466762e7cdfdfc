"""The members of an engine pool: who is alive, who may serve, and who serves the next request.

States:  starting -> ready <-> syncing -> dirty;  any -> dead, draining.
Only ready members are in rotation. A dirty one is alive, but nobody has verified that it holds the pool's version.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from miles_core.errors import ContractError, RunFailed, WorkerDied
from miles_core.interfaces import EngineReplica

T = TypeVar("T")
MemberState = Literal["starting", "ready", "syncing", "dirty", "dead", "draining"]
OnEvent = Callable[[str, str, str], None]
"""`on_event(kind, engine id, message)`; kinds: ready, dirty, dead, replaced, requeued."""

AFFINITY_ENTRIES = 4096
"""Contexts and sessions whose replica is remembered; the least recently used are forgotten."""
AFFINITY_SLACK = 16
"""A preferred replica is left when it runs more than 1.5 x the least loaded one's requests plus this many."""


async def bounded(work: Awaitable[T], timeout_s: float) -> T:
    """The result of `work`, or TimeoutError after `timeout_s`, even when `work` swallows its cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        forget(task)
        raise
    if not done:
        forget(task)
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return task.result()


def forget(task: asyncio.Future[Any]) -> None:
    """Cancels a task that nobody will await, without asyncio complaining about its result."""
    task.cancel()
    task.add_done_callback(lambda late: late.cancelled() or late.exception())


@dataclass(slots=True, frozen=True)
class MemberInfo:
    id: str
    state: MemberState
    version: int
    incarnation: str
    running: int
    served: int
    reason: str


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits for, or holds, a slot. `homes` are the keys by which it prefers a replica."""

    id: str
    homes: tuple[Any, ...] = ()
    avoid: set[str] = field(default_factory=set)
    slot: asyncio.Future[Member] | None = None
    cuts: int = 0
    """How often a pause ended it early."""
    epoch: int = 0
    """The member's epoch when the slot was granted."""


@dataclass(slots=True, eq=False)
class Member:
    """One replica. `slots` are the requests that it was given, `calls` those that it runs; `epoch` counts its pauses;
    `verdict` is open while weights arrive."""

    replica: EngineReplica
    state: MemberState = "starting"
    version: int = 0
    incarnation: str = ""
    reason: str = ""
    slots: dict[str, Ticket] = field(default_factory=dict)
    calls: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    epoch: int = 0
    verdict: asyncio.Future[None] | None = None
    check: asyncio.Task[None] | None = None
    failed_pushes: int = 0
    """Pushes that it failed since it was last verified, or since the last whole push began."""
    served: int = 0
    replacements: int = 0

    @property
    def id(self) -> str:
        return self.replica.id

    @property
    def has_room(self) -> bool:
        limit = getattr(self.replica, "max_running", None)
        return limit is None or len(self.slots) < limit

    def info(self) -> MemberInfo:
        return MemberInfo(self.id, self.state, self.version, self.incarnation, len(self.slots), self.served, self.reason)

    def evict(self) -> None:
        """Gives up on every request that it runs; those find out and look for another replica."""
        for call in self.calls.values():
            forget(call)
        self.calls.clear()
        self.slots.clear()
        self.idle.set()


class Fleet:
    """Membership and routing. `wait_s` bounds how long a request waits while nothing serves; `call_s` one control call.
    `replace(replica)` may start a replica in place of a dead one, at most `max_replacements` times in a row."""

    def __init__(
        self,
        *,
        version: int,
        wait_s: float,
        call_s: float,
        replace: Callable[[EngineReplica], Awaitable[EngineReplica | None]] | None = None,
        max_replacements: int = 3,
        on_event: OnEvent | None = None,
    ) -> None:
        self.version, self.wait_s, self.call_s = version, wait_s, call_s
        self.replace, self.max_replacements, self.on_event = replace, max_replacements, on_event
        self.members: dict[str, Member] = {}
        self.counts: Counter[str] = Counter()
        self.paused = False
        self.initial = version == 0
        """True while the weights that replicas load at their start are the pool's weights: before the first push."""
        self.dirty = asyncio.Event()
        """Set when a member became dirty; whoever repairs clears it."""
        self._queue: deque[Ticket] = deque()
        self._homes: OrderedDict[Any, str] = OrderedDict()
        self._replacing = 0
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- Membership --------------------------------------------------------------------------------------------------

    def enlist(self, replica: EngineReplica) -> Member:
        if replica.id in self.members:
            raise ContractError(f'two engine replicas have the id "{replica.id}"; every replica needs an id of its own')
        member = self.members[replica.id] = Member(replica)
        member.idle.set()
        return member

    async def start(self, member: Member) -> None:
        await member.replica.start()
        member.incarnation = member.replica.incarnation
        if self.initial:
            self.set_ready(member)
        else:
            self.set_dirty(member, f"it joined at version {self.version} and has not been synced yet")

    def set_ready(self, member: Member) -> None:
        member.state, member.version, member.reason = "ready", self.version, ""
        member.failed_pushes = 0
        self.event("ready", member.id, f"serves version {self.version}")
        self.dispatch()

    def set_dirty(self, member: Member, reason: str) -> None:
        if member.state == "dead":
            return
        member.state, member.reason = "dirty", reason
        member.evict()
        self.event("dirty", member.id, reason)
        self.dirty.set()

    def die(self, member: Member, reason: str) -> None:
        if member.state == "dead":
            return
        member.state, member.reason = "dead", reason
        self.counts["deaths"] += 1
        self.event("dead", member.id, reason)
        member.evict()
        if self.replace is not None and member.replacements < self.max_replacements:
            self._replacing += 1
            self.spawn(self._replace(member))
        self.dispatch()

    async def _replace(self, old: Member) -> None:
        assert self.replace is not None
        try:
            replica = await self.replace(old.replica)
        except Exception as error:
            old.reason += f"; its replacement failed: {error or type(error).__name__}"
            replica = None
        if replica is not None:
            new = Member(replica, replacements=old.replacements + 1)
            new.idle.set()
            # The old one leaves first: an answer of it that still arrives belongs to nobody and is dropped.
            del self.members[old.id]
            self.members[replica.id] = new
            try:
                await self.start(new)
                self.counts["replacements"] += 1
                self.event("replaced", new.id, f"in place of {old.id}: {old.reason}")
            except Exception as error:
                self.die(new, f"it did not start: {error or type(error).__name__}")
        self._replacing -= 1
        self.dispatch()

    async def check(self, member: Member, why: str) -> None:
        """Finds out whether a member that failed is alive; one question at a time however many requests ask."""
        if member.check is None:
            member.check = self.spawn(self._check(member, why))
        await asyncio.wait({member.check})

    async def bury_if_gone(self, member: Member) -> None:
        """A member that failed a push is dead if its process is; one that is merely ill may take the next push."""
        with suppress(Exception):
            try:
                await bounded(member.replica.health(), self.call_s)
            except WorkerDied as error:
                self.die(member, str(error))

    async def _check(self, member: Member, why: str) -> None:
        try:
            await bounded(member.replica.health(), self.call_s)
            if member.replica.incarnation != member.incarnation:
                member.incarnation = member.replica.incarnation
                self.set_dirty(member, "it restarted by itself and holds its initial weights")
        except Exception as error:
            self.die(member, f"{why}; health: {error or type(error).__name__}")
        finally:
            member.check = None

    # --- Routing -----------------------------------------------------------------------------------------------------

    async def assign(self, ticket: Ticket) -> Member:
        """Waits for a slot on a ready member, first come, first served.

        Raises RunFailed when every engine is dead, or when no engine was ready for `wait_s`; CancelledError when
        `withdraw` took the ticket back.
        """
        if self._closed:
            raise RunFailed("the engine pool was closed")
        ticket.slot = slot = asyncio.get_running_loop().create_future()
        self._queue.append(ticket)
        self.dispatch()
        granted = False
        try:
            while not (await asyncio.wait({slot}, timeout=self.wait_s))[0]:
                if not any(m.state == "ready" for m in self.members.values()) or self.paused:
                    raise RunFailed(f"no engine has been ready for {self.wait_s:g} s", *self.describe())
            member = slot.result()
            granted = True
            return member
        finally:
            if ticket in self._queue:
                self._queue.remove(ticket)
            if not granted and slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release(slot.result(), ticket)

    def withdraw(self, ticket: Ticket) -> None:
        if ticket.slot is not None and not ticket.slot.done():
            ticket.slot.cancel()

    def release(self, member: Member, ticket: Ticket) -> None:
        if member.slots.get(ticket.id) is ticket:
            del member.slots[ticket.id]
        if not member.slots:
            member.idle.set()
        self.dispatch()

    def dispatch(self) -> None:
        """Grants slots while there are both a waiting request and a ready member with room."""
        if not self._replacing and all(m.state == "dead" for m in self.members.values()):
            self.fail_waiting(RunFailed("every engine is dead", *self.describe()))
        while self._queue and not self.paused:
            ticket = self._queue[0]
            assert ticket.slot is not None
            if ticket.slot.done():
                self._queue.popleft()
                continue
            member = self._pick(ticket)
            if member is None:
                return
            self._queue.popleft()
            member.slots[ticket.id] = ticket
            member.idle.clear()
            ticket.epoch = member.epoch
            ticket.slot.set_result(member)

    def fail_waiting(self, error: RunFailed) -> None:
        for ticket in self._queue:
            if ticket.slot is not None and not ticket.slot.done():
                ticket.slot.set_exception(error)
        self._queue.clear()

    def _pick(self, ticket: Ticket) -> Member | None:
        """Where the session or the context lives, unless that one is much more loaded; else the least loaded. A replica
        on which this request has failed is avoided while there is another."""
        free = [m for m in self.members.values() if m.state == "ready" and m.has_room]
        free = [m for m in free if m.id not in ticket.avoid] or free
        if not free:
            return None
        choice = min(free, key=lambda m: len(m.slots))
        least = len(choice.slots)
        for home in ticket.homes:
            known = next((m for m in free if m.id == self._homes.get(home)), None)
            if known is not None and len(known.slots) <= 1.5 * least + AFFINITY_SLACK:
                choice = known
                break
        for home in ticket.homes:
            self._homes[home] = choice.id
            self._homes.move_to_end(home)
        while len(self._homes) > AFFINITY_ENTRIES:
            self._homes.popitem(last=False)
        return choice

    # --- Common ------------------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        return [f"{m.id}: {m.state}" + (f" - {m.reason}" if m.reason else "") for m in self.members.values()]

    def event(self, kind: str, engine_id: str, message: str) -> None:
        if self.on_event is not None:
            self.on_event(kind, engine_id, message)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, replicas: Sequence[EngineReplica]) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        self.fail_waiting(RunFailed("the engine pool was closed"))
        for member in self.members.values():
            member.evict()
        ends = [bounded(replica.close(), self.call_s) for replica in replicas]
        await asyncio.gather(*ends, return_exceptions=True)
