"""Actors: where they are, what they see, how they end, and what a refusal says."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from ray_support import GPUS, gone

from miles_core.errors import RunFailed, RuntimeMissing, WorkerDied
from miles_core.types import RoleSpec
from miles_ray_launcher import RayLauncherConfig

pytestmark = pytest.mark.usefixtures("cluster")
FAKES = str(Path(__file__).with_name("ray_fakes.py"))


def launcher(run_dir: Path, **options):
    from miles_ray_launcher.launcher import RayLauncher

    return RayLauncher(run_dir=run_dir, config=RayLauncherConfig(**options))


@asynccontextmanager
async def launched(run_dir: Path, *specs: RoleSpec, placement: str = "auto", **options):
    """A group for each of `specs`."""
    allocation = await launcher(run_dir, **options).allocate(specs, placement)
    try:
        payload = {"kind": "trainer", "factory": f"{FAKES}:plain", "args": {}}
        yield await asyncio.gather(*(allocation.launch(spec.name, payload) for spec in specs))
    finally:
        await allocation.close()


def spec(name: str = "r", num_workers: int = 1, gpus: float = 0.0, **more) -> RoleSpec:
    return RoleSpec(name=name, component="x", num_workers=num_workers, gpus=gpus, **more)


# --- Devices ---------------------------------------------------------------------------------------------------------


def test_colocated_workers_see_the_same_gpus_and_a_wide_engine_those_of_its_ranks(tmp_path):
    async def work():
        async with launched(tmp_path, spec("t", 2, 1), spec("e", 1, 2), placement="colocated") as groups:
            return [[names[0] for names in await g.call("environment", "CUDA_VISIBLE_DEVICES")] for g in groups]

    ranks, (engine,) = asyncio.run(work())
    assert len(set(ranks)) == 2
    assert engine.split(",") == ranks


def test_disaggregated_workers_see_gpus_of_their_own_and_those_without_see_none(tmp_path):
    async def work():
        async with launched(tmp_path, spec("t", 1, 1), spec("e", 1, 2), spec("r"), placement="disaggregated") as groups:
            return [(await g.call("environment", "CUDA_VISIBLE_DEVICES"))[0][0] for g in groups]

    rank, engine, none = asyncio.run(work())
    assert len({rank, *engine.split(",")}) == 3
    assert none == ""


# --- Refusals --------------------------------------------------------------------------------------------------------


def test_X3_too_many_gpus_are_refused_in_seconds_with_what_there_is(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeMissing) as caught:  # 3 + 2 x 1, and the cluster has 4; each bundle alone would fit
        asyncio.run(launcher(tmp_path, placement_timeout_s=60).allocate([spec("trainer", 2, 1), spec("engine", 1, 3)]))
    text = str(caught.value)
    for part in (
        'launcher.placement = "auto"',
        "trainer 2 x (1 GPUs); engine 1 x (3 GPUs)",
        f"free {GPUS} of {GPUS} GPUs",
        "lower trainer.num_workers or engine.replicas",
    ):
        assert part in text, text
    assert time.monotonic() - began < 10
    assert caught.value.exit_code == 3


def test_X3_labels_that_no_node_has_are_refused_with_those_there_are(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeMissing, match=r'placement = \{"r": \{"rack": "b"\}\}: .*nodes labelled \{\'rack\': \'b\'\}'):
        asyncio.run(launcher(tmp_path, placement_timeout_s=60).allocate([spec()], {"r": {"rack": "b"}}))
    assert time.monotonic() - began < 10


def test_X3_room_that_others_hold_is_waited_for_and_then_refused(tmp_path):
    async def work():
        first = await launcher(tmp_path).allocate([spec("a", GPUS - 1, 1)])
        with pytest.raises(RuntimeMissing, match=f"free 1 of {GPUS} GPUs"):
            await launcher(tmp_path, placement_timeout_s=1.0).allocate([spec("b", 2, 1)])
        waiting = asyncio.create_task(launcher(tmp_path, placement_timeout_s=30.0).allocate([spec("b", 2, 1)]))
        await asyncio.sleep(0.3)
        await first.close()
        await (await waiting).close()  # what was refused holds nothing, and what waited has got it

    asyncio.run(work())


def test_a_run_folder_that_a_node_does_not_see_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()

    async def launch():
        made = launcher(folder)
        allocation = await made.allocate([spec()])
        folder.rmdir()
        try:
            await allocation.launch("r", {"kind": "trainer", "factory": f"{FAKES}:plain", "args": {}})
        finally:
            await allocation.close()

    with pytest.raises(RuntimeMissing, match="every node of the cluster sees"):
        asyncio.run(launch())


def test_no_cluster_at_the_address_is_said_in_seconds():
    from miles_ray_launcher import cluster

    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(RuntimeMissing, match=r"launcher\.ray\.address and RAY_ADDRESS"):
            cluster._reach(address)


# --- Calls -----------------------------------------------------------------------------------------------------------


def test_what_travels(tmp_path):
    """Arrays arrive writable, whatever their size; cancelled coroutines are cancelled; what cannot travel says so."""
    big = np.arange(200_000, dtype=np.float64)  # 1.6 MB, which Ray moves through shared memory

    async def work():
        async with launched(tmp_path, spec(env={"OWN": "1"}), forward_env=("FORW*",)) as (group,):
            (twice,) = await group.call("doubled", big)
            twice += 1
            waiting = asyncio.create_task(group.call("wait"))
            await asyncio.sleep(0.5)
            waiting.cancel()
            await asyncio.wait({waiting})
            for _ in range(100):
                (cancelled,) = await group.call("count_cancelled")
                if cancelled:
                    break
                await asyncio.sleep(0.05)
            with pytest.raises(RunFailed, match='arguments of "say" cannot travel to r 0'):
                await group.call("say", lambda: None)
            with pytest.raises(RunFailed, match="r 0"):
                await group.call("unpicklable")
            await group.call("say", "a line of the actor")
            return twice, cancelled, (await group.call("environment", "OWN", "FORWARD", "FOREIGN"))[0]

    os.environ |= {"FORWARD": "2", "OWN": "0"}
    twice, cancelled, variables = asyncio.run(work())
    assert (twice == 2 * big + 1).all()
    assert cancelled == 1
    assert variables == ["1", "2", None]
    log = (tmp_path / "logs/r-0.log").read_text()
    assert "a line of the actor" in log
    assert log.startswith("r-0: process ")


# --- Ends ------------------------------------------------------------------------------------------------------------


def test_X1_a_killed_actor_is_told_with_and_without_a_call_and_takes_its_children_along(tmp_path):
    async def work():
        async with launched(tmp_path, spec(num_workers=2)) as (group,):
            busy, idle = await group.call("pid")
            (child,) = await group.call("child", ranks=[1])
            os.kill(idle, signal.SIGKILL)
            death = await asyncio.wait_for(anext(aiter(group.deaths())), 10)
            with pytest.raises(WorkerDied, match='r 1 died during "pid"'):
                await group.call("pid", ranks=[1])
            waiting = asyncio.create_task(group.call("wait", ranks=[0]))
            await asyncio.sleep(0.2)
            os.kill(busy, signal.SIGKILL)
            with pytest.raises(WorkerDied, match=rf'r 0 died during "wait": process {busy} on node .* killed') as caught:
                await waiting
            return death, idle, str(caught.value), child

    death, idle, text, child = asyncio.run(work())
    assert (death.role, death.index, death.log) == ("r", 1, str(tmp_path / "logs/r-1.log"))
    assert f"process {idle} on node" in death.cause
    assert str(tmp_path / "logs/r-0.log") in text
    assert gone(child)


def test_close_leaves_nothing_of_an_actor(tmp_path):
    async def work():
        async with launched(tmp_path, spec(num_workers=2)) as (group,):
            pids = [*await group.call("pid"), *await group.call("child")]
            guardians = [worker.place["guardian"] for worker in group.workers]
            folders = [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2] for pid in guardians]
            interface = (await group.call("environment", "GLOO_SOCKET_IFNAME"))[0][0]
            assert all(Path(folder).is_dir() for folder in folders) and interface == "lo"
            return [*pids, *guardians], folders

    pids, folders = asyncio.run(work())
    assert all(gone(pid) for pid in pids)
    assert not any(Path(folder).exists() for folder in folders)
