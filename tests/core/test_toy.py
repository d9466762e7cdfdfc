"""The numpy toy stack: it obeys the contracts that real engines and trainers obey, and it learns."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miles_core.batch import apply_advantages, make_batches, prepare
from miles_core.builtin.advantages import group_normalised, per_group
from miles_core.builtin.losses import policy_gradient
from miles_core.component import BuildContext
from miles_core.errors import ConfigError, EngineFailed, RunFailed, WeightSyncFailed
from miles_core.settings import TrainTable
from miles_core.testing import toy, toy_model
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.testing.toy_arrays import ToyArray
from miles_core.testing.toy_engine import ToyEngine
from miles_core.testing.toy_trainer import ToyTrainer
from miles_core.transport import publish, release
from miles_core.types import (
    AdvantageOutput,
    GenerateRequest,
    LossOutput,
    Prompt,
    Sample,
    SampleGroup,
    SamplingParams,
    VersionSpan,
    WeightMessage,
)

TOKENIZER = toy.ToyTokenizer()


def context(*losses, seed=0, **fields):
    built = [(f"loss-{i}", loss) for i, loss in enumerate(losses or (policy_gradient,))]
    values = {"component": "x/toy", "run_dir": Path("."), "seed": seed, "run_config": None, "tokenizer": TOKENIZER}
    return BuildContext(**(values | {"select": lambda kind: built} | fields))


def trainer(*losses, config=None, **fields):
    made = ToyTrainer(config or toy.ToyTrainerConfig(), context(*losses, **fields))
    made.start()
    return made


async def engine(config=None, **fields):
    made = ToyEngine(config or toy.ToyEngineConfig(), context(**fields))
    await made.start()
    return made


def request(name="r", prompt="3,4=", seed=1, **params):
    values = {"max_new_tokens": 4, "stop_token_ids": TOKENIZER.stop_token_ids} | params
    ids = TOKENIZER.render([{"role": "user", "content": prompt}]).token_ids
    return GenerateRequest(id=name, token_ids=ids, params=SamplingParams(**values), seed=seed)


def buckets_as_messages(source, version, bucket_bytes=1 << 14):
    """(message, key to release) for each bucket of a trainer's export."""
    for bucket in source.export("hf_full", bucket_bytes):
        key = publish(bucket.data)
        body = {"handle": key, "nbytes": bucket.nbytes}
        tensors, sha = bucket.tensors, bucket.sha
        yield WeightMessage(kind="ipc", version=version, bucket=bucket.index, tensors=tensors, sha=sha, body=body), key


async def push(target, source, version, kinds=("begin", "data", "flush", "commit")):
    """The messages of one update, in order; returns the answer to the last."""
    answer = {}
    for kind in kinds:
        if kind == "data":
            for message, key in buckets_as_messages(source, version):
                answer = await target.receive(message)
                release(key)
        else:
            answer = await target.receive(WeightMessage(kind=kind, version=version))
    return answer


def moved(source, token="7", by=40.0):
    """Makes the policy of `source` answer `token` to everything."""
    source.params["bigram"][toy_model.ASSISTANT, toy_model.token_id(token)] += by
    return source


def batch_of(groups, advantage=1.0, **options):
    batch = prepare(groups)
    rule = lambda inputs: AdvantageOutput(advantages=[m * np.float32(advantage) for m in inputs.mask])  # noqa: E731
    apply_advantages(batch, [("constant", rule)])
    return make_batches(batch, options.pop("train", TrainTable()), **options)[0]


# --- Tokenizer and data ----------------------------------------------------------------------------------------------


def test_a_chat_ends_where_the_assistant_speaks():
    shown = TOKENIZER.render([{"role": "user", "content": "1,2="}]).text
    assert shown == "<bos><user>1,2=<assistant>"
    opened = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "It is"}]
    assert TOKENIZER.render(opened).text == "<bos><user>1<assistant>It is"
    over = [*opened, {"role": "user", "content": "?"}]
    assert TOKENIZER.render(over).text == "<bos><user>1<assistant>It is<eos><user>?<assistant>"


def test_text_round_trips():
    ids = TOKENIZER.encode("a b\n~").token_ids
    assert (ids[0], TOKENIZER.decode(ids)) == (toy_model.BOS, "a b\n~")
    assert TOKENIZER.decode(TOKENIZER.encode("é").token_ids, skip_special=False) == "<bos><unk>"
    with pytest.raises(ConfigError, match='no role "wizard"'):
        TOKENIZER.render([{"role": "wizard", "content": ""}])


def test_data_is_the_same_for_a_seed_and_after_restore():
    def source(seed=1):
        return toy.ToyData(toy.ToyDataConfig(num_prompts=10), seed)

    whole = [(p.id, p.draw) for p in source().next(25)]
    assert len(set(whole)) == 25
    assert sorted(i for i, _ in whole[:10]) == sorted(i for i, _ in whole[10:20])  # an epoch holds each prompt once
    assert whole != [(p.id, p.draw) for p in source(2).next(25)]
    first, second = source(), source()
    head = first.next(7)
    second.restore(first.state())
    assert [(p.id, p.draw) for p in head + second.next(18)] == whole


def test_data_ends_after_its_epochs():
    source = toy.ToyData(toy.ToyDataConfig(num_prompts=4, epochs=2), 0)
    assert [len(source.next(3)) for _ in range(4)] == [3, 3, 2, 0]


# --- Engine ----------------------------------------------------------------------------------------------------------


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


# --- Trainer ---------------------------------------------------------------------------------------------------------


def uneven_groups():
    """Two groups with responses of 1 and 3 tokens, tool tokens in between, an empty one and a failed one."""
    first = [make_sample([20, 21, 22], mask=[1, 0, 1], group="a@0"), make_sample(1, group="a@0", index=1)]
    second = [make_sample(3, group="b@0"), make_sample(0, group="b@0", index=1)]
    second.append(make_sample(2, group="b@0", index=2, status="error"))
    return [group_of(first, name="a"), group_of(second, name="b")]


def squared(x):
    """An elementwise loss with a curvature, so that a wrong split shows in the gradient too."""
    logprobs = x.get("logprobs")
    return LossOutput(per_token=logprobs * logprobs * x.advantages, metrics={"n": (x.mask.sum(), 1.0, "sum")})


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"])
def test_F4_microbatches_and_ranks_change_neither_loss_nor_gradient(aggregation):
    batch = batch_of(uneven_groups(), train=TrainTable(aggregation=aggregation))
    loss, grads, _, _ = trainer(squared).loss_and_gradients(batch)
    splits = [[batch]] + [[batch.select(rows) for rows in s] for s in ([[0, 1], [2, 3, 4]], [[0], [4], [1, 2, 3]])]
    for size in (0, 1, 2):
        made = trainer(squared, config=toy.ToyTrainerConfig(microbatch_tokens=size))
        for parts in splits:
            results = [made.loss_and_gradients(part) for part in parts]
            assert sum(r[0] for r in results) == pytest.approx(loss, rel=1e-12)
            for name, grad in grads.items():
                np.testing.assert_allclose(sum(r[1][name] for r in results), grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["bias", "bigram", "embed", "head"])
def test_gradients_equal_finite_differences(name):
    batch, made = batch_of(uneven_groups()), trainer(squared)
    made.params = {k: v.astype(np.float64) for k, v in made.params.items()}
    _, grads, _, _ = made.loss_and_gradients(batch)
    for place in np.argsort(-np.abs(grads[name]).ravel())[:3]:
        flat, h = made.params[name].reshape(-1), 1e-5
        losses = []
        for sign in (1, -1):
            flat[place] += sign * h
            losses.append(made.loss_and_gradients(batch)[0])
            flat[place] -= sign * h
        assert grads[name].ravel()[place] == pytest.approx((losses[0] - losses[1]) / (2 * h), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_policy_gradient_raises_good_tokens(temperature):
    batch = batch_of([make_group([1.0], temperature=temperature)])
    made = trainer()
    outputs = frozenset({"logprobs"})
    before = made.forward(batch, "policy", outputs)["logprobs"][0]
    report = made.step(batch)
    after = made.forward(batch, "policy", outputs)["logprobs"][0]
    assert report.loss == pytest.approx(-1.0)  # the mean of -A, with A = 1
    assert report.columns["logprobs"][0][3:] == pytest.approx(before[3:], abs=1e-6)
    assert (after > before)[3:].all()


def test_T6_tool_logprobs_leave_loss_and_gradient_bit_identical():
    made = trainer(squared)
    group = uneven_groups()
    loss, grads, _, _ = made.loss_and_gradients(batch_of(group))
    for junk in (np.nan, -np.inf, -3.0):
        for sample in (s for g in group for s in g.samples):
            sample.logprobs[~sample.loss_mask] = junk
        other, other_grads, _, _ = made.loss_and_gradients(batch_of(group))
        assert other == loss
        assert all(other_grads[n].tobytes() == g.tobytes() for n, g in grads.items())


def test_T7_only_logits_that_predict_the_response_matter():
    # The row of `bigram` for token t gives the logits after t. Prompt 1 2 3, response 10 11 (11 is the last).
    batch, made = batch_of([make_group([1.0])]), trainer(squared)
    want = made.loss_and_gradients(batch)[0]
    for last, matters in [(1, False), (2, False), (3, True), (10, True), (11, False)]:
        made.params["bigram"][last, 11] += 1.0
        assert (made.loss_and_gradients(batch)[0] != want) is matters
        made.params["bigram"][last, 11] -= 1.0


def test_F6_nothing_trainable_moves_nothing():
    made = trainer()
    made.step(batch_of([make_group([1.0])]))  # moments are no longer zero
    before = (made.state_hash(), made.num_steps, {k: v.copy() for k, v in made.moments.items()})
    report = made.step(batch_of([make_group([1.0], status="error")]))
    assert (report.skipped, report.loss, report.grad_norm) == ("nothing-trainable", 0.0, 0.0)
    assert (made.state_hash(), made.num_steps) == before[:2]
    assert all((made.moments[k] == v).all() for k, v in before[2].items())


def test_F7_a_nan_loss_of_a_trained_token_stops_the_run():
    def broken(x):
        return LossOutput(per_token=x.get("logprobs") * np.nan)

    made = trainer(broken)
    before = made.state_hash()
    with pytest.raises(RunFailed, match="loss is nan"):
        made.step(batch_of([make_group([1.0])]))
    assert made.state_hash() == before


def test_old_is_current_gives_the_losses_own_logprobs():
    def ratio(x):
        return LossOutput(per_token=(x.get("logprobs") - x.get("old_logprobs")).exp() * x.advantages)

    batch = batch_of([make_group([1.0])], needs=frozenset({"old_logprobs"}))
    loss, grads, _, _ = trainer(ratio).loss_and_gradients(batch)
    assert loss == pytest.approx(1.0)
    assert np.abs(grads["head"]).max() > 0


def test_a_multiplier_scales_loss_and_gradient():
    batch = batch_of([make_group([1.0])])
    loss, grads, _, _ = trainer().loss_and_gradients(batch)
    batch.columns["multiplier"] = [m * np.float32(2) for m in batch.mask]
    double, double_grads, _, _ = trainer().loss_and_gradients(batch)
    assert double == pytest.approx(2 * loss)
    np.testing.assert_allclose(double_grads["head"], 2 * grads["head"])


def test_F7_policy_gradient_ignores_masked_junk():
    junk = np.array([np.nan, np.inf, -np.inf, -1.0])
    mask = np.array([False, False, False, True])
    for wrap in (np.asarray, ToyArray):
        x = type("X", (), {})()
        x.mask, x.advantages, x.multiplier, x.get = wrap(mask), wrap(junk * 2), wrap(np.ones(4)), lambda _, w=wrap: w(junk)
        out = policy_gradient(x).per_token
        assert getattr(out, "value", out).tolist() == [0, 0, 0, 2]  # -A with A = -2


def summed(x):
    return LossOutput(per_token=x.get("logprobs") * x.get("logprobs").sum())


def by_sequence(x):
    return LossOutput(per_token=x.get("logprobs") - x.seq.mean(x.get("logprobs")))


def sorted_tokens(x):
    return LossOutput(per_token=np.sort(x.get("logprobs")))


def plain_array(x):
    return LossOutput(per_token=x.get("logprobs").value)


REFUSED = [
    (summed, r"uses sum\(\) of something that depends on logprobs"),
    (by_sequence, "uses seq.mean"),
    (sorted_tokens, "uses numpy.sort"),
    (plain_array, "returned a ndarray"),
]


@pytest.mark.parametrize(("loss", "message"), REFUSED)
def test_losses_that_are_not_elementwise_are_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        trainer(loss).step(batch_of([make_group([1.0])]))


# Each derivative is the textbook one at 0.3.
DERIVATIVES = [
    (lambda a: a.exp() * 2.0, 2 * np.exp(0.3)),
    (lambda a: np.expm1(-a), -np.exp(-0.3)),
    (lambda a: 1.0 / a, -1 / 0.09),
    (lambda a: (a**3).log(), 3 / 0.3),
    (lambda a: 2.0**a, 2**0.3 * np.log(2)),
    (lambda a: (a - 1).abs().square(), 2 * (0.3 - 1)),
    (lambda a: a.clamp(0.5, 1.0) * a, 0.5),
    (lambda a: np.clip(a, 0.0, 1.0) * a, 0.6),
    (lambda a: np.minimum(a, 0.1) + np.maximum(a, 0.1), 1.0),
    (lambda a: np.where(np.array([True]), a, np.nan) * a.detach(), 0.3),
    (lambda a: (a - a.detach()) * 5 + 1, 5.0),
]


@pytest.mark.parametrize(("function", "slope"), DERIVATIVES)
def test_toy_arrays_know_their_derivative(function, slope):
    assert function(ToyArray([0.3], [1.0])).slope.tolist() == pytest.approx([slope])


def test_C5_save_and_load_are_bit_equal(tmp_path):
    made, batch = trainer(), batch_of(uneven_groups())
    for _ in range(3):
        made.step(batch)
    made.save(tmp_path)
    other = trainer(seed=9)
    other.load(tmp_path)
    for _ in range(2):
        made.step(batch)
        other.step(batch)
    assert other.state_hash() == made.state_hash()
    assert all(other.moments[k].tobytes() == v.tobytes() for k, v in made.moments.items())


def test_C5_a_missing_part_is_named(tmp_path):
    made = trainer()
    made.save(tmp_path)
    toy_model.write_tensors(tmp_path / "optimizer.safetensors", {"m.bias": made.moments["m.bias"], "n.bias": np.zeros(2)})
    with pytest.raises(ConfigError, match=r"missing: v\.bias[\s\S]*unexpected: n\.bias"):
        trainer().load(tmp_path)
    (tmp_path / "optimizer.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the tensors in .*optimizer"):
        trainer().load(tmp_path)
    trainer().load(tmp_path, weights_only=True)


def test_the_saved_model_is_what_the_engine_loads(tmp_path):
    made = moved(trainer(seed=4))
    made.save_model(tmp_path)

    async def answer():
        e = await engine(model_path=tmp_path)
        return TOKENIZER.decode((await e.generate(request(temperature=0.0))).token_ids)

    assert asyncio.run(answer()) == "7"


def test_export_covers_every_tensor_once_in_buckets():
    made = trainer()
    buckets = list(made.export("hf_full", 1 << 14))
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert sorted(t.name for b in buckets for t in b.tensors) == sorted(toy_model.SHAPES)
    assert sum(b.nbytes for b in buckets) == sum(v.nbytes for v in made.params.values())


def test_the_reference_stays_where_the_policy_began():
    made, batch, outputs = trainer(), batch_of([make_group([1.0])]), frozenset({"logprobs"})
    before = made.forward(batch, "reference", outputs)["logprobs"][0]
    made.step(batch)
    assert (made.forward(batch, "reference", outputs)["logprobs"][0] == before).all()
    assert (made.forward(batch, "policy", outputs)["logprobs"][0] != before).any()


def test_more_than_one_rank_is_refused():
    with pytest.raises(ConfigError, match="trainer toy has one rank, not 2"):
        ToyTrainer(toy.ToyTrainerConfig(), context(world_size=2))


# --- All together ----------------------------------------------------------------------------------------------------


async def sampled_group(e: ToyEngine, prompt: Prompt, version: int) -> SampleGroup:
    ids = TOKENIZER.render(prompt.messages).token_ids
    group = f"{prompt.id}@{prompt.draw}"
    params = SamplingParams(max_new_tokens=4, stop_token_ids=TOKENIZER.stop_token_ids)
    requests = [
        GenerateRequest(id=f"{group}/{i}", token_ids=ids, params=params, seed=prompt.draw * 100 + i) for i in range(8)
    ]
    samples = []
    for i, made in enumerate(await asyncio.gather(*map(e.generate, requests))):
        count = len(ids)
        sample = Sample(
            group_id=group,
            trajectory_id=f"{group}/{i}",
            index=i,
            tokens=np.concatenate([ids, made.token_ids]),
            prompt_len=count,
            loss_mask=np.arange(count + len(made.token_ids)) >= count,
            logprobs=np.concatenate([np.zeros(count, np.float32), made.logprobs]),
            versions=tuple(
                VersionSpan(start=s.start + count, stop=s.stop + count, version=s.version) for s in made.versions
            ),
            status=made.finish,
            prompt=prompt,
            response=TOKENIZER.decode(made.token_ids),
        )
        sample.reward = toy.ToyReward().score(sample)
        samples.append(sample)
    return SampleGroup(id=group, prompt=prompt, samples=samples, num_samples=8)


async def learned_rewards(steps):
    data, e, made = toy.ToyData(toy.ToyDataConfig(), 0), await engine(), trainer()
    rewards = []
    for version in range(steps):
        groups = await asyncio.gather(*(sampled_group(e, p, version) for p in data.next(16)))
        batch = prepare(groups, version=version, max_lag=0)
        rule = lambda inputs: per_group(inputs, "grpo", lambda r: group_normalised(r, True, 1e-6))  # noqa: E731
        apply_advantages(batch, [("grpo", rule)])
        for part in make_batches(batch, TrainTable()):
            made.step(part)
        rewards.append(np.mean([s.reward for g in groups for s in g.samples]))
        await e.pause()
        await push(e, made, version + 1)
        await e.resume()
    return rewards


def test_the_toy_learns_and_a_rerun_is_the_same():
    rewards = asyncio.run(learned_rewards(40))
    assert np.mean(rewards[:2]) < 0.25  # one of ten digits, and the end after it
    assert np.mean(rewards[-5:]) > 0.9
    assert asyncio.run(learned_rewards(5)) == rewards[:5]
