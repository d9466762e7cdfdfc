"""The toy engine obeys what real engines obey, and fails as they fail."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from miles_core.errors import EngineFailed, WeightSyncFailed
from miles_core.testing import toy, toy_model
from miles_core.testing.samples import group_of, make_sample
from miles_core.testing.toy_kit import TOKENIZER, batch_of, buckets_as_messages, engine, moved, push, request, trainer
from miles_core.transport import release
from miles_core.types import VersionSpan, WeightMessage


def test_E3_seeds_make_siblings_differ_and_reruns_agree():
    async def answers():
        e = await engine()
        seeds = range(8)
        made = await asyncio.gather(*(e.generate(request(f"r{s}", seed=s, ignore_eos=True)) for s in seeds))
        return [g.token_ids.tolist() for g in made]

    first = asyncio.run(answers())
    assert len({tuple(row) for row in first}) == 8
    assert asyncio.run(answers()) == first


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_F11_engine_and_trainer_agree_on_logprobs(temperature):
    async def sampled():
        return await (await engine()).generate(request(temperature=temperature, ignore_eos=True))

    made = asyncio.run(sampled())
    ids = np.concatenate([request().token_ids, made.token_ids])
    sample = make_sample(len(made.token_ids), prompt_len=len(request().token_ids), temperature=temperature, tokens=ids)
    row = trainer().forward(batch_of([group_of([sample])]), "policy", frozenset({"logprobs"}))["logprobs"][0]
    assert row[-len(made.token_ids) :] == pytest.approx(made.logprobs, abs=1e-6)
    assert row.dtype == np.float32


def test_greedy_takes_the_likeliest_and_score_agrees():
    async def run():
        e = await engine()
        made = await e.generate(request(temperature=0.0))
        ids = np.concatenate([request().token_ids, made.token_ids])
        return made, (await e.score([ids], topk=2))[0]

    made, scored = asyncio.run(run())
    count = len(made.token_ids)
    assert scored["topk_ids"][-count:, 0].tolist() == made.token_ids.tolist()
    assert scored["logprobs"][-count:] == pytest.approx(made.logprobs, abs=1e-6)
    assert scored["logprobs"][0] == 0


def test_top_k_and_top_p_cut_the_choice_but_not_the_logprob():
    async def run(**cut):
        e = await engine()
        likeliest = (await e.generate(request("greedy", temperature=0.0, max_new_tokens=1))).token_ids[0]
        made = [await e.generate(request(f"r{s}", seed=s, max_new_tokens=1, **cut)) for s in range(20)]
        return likeliest, made

    for cut in ({"top_k": 1}, {"top_p": 0.01}):
        likeliest, made = asyncio.run(run(**cut))
        assert {int(g.token_ids[0]) for g in made} == {int(likeliest)}
        assert made[0].logprobs[0] < -1  # about ln 0.1: the full distribution over ten digits


def test_T4_length_and_stop():
    async def run():
        e = await engine(seed=0)
        stopped = await e.generate(request("a", temperature=0.0))
        cut = await e.generate(request("b", temperature=0.0, max_new_tokens=1))
        text = await e.generate(request("c", temperature=0.0, stop=tuple("0123456789")))
        return stopped, cut, text

    stopped, cut, text = asyncio.run(run())
    assert (stopped.finish, stopped.token_ids[-1], len(stopped.token_ids)) == ("stop", toy_model.EOS, 2)
    assert (cut.finish, len(cut.token_ids), len(cut.logprobs)) == ("length", 1, 1)
    assert (text.finish, len(text.token_ids)) == ("stop", 1)


def test_D5_the_context_bounds_an_answer():
    async def run(prompt_len, limit):
        e = await engine()
        e.max_context = limit
        ids = np.ones(prompt_len, np.int32)
        return await e.generate(replace(request(max_new_tokens=32, ignore_eos=True), token_ids=ids))

    made = asyncio.run(run(60, 64))
    assert (made.finish, len(made.token_ids)) == ("length", 4)  # min(32, 64 - 60)
    assert asyncio.run(run(64, 64)).token_ids.tolist() == []


def test_W1_a_flushed_cache_gives_the_new_answer():
    async def run(kinds):
        e = await engine()
        answers = [await e.generate(request(f"a{i}", temperature=0.0)) for i in range(2)]
        await e.pause("in_place")
        await push(e, moved(trainer()), 1, kinds)
        await e.resume()
        return [*answers, await e.generate(request("b", temperature=0.0))]

    cold, warm, new = asyncio.run(run(("begin", "data", "flush", "commit")))
    prompt_len = len(request().token_ids)
    assert [g.cached_tokens for g in (cold, warm, new)] == [0, prompt_len, 0]
    assert TOKENIZER.decode(cold.token_ids) != TOKENIZER.decode(new.token_ids) == "7"
    assert new.versions == (VersionSpan(start=0, stop=2, version=1),)
    # Without the flush the first token still comes from the old weights: the cache is real.
    stale = asyncio.run(run(("begin", "data", "commit")))[2]
    assert stale.token_ids[0] == cold.token_ids[0]
    assert stale.cached_tokens == prompt_len


def test_an_update_arrives_exactly():
    async def run():
        e, source = await engine(seed=1), trainer(seed=2)
        await e.pause()
        return await push(e, source, 3), source.state_hash(), await e.health()

    answer, state_hash, health = asyncio.run(run())
    assert answer == {"version": 3, "state_hash": state_hash}
    assert health == {"version": 3, "running": 0, "waiting": 0, "dirty": False}


def test_an_update_from_a_folder(tmp_path):
    async def run():
        e, source = await engine(seed=1), trainer(seed=2)
        source.save_model(tmp_path)
        await e.receive(WeightMessage(kind="begin", version=1))
        await e.receive(WeightMessage(kind="path", version=1, body={"path": str(tmp_path)}))
        return await e.receive(WeightMessage(kind="commit", version=1)), source.state_hash()

    answer, state_hash = asyncio.run(run())
    assert answer["state_hash"] == state_hash


async def _begin_and_commit(e, source):
    await push(e, source, 1, ("begin", "commit"))


async def _wrong_hash(e, source):
    await push(e, source, 1, ("begin",))
    message, key = next(iter(buckets_as_messages(source, 1)))
    try:
        await e.receive(replace(message, sha="0" * 64))
    finally:
        release(key)


async def _no_begin(e, source):
    await push(e, source, 1, ("data",))


async def _other_incarnation(e, source):
    await e.receive(WeightMessage(kind="begin", version=1, incarnation="before"))


BROKEN_UPDATES = [
    (_begin_and_commit, "these tensors never came: bias, bigram, embed, head", True),
    (_wrong_hash, "bucket 0 arrived with hash", True),
    (_no_begin, '"ipc" came before "begin"', True),
    (_other_incarnation, "is incarnation .*, and the message is for before", False),
]


@pytest.mark.parametrize(("update", "message", "dirty"), BROKEN_UPDATES)
def test_a_broken_update_is_refused_and_leaves_the_engine_dirty(update, message, dirty):
    async def run():
        e = await engine()
        await e.pause()
        with pytest.raises(WeightSyncFailed, match=message):
            await update(e, trainer())
        assert (await e.health())["dirty"] is dirty
        if dirty:
            with pytest.raises(EngineFailed, match="cannot serve"):
                await e.resume()
            with pytest.raises(EngineFailed, match="cannot serve"):
                await e.generate(request())
            await push(e, trainer(), 2)
        await e.resume()
        return (await e.generate(request())).finish

    assert asyncio.run(run()) == "stop"


async def _paused_in_mid_answer(mode):
    e = await engine(toy.ToyEngineConfig(token_seconds=0.002))
    task = asyncio.ensure_future(e.generate(request(ignore_eos=True, max_new_tokens=12)))
    await asyncio.sleep(0)
    run = e._running["r"]
    while len(run.versions) < 3:
        await asyncio.sleep(0.001)
    await e.pause(mode)
    count = len(run.versions)
    await asyncio.sleep(0.02)
    assert len(run.versions) == count  # nothing is sampled while paused
    await push(e, trainer(seed=5), 1)
    await e.resume()
    return count, await task


def test_A3_pause_abort_returns_what_there_is():
    _, made = asyncio.run(_paused_in_mid_answer("abort"))
    assert made.finish == "aborted"
    assert 3 <= len(made.token_ids) < 12
    assert {s.version for s in made.versions} == {0}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_A3_other_pauses_go_on_with_per_token_versions(mode):
    count, made = asyncio.run(_paused_in_mid_answer(mode))
    assert (made.finish, len(made.token_ids)) == ("length", 12)
    assert [(s.start, s.stop, s.version) for s in made.versions] == [(0, count, 0), (count, 12, 1)]


def test_abort_ends_the_named_requests_only():
    async def run():
        e = await engine(toy.ToyEngineConfig(token_seconds=0.002))
        tasks = [asyncio.ensure_future(e.generate(request(n, ignore_eos=True, max_new_tokens=8))) for n in "ab"]
        await asyncio.sleep(0.006)
        await e.abort(["a"])
        assert tasks[0].done()
        return [(await t).finish for t in tasks]

    assert asyncio.run(run()) == ["aborted", "length"]


def test_a_closed_engine_fails_what_waits():
    async def run():
        e = await engine()
        await e.pause()
        task = asyncio.ensure_future(e.generate(request()))
        await asyncio.sleep(0.01)
        await e.close()
        await e.close()
        with pytest.raises(EngineFailed, match="closed"):
            await task
        with pytest.raises(EngineFailed, match="closed"):
            await e.health()

    asyncio.run(run())
