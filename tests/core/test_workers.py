"""Worker processes: hosting, calls, errors that travel, deaths that are explained, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from miles_core.channel import Channel, RemoteError
from miles_core.errors import ConfigError, ContractError, DataError, EngineFailed, RunFailed, RuntimeMissing, WorkerDied
from miles_core.launch import InlineWorkerGroup, LocalLauncher, RemoteEngine
from miles_core.placement import Machine
from miles_core.processes import CallTimeout
from miles_core.types import GenerateRequest, RoleSpec, SamplingParams
from miles_core.worker import load_factory

FAKES = str(Path(__file__).with_name("worker_fakes.py"))
CPU = Machine(gpus=(), cpus=2, memory_bytes=8 << 30)
FOUR = Machine(gpus=("0", "1", "2", "3"), cpus=4, memory_bytes=8 << 30)


@asynccontextmanager
async def launched(tmp_path, factory="plain", num_workers=2, *, kind="trainer", restarts=0, args=None, machine=CPU, **spec):
    launcher = LocalLauncher(run_dir=tmp_path, startup_timeout_s=60, grace_s=5, machine=machine)
    role = spec.pop("role", "trainer")
    allocation = await launcher.allocate(
        [RoleSpec(name=role, component="fake", num_workers=num_workers, restarts=restarts, **spec)]
    )
    try:
        payload = {"kind": kind, "factory": f"{FAKES}:{factory}", "args": args or {}}
        yield allocation, await allocation.launch(role, payload)
    finally:
        await allocation.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def alive(pid):
    """Running; a zombie does not count, but is looked for separately."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_channel_keeps_values_and_makes_big_arrays_writable():
    async def check():
        a, b = socket.socketpair()
        left, right = Channel(a), Channel(b)
        sent = {"small": np.arange(3), "big": np.arange(1 << 20), "empty": np.zeros((0, 4)), "text": "x"}
        left.send(sent)
        left.send("next")
        got = await right.receive()
        assert await right.receive() == "next"
        for name in ("small", "big", "empty"):
            np.testing.assert_array_equal(got[name], sent[name])
            got[name] += 1
        left.close()
        with pytest.raises(EOFError):
            await right.receive()
        right.close()

    run(check())


def test_every_rank_learns_its_place_and_gets_its_own_arguments(tmp_path):
    async def check():
        async with launched(tmp_path, args={"x": 1}) as (_, group):
            assert await group.call("who") == [("trainer", i, 2, {"x": 1}, ()) for i in range(2)]
            calls = await group.call("who", "all", per_rank=[("a",), ("b",)])
            assert [c[-1] for c in calls] == [("all", "a"), ("all", "b")]
            assert [c[1] for c in await group.call("who", ranks=[1])] == [1]
            array = np.random.default_rng(0).normal(size=100_000)
            np.testing.assert_array_equal((await group.call("echo", array, ranks=[0]))[0], array)
            with pytest.raises(ContractError, match="3 ranks"):
                await group.call("who", per_rank=[()] * 3)
            places = await group.call("@place")
            assert [p["pid"] for p in places] == [w.pid for w in group.workers]
            assert await group.call("@get", "options", "nothing", ranks=[0]) == [[{"x": 1}, None]]

    run(check())


def test_errors_travel_with_class_rank_and_remote_traceback(tmp_path):
    async def check():
        async with launched(tmp_path, num_workers=1) as (_, group):
            with pytest.raises(DataError, match="trainer 0: row 3 is bad\n  fix it") as miles:
                await group.call("raise_data_error")
            assert "in raise_data_error" in miles.value.__notes__[0]
            with pytest.raises(RemoteError, match='trainer 0 raised in "raise_value_error": ValueError: no') as plain:
                await group.call("raise_value_error", "no")
            assert isinstance(plain.value.__cause__, ValueError) and "in raise_value_error" in plain.value.__notes__[0]
            with pytest.raises(RemoteError, match="Unpicklable: holds a file"):
                await group.call("raise_unpicklable")
            with pytest.raises(RunFailed, match=r"SystemExit: 7"):
                await group.call("exit")
            with pytest.raises(RunFailed, match='Plain has no method "nothing"'):
                await group.call("nothing")
            with pytest.raises(RunFailed, match="cannot travel"):
                await group.call("echo", lambda: 1)
            assert await group.call("echo", 1) == [1]  # none of this ended the worker

    run(check())


def test_X1_a_memory_error_names_worker_and_cause(tmp_path):
    async def check():
        async with launched(tmp_path) as (_, group):
            with pytest.raises(
                RunFailed, match='trainer 1 raised in "raise_memory_error": MemoryError: cannot allocate 9 GB'
            ):
                await group.call("raise_memory_error", ranks=[1])

    run(check())


def test_X1_a_killed_rank_is_named_with_signal_cause_and_log_although_another_complains_first(tmp_path):
    async def check():
        async with launched(tmp_path) as (_, group):
            with pytest.raises(WorkerDied) as caught:
                await group.call("kill", 1)
            text = str(caught.value)
            assert text.startswith('trainer 1 died during "kill": killed by SIGKILL: perhaps memory ran out')
            assert f"log: {tmp_path}/logs/trainer-1.log" in text and "about to die" in text
            with pytest.raises(WorkerDied, match="SIGKILL"):  # and again, at once
                await group.call("who")
            assert (await group.call("who", ranks=[0]))[0][1] == 0

    run(check())


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGSEGV, "native code"), (signal.SIGBUS, "/dev/shm"), (signal.SIGABRT, "gave up")]
)
def test_X1_other_signals_have_their_own_cause(tmp_path, number, cause):
    async def check():
        async with launched(tmp_path, num_workers=1) as (_, group):
            with pytest.raises(WorkerDied, match=f"{number.name}: .*{cause}"):
                await group.call("kill", 0, number)

    run(check())


def test_an_exit_code_is_told_with_the_last_words(tmp_path):
    async def check():
        async with launched(tmp_path, num_workers=1) as (_, group):
            with pytest.raises(WorkerDied, match=r'died during "exit_hard": exit code 3') as caught:
                await group.call("exit_hard", 3)
            assert "last words" in str(caught.value)

    run(check())


def test_a_hanging_rank_is_named_with_its_stack(tmp_path):
    async def check():
        async with launched(tmp_path) as (_, group):
            with pytest.raises(CallTimeout, match=r'no answer to "sleep_if" within 0.5 s from trainer 1') as caught:
                await group.call("sleep_if", 1, 30, timeout_s=0.5)
            assert "trainer 0" not in str(caught.value) and "in sleep_if" in str(caught.value)
            started = time.monotonic()
        assert time.monotonic() - started < 8  # grace of 5 s, then SIGKILL

    run(check())


def test_one_failing_rank_does_not_wait_for_those_that_wait_for_it(tmp_path):
    async def check():
        async with launched(tmp_path) as (_, group):
            started = time.monotonic()
            with pytest.raises(RemoteError, match=r"trainer 1 raised .*rank 1 has bad luck"):
                await group.call("fail_if", 1)
            assert time.monotonic() - started < 5
            for worker in group.workers:
                worker._signal(signal.SIGKILL, whole_group=True)

    run(check())


def test_coroutines_overlap_plain_calls_queue_and_cancelling_reaches_the_worker(tmp_path):
    async def check():
        async with launched(tmp_path, num_workers=1, kind="engine", role="engine") as (_, group):
            started = time.monotonic()
            await asyncio.gather(*(group.call("slow", 0.3) for _ in range(10)))
            assert time.monotonic() - started < 1.5  # 3 s one after the other
            call = asyncio.create_task(group.call("slow", 60))
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.sleep(0.1)
            assert (await group.call("seen"))[0][-1] == "cancelled"
            with pytest.raises(CallTimeout):
                await group.call("slow", 60, timeout_s=0.1)

    run(check())


def test_deaths_are_told_once_each_and_end_with_the_group(tmp_path):
    async def check():
        async with launched(tmp_path) as (allocation, group):
            deaths = []

            async def watch():
                async for death in group.deaths():
                    deaths.append((death.role, death.index, death.signal, death.exit_code, Path(death.log).name))

            watcher = asyncio.create_task(watch())
            os.kill(group.workers[1].pid, signal.SIGKILL)
            await asyncio.sleep(0.5)
            assert deaths == [("trainer", 1, "SIGKILL", None, "trainer-1.log")]
            await allocation.close()
            await asyncio.wait_for(watcher, 1)
            assert len(deaths) == 1

    run(check())


def test_replace_starts_a_worker_again_until_its_role_has_had_enough(tmp_path):
    async def check():
        async with launched(tmp_path, restarts=1) as (allocation, group):
            old = group.workers[1].pid
            os.kill(old, signal.SIGKILL)
            await asyncio.sleep(0.3)
            await allocation.replace("trainer", 1)
            assert group.workers[1].pid != old
            assert [c[1] for c in await group.call("who")] == [0, 1]
            with pytest.raises(RunFailed, match="trainer 1 is not started again: it has been 1 times, and 1 is the limit"):
                await allocation.replace("trainer", 1)

    run(check())


def test_start_up_failures_name_the_worker(tmp_path):
    async def check():
        with pytest.raises(RuntimeMissing, match="trainer 1: no such device\n  buy one"):
            async with launched(tmp_path, args={"fail": 1}):
                pass
        launcher = LocalLauncher(run_dir=tmp_path, startup_timeout_s=2, machine=CPU)
        allocation = await launcher.allocate([RoleSpec(name="trainer", component="x", num_workers=2)])
        with pytest.raises(CallTimeout, match=r'no answer to "start-up" within 2 s from trainer 1'):
            await allocation.launch("trainer", {"kind": "x", "factory": f"{FAKES}:plain", "args": {"hang": 1}})
        with pytest.raises(ConfigError, match='no function "nothing"'):
            async with launched(tmp_path, "nothing"):
                pass

    run(check())


def test_closing_leaves_no_process_behind_not_even_grandchildren(tmp_path):
    async def check():
        async with launched(tmp_path) as (_, group):
            pids = [worker.pid for worker in group.workers] + await group.call("spawn_grandchild")
            assert all(map(alive, pids))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids[:2])  # not even as zombies
        deadline = time.monotonic() + 5  # grandchildren have been killed, but it is not us who reap them
        while any(map(alive, pids)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert not any(map(alive, pids))

    run(check())


def test_workers_and_their_children_end_when_the_driver_is_killed(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from miles_core.launch import LocalLauncher
        from miles_core.types import RoleSpec

        async def main():
            launcher = LocalLauncher(run_dir=Path({str(tmp_path)!r}))
            allocation = await launcher.allocate([RoleSpec(name="trainer", component="x", num_workers=2)])
            group = await allocation.launch("trainer", {{"kind": "x", "factory": {FAKES + ":plain"!r}}})
            pids = [w.pid for w in group.workers] + await group.call("spawn_grandchild")
            print(*pids, flush=True)
            await group.call("sleep_if", 0, 600)

        asyncio.run(main())
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 4 and all(map(alive, pids))
        driver.kill()
        until = time.monotonic() + 15
        while any(map(alive, pids)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not any(map(alive, pids))


def test_an_answer_that_cannot_be_read_loses_the_worker_with_a_reason(tmp_path):
    async def check():
        async with launched(tmp_path, num_workers=1) as (_, group):
            with pytest.raises(WorkerDied, match="cannot read its answer"):
                await group.call("unreadable")

    run(check())


def test_a_worker_sees_its_gpus_and_its_share_of_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def check():
        async with launched(tmp_path, machine=FOUR, gpus=1.0, env={"MINE": "yes"}) as (_, group):
            assert await group.call("environment", "CUDA_VISIBLE_DEVICES") == ["0", "1"]
            assert await group.call("environment", "OMP_NUM_THREADS") == ["2", "2"]  # 4 processors, 2 workers
            assert await group.call("environment", "MINE") == ["yes", "yes"]
            (a, b) = await group.call("rendezvous")
            assert a == b and a.startswith("file:///")

    run(check())


# --- Inline ----------------------------------------------------------------------------------------------------------


def test_inline_plain_calls_leave_the_loop_free_and_a_hang_names_the_object():
    async def check():
        context = load_context()
        group = await InlineWorkerGroup.create("trainer", [lambda: load_factory(f"{FAKES}:plain")(context)])
        call = asyncio.create_task(group.call("sleep_if", 0, 0.4))
        ticks = 0
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 4  # 40 at best, 1 when the loop is blocked
        assert await call == [0]
        with pytest.raises(ValueError, match="as it is"):
            await group.call("raise_value_error", "as it is")
        with pytest.raises(RunFailed, match="SystemExit"):
            await group.call("exit")
        with pytest.raises(CallTimeout, match=r'"sleep_if" within 0.1 s from trainer 0') as caught:
            await group.call("sleep_if", 0, 3, timeout_s=0.1)
        assert "in sleep_if" in str(caught.value)
        await group.close()

    run(check())


def load_context():
    from miles_core.component import BuildContext

    return BuildContext(component="factory/x", run_dir=Path("."), seed=0, run_config=None)


# --- Engines in workers ----------------------------------------------------------------------------------------------


def request(seed, name="r"):
    return GenerateRequest(id=name, token_ids=np.zeros(3, np.int32), params=SamplingParams(max_new_tokens=4), seed=seed)


def test_X1_a_remote_engine_serves_dies_with_a_cause_and_serves_again_after_a_restart(tmp_path):
    async def check():
        async with launched(tmp_path, "make_engine", 2, kind="engine", role="engine", restarts=2) as (allocation, group):
            engine = RemoteEngine(group, 1, allocation=allocation)
            await engine.start()
            assert engine.id == "engine-1" and "weights/ipc" in engine.capabilities
            first = engine.incarnation
            assert first == f"engine-1-{group.workers[1].pid}-1"
            answers = await asyncio.gather(*(engine.generate(request(20, f"r{i}")) for i in range(5)))
            assert [a.id for a in answers] == [f"r{i}" for i in range(5)]
            with pytest.raises(NotImplementedError, match="cannot score"):
                await engine.score([np.zeros(2, np.int32)])
            with pytest.raises(EngineFailed, match='engine 1 died during "generate": killed by SIGKILL') as caught:
                await engine.generate(request(666))
            assert isinstance(caught.value, WorkerDied)
            with pytest.raises(EngineFailed, match="SIGKILL"):
                await engine.health()
            await (await engine.restart()).start()
            assert engine.incarnation != first
            assert (await engine.generate(request(0))).finish == "stop"

    run(check())


def test_a_remote_engine_that_hangs_fails_in_time(tmp_path):
    async def check():
        async with launched(tmp_path, "plain", 1, kind="engine", role="engine") as (_, group):
            engine = RemoteEngine(group, 0, timeout_s=0.2)
            with pytest.raises(EngineFailed, match=r"within 0.2 s from engine 0"):
                await engine._call("slow", 30)

    run(check())
