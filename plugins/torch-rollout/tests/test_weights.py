"""New weights in a running engine: complete and verified, or not served."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from miles_core.errors import EngineFailed, WeightSyncFailed
from miles_core.transport import SharedSegment, publish, release
from miles_core.types import TensorSpec, WeightMessage


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def pack(tensors):
    """(specs, uint8 tensor) with all tensors one after the other."""
    specs, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset))
        parts.append(tensor.contiguous().reshape(-1).view(torch.uint8))
        offset += parts[-1].numel()
    return tuple(specs), torch.cat(parts)


async def push(engine, version, tensors, *, num_buckets=2, channel="handle", sha=None, finish=True):
    """begin, buckets, flush, commit. Returns the answers."""
    names = list(tensors)
    await engine.receive(WeightMessage(kind="begin", version=version, incarnation=engine.incarnation))
    answers = []
    for index in range(num_buckets):
        specs, data = pack({n: tensors[n] for n in names[index::num_buckets]})
        digest = hashlib.sha256(data.numpy()).hexdigest() if sha is None else sha
        segment = SharedSegment(f"miles-test-{id(engine)}")
        body = {"nbytes": data.numel()}
        if channel == "shm":
            segment.write(data.numpy())
            body["shm"] = segment.name
        else:
            body["handle"] = publish(data if channel == "handle" else data.numpy())
        try:
            message = WeightMessage(kind="ipc", version=version, bucket=index, tensors=specs, sha=digest, body=body)
            answers.append(await engine.receive(message))
            assert not digest or answers[-1] == {"sha": digest}
        finally:
            release(body.get("handle", ""))
            segment.close()
    if finish:
        await engine.receive(WeightMessage(kind="flush", version=version))
        answers.append(await engine.receive(WeightMessage(kind="commit", version=version)))
    return answers


@pytest.mark.parametrize("channel", ["handle", "array", "shm", "path"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe"])
def test_after_a_push_the_engine_is_a_fresh_load_of_the_same_weights(
    family, channel, model_folder, reference, serve, prompt
):
    old, new, ids = model_folder(family), model_folder(family, seed=1), prompt(20)
    before = hashlib.sha256((old / "model.safetensors").read_bytes()).hexdigest()

    async def go():
        async with serve(old, state_hash=True) as engine, serve(new, state_hash=True) as fresh:
            await engine.pause()
            if channel == "path":
                await engine.receive(WeightMessage(kind="begin", version=1))
                await engine.receive(WeightMessage(kind="path", version=1, body={"path": str(new)}))
                done = await engine.receive(WeightMessage(kind="commit", version=1))
            else:
                *_, done = await push(engine, 1, weights_of(new), channel=channel)
            await engine.resume()
            *_, same = await push(fresh, 1, weights_of(new))
            assert done == same == {"version": 1, "state_hash": done["state_hash"]}
            return (await engine.score([ids]))[0]["logprobs"], await engine.health()

    logprobs, health = run(go())
    np.testing.assert_allclose(logprobs, reference(new, ids), atol=1e-4)
    assert health["version"] == 1
    assert hashlib.sha256((old / "model.safetensors").read_bytes()).hexdigest() == before  # the file is only read


def test_W1_no_kept_prompt_outlives_the_weights_it_came_from(model_folder, serve, ask, prompt):
    async def greedy(folder, push_to=None):
        request = ask("a", prompt(24), temperature=0.0, max_new_tokens=10)
        async with serve(folder) as engine:
            first = await engine.generate(request)
            again = await engine.generate(request)
            assert (first.cached_tokens, again.cached_tokens) == (0, 24)  # the cache does work
            if push_to is None:
                return first
            await engine.pause()
            await push(engine, 1, weights_of(push_to))
            await engine.resume()
            return await engine.generate(request)

    old, new = model_folder("llama"), model_folder("llama", seed=1)
    after, fresh, stale = run(greedy(old, push_to=new)), run(greedy(new)), run(greedy(old))
    assert after.token_ids.tolist() == fresh.token_ids.tolist() != stale.token_ids.tolist()
    assert after.cached_tokens == 0
    assert [(s.start, s.stop, s.version) for s in after.versions] == [(0, 10, 1)]


@pytest.mark.parametrize("names", ["embedding", "head", "both"])
def test_W3_tied_embeddings_stay_tied_whichever_copy_comes(names, model_folder, reference, serve, prompt):
    new, ids = model_folder("llama", seed=1), prompt(12)
    tensors = weights_of(new)
    assert "lm_head.weight" not in tensors  # what the config says: tied
    embedding = tensors["model.embed_tokens.weight"]
    if names != "embedding":
        tensors["lm_head.weight"] = embedding.clone()
    if names == "head":
        del tensors["model.embed_tokens.weight"]

    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.pause()
            await push(engine, 1, tensors)
            await engine.resume()
            inner, outer = engine._model.get_input_embeddings().weight, engine._model.get_output_embeddings().weight
            assert torch.equal(inner, outer) and torch.equal(inner, embedding)
            return (await engine.score([ids]))[0]["logprobs"]

    np.testing.assert_allclose(run(go()), reference(new, ids), atol=1e-4)


def test_W3_two_different_copies_of_a_tied_embedding_are_refused(model_folder, serve):
    tensors = weights_of(model_folder("llama", seed=1))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.pause()
            await push(engine, 1, tensors)

    with pytest.raises(WeightSyncFailed, match="different values"):
        run(go())


def without(tensors, name):
    return {k: v for k, v in tensors.items() if k != name}


MISTAKES = {
    "a name that the model lacks": (lambda t: {**t, "model.layers.7.x": torch.zeros(2)}, "model.layers.7.x"),
    "a parameter that does not come": (lambda t: without(t, "model.norm.weight"), "model.norm.weight"),
    "another shape": (lambda t: {**t, "model.norm.weight": torch.zeros(31)}, r"\(31,\).*\(32,\)"),
    "another data type": (lambda t: {**t, "model.norm.weight": torch.zeros(32, dtype=torch.float64)}, "float64"),
    "fewer bits than the engine holds": (lambda t: {**t, "model.norm.weight": torch.zeros(32).bfloat16()}, "bfloat16"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_update_is_refused_and_the_engine_stays_dirty_until_a_right_one(
    mistake, model_folder, reference, serve, ask, prompt
):
    change, named = MISTAKES[mistake]
    new = weights_of(model_folder("llama", seed=1))

    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.pause()
            with pytest.raises(WeightSyncFailed, match=named):
                await push(engine, 1, change(new))
            assert (await engine.health())["dirty"] and (await engine.health())["version"] == 0
            for attempt in (engine.resume(), engine.generate(ask("a", prompt(4))), engine.score([prompt(4)])):
                with pytest.raises(EngineFailed, match="of version 1 failed"):
                    await attempt
            await push(engine, 2, new)
            await engine.resume()
            assert not (await engine.health())["dirty"]
            return (await engine.score([prompt(9)]))[0]["logprobs"]

    np.testing.assert_allclose(run(go()), reference(model_folder("llama", seed=1), prompt(9)), atol=1e-4)


def test_an_expert_that_does_not_come_is_missed(model_folder, serve):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = without(weights_of(model_folder("qwen3-moe", seed=1)), name)

    async def go():
        async with serve(model_folder("qwen3-moe")) as engine:
            await engine.pause()
            await push(engine, 1, tensors)

    with pytest.raises(WeightSyncFailed, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        run(go())


def test_changed_bytes_are_refused(model_folder, serve):
    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.pause()
            await push(engine, 1, weights_of(model_folder("llama", seed=1)), sha="0" * 64)

    with pytest.raises(WeightSyncFailed, match="sent as SHA-256 000000000000"):
        run(go())


def test_shared_memory_is_hashed_also_when_the_sender_did_not(model_folder, serve):
    tensors = weights_of(model_folder("llama", seed=1))

    async def go(channel):
        async with serve(model_folder("llama")) as engine:
            await engine.pause()
            return await push(engine, 1, tensors, num_buckets=1, channel=channel, sha="")

    digest = hashlib.sha256(pack(tensors)[1].numpy()).hexdigest()
    assert run(go("shm"))[0] == {"sha": digest}
    assert run(go("handle"))[0] == {"sha": ""}  # no byte moved


def test_an_update_that_is_given_up_leaves_the_engine_dirty(model_folder, serve):
    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.pause()
            await push(engine, 1, weights_of(model_folder("llama", seed=1)), finish=False)
            with pytest.raises(EngineFailed, match="is open"):
                await engine.resume()
            await engine.receive(WeightMessage(kind="abort", version=1))
            with pytest.raises(EngineFailed, match="given up"):
                await engine.resume()

    run(go())


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (WeightMessage(kind="commit", version=1), "without its"),
        (WeightMessage(kind="begin", version=1, incarnation="another"), "incarnation another"),
        (WeightMessage(kind="path", version=1, body={"path": "/"}), "without its"),
    ],
)
def test_messages_out_of_order_or_for_another_incarnation_are_refused(message, named, model_folder, serve):
    async def go():
        async with serve(model_folder("llama")) as engine:
            await engine.receive(message)

    with pytest.raises(WeightSyncFailed, match=named):
        run(go())


def test_weights_do_not_change_under_running_requests(model_folder, serve, ask, prompt, until):
    async def go():
        async with serve(model_folder("llama")) as engine:
            task = asyncio.create_task(engine.generate(ask("a", prompt(4), max_new_tokens=400)))
            await until(engine, 2)
            try:
                await engine.receive(WeightMessage(kind="begin", version=1))
            finally:
                task.cancel()

    with pytest.raises(WeightSyncFailed, match="pause comes before begin"):
        run(go())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_answer_over_two_versions_says_which_token_is_whose(mode, model_folder, reference, serve, ask, prompt, until):
    old, new = model_folder("llama"), model_folder("llama", seed=1)

    async def go():
        async with serve(old) as engine:
            tasks = [
                asyncio.create_task(engine.generate(ask(str(i), prompt(40), seed=i, max_new_tokens=400))) for i in range(2)
            ]
            await until(engine, 5)
            await engine.pause(mode)
            await push(engine, 3, weights_of(new))
            await engine.resume()
            return await asyncio.gather(*tasks)

    for answer in run(go()):
        first, second = answer.versions
        assert (first.start, first.version, second.version, second.stop) == (0, 0, 3, 400)
        assert first.stop == second.start >= 5
        ids = np.concatenate([prompt(40), answer.token_ids])
        cut = 40 + first.stop
        np.testing.assert_allclose(answer.logprobs[: first.stop], reference(old, ids)[40:cut], atol=1e-4)
        gap = np.abs(answer.logprobs[first.stop :] - reference(new, ids)[cut:]).max()
        # Retracted requests are computed afresh; in place, keys and values of the old weights stay.
        assert gap < 1e-4 if mode == "retract" else gap > 1e-2


def test_float32_weights_are_rounded_for_an_engine_with_fewer_bits(model_folder, serve):
    tensors = weights_of(model_folder("llama", seed=1))

    async def go():
        async with serve(model_folder("llama"), dtype="bfloat16") as engine:
            await engine.pause()
            await push(engine, 1, tensors)
            return engine._model.model.norm.weight.clone()

    assert torch.equal(run(go()), tensors["model.norm.weight"].bfloat16())
