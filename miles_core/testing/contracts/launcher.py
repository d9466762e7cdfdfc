"""Suite of the kind launcher. It starts real workers: a few seconds each."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError, RunFailed, RuntimeMissing, WorkerDied
from miles_core.interfaces import Allocation, WorkerGroup
from miles_core.testing.contracts.base import ComponentContract, no_error, refused
from miles_core.types import Death, RoleSpec

FACTORY = "miles_core.testing.workers:make"


class LauncherContract(ComponentContract):
    """A `Launcher`."""

    refusal_s: float = 20.0
    """An impossible demand is refused within this time."""
    hang_s: float = 30.0
    """A call with a limit of one second ends within this time, also when the worker hangs."""
    local: bool = True
    """Whether workers are processes of this machine, so that the suite can look for them."""

    # --- Helpers ---

    @asynccontextmanager
    async def launched(
        self, folder: Path, num_workers: int = 2, restarts: int = 0, **args: Any
    ) -> AsyncIterator[tuple[Allocation, WorkerGroup]]:
        """`num_workers` workers of the role "r"; see `miles_core.testing.workers`."""
        spec = RoleSpec(name="r", component="contract/worker", num_workers=num_workers, restarts=restarts)
        allocation = await self.build(folder).allocate([spec])
        try:
            yield allocation, await allocation.launch("r", {"kind": "trainer", "factory": FACTORY, "args": args})
        finally:
            await allocation.close()

    def with_workers(self, folder: Path, work: Callable[[Any, Any], Coroutine[Any, Any, Any]], **options: Any) -> Any:
        """The result of `work(allocation, group)`; `options` are those of `launched`."""

        async def served() -> Any:
            async with self.launched(folder, **options) as (allocation, group):
                return await work(allocation, group)

        return self.run(served())

    # --- Calls ---

    def test_results_come_in_rank_order(self, tmp_path: Path) -> None:
        """`call` runs on every worker, and each knows its role, index and world size; `ranks` choose some."""

        async def work(_: Any, group: Any) -> Any:
            return group.role, group.size, await group.call("who", 7), await group.call("who", ranks=[1])

        role, size, everyone, second = self.with_workers(tmp_path, work)
        assert (role, size) == ("r", 2)
        assert list(everyone) == [("r", 0, 2, 7), ("r", 1, 2, 7)], everyone
        assert list(second) == [("r", 1, 2)], second

    def test_each_rank_gets_its_own_arguments(self, tmp_path: Path) -> None:
        """`per_rank[i]` goes to the i-th of `ranks`, or of all, after the common arguments."""

        async def work(_: Any, group: Any) -> Any:
            both = await group.call("who", "all", per_rank=[("a",), ("b",)])
            return both, await group.call("who", ranks=[1], per_rank=[("c",)])

        both, one = self.with_workers(tmp_path, work)
        assert [row[3:] for row in both] == [("all", "a"), ("all", "b")], both
        assert [row[1:] for row in one] == [(1, 2, "c")], one

    def test_a_worker_keeps_its_object(self, tmp_path: Path) -> None:
        """The object is built once: what a call changed, the next one finds."""

        async def work(_: Any, group: Any) -> list[Any]:
            return [await group.call("count") for _ in range(2)]

        assert [list(row) for row in self.with_workers(tmp_path, work)] == [[1, 1], [2, 2]]

    def test_ranks_can_meet(self, tmp_path: Path) -> None:
        """All workers of a role get the same rendezvous, "file://..." or "tcp://..."."""

        async def work(_: Any, group: Any) -> Any:
            return await group.call("rendezvous")

        places = set(self.with_workers(tmp_path, work))
        assert len(places) == 1 and places.pop().startswith(("file://", "tcp://")), f"rendezvous {places}"

    def test_an_exception_names_its_rank(self, tmp_path: Path) -> None:
        """What a worker raises is raised, with the rank's name and what it said; the workers go on."""

        async def work(_: Any, group: Any) -> Any:
            with refused(Exception, "a call that raises on rank 1") as caught:
                await group.call("fail", 1)
            return str(caught[0]), await group.call("who")

        text, after = self.with_workers(tmp_path, work)
        assert "rank 1 has bad luck" in text and "r 1" in text.replace("-", " "), f"not named: {text}"
        assert len(after) == 2

    def test_a_call_can_time_out(self, tmp_path: Path) -> None:
        """A call that hangs on one rank ends after `timeout_s` with a MilesError that names the rank."""

        async def work(_: Any, group: Any) -> str:
            with refused(MilesError, "a call that hangs on rank 1") as caught:
                await asyncio.wait_for(group.call("hang", 1, timeout_s=1.0), self.hang_s)
            return str(caught[0])

        text = self.with_workers(tmp_path, work)
        assert "r 1" in text.replace("-", " "), f"rank 1 is not named: {text}"

    # --- Deaths ---

    def test_a_death_is_named(self, tmp_path: Path) -> None:
        """A call to a worker that dies raises WorkerDied with role and index, and `deaths` tells it."""

        async def work(_: Any, group: Any) -> tuple[str, Death]:
            with refused(WorkerDied, "a call to a worker that dies") as caught:
                await asyncio.wait_for(group.call("die", 1), 60)
            return str(caught[0]), await asyncio.wait_for(anext(aiter(group.deaths())), 10)

        text, death = self.with_workers(tmp_path, work)
        assert "r 1" in text.replace("-", " "), f"not named: {text}"
        assert (death.role, death.index) == ("r", 1), death
        assert death.cause or death.signal or death.exit_code is not None, f"{death} gives no cause"

    def test_a_dead_worker_is_replaced(self, tmp_path: Path) -> None:
        """`replace` starts it again in its place, `restarts` times; then it raises RunFailed. The others stay."""

        async def work(allocation: Any, group: Any) -> Any:
            await group.call("count")
            for attempt in range(2):
                with refused(WorkerDied, "a call to a worker that dies"):
                    await group.call("die", 1)
                if attempt == 0:
                    await allocation.replace("r", 1)
                    counts = await group.call("count")
            with refused(RunFailed, "a second restart of a role with restarts = 1"):
                await allocation.replace("r", 1)
            return counts

        counts = self.with_workers(tmp_path, work, restarts=1)
        assert list(counts) == [2, 1], f"calls counted {counts}: the other worker stays, the new one starts afresh"

    # --- Beginning and end ---

    def test_what_building_raises_is_raised(self, tmp_path: Path) -> None:
        """A worker that cannot be built makes `launch` raise what building raised."""

        async def work(allocation: Any, group: Any) -> None:
            raise AssertionError("launch returned")

        with refused(RuntimeMissing, "launch of a worker that cannot be built") as caught:
            self.with_workers(tmp_path, work, fail=1)
        assert "no such device" in str(caught[0]), str(caught[0])

    def test_an_impossible_demand_is_refused_quickly(self, tmp_path: Path) -> None:
        """`allocate` raises RuntimeMissing that says how many GPUs were asked for, within seconds."""

        async def work() -> None:
            await self.build(tmp_path).allocate([RoleSpec(name="r", component="x", num_workers=1, gpus=4321)])

        started = time.monotonic()
        with refused(RuntimeMissing, "a demand of 4321 GPUs") as caught:
            self.run(work())
        assert "4321" in str(caught[0]), f"the demand is not named: {caught[0]}"
        assert time.monotonic() - started < self.refusal_s

    def test_close_ends_the_workers(self, tmp_path: Path) -> None:
        """After `close` no worker is left; closing twice is fine."""

        async def work(allocation: Any, group: Any) -> Any:
            pids = await group.call("pid")
            for _ in range(2):
                with no_error("close"):
                    await allocation.close()
            with refused(Exception, "a call after close"):
                await asyncio.wait_for(group.call("who"), 10)
            return pids

        left = [pid for pid in self.with_workers(tmp_path, work) if self.local and pid != os.getpid() and alive(pid)]
        assert not left, f"workers {left} are left"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
