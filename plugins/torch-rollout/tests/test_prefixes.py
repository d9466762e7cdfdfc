"""Beginnings that prompts share: computed once, reused, and gone when the weights change."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from miles_core.types import WeightMessage
from miles_torch_rollout import kv
from miles_torch_rollout.kv import Prefix, PrefixCache, Rows
from miles_torch_rollout.prompts import common_tokens, plan_prompts, prompt_key

CPU = torch.device("cpu")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def prefix(num_tokens, fill=0.0):
    """One layer, two heads of size 4."""
    return Prefix(torch.full((1, 2, num_tokens, 4), fill), torch.full((1, 2, num_tokens, 4), -fill), torch.zeros(8))


@pytest.fixture
def watch_prefill():
    def watch(engine):
        computed = []
        prefill = engine._batch.decoder.prefill

        def watched(prompts):
            computed.append(sorted(len(p.ids) - p.depth for p in prompts))
            return prefill(prompts)

        engine._batch.decoder.prefill = watched
        return computed

    return watch


def assert_logprobs(answers, requests, folder, reference):
    for request, answer in zip(requests, answers, strict=True):
        sequence = np.concatenate([request.token_ids, answer.token_ids])
        np.testing.assert_allclose(answer.logprobs, reference(folder, sequence)[len(request.token_ids) :], atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_beginnings_shared_by_waiting_prompts_are_computed_once(
    forward, in_place, model_folder, reference, serve, ask, prompt, watch_prefill, monkeypatch
):
    monkeypatch.setattr(kv, "SHARE_MIN_TOKENS", 1 if in_place else 10**9)
    common, folder = prompt(30), model_folder("llama")
    rests = [ids(40, 5, 6), ids(40, 5, 7, 8), ids(40, 5), ids(50), ids(40, 9), ids(40, 5, 6, 9, 9)]
    prompts = [np.concatenate([common, rest]) for rest in rests] + [prompt(12, 3)]
    requests = [ask(f"{i}/{s}", p, seed=10 * i + s) for i, p in enumerate(prompts) for s in range(2)]

    async def go():
        async with serve(folder, forward=forward) as engine:
            computed = watch_prefill(engine)
            return computed, await asyncio.gather(*(engine.generate(r) for r in requests))

    computed, answers = run(go())
    # In order of token ids: common 40 5 (32), then 6 (1), 9 9 (2), 7 8 (2), common 40 | 9 (1), common | 50 (1), other (12).
    assert computed == [[1, 1, 1, 2, 2, 12, 32]]
    assert_logprobs(answers, requests, folder, reference)
    lengths = sum(len(r.token_ids) for r in requests)
    assert lengths - sum(a.cached_tokens for a in answers) == sum(computed[0])


@pytest.mark.parametrize("forward", ["fused", "generic"])
def test_a_prompt_that_begins_like_a_kept_one_computes_only_its_rest(
    forward, model_folder, reference, serve, ask, prompt, watch_prefill
):
    kept, folder = prompt(30), model_folder("qwen3")
    cases = [  # prompt, tokens that it finds
        (kept, 0),
        (np.concatenate([kept, ids(3, 4, 5)]), 30),  # goes on where the kept one ends
        (np.concatenate([kept[:20], ids((kept[20] + 1) % 90 + 2, 4)]), 20),  # leaves it after 20
        (kept[:12], 11),  # is a beginning of it: the last token gives the logits
        (kept, 30),
        (ids((kept[0] + 1) % 90 + 2, 4), 0),
    ]
    requests = [ask(str(i), p, seed=i) for i, (p, _) in enumerate(cases)]

    async def go():
        async with serve(folder, forward=forward) as engine:
            computed = watch_prefill(engine)
            return computed, [await engine.generate(r) for r in requests]

    computed, answers = run(go())
    assert [a.cached_tokens for a in answers] == [found for _, found in cases]
    assert computed == [[len(p) - found] for p, found in cases if found < len(p)]
    assert_logprobs(answers, requests, folder, reference)


def test_without_a_cache_nothing_is_reused_between_requests(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama"), prefix_cache_tokens=0) as engine:
            return [(await engine.generate(ask(str(i), prompt(20)))).cached_tokens for i in range(2)]

    assert run(go()) == [0, 0]


@pytest.mark.parametrize("message", ["begin", "flush"])
def test_W1_no_part_of_a_kept_prompt_is_reused_after_an_update_or_a_flush(message, model_folder, serve, ask, prompt):
    kept = prompt(24)

    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.generate(ask("a", kept))
            before = await engine.generate(ask("b", np.concatenate([kept, ids(2)])))
            await engine.pause()
            await engine.receive(WeightMessage(kind=message, version=1))
            if message == "begin":
                await engine.receive(WeightMessage(kind="path", version=1, body={"path": str(model_folder("llama", 1))}))
                await engine.receive(WeightMessage(kind="commit", version=1))
            await engine.resume()
            return before.cached_tokens, (await engine.generate(ask("c", np.concatenate([kept, ids(3)])))).cached_tokens

    assert run(go()) == (24, 0)


def test_W1_log_probabilities_after_an_update_are_those_of_the_new_weights(model_folder, reference, serve, ask, prompt):
    requests = [ask(str(i), np.concatenate([prompt(24), ids(2 + i)]), seed=i) for i in range(3)]
    new = model_folder("llama", 1)

    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.generate(ask("old", prompt(24)))
            await engine.pause()
            await engine.receive(WeightMessage(kind="begin", version=1))
            await engine.receive(WeightMessage(kind="path", version=1, body={"path": str(new)}))
            await engine.receive(WeightMessage(kind="commit", version=1))
            await engine.resume()
            return await asyncio.gather(*(engine.generate(r) for r in requests))

    assert_logprobs(run(go()), requests, new, reference)


def test_retracted_samples_of_a_prompt_compute_it_once_again(
    model_folder, reference, serve, ask, prompt, until, watch_prefill
):
    folder = model_folder("llama")
    requests = [ask(str(i), prompt(40), seed=i, max_new_tokens=60) for i in range(4)]

    async def go():
        async with serve(folder, prefix_cache_tokens=0) as engine:
            tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
            await until(engine, 5)
            await engine.pause("retract")
            sampled = [len(r.tokens) for r in engine._batch.waiting]
            computed = watch_prefill(engine)
            await engine.resume()
            return sampled, computed, await asyncio.gather(*tasks)

    sampled, computed, answers = run(go())
    assert 40 <= sum(computed[0]) <= 40 + sum(sampled)  # not 4 * 40; answers may begin alike as well
    assert_logprobs(answers, requests, folder, reference)


def test_the_cache_finds_the_longest_beginning_and_forgets_the_least_recently_used():
    cache = PrefixCache(10)
    for tokens in [(1, 2, 3), (1, 2, 300, 4), (9,)]:
        cache.put(prompt_key(ids(*tokens)), prefix(len(tokens)))
    find = {(1, 2, 300): 3, (1, 2, 3, 9): 3, (1, 2, 7): 2, (1,): 1, (8, 1): 0, (9, 9): 1}
    assert {tokens: cache.longest(prompt_key(ids(*tokens)))[1] for tokens in find} == find
    cache.longest(prompt_key(ids(1, 2, 3, 4)))  # now 1 2 300 4 was used last-but-two: by (1, 2, 300)
    cache.put(prompt_key(ids(7, 7, 7, 7)), prefix(4))  # 3 + 4 + 1 + 4 > 10
    assert cache.get(prompt_key(ids(1, 2, 300, 4))) is None
    assert cache.longest(prompt_key(ids(1, 2, 300, 4)))[1] == 2  # what it shares with 1 2 3
    assert len(cache) == 3
    cache.clear()
    assert cache.longest(prompt_key(ids(1, 2, 3))) == (None, 0)


@pytest.mark.parametrize("seed", range(20))
def test_planned_beginnings_are_the_longest_there_are(seed):
    rng = np.random.default_rng(seed)
    contexts = [*{tuple(rng.integers(250, 260 if seed % 2 else 252, rng.integers(1, 9))) for _ in range(12)}]
    cache = PrefixCache(100)
    old = [tuple(rng.integers(250, 253, 6)) for _ in range(3)]
    for tokens in old:
        cache.put(prompt_key(ids(*tokens)), prefix(6))
    order, prompts = plan_prompts([ids(*c) for c in contexts], cache.longest, CPU)
    done = []
    for index, planned in zip(order, prompts, strict=True):
        own = contexts[index]
        best = max(common_tokens(prompt_key(ids(*own)), prompt_key(ids(*other))) for other in [*old, *done])
        assert (tuple(planned.ids.tolist()), planned.depth) == (own, min(best, len(own) - 1))
        if planned.kept is None and planned.depth:
            assert done[-1][: planned.depth] == own[: planned.depth]
        done.append(own)


def test_row_buffers_are_reserved_once_for_what_starts_together_and_kept(monkeypatch):
    rows = Rows(CPU, torch.float32, share=False)
    rows.add([(prefix(5, 1.0), 2, 4), (prefix(3, 2.0), 1, 9)])
    assert rows.k.shape == (1, 3, 2, 16, 4)  # 3 + 9 slots at most, in steps of 8
    first = rows.k.untyped_storage().data_ptr()
    for _ in range(9):
        rows.plan()
        rows.advance()
    assert rows.used == [14, 14, 12] and rows.k.untyped_storage().data_ptr() == first
    rows.clear()
    rows.add([(prefix(3, 3.0), 4, 5)])  # 4 rows of 8 slots take less than 3 of 16
    assert rows.k.shape == (1, 6, 2, 8, 4) and rows.k.untyped_storage().data_ptr() == first
    assert bool((rows.k[:, :4, :, :3] == 3).all()) and bool((rows.v[:, :4, :, :3] == -3).all())
    rows.clear()
    rows.release()
    assert rows.k is None
    monkeypatch.setattr(kv, "KEEP_BYTES", 2 * 4 * 128 - 1)  # k and v of 1 layer, 1 row, 2 heads, 16 slots, size 4
    rows.add([(prefix(3), 1, 12)])
    rows.clear()
    assert rows.k is None


def test_rows_keep_what_they_hold_when_others_join_and_need_more():
    rows = Rows(CPU, torch.float32, share=False)
    rows.add([(prefix(5, 1.0), 2, 3)])
    rows.add([(prefix(30, 2.0), 1, 1000)])
    assert rows.k.shape[3] == 31 + kv.SLOTS_AHEAD + 1  # 288, a multiple of 8: not yet 1030
    assert bool((rows.k[:, :2, :, :5] == 1).all()) and bool((rows.v[:, 2, :, :30] == -2).all())
    assert torch.isfinite(rows.k).all() and torch.isfinite(rows.v).all()
