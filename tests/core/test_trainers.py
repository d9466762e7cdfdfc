"""The driver's side of a trainer: shards, results in order, one report, sends, ranks that fail."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.channel import RemoteError
from miles_core.component import BuildContext
from miles_core.errors import ContractError, WorkerDied
from miles_core.launch import InlineWorkerGroup, LocalLauncher
from miles_core.placement import Machine
from miles_core.processes import CallTimeout
from miles_core.trainers import RankHost, TrainerGroup, check_ranks, merge_reports, shard_indices
from miles_core.types import Prompt, RankInfo, RoleSpec, Sample, Score, SendPlan, StepReport, TrainBatch
from miles_core.worker import load_factory

FAKES = str(Path(__file__).with_name("worker_fakes.py"))


def make_sample(group, index, length, start=0):
    return Sample(
        group_id=group,
        trajectory_id=f"{group}/{index}",
        index=index,
        tokens=np.arange(start, start + length, dtype=np.int32),
        prompt_len=1,
        loss_mask=np.arange(length) > 0,
        logprobs=np.zeros(length, np.float32),
        prompt=Prompt(id=group, text="long text"),
        response="text",
        scores={"x": Score(value=1.0)},
        metadata={"much": "data"},
    )


def make_batch(lengths, shared=()):
    """`lengths[g]` are the lengths of the samples of group g; every token weighs 1."""
    samples = [make_sample(f"g{g}", i, n) for g, group in enumerate(lengths) for i, n in enumerate(group)]
    return TrainBatch(
        samples=samples,
        token_weights={"policy": [np.ones(s.num_tokens, np.float32) for s in samples]},
        mask=[s.loss_mask for s in samples],
        shared=list(shared),
        step=3,
    )


# --- Shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "shared", "num_shards", "expected"),
    [
        ([[4, 4], [4, 4]], [], 2, [[0, 1], [2, 3]]),  # whole groups: 8 and 8 tokens
        ([[9, 9], [3, 3], [6, 6]], [], 2, [[0, 1], [2, 3, 4, 5]]),  # 18 against 6 + 12
        ([[4, 4, 4, 4]], [], 2, [[0, 1], [2, 3]]),  # one group has to be cut
        ([[4, 4], [4, 4], [4, 4]], [], 2, [[0, 1, 2], [3, 4, 5]]),  # whole: 16 against 8, 1.33 times an even 12
        ([[4, 4, 4, 4]], [(0, 3), (1, 2)], 2, [[0, 3], [1, 2]]),  # pairs stay together
        ([[5]], [], 2, [[0], []]),  # fewer samples than shards
        ([], [], 3, [[], [], []]),
        ([[4, 9], [2]], [], 1, [[0, 1, 2]]),
    ],
)
def test_shards(lengths, shared, num_shards, expected):
    got = shard_indices(make_batch(lengths, shared), num_shards)
    assert sorted(got) == sorted(expected)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_shards_hold_each_sample_once_keep_pairs_and_are_even(data):
    lengths = data.draw(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), max_size=8))
    total = sum(map(len, lengths))
    order = data.draw(st.permutations(range(total)))
    shared = [tuple(order[i : i + 2]) for i in range(0, data.draw(st.integers(0, total // 2)) * 2, 2)]
    num_shards = data.draw(st.integers(1, 5))
    batch = make_batch(lengths, shared)
    shards = shard_indices(batch, num_shards)
    assert len(shards) == num_shards
    assert sorted(i for shard in shards for i in shard) == list(range(total))
    assert all(shard == sorted(shard) for shard in shards)
    where = {i: s for s, shard in enumerate(shards) for i in shard}
    assert all(len({where[i] for i in pair}) == 1 for pair in shared)
    assert shards == shard_indices(batch, num_shards)
    # A shard takes units whose middles lie in its even share, so it exceeds it by at most half a unit on either side.
    loads = [sum(batch.samples[i].num_tokens for i in shard) for shard in shards]
    largest = max([sum(batch.samples[i].num_tokens for i in p) for p in shared] + [max(map(max, lengths), default=0)])
    even = sum(loads) / num_shards
    assert max(loads) <= max(1.15 * even, even + largest) + 1e-9


# --- Ranks -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def trainer_group(tmp_path, num_workers=2, factory="make_rank", timeout_s=60.0, **args):
    launcher = LocalLauncher(run_dir=tmp_path, grace_s=2, machine=Machine(gpus=(), cpus=2, memory_bytes=0))
    allocation = await launcher.allocate([RoleSpec(name="trainer", component="x", num_workers=num_workers)])
    payload = {"kind": "trainer", "factory": f"{FAKES}:{factory}", "args": args}
    group = TrainerGroup(await allocation.launch("trainer", payload), timeout_s=timeout_s)
    try:
        yield group
    finally:
        await group.close()


async def inline_group(**args):
    context = BuildContext(component="factory/x", run_dir=Path("."), seed=0, run_config=None)
    workers = await InlineWorkerGroup.create(
        "trainer", [lambda: RankHost(load_factory(f"{FAKES}:make_rank")(context, **args))]
    )
    return TrainerGroup(workers)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


UNEVEN = [[7, 3], [20], [2, 2, 2]]


def test_results_come_back_in_the_order_of_the_batch_from_two_uneven_shards(tmp_path):
    async def check():
        batch = make_batch(UNEVEN)
        async with trainer_group(tmp_path) as group:
            assert [info.rank for info in await group.start()] == [0, 1]
            out = await group.forward(batch, "policy", frozenset({"logprobs", "entropy"}))
            assert set(out) == {"logprobs", "entropy"}
            for sample, row in zip(batch.samples, out["logprobs"], strict=True):
                np.testing.assert_array_equal(row, -sample.tokens)
            seen = await group.workers.call("seen")
            # 20 tokens against 7 + 3 + 2 + 2 + 2: whole groups, 20 <= 1.15 * 18
            assert sorted(s["ids"] for s in seen) == [["g0/0", "g0/1", "g2/0", "g2/1", "g2/2"], ["g1/0"]]
            assert not any(s["fat"] for s in seen)  # no prompt, text, scores or metadata travels
            assert await group.forward(make_batch([]), "policy", frozenset({"logprobs"})) == {"logprobs": []}

    run(check())


def test_one_report_is_made_of_those_of_two_ranks_and_equals_that_of_one(tmp_path):
    async def check():
        batch = make_batch(UNEVEN)
        async with trainer_group(tmp_path) as group:
            await group.start()
            two = await group.step(batch)
        alone = await inline_group()
        await alone.start()
        one = await alone.step(batch)
        await alone.close()
        # sum of token ids: n(n-1)/2 of 7, 3, 20, 2, 2, 2
        assert two.loss == one.loss == 21 + 3 + 190 + 1 + 1 + 1
        assert two.tokens == one.tokens == 36
        assert two.trainable == one.trainable == 30  # all but the first of six samples
        assert (two.step, two.grad_norm, two.lr) == (3, 1.0, 0.5)
        assert two.seconds == {"backward": 2.0} and two.peak_bytes == 20  # the slower and larger: rank 1
        assert two.metrics == {"length": (36.0, 6.0, "mean"), "longest": (20.0, 2.0, "max")}
        assert two.auxiliary == {"router": 0.5}
        for a, b in zip(two.columns["logprobs"], one.columns["logprobs"], strict=True):
            np.testing.assert_array_equal(a, b)

    run(check())


def test_F6_an_empty_shard_takes_part_and_changes_nothing(tmp_path):
    async def check():
        batch = make_batch([[10]])
        async with trainer_group(tmp_path) as group:
            await group.start()
            report = await group.step(batch)
            assert sorted(len(s["ids"]) for s in await group.workers.call("seen")) == [0, 1]
            assert report.loss == 45.0  # 0 + 1 + ... + 9, as on one rank
            assert [len(row) for row in report.columns["logprobs"]] == [10]

    run(check())


def test_ranks_of_one_data_parallel_rank_get_the_same_shard_and_one_of_them_answers(tmp_path):
    async def check():
        async with trainer_group(tmp_path, tp=2) as group:
            infos = await group.start()
            assert group.dp_size == 1 and [i.output for i in infos] == [True, False]
            report = await group.step(make_batch(UNEVEN))
            a, b = await group.workers.call("seen")
            assert a["ids"] == b["ids"] and len(a["ids"]) == 6
            assert report.loss == 217.0 and report.tokens == 36  # counted once
            assert report.peak_bytes == 10  # of output ranks

    run(check())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("rows", 'trainer rank 0 returned 0 rows of "logprobs" for 1 samples'),
        ("length", r'returned "logprobs" of shape \(4,\) for a sample of shape \(5,\)'),
    ],
)
def test_results_that_do_not_fit_the_batch_are_refused(wrong, message):
    async def check():
        group = await inline_group(wrong=wrong)
        await group.start()
        with pytest.raises(ContractError, match=message):
            await group.forward(make_batch([[5]]), "policy", frozenset({"logprobs"}))
        await group.close()

    run(check())


def info(rank, dp_rank, dp_size=2, output=True, world_size=2):
    return RankInfo(rank=rank, world_size=world_size, dp_rank=dp_rank, dp_size=dp_size, output=output)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([info(0, 0), info(1, 1, output=False)], r"cover the data-parallel ranks \[0\] of 2"),
        ([info(0, 0), info(1, 0)], "data-parallel rank 0 has two output ranks"),
        ([info(0, 0), info(1, 1, dp_size=1)], "different data-parallel sizes"),
        ([info(1, 0), info(0, 1)], "ranks 0 to 1"),
        ([info(0, 0, world_size=4), info(1, 1, world_size=4)], "2 were started"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(ranks, message):
    with pytest.raises(ContractError, match=message):
        check_ranks(ranks, 2)


@pytest.mark.parametrize(
    ("change", "name"), [({"grad_norm": 1.1}, "grad_norm"), ({"lr": 0.2}, "lr"), ({"skipped": "nothing"}, "skipped")]
)
def test_what_all_ranks_share_must_agree(change, name):
    base = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
    with pytest.raises(ContractError, match=f'different "{name}" of step 1'):
        merge_reports([StepReport(**base), StepReport(**(base | change))])


# --- Lifecycle and faults --------------------------------------------------------------------------------------------


def test_save_and_load_reach_every_rank(tmp_path):
    async def check():
        async with trainer_group(tmp_path) as group:
            await group.start()
            folder = tmp_path / "checkpoint"
            folder.mkdir()
            await group.save(folder)
            assert sorted(p.name for p in folder.iterdir()) == ["rank-0", "rank-1"]
            await group.load(folder)
            await group.sleep()
            await group.wake()
            assert await group.state_hash() == ""
            with pytest.raises(RemoteError, match="NotImplementedError: Rank cannot write"):
                await group.save_model(folder)

    run(check())


def test_a_send_is_pulled_on_all_ranks_and_ends_on_all(tmp_path):
    async def check():
        async with trainer_group(tmp_path, buckets=3) as group:
            await group.start()
            await group.send_open(SendPlan(version=1))
            pulled = []
            while (messages := await group.send_next()) is not None:
                pulled.append([m.bucket if m else None for m in messages])
            assert pulled == [[0, None], [1, None], [2, None]]  # rank 1 publishes nothing
            await group.send_close()
            # left half-way: the rest is drained, on every rank
            await group.send_open(SendPlan(version=2))
            await group.send_next()
            assert await group.workers.call("num_exported") == [1, 1]
            await group.send_close()
            assert await group.workers.call("num_exported") == [3, 3]

    run(check())


def test_X1_a_killed_trainer_rank_fails_the_step_with_who_and_why(tmp_path):
    async def check():
        async with trainer_group(tmp_path) as group:
            await group.start()
            call = asyncio.create_task(group.workers.call("hang", 0))
            await asyncio.sleep(0.2)
            os.kill(group.workers.workers[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r'trainer 0 died during "hang": killed by SIGKILL'):
                await call
            with pytest.raises(WorkerDied, match=r"trainer-0\.log"):
                await group.step(make_batch(UNEVEN))

    run(check())


def test_a_rank_that_raises_or_hangs_is_named(tmp_path):
    async def check():
        async with trainer_group(tmp_path, export_error=1) as group:
            await group.start()
            await group.send_open(SendPlan(version=1))
            await group.send_next()
            with pytest.raises(RemoteError, match=r'trainer [01] raised in "send_next": ValueError: the export broke'):
                await group.send_next()
            with pytest.raises(CallTimeout, match=r'"hang" within 0.3 s from trainer 1'):
                await group.workers.call("hang", 1, timeout_s=0.3)

    run(check())


def test_ranks_meet_through_the_rendezvous(tmp_path):
    pytest.importorskip("torch")

    async def check():
        async with trainer_group(tmp_path, factory="make_torch_rank") as group:
            await group.start()
            assert await group.workers.call("reduced") == [3.0, 3.0]  # (0 + 1) + (1 + 1)

    run(check())
