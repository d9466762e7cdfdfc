"""Broken transports and launchers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles_core.errors import RunFailed
from miles_core.interfaces import EngineReplica
from miles_core.testing import fakes, suites
from miles_core.testing.broken import Shelf
from miles_core.testing.workers import Worker
from miles_core.transport import DirectSender, DirectTransport
from miles_core.types import Bucket, RoleSpec, SendPlan, SyncReport, WeightMessage

BUCKET_BYTES = 1 << 15


def direct(cls: Any) -> Any:
    def build(config: Any, context: Any) -> Any:
        return cls(bucket_bytes=BUCKET_BYTES, timeout_s=context.run_config.transport.timeout_s, hash_handles=True)

    return build


TRANSPORT = Shelf(suites.Direct, direct)

TRANSPORT.component("test_there_is_a_sender", "no-sender", parts={})


class DropsTheFirst(DirectSender):
    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        stream = super().send(plan, buckets)
        next(stream)
        yield from stream


TRANSPORT.component(
    "test_every_tensor_arrives", "drops-the-first", parts={"sender": lambda config, context: DropsTheFirst()}
)


@TRANSPORT.breaks("test_every_tensor_arrives")
class CountsNoBytes(DirectTransport):
    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        return replace(await super().push(version, engines), num_bytes=0)


@TRANSPORT.breaks("test_messages_come_in_order")
class NeverFlushes(DirectTransport):
    async def _deliver(self, ends: Any, phase: str, message: WeightMessage, check: Any = None) -> None:
        if phase != "flush":
            await super()._deliver(ends, phase, message, check)


@TRANSPORT.breaks("test_messages_come_in_order")
class AnyIncarnation(DirectTransport):
    def _end(self, engine: EngineReplica) -> Any:
        end = super()._end(engine)
        return _Anonymous(end.engine, end.result, end.local)


class _Anonymous:
    """An end whose messages name no incarnation."""

    def __init__(self, engine: Any, result: Any, local: bool) -> None:
        self.engine, self.result, self.local, self.started = engine, result, local, 0.0

    def message(self, message: WeightMessage, timeout_s: float) -> WeightMessage:
        return replace(message, timeout_s=timeout_s)


class Believes(DirectTransport):
    """Never looks at what engines answer."""

    async def _deliver(self, ends: Any, phase: str, message: WeightMessage, check: Any = None) -> None:
        await super()._deliver(ends, phase, message)


TRANSPORT.breaks("test_changed_bytes_are_noticed")(Believes)
TRANSPORT.breaks("test_a_wrong_version_is_noticed")(Believes)


@TRANSPORT.breaks("test_a_failing_engine_does_not_stop_the_others")
class AllOrNothing(DirectTransport):
    async def _deliver(self, ends: Any, phase: str, message: WeightMessage, check: Any = None) -> None:
        await super()._deliver(ends, phase, message, check)
        for end in ends:
            if not end.result.ok:
                raise RunFailed(f"{end.engine.id} failed in {phase}: {end.result.error}")


@TRANSPORT.breaks("test_a_silent_engine_does_not_stop_the_others", timeout_s=3.0)
class WaitsForEver(DirectTransport):
    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"timeout_s": 3600.0}))


@TRANSPORT.breaks("test_the_export_is_taken_to_its_end")
class StopsHalfWay(DirectTransport):
    async def _send(self, version: int, ends: Any, report: SyncReport) -> None:
        await self._deliver(ends, "begin", WeightMessage(kind="begin", version=version))
        options = {"handles": True, "files": False, "hash": True}
        await self._trainer.send_open(SendPlan(version=version, bucket_bytes=BUCKET_BYTES, options=options))
        while any(end.result.ok for end in ends) and (messages := await self._trainer.send_next()) is not None:
            for message in filter(None, messages):
                await self._deliver(ends, "data", message, self._check_hash)

    @staticmethod
    def _check_hash(end: Any, message: WeightMessage, answer: Mapping[str, Any]) -> None:
        if answer.get("sha") != message.sha:
            raise RunFailed("the bytes arrived changed")


@TRANSPORT.breaks("test_a_second_push_works")
class WorksOnce(DirectTransport):
    used = False

    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        if self.used:
            raise RunFailed("the group was torn down")
        self.used = True
        return await super().push(version, engines)


@TRANSPORT.breaks("test_an_engine_without_the_channel_is_refused")
class ConnectsToAnything(DirectTransport):
    def _check(self, engine: EngineReplica) -> None:
        """Finds out during the first push."""


# --- Launchers -------------------------------------------------------------------------------------------------------


def inline(group: type = fakes.InlineGroup, allocation: type = fakes.InlineAllocation) -> Any:
    """A launcher whose groups and allocations are of these classes."""

    class Own(allocation):  # type: ignore[misc, valid-type]
        async def launch(self, role: str, payload: Mapping[str, Any]) -> Any:
            made = await super().launch(role, payload)
            self.groups[role] = group(role, made.workers, payload)
            return self.groups[role]

    class OwnLauncher(fakes.InlineLauncher):
        async def allocate(self, specs: Sequence[RoleSpec], placement: Any = "auto") -> Any:
            await super().allocate(specs, placement)
            return Own(specs)

    return lambda config, context: OwnLauncher()


LAUNCHER = Shelf(suites.InlineLauncher, inline)
ALLOCATION = Shelf(suites.InlineLauncher, lambda cls: inline(allocation=cls))
WHOLE = Shelf(suites.InlineLauncher)


@LAUNCHER.breaks("test_results_come_in_rank_order")
class Backwards(fakes.InlineGroup):
    async def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        return (await super().call(method, *args, **options))[::-1]


@LAUNCHER.breaks("test_results_come_in_rank_order")
class IgnoresRanks(fakes.InlineGroup):
    async def call(self, method: str, *args: Any, ranks: Any = None, **options: Any) -> list[Any]:
        return await super().call(method, *args, **options)


@LAUNCHER.breaks("test_each_rank_gets_its_own_arguments")
class TheSameForAll(fakes.InlineGroup):
    async def call(self, method: str, *args: Any, per_rank: Any = None, **options: Any) -> list[Any]:
        return await super().call(method, *args, *(per_rank[0] if per_rank else ()), **options)


@LAUNCHER.breaks("test_a_worker_keeps_its_object")
class BuildsForEachCall(fakes.InlineGroup):
    async def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        self.workers = [Worker(worker.context) for worker in self.workers]
        return await super().call(method, *args, **options)


@ALLOCATION.breaks("test_ranks_can_meet")
class PlacesOfTheirOwn(fakes.InlineAllocation):
    def worker(self, role: str, index: int, payload: Mapping[str, Any]) -> Worker:
        made = super().worker(role, index, payload)
        made.context.rendezvous = f"file:///tmp/meet-{index}"
        return made


@LAUNCHER.breaks("test_an_exception_names_its_rank")
class RaisesAsItIs(fakes.InlineGroup):
    def one(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.workers[rank], method)(*args)


@LAUNCHER.breaks("test_a_call_can_time_out", hang_s=1.5)
class WaitsForEverOnCalls(fakes.InlineGroup):
    async def end(self, method: str, rank: int, timeout_s: float | None) -> list[Any]:
        return await super().end(method, rank, None)


@LAUNCHER.breaks("test_a_death_is_named")
class DiesNameless(fakes.InlineGroup):
    async def end(self, method: str, rank: int, timeout_s: float | None) -> list[Any]:
        raise RunFailed("connection reset by peer")


@LAUNCHER.breaks("test_a_death_is_named", timeout_s=3.0)
class TellsNoDeaths(fakes.InlineGroup):
    async def deaths(self) -> Any:
        await asyncio.sleep(3600)
        yield None


@ALLOCATION.breaks("test_a_dead_worker_is_replaced")
class ReplacesForEver(fakes.InlineAllocation):
    async def replace(self, role: str, index: int) -> None:
        self.restarts.clear()
        await super().replace(role, index)


@ALLOCATION.breaks("test_a_dead_worker_is_replaced")
class ReplacesAll(fakes.InlineAllocation):
    async def replace(self, role: str, index: int) -> None:
        await super().replace(role, index)
        group = self.groups[role]
        group.workers = [self.worker(role, i, group.payload) for i in range(group.size)]


@ALLOCATION.breaks("test_what_building_raises_is_raised")
class LaunchesAnyway(fakes.InlineAllocation):
    def worker(self, role: str, index: int, payload: Mapping[str, Any]) -> Worker:
        return super().worker(role, index, {})


@WHOLE.breaks("test_an_impossible_demand_is_refused_quickly")
class PromisesEverything(fakes.InlineLauncher):
    async def allocate(self, specs: Sequence[RoleSpec], placement: Any = "auto") -> fakes.InlineAllocation:
        return fakes.InlineAllocation(specs)


@LAUNCHER.breaks("test_close_ends_the_workers")
class OutlivesTheRun(fakes.InlineGroup):
    async def close(self) -> None:
        """Leaves them running."""


@ALLOCATION.breaks("test_close_ends_the_workers")
class ClosesOnce(fakes.InlineAllocation):
    closed = 0

    async def close(self) -> None:
        self.closed += 1
        if self.closed == 2:
            raise RunFailed("there is nothing to close")
        await super().close()
