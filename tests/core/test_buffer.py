"""GroupBuffer: how many groups start, which are trained, how old they may be."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import pytest

from miles_core.buffer import GroupBuffer
from miles_core.errors import ContractError, RunFailed
from miles_core.fields import FieldRef
from miles_core.group_state import group_from_state, group_to_state
from miles_core.staleness import mask_stale
from miles_core.testing.clock import run_virtual
from miles_core.types import Prompt, Sample, SampleGroup, Score, Verdict, VersionSpan


class Data:
    """Prompts "0", "1", ... in order; ends after `size`."""

    def __init__(self, size: int = 10_000, start: int = 0) -> None:
        self.at, self.size = start, size

    def take(self, n: int) -> list[Prompt]:
        ids = range(self.at, min(self.at + n, self.size))
        self.at += len(ids)
        return [Prompt(id=str(i)) for i in ids]


def make_sample(prompt: Prompt, spans: list[tuple[int, int]], reward: float | None = 1.0, status: str = "stop") -> Sample:
    """One prompt token, then the spans as (tokens, version)."""
    count = 1 + sum(n for n, _ in spans)
    at, versions = 1, []
    for n, version in spans:
        versions.append(VersionSpan(start=at, stop=at + n, version=version))
        at += n
    mask = np.arange(count) > 0
    return Sample(
        group_id=f"{prompt.id}@{prompt.draw}", trajectory_id=f"{prompt.id}@{prompt.draw}/0", index=0, prompt_len=1,
        tokens=np.arange(count, dtype=np.int32), loss_mask=mask, logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=tuple(versions), reward=reward, status=status, prompt=prompt,
    )  # fmt: skip


class World:
    """A buffer over a fake rollout that takes `seconds(prompt)` and samples one token per second, at the version of
    that second. `keep(prompt)`: the filter. `starts`: (prompt id, version) of every start."""

    def __init__(self, *, data: Data | None = None, seconds=lambda p: 1.0, keep=lambda p: True, reward=1.0, **options):
        self.data, self.seconds, self.keep, self.reward = data or Data(), seconds, keep, reward
        self.version = 0
        self.starts: list[tuple[str, int]] = []
        self.partials: list[SampleGroup | None] = []
        self.aborts: Counter[str] = Counter()
        self.buffer = GroupBuffer(
            take_prompts=self.data.take,
            run=self.run,
            verdict=lambda g: Verdict(keep=self.keep(g.prompt), reason="" if self.keep(g.prompt) else "zero-std"),
            **{"groups_per_step": 2, **options},
        )

    async def run(self, prompt: Prompt, order: int, partial: SampleGroup | None) -> SampleGroup:
        self.starts.append((prompt.id, self.version))
        self.partials.append(partial)
        spans: list[tuple[int, int]] = []
        left = self.seconds(prompt)
        while left > 0:
            await asyncio.sleep(min(left, 1.0))
            spans.append((1, self.version))
            left -= 1.0
        status = "aborted" if self.aborts[prompt.id] > 0 else "stop"
        self.aborts[prompt.id] -= 1
        sample = make_sample(prompt, spans, self.reward, status)
        return SampleGroup(id=sample.group_id, prompt=prompt, samples=[sample], num_samples=1)

    async def step(self, train_s: float = 1.0) -> list[SampleGroup]:
        """One step of the loop: batch, training, push."""
        batch = await self.buffer.next_batch()
        await asyncio.sleep(train_s)
        await self.buffer.before_push(self.version + 1)
        self.version += 1
        self.buffer.advance(self.version)
        return batch


def ids(groups: list[SampleGroup]) -> list[str]:
    return [g.prompt.id for g in groups]


def oldest(groups: list[SampleGroup]) -> int:
    return min(span.version for g in groups for s in g.samples for span in s.versions)


# --- Order and selection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["0", "1", "4", "none"])
def test_at_lag_0_kept_groups_are_the_first_in_data_order_whatever_finishes_first(slow):
    async def main():
        world = World(seconds=lambda p: 9.0 if p.id == slow else 1.0 / (1 + int(p.id)), keep=lambda p: p.id not in "12")
        return [ids(await world.step()) for _ in range(3)], [i for i, _ in world.starts]

    batches, starts = run_virtual(main())
    # 1 and 2 are dropped: batch 1 is the first two of 0,3,4,...
    assert batches == [["0", "3"], ["4", "5"], ["6", "7"]]
    # Exactly as many replacements as drops: 6 trained + 2 dropped.
    assert starts == [str(i) for i in range(8)]


def test_at_lag_0_nothing_starts_while_the_trainer_works():
    async def main():
        world = World()
        await world.step(train_s=50.0)
        return len(world.starts)

    assert run_virtual(main()) == 2


def test_two_steps_per_push_at_lag_0_train_in_data_order():
    async def main():
        world = World(update_every=2, seconds=lambda p: 4.0 if p.id == "0" else 1.0)
        first = ids(await world.buffer.next_batch())
        second = ids(await world.buffer.next_batch())
        return first, second, world.starts

    first, second, starts = run_virtual(main())
    assert (first, second) == (["0", "1"], ["2", "3"])
    assert [v for _, v in starts] == [0, 0, 0, 0]  # (0 + 2 * 1) * 2 = 4 groups may start under version 0


def test_a_push_that_does_not_come_does_not_stop_the_buffer():
    async def main():
        world = World()
        return [ids(await world.buffer.next_batch()) for _ in range(3)]

    assert run_virtual(main()) == [["0", "1"], ["2", "3"], ["4", "5"]]


# --- Capacity and age ------------------------------------------------------------------------------------------------


def test_A1_capacity_is_8_after_recovery_at_version_10():
    # Batch 4, bound 1, version 10, 40 consumed: (10 + 1 + 1) * 4 - (40 + 0) = 8; with counters at 0 it would be 48.
    async def main():
        world = World(groups_per_step=4, max_lag=1)
        for _ in range(10):
            await world.step()
        await world.buffer.close()
        state = json.loads(json.dumps(world.buffer.state(), default=lambda a: a.tolist()))
        state["pending"], state["complete"] = [], []  # what was in flight is not the point here
        again = World(groups_per_step=4, max_lag=1, data=world.data)
        again.buffer.restore(state)
        return again.buffer.capacity(), again.buffer.trained_steps

    assert run_virtual(main()) == (8, 10)


@pytest.mark.parametrize("on_stale", ["wait", "abort_requeue", "continue"])
@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
def test_A1_no_trained_token_is_older_than_max_lag_also_after_a_restart(on_stale, max_lag):
    def seconds(prompt):  # long-tailed: every 7th prompt takes far longer than a step
        return 12.0 if int(prompt.id) % 7 == 3 else 1.0 + int(prompt.id) % 3

    async def main():
        options = {"groups_per_step": 2, "max_lag": max_lag, "on_stale": on_stale}
        world = World(seconds=seconds, **options)
        trained, ages = [], []
        for step in range(24):
            if step == 11:
                state = world.buffer.state()
                await world.buffer.close()
                version = world.version
                world = World(seconds=seconds, data=Data(start=world.data.at), **options)
                world.version = version
                world.buffer.restore(state)
            now = world.version
            for group in await world.step():
                trained.append(group.id)
                (sample,) = group.samples
                kept = mask_stale(sample, now, max_lag)
                tokens = [now - s.version for s in sample.versions for t in range(s.start, s.stop) if kept[t]]
                ages += tokens
                if on_stale != "continue":
                    assert kept.sum() == sample.loss_mask.sum()  # nothing had to be masked
        await world.buffer.close()
        return trained, ages

    trained, ages = run_virtual(main())
    assert len(trained) == 48 and len(set(trained)) == 48  # 24 steps of 2, each once
    assert max(ages) <= max_lag
    if max_lag:
        assert max(ages) == max_lag  # the bound is reached, so this test can fail


@pytest.mark.parametrize("slow", [{"3", "10", "17"}, {"2", "3", "4", "5"}, {"0", "1", "2", "3"}])
@pytest.mark.parametrize("max_lag", [1, 2])
def test_wait_does_nothing_in_vain(slow, max_lag):
    # With {2, 3, 4, 5} at lag 2, four slow groups of version 0 have their last step under version 2: if quick groups of
    # version 1 were trained in step 2, two of the four would be too old.
    async def main():
        world = World(seconds=lambda p: 20.0 if p.id in slow else 1.0, max_lag=max_lag)
        for _ in range(20):
            await world.step()
        await world.buffer.close()
        return world.buffer.counts["requeued"]

    assert run_virtual(main()) == 0


def test_abort_requeue_starts_the_same_draw_again_and_does_not_put_it_off_for_ever():
    # Prompt 0 takes 30 s, a step about 2 s: at lag 1 it is aborted twice, and then waited for.
    async def main():
        world = World(seconds=lambda p: 30.0 if p.id == "0" else 1.0, max_lag=1, on_stale="abort_requeue", max_requeues=2)
        batches = [ids(await world.step()) for _ in range(12)]
        await world.buffer.close()
        return batches, [v for i, v in world.starts if i == "0"], world.buffer.counts

    batches, versions, counts = run_virtual(main())
    assert versions == [0, 2, 4]  # born at 0, too old for version 2; born at 2, too old for 4
    assert sum(b.count("0") for b in batches) == 1
    assert counts["requeued/stale-running"] == 2


def test_continue_keeps_a_long_group_running():
    async def main():
        world = World(seconds=lambda p: 10.0 if p.id == "0" else 1.0, max_lag=1, on_stale="continue")
        groups = [g for _ in range(12) for g in await world.step()]
        await world.buffer.close()
        return next(g for g in groups if g.prompt.id == "0"), [i for i, _ in world.starts], world.buffer.metrics()

    group, starts, _ = run_virtual(main())
    assert starts.count("0") == 1
    assert len({s.version for s in group.samples[0].versions}) > 2


def test_A3_mask_keeps_only_the_last_8_tokens():
    # 12 tokens of version 3 and 8 of version 5, trained at version 5 with lag 1: only the 8 count.
    sample = make_sample(Prompt(id="0"), [(12, 3), (8, 5)])
    mask = mask_stale(sample, version=5, max_lag=1)
    assert mask.sum() == 8 and mask[-8:].all()
    assert np.all(sample.logprobs[1:] == np.float32(-0.5))  # those of sampling time stay


@pytest.mark.parametrize(("on_stale", "keeps"), [("wait", False), ("abort_requeue", False), ("continue", True)])
def test_A3_an_aborted_group_goes_on_only_where_a_sample_may_mix_versions(on_stale, keeps):
    async def main():
        world = World(max_lag=1, on_stale=on_stale)
        world.aborts["0"] = 1
        batch = await world.step()
        await world.buffer.close()
        return ids(batch), [p for (i, _), p in zip(world.starts, world.partials, strict=True) if i == "0"]

    _, partials = run_virtual(main())
    assert partials[0] is None and (partials[1] is not None) == keeps


def test_a_group_that_is_always_aborted_is_dropped_in_the_end():
    async def main():
        world = World()
        world.aborts["0"] = 1000
        return ids(await world.step()), world.buffer.counts

    batch, counts = run_virtual(main())
    assert batch == ["1", "2"]
    assert counts["dropped/aborted"] == 1


def test_oldest_groups_are_trained_first():
    # At lag 2 six groups start; 5 finishes first, but it was born with the others and comes by order.
    async def main():
        world = World(seconds=lambda p: 6.0 - int(p.id) if int(p.id) < 6 else 1.0, max_lag=2)
        return [ids(await world.step(train_s=20.0)) for _ in range(3)]

    batches = run_virtual(main())
    assert batches[0] == ["4", "5"]  # the first two to be complete
    assert batches[1] == ["0", "1"] and batches[2] == ["2", "3"]  # then by age, not 6, 7


# --- Filters that drop everything --------------------------------------------------------------------------------------


def test_F9_stops_with_counts_when_no_group_is_kept():
    async def main():
        world = World(keep=lambda p: False, reward=0.0, groups_per_step=16, max_rounds=3)
        with pytest.raises(RunFailed) as error:
            await world.buffer.next_batch()
        return str(error.value), len(world.starts)

    message, tried = run_virtual(main())
    assert tried == 48  # 3 rounds of 16, and then it stops
    assert "48 prompts tried" in message and "0 were kept" in message
    assert "48  zero-std: all 0" in message
    assert "rollout.max_rounds" in message


def test_F9_trains_what_there_is_when_told_to():
    async def main():
        world = World(keep=lambda p: int(p.id) % 16 < 5, groups_per_step=16, max_rounds=1, on_exhausted="train")
        return ids(await world.step()), ids(await world.step())

    first, second = run_virtual(main())
    assert first == ["0", "1", "2", "3", "4"]  # 5 of 16 survive
    assert second == ["16", "17", "18", "19", "20"]


def test_F9_the_batch_is_full_when_5_of_16_survive():
    async def main():
        world = World(keep=lambda p: int(p.id) % 16 < 5, groups_per_step=16, max_rounds=10)
        return ids(await world.step()), world.buffer.counts

    batch, counts = run_virtual(main())
    # 5 + 5 + 5 + 1: prompts 0-4, 16-20, 32-36, 48; the 33 others up to 48 are dropped.
    assert [int(i) for i in batch] == [*range(5), *range(16, 21), *range(32, 37), 48]
    assert (counts["started"], counts["dropped/zero-std"]) == (49, 33)


def test_the_end_of_the_data_gives_what_is_left():
    async def main():
        world = World(data=Data(size=3))
        return [ids(await world.step()) for _ in range(3)], world.buffer.data_ended

    assert run_virtual(main()) == ([["0", "1"], ["2"], []], True)


def test_what_a_rollout_raises_ends_the_wait():
    async def main():
        world = World()

        async def broken(prompt, order, partial):
            raise ContractError("bad rollout")

        world.buffer.run = broken
        await world.buffer.next_batch()

    with pytest.raises(ContractError, match="bad rollout"):
        run_virtual(main())


def test_a_prompt_draw_twice_in_flight_is_refused():
    async def main():
        world = World()
        world.buffer.take_prompts = lambda n: [Prompt(id="same")] * n
        await world.buffer.next_batch()

    with pytest.raises(ContractError, match='"same" twice'):
        run_virtual(main())


# --- Checkpoint --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_C3_each_id_is_trained_exactly_once_across_a_resume(max_lag, stop_after):
    # Ids 0..7, batch 2: four steps. At lag 1 four are generated when [0, 1] is trained; 2 and 3 must come next.
    async def main():
        world = World(data=Data(size=8), max_lag=max_lag, seconds=lambda p: 2.5 if p.id in "25" else 1.0)
        trained = [i for _ in range(stop_after) for i in ids(await world.step())]
        state, cursor, version = world.buffer.state(), world.data.at, world.version
        await world.buffer.close()
        again = World(data=Data(size=8, start=cursor), max_lag=max_lag)
        again.version = version
        again.buffer.restore(state)
        rest = [ids(await again.step()) for _ in range(4 - stop_after)]
        await again.buffer.close()
        return trained, rest

    trained, rest = run_virtual(main())
    assert sorted(trained + [i for b in rest for i in b]) == [str(i) for i in range(8)]
    if stop_after == 1 and max_lag == 0:
        assert rest[0] == ["2", "3"]


def test_C3_complete_groups_come_back_with_their_samples():
    async def main():
        world = World(max_lag=1)
        await world.step(train_s=5.0)
        await asyncio.sleep(5.0)
        state = world.buffer.state()
        await world.buffer.close()
        again = World(max_lag=1, data=Data(start=world.data.at))
        again.version = 1
        again.buffer.restore(state)
        batch = await again.step()
        await again.buffer.close()
        return [g.prompt.id for g in batch], [i for i, _ in again.starts], batch[0].samples[0]

    batch, starts, sample = run_virtual(main())
    assert batch == ["2", "3"]
    assert not {"2", "3"} & set(starts)  # not generated again
    assert sample.tokens.dtype == np.int32 and sample.prompt is not None


def test_a_group_comes_back_from_its_state_as_it_was(tmp_path):
    prompt = Prompt(id="p", draw=3, messages=[{"role": "user", "content": "2 + 2"}], label=(4, None), metadata={"x": 1.5})
    sample = make_sample(prompt, [(2, 0), (3, 1)], reward=0.25)
    sample.scores = {"exact": Score(value=0.25, parts={"a": 1.0}, reason="r", seconds=0.5)}
    sample.extras = {"routes": np.arange(10, dtype=np.int16).reshape(5, 2)}
    sample.metadata = {"nan": float("nan"), "raw": b"\x00\xff", 3: "key"}
    group = SampleGroup(id="p@3", prompt=prompt, samples=[sample], num_samples=1, born_version=2, order=7)

    state = group_to_state(group)
    text = json.dumps(state, default=lambda a: {"$a": a.tolist(), "t": str(a.dtype)}, allow_nan=False)
    raw = json.loads(text, object_hook=lambda d: np.array(d["$a"], dtype=d["t"]) if "$a" in d else d)
    back = group_from_state(raw)

    (other,) = back.samples
    assert back.prompt == prompt and (back.id, back.born_version, back.order) == ("p@3", 2, 7)
    assert other.versions == sample.versions and other.scores == sample.scores
    for name in ("tokens", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(other, name), getattr(sample, name))
        assert getattr(other, name).dtype == getattr(sample, name).dtype
    assert np.array_equal(other.extras["routes"], sample.extras["routes"])
    assert np.isnan(other.metadata["nan"]) and other.metadata["raw"] == b"\x00\xff" and other.metadata[3] == "key"


def test_a_prompt_that_cannot_be_kept_is_named():
    group = SampleGroup(id="p@0", prompt=Prompt(id="p", label=object()), samples=[], num_samples=0)
    with pytest.raises(ContractError, match='prompt "p", label: a value of type object'):
        group_to_state(group)


def test_groups_with_references_to_other_processes_are_generated_again_after_a_resume():
    async def main():
        world = World(max_lag=1)
        await world.step(train_s=5.0)
        await asyncio.sleep(5.0)
        for entry in world.buffer._complete:
            entry.group.samples[0].extras["routes"] = FieldRef(store="gone", key="k")
        state = world.buffer.state()
        await world.buffer.close()
        return len(state["complete"]), [p["prompt"]["id"] for p in state["pending"]]

    # During and after step 1 at lag 1: 2, 3 (the slots of lag 1), then 4, 5 once version 1 is there.
    assert run_virtual(main()) == (0, ["2", "3", "4", "5"])


def test_metrics_give_age_and_totals():
    async def main():
        world = World(max_lag=1)
        await world.step()
        await world.step()
        await world.buffer.close()
        return world.buffer.metrics()

    metrics = run_virtual(main())
    # Step 2 trains at version 1 what was sampled under version 0 while step 1 trained.
    assert metrics["staleness/max"] == 1.0 and metrics["staleness/share_1"] == 1.0 and metrics["staleness/mean"] == 1.0
    assert metrics["buffer/trained"] == 4.0 and metrics["buffer/requeued"] == 0.0
