"""The toy trainer: exact whatever the split, nothing moves without a reason, saved and loaded to the bit."""

import asyncio

import numpy as np
import pytest

from miles_core.builtin.losses import policy_gradient
from miles_core.errors import ConfigError, RunFailed
from miles_core.settings import TrainTable
from miles_core.testing import toy, toy_model
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.testing.toy_arrays import ToyArray
from miles_core.testing.toy_kit import TOKENIZER, batch_of, context, engine, moved, request, trainer
from miles_core.testing.toy_trainer import ToyTrainer
from miles_core.types import LossOutput


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
