"""What the engine samples and how it accounts for it."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch

from miles_core.errors import ConfigError, EngineFailed
from miles_torch_rollout import kv


def watch_prefill(engine):
    """A list that grows by how many tokens of each prompt the engine computes."""
    computed = []
    prefill = engine._batch.decoder.prefill

    def watched(prompts):
        computed.extend(len(p.ids) - p.depth for p in prompts)
        return prefill(prompts)

    engine._batch.decoder.prefill = watched
    return computed


FAMILIES = ["llama", "llama-untied", "qwen2", "qwen3", "qwen3-moe"]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize("prompts", ["in place", "copied", "copied, as on CUDA"])
@pytest.mark.parametrize(("family", "forward"), [*((f, "auto") for f in FAMILIES), ("llama", "generic")])
def test_logprobs_of_a_mixed_batch_are_those_of_hugging_face(
    family, forward, prompts, model_folder, reference, serve, ask, prompt, monkeypatch
):
    monkeypatch.setattr(kv, "SHARE_MIN_TOKENS", 1 if prompts == "in place" else 10**9)
    folder = model_folder(family)
    requests = [
        ask(f"{length}/{i}", prompt(length), seed=100 * length + i, temperature=t, max_new_tokens=new, top_p=p, top_k=k)
        for length, t, new, p, k in [(1, 1.0, 5, 1.0, 0), (9, 0.7, 12, 0.9, 0), (40, 1.3, 7, 1.0, 5), (17, 0.0, 70, 1.0, 0)]
        for i in range(3)
    ]

    async def go():
        async with serve(folder, forward=forward, max_running=7) as engine:  # fewer rows than requests: some join later
            if prompts == "copied, as on CUDA":
                engine._batch.decoder.share_prompts = engine._batch.rows.share = False
            return await asyncio.gather(*(engine.generate(r) for r in requests))

    for request, answer in zip(requests, run(go()), strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == request.params.max_new_tokens
        ids = np.concatenate([request.token_ids, answer.token_ids])
        expected = reference(folder, ids, request.params.temperature or 1.0)[len(request.token_ids) :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        assert answer.finish == "length"
        assert [(s.start, s.stop, s.version) for s in answer.versions] == [(0, len(answer.token_ids), 0)]


def test_fused_forward_serves_the_families_it_names(model_folder, serve):
    async def kind(family, **options):
        async with serve(model_folder(family), **options) as engine:
            return type(engine._batch.decoder).__name__

    assert [run(kind(f)) for f in FAMILIES] == ["FusedModel"] * 4 + ["GenericModel"]
    with pytest.raises(ConfigError, match="qwen3_moe has none"):
        run(kind("qwen3-moe", forward="fused"))


def test_samples_do_not_depend_on_the_batch_or_on_arrival(model_folder, serve, ask, prompt, monkeypatch):
    monkeypatch.setattr(kv, "SHARE_MIN_TOKENS", 64)
    requests = [ask(f"r{i}", prompt(5 + i % 3 * 8), seed=i, max_new_tokens=20 + i) for i in range(8)]

    async def alone():
        async with serve(model_folder("llama"), prefix_cache_tokens=0) as engine:
            return [(await engine.generate(r)).token_ids.tolist() for r in requests]

    async def together(max_running, gap_s):
        async def later(engine, i, request):
            await asyncio.sleep(gap_s * i)
            return (await engine.generate(request)).token_ids.tolist()

        async with serve(model_folder("llama"), max_running=max_running) as engine:
            return await asyncio.gather(*(later(engine, i, r) for i, r in enumerate(requests)))

    expected = run(alone())
    assert run(together(8, 0.0)) == expected
    assert run(together(3, 0.0)) == expected
    assert run(together(8, 0.004)) == expected


def test_E3_siblings_differ_and_a_rerun_or_another_number_of_engines_gives_the_same(model_folder, serve, ask, prompt):
    requests = [ask(str(i), prompt(6), seed=1000 + i, max_new_tokens=12) for i in range(8)]

    async def sampled(num_engines):
        answers = []
        for part in range(num_engines):
            async with serve(model_folder("llama")) as engine:
                answers += await asyncio.gather(*(engine.generate(r) for r in requests[part::num_engines]))
        return {a.id: tuple(a.token_ids.tolist()) for a in answers}

    first = run(sampled(1))
    assert len(set(first.values())) == 8
    assert run(sampled(1)) == first
    assert run(sampled(2)) == first


def test_a_prompt_is_computed_once_for_all_its_samples(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama"), max_running=3) as engine:
            computed = watch_prefill(engine)
            answers = await asyncio.gather(*(engine.generate(ask(str(i), prompt(20), seed=i)) for i in range(8)))
            return computed, sorted(a.cached_tokens for a in answers)

    assert run(go()) == ([20], [0] + [20] * 7)


def test_stop_tokens_end_an_answer_and_belong_to_it(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama")) as engine:
            free = await engine.generate(ask("free", prompt(6), max_new_tokens=30))
            stop = int(free.token_ids[5])
            at = free.token_ids.tolist().index(stop)
            cut = await engine.generate(ask("cut", prompt(6), max_new_tokens=30, ignore_eos=False, stop_token_ids=(stop,)))
            engine._eos = frozenset([stop])  # the model's own end, without being asked for
            own = await engine.generate(ask("own", prompt(6), max_new_tokens=30, ignore_eos=False))
            ignored = await engine.generate(ask("ignored", prompt(6), max_new_tokens=30, stop_token_ids=(stop,)))
            return free.token_ids.tolist(), at, cut, own, ignored

    tokens, at, cut, own, ignored = run(go())
    for answer in (cut, own):
        assert (answer.token_ids.tolist(), answer.finish) == (tokens[: at + 1], "stop")
    assert (ignored.token_ids.tolist(), ignored.finish) == (tokens, "length")


def test_stop_strings_end_an_answer_with_the_token_that_completes_them(model_folder, serve, ask, prompt):
    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    async def go():
        async with serve(model_folder("llama"), make_decode=lambda: decode) as engine:
            free = (await engine.generate(ask("free", prompt(6), max_new_tokens=30))).token_ids.tolist()
            # Begins in the middle of token 3, spans token 4 whole, and ends in the middle of token 5.
            text = f"{free[3]}><{free[4]}><{str(free[5])[0]}"
            cut = await engine.generate(ask("cut", prompt(6), max_new_tokens=30, stop=("never", text)))
            return free, cut

    free, cut = run(go())
    assert (cut.token_ids.tolist(), cut.finish) == (free[:6], "stop")


def test_stop_strings_without_a_tokenizer_are_refused(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.generate(ask("a", prompt(3), stop=("x",)))

    with pytest.raises(EngineFailed, match="no tokenizer"):
        run(go())


@pytest.mark.parametrize(("length", "sampled"), [(32, 32), (60, 4), (63, 1), (64, 0), (81, 0)])
def test_D5_the_context_bounds_the_answer(length, sampled, model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama"), max_context=64) as engine:
            return await engine.generate(ask("a", prompt(length), max_new_tokens=32))

    answer = run(go())  # min(32, 64 - length), never below 0
    assert (len(answer.token_ids), answer.finish) == (sampled, "length")


def test_requests_beyond_the_memory_for_keys_and_values_wait(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama"), max_kv_tokens=64) as engine:  # two rows of 20 + 12 tokens
            most = 0
            decode = engine._batch.decoder.decode

            def watched(tokens, rows, plan):
                nonlocal most
                most = max(most, len(tokens))
                return decode(tokens, rows, plan)

            engine._batch.decoder.decode = watched
            answers = await asyncio.gather(
                *(engine.generate(ask(str(i), prompt(20, i), max_new_tokens=12)) for i in range(5))
            )
            return most, [len(a.token_ids) for a in answers]

    assert run(go()) == (2, [12] * 5)


def test_score_is_that_of_hugging_face(model_folder, reference, serve, prompt):
    sequences = [prompt(n, n) for n in (2, 1, 33, 300)]  # 300 positions take two pieces of logits

    async def go(family):
        async with serve(model_folder(family), prefill_tokens=40) as engine:
            return await engine.score(sequences, topk=3)

    for family in ("llama", "qwen3-moe"):
        for ids, row in zip(sequences, run(go(family)), strict=True):
            np.testing.assert_allclose(row["logprobs"], reference(model_folder(family), ids), atol=1e-4)
            assert row["topk_ids"].shape == row["topk_logprobs"].shape == (len(ids), 3)
            for t in range(1, min(len(ids), 20)):
                changed = np.concatenate([ids[:t], row["topk_ids"][t, :1]])
                best = reference(model_folder(family), changed)[t]
                assert row["topk_logprobs"][t, 0] == pytest.approx(best, abs=1e-4)
                assert best >= row["logprobs"][t] - 1e-4


def test_an_idle_engine_uses_no_processor_time(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.generate(ask("a", prompt(4)))
            clock = time.pthread_getcpuclockid(engine._thread.ident)
            await asyncio.sleep(0.1)
            before = time.clock_gettime(clock)
            await asyncio.sleep(0.3)
            return time.clock_gettime(clock) - before

    assert run(go()) < 0.002


def test_broken_logits_end_the_engine_loudly(model_folder, serve, ask, prompt):
    async def go():
        async with serve(model_folder("llama")) as engine:
            with torch.no_grad():
                engine._model.model.norm.weight.fill_(float("nan"))
            with pytest.raises(EngineFailed, match="not finite"):
                await engine.generate(ask("a", prompt(4)))
            with pytest.raises(EngineFailed, match="broken"):
                await engine.health()
            with pytest.raises(EngineFailed, match="broken"):
                await engine.generate(ask("b", prompt(4)))
            with pytest.raises(EngineFailed, match="broken"):
                await engine.pause()

    run(go())


def test_closing_fails_what_runs_and_is_safe_twice(model_folder, serve, ask, prompt, until):
    async def go():
        async with serve(model_folder("llama")) as engine:
            task = asyncio.create_task(engine.generate(ask("a", prompt(4), max_new_tokens=600)))
            await until(engine, 2)
            await engine.close()
            await engine.close()
            with pytest.raises(EngineFailed, match="closed"):
                await task

    run(go())
