"""The transport `direct`: handles in process, shared memory between processes, engines that fail in the middle."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core import transport as transport_module
from miles_core.channel import RemoteError
from miles_core.component import BuildContext
from miles_core.errors import ConfigError, RuntimeMissing, WeightSyncFailed, WorkerDied
from miles_core.launch import InlineWorkerGroup, LocalLauncher, RemoteEngine
from miles_core.placement import Machine
from miles_core.processes import CallTimeout
from miles_core.trainers import RankHost, TrainerGroup
from miles_core.transport import (
    DirectTransport,
    SharedSegment,
    as_bytes,
    hash_bytes,
    open_bucket,
    publish,
    release,
    resolve,
)
from miles_core.types import RoleSpec, WeightMessage
from miles_core.worker import load_factory

FAKES = str(Path(__file__).with_name("worker_fakes.py"))
WEIGHTS = np.arange(1000, dtype=np.float32).tobytes()  # what the fake rank exports, in 4 buckets of 1000 bytes


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def left_behind(session):
    """Shared memory of this session's pushes; other runs on this machine have names of their own."""
    return [p.name for p in Path("/dev/shm").glob(f"{session.direct._prefix}-*")]


@asynccontextmanager
async def session(
    tmp_path, *, trainers=0, engines=0, local=0, timeout_s=20.0, hash_handles=False, trainer_args=None, **engine_args
):
    """A trainer (0: in this process, else that many workers), `engines` in workers and `local` in this process."""
    launcher = LocalLauncher(run_dir=tmp_path, grace_s=2, machine=Machine(gpus=(), cpus=2, memory_bytes=0))
    roles = {"trainer": trainers, "engine": engines}
    specs = [RoleSpec(name=name, component="x", num_workers=n) for name, n in roles.items() if n]
    allocation = await launcher.allocate(specs)
    try:
        if trainers:
            payload = {"kind": "trainer", "factory": f"{FAKES}:make_rank", "args": trainer_args or {}}
            workers = await allocation.launch("trainer", payload)
        else:
            context = BuildContext(component="factory/x", run_dir=tmp_path, seed=0, run_config=None)
            rank = load_factory(f"{FAKES}:make_rank")
            workers = await InlineWorkerGroup.create("trainer", [lambda: RankHost(rank(context, **(trainer_args or {})))])
        trainer = TrainerGroup(workers)
        await trainer.start()
        members = []
        if engines:
            group = await allocation.launch(
                "engine", {"kind": "engine", "factory": f"{FAKES}:make_engine", "args": engine_args}
            )
            members += [RemoteEngine(group, i) for i in range(engines)]
        cls = load_factory(f"{FAKES}:Engine")
        members += [cls(name=f"local-{i}", **engine_args) for i in range(local)]
        for engine in members:
            await engine.start()
        direct = DirectTransport(bucket_bytes=1000, timeout_s=timeout_s, hash_handles=hash_handles)
        await direct.connect(trainer, SimpleNamespace(replicas=members))
        yield SimpleNamespace(direct=direct, trainer=trainer, engines=members, workers=workers)
    finally:
        await allocation.close()


async def state(engine):
    return await engine._call("state") if isinstance(engine, RemoteEngine) else await engine.state()


def verdicts(report):
    return {e.engine: (e.ok, e.phase) for e in report.engines}


# --- Ways through ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainers", "engines", "local", "kinds"),
    [(0, 0, 2, [{"handle"}] * 2), (2, 2, 0, [{"shm"}] * 2), (0, 1, 1, [{"shm"}, {"handle"}])],
    ids=["one-process", "processes", "mixed"],
)
def test_weights_arrive_whole_and_nothing_stays_in_shared_memory(tmp_path, trainers, engines, local, kinds):
    known = set(transport_module._published)  # what other tests broke off in the middle of a push

    async def check():
        async with session(tmp_path, trainers=trainers, engines=engines, local=local) as s:
            for version in (1, 2):
                report = await s.direct.push(version, s.engines)
                assert [e.ok for e in report.engines] == [True, True]
                assert (report.version, report.num_buckets, report.num_bytes) == (version, 4, 4000)
                assert [e.state_hash for e in report.engines] == ["4000", "4000"]
            for engine, kind in zip(s.engines, kinds, strict=True):
                got = await state(engine)
                assert (got["version"], got["weights"], got["kinds"]) == (2, WEIGHTS, kind)
                assert got["log"] == ["begin", *["ipc"] * 4, "flush", "commit"] * 2
            # bytes that move are hashed, handles are not
            assert all(report.hashes) == bool(engines) and len(report.hashes) == 4
            assert not left_behind(s) and set(transport_module._published) == known

    run(check())


def test_handles_are_hashed_on_request(tmp_path):
    async def check():
        async with session(tmp_path, local=1, hash_handles=True) as s:
            report = await s.direct.push(1, s.engines)
            assert report.hashes[0] == hash_bytes(np.frombuffer(WEIGHTS[:1000], np.uint8))

    run(check())


# --- Faults of engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "phase", "error"),
    [
        ((2, "die"), "bucket 2", "engine 1 died during .receive.: killed by SIGKILL"),
        ((1, "corrupt"), "bucket 1", "sent as SHA-256 .* and arrived as 000000000000"),
        ((0, "raise"), "bucket 0", "ValueError: cannot load this"),
        (("commit", "old-version"), "commit", "committed version 0 instead of 1"),
    ],
)
def test_an_engine_that_fails_in_the_middle_does_not_stop_the_other(tmp_path, fault, phase, error):
    async def check():
        async with session(tmp_path, trainers=2, engines=2, fault=(*fault, 1)) as s:
            report = await s.direct.push(1, s.engines)
            assert verdicts(report) == {"engine-0": (True, "commit"), "engine-1": (False, phase)}
            assert re.search(error, report.engines[1].error), report.engines[1].error
            assert (await state(s.engines[0]))["weights"] == WEIGHTS
            assert not left_behind(s)
            if fault[1] != "die":
                assert (await state(s.engines[1]))["log"][-1] == "abort"
                assert (await state(s.engines[1]))["version"] == 0
                # the fault happens once: a second attempt heals
                assert verdicts(await s.direct.push(2, s.engines))["engine-1"] == (True, "commit")

    run(check())


def test_W5_an_engine_that_never_answers_is_named_with_its_phase_and_a_second_attempt_works(tmp_path):
    async def check():
        async with session(tmp_path, trainers=1, engines=2, timeout_s=1.0, fault=("begin", "hang", 1)) as s:
            report = await s.direct.push(1, s.engines)
            assert verdicts(report) == {"engine-0": (True, "commit"), "engine-1": (False, "begin")}
            assert "within 1 s" in report.engines[1].error
            assert report.seconds < 5
            assert verdicts(await s.direct.push(2, s.engines)) == {
                "engine-0": (True, "commit"),
                "engine-1": (True, "commit"),
            }

    run(check())


def test_the_export_is_drained_on_every_rank_when_no_engine_is_left(tmp_path):
    async def check():
        async with session(tmp_path, trainers=2, engines=1, fault=(0, "raise", 0)) as s:
            report = await s.direct.push(1, s.engines)
            assert verdicts(report) == {"engine-0": (False, "bucket 0")}
            assert await s.workers.call("num_exported") == [4, 4]

    run(check())


# --- Faults of ranks -------------------------------------------------------------------------------------------------


def test_W5_a_rank_that_hangs_or_dies_in_a_push_is_named_and_the_engines_are_told(tmp_path):
    async def check():
        async with session(tmp_path, trainers=2, engines=1, timeout_s=1.0) as s:
            stuck = asyncio.create_task(s.workers.call("hang", 1))
            await asyncio.sleep(0.1)
            with pytest.raises(CallTimeout, match='"send_open" within 1 s from trainer 1'):
                await s.direct.push(1, s.engines)
            assert (await state(s.engines[0]))["log"][-1] == "abort"
            os.kill(s.workers.workers[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="trainer 1"):
                await s.direct.push(1, s.engines)  # at once, and not blocked by a lock of the first
            assert (await asyncio.gather(stuck, return_exceptions=True))[0] is not None
            assert not left_behind(s)

    run(check())


def test_a_sender_killed_in_mid_push_leaves_no_shared_memory(tmp_path):
    async def check():
        async with session(tmp_path, trainers=1, engines=1, timeout_s=5.0, fault=(2, "hang", 0)) as s:
            push = asyncio.create_task(s.direct.push(1, s.engines))
            while not left_behind(s):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            os.kill(s.workers.workers[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="trainer 0"):
                await push
            assert not left_behind(s)

    run(check())


def test_an_export_that_raises_fails_the_push_and_frees_everything(tmp_path):
    async def check():
        async with session(tmp_path, trainers=2, engines=1, trainer_args={"export_error": 2}) as s:
            with pytest.raises(RemoteError, match="the export broke"):
                await s.direct.push(1, s.engines)
            assert (await state(s.engines[0]))["log"][-1] == "abort"
            assert not left_behind(s)

    run(check())


# --- Before the first push -------------------------------------------------------------------------------------------


def test_an_engine_without_the_channel_or_on_another_machine_is_refused(tmp_path):
    async def check():
        async with session(tmp_path, local=1) as s:
            engine = s.engines[0]
            engine.capabilities = frozenset({"weights/path"})
            with pytest.raises(ConfigError, match=r"local-0 cannot .* no weights/ipc \(it has: weights/path\)"):
                await s.direct.connect(s.trainer, SimpleNamespace(replicas=s.engines))
            assert verdicts(await s.direct.push(1, s.engines)) == {"local-0": (False, "connect")}
            engine.capabilities = frozenset({"weights/ipc"})
            engine.place = {"pid": 1, "node": "elsewhere", "host": "host-7"}
            with pytest.raises(ConfigError, match="local-0 is on host-7 and trainer rank 0 on"):
                await s.direct.connect(s.trainer, SimpleNamespace(replicas=s.engines))

    run(check())


# --- Buffers ---------------------------------------------------------------------------------------------------------


def test_handles_and_segments_are_found_and_gone():
    data = np.arange(10, dtype=np.uint8)
    key = publish(data)
    assert resolve({"handle": key, "nbytes": 10}) is data
    release(key)
    with pytest.raises(WeightSyncFailed, match="not in this process"):
        resolve({"handle": key, "nbytes": 10})
    segment = SharedSegment(f"miles-test-{os.getpid()}")
    for size in (10, 5000, 20):  # grows, then is used again
        written = np.arange(size, dtype=np.uint8)
        segment.write(written)
        body = {"shm": segment.name, "nbytes": size}
        got, sha = open_bucket(WeightMessage(kind="ipc", version=1, sha="x", body=body))
        np.testing.assert_array_equal(got, written)
        assert sha == hash_bytes(written) and not got.flags.writeable
    with pytest.raises(WeightSyncFailed, match="5000 bytes, but the bucket has 6000"):
        resolve({"shm": segment.name, "nbytes": 6000})
    segment.close()
    np.testing.assert_array_equal(got, written)  # a mapping outlives its name
    with pytest.raises(WeightSyncFailed, match="cannot map"):
        resolve(body)


def test_tensors_are_told_by_their_methods():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    np.testing.assert_array_equal(
        as_bytes(tensor), np.arange(12, dtype=np.float32).reshape(3, 4).T.copy().view(np.uint8).ravel()
    )
    flat = torch.arange(8, dtype=torch.uint8)
    assert as_bytes(flat).ctypes.data == flat.data_ptr()  # no copy
    assert as_bytes(bytearray(b"ab")).tolist() == [97, 98]


def test_full_or_missing_shared_memory_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    free = os.statvfs("/dev/shm")
    segment = SharedSegment(f"miles-test-{os.getpid()}")
    with pytest.raises(
        RuntimeMissing, match=r"shared memory is full: a bucket needs .* MB free\n  lower transport.bucket_bytes"
    ):
        segment._reserve(free.f_blocks * free.f_frsize + (1 << 20))
    assert not segment.path.exists()
    monkeypatch.setattr(transport_module, "SHM", tmp_path / "nowhere")
    with pytest.raises(RuntimeMissing, match="shared memory does not work here"):
        SharedSegment("x").write(np.zeros(3, np.uint8))
