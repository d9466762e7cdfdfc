"""Corrections: masks, denominators, multipliers, and what is refused of them and of advantages."""

import numpy as np
import pytest
from batching import batches_of, ones

import miles_core
from miles_core.batch import apply_advantages, make_batches, prepare
from miles_core.errors import ContractError, RunFailed
from miles_core.settings import TrainTable
from miles_core.testing.samples import make_group
from miles_core.types import AdvantageOutput, CorrectionOutput


def drop_last(inputs):
    masks = [m.copy() for m in inputs.mask]
    for m in masks:
        m[np.flatnonzero(m)[-1]] = False
    return CorrectionOutput(mask=masks, metrics={"dropped": (float(len(masks)), 1.0, "sum")})


def double(inputs):
    return CorrectionOutput(mask=inputs.mask, multiplier=[np.full(len(m), 2.0, np.float32) for m in inputs.mask])


# One sample of 4 tokens; each drop_last takes one of them.
CORRECTED = [
    ([("a", drop_last, "shrink")], [1 / 3, 1 / 3, 1 / 3, 0]),
    ([("a", drop_last, "keep")], [1 / 4, 1 / 4, 1 / 4, 0]),
    ([("a", drop_last, "keep"), ("b", drop_last, "shrink")], [1 / 3, 1 / 3, 0, 0]),
    ([("a", drop_last, "shrink"), ("b", drop_last, "keep")], [1 / 3, 1 / 3, 0, 0]),
    ([("a", drop_last, "keep"), ("b", drop_last, "keep")], [1 / 4, 1 / 4, 0, 0]),
]


@pytest.mark.parametrize(("corrections", "weights"), CORRECTED)
def test_corrections_keep_or_shrink_the_denominator(corrections, weights):
    (batch,) = batches_of([make_group([0.0], response=4)], corrections=corrections)
    assert batch.token_weights["policy"][0][3:].tolist() == pytest.approx(weights)
    assert batch.mask[0][3:].tolist() == [w > 0 for w in weights]


def test_multipliers_multiply_and_vanish_with_the_mask():
    (batch,) = batches_of(
        [make_group([0.0], response=3)],
        corrections=[("a", double, "keep"), ("b", double, "keep"), ("c", drop_last, "keep"), ("d", double, "keep")],
    )
    assert batch.columns["multiplier"][0].tolist() == [0, 0, 0, 8, 8, 0]


def test_a_correction_leaves_the_other_minibatches_alone():
    batch = prepare([make_group([0.0], name="a"), make_group([0.0], name="b")])
    apply_advantages(batch, [("ones", ones)])
    make_batches(batch, TrainTable(epochs=2), corrections=[("a", drop_last, "shrink")])
    assert [int(m.sum()) for m in batch.mask] == [2, 2]
    assert batch.metrics["correction/a/dropped"] == (4, 2, "sum")


def unmask(inputs):
    return CorrectionOutput(mask=[np.ones(len(m), bool) for m in inputs.mask])


def short(inputs):
    return CorrectionOutput(mask=inputs.mask[:-1])


def infinite(inputs):
    return CorrectionOutput(mask=inputs.mask, multiplier=[np.full(len(m), np.inf) for m in inputs.mask])


def wordy(inputs):
    return CorrectionOutput(mask=inputs.mask, multiplier=["high" for _ in inputs.mask])


def one_number(inputs):
    return CorrectionOutput(mask=inputs.mask, metrics={"share": 0.5})


def of_lists(inputs):
    return CorrectionOutput(mask=[m.tolist() for m in inputs.mask])


BAD_CORRECTIONS = [
    (lambda inputs: None, "keep", "correction/x returned None, not CorrectionOutput"),
    (wordy, "keep", "correction/x returned multiplier for sample p@0/0 that are no numbers: str 'high'"),
    (one_number, "keep", r'correction/x returned float 0.5 as its metric "share"; a metric is \(sum, count, reduce\)'),
    (of_lists, "keep", r"correction/x returned list .* as the mask of sample p@0/0, not an array"),
    (unmask, "keep", "correction/x unmasked a token of sample p@0/0"),
    (short, "keep", "correction/x returned 1 masks for 2 samples"),
    (infinite, "keep", "correction/x returned multiplier inf for sample p@0/0 at token 3"),
    (drop_last, "both", 'denominator="both"'),
]


@pytest.mark.parametrize(("correction", "rule", "message"), BAD_CORRECTIONS)
def test_bad_corrections_are_named(correction, rule, message):
    with pytest.raises(ContractError, match=message):
        batches_of([make_group([0.0, 1.0])], corrections=[("x", correction, rule)])


def nowhere(inputs):
    return AdvantageOutput(advantages=[np.ones(len(m), np.float32) for m in inputs.mask])


def not_a_number(inputs):
    return AdvantageOutput(advantages=[np.where(m, np.nan, 0) for m in inputs.mask])


def too_long(inputs):
    return AdvantageOutput(advantages=[np.zeros(len(m) + 1) for m in inputs.mask])


def a_rate(inputs):
    rows = [np.zeros(len(m)) for m in inputs.mask]
    return AdvantageOutput(advantages=rows, metrics={"rate": (1.0, 2.0, "median")})


BAD_ADVANTAGES = [
    (lambda inputs: None, "advantage/ones returned None, not AdvantageOutput"),
    (lambda inputs: inputs.mask, "advantage/ones returned list .*, not AdvantageOutput"),
    (lambda inputs: AdvantageOutput(advantages=0.0), "returned float 0.0 for the rows of advantages; it is a list"),
    (lambda inputs: AdvantageOutput(advantages=["a", "b"]), "for sample p@0/0 that are no numbers: str 'a'"),
    (a_rate, 'as its metric "rate".* one of mean, sum, max, min'),
    (nowhere, "advantage/ones gave an advantage to a masked token of sample p@0/0"),
    (not_a_number, "advantage/ones returned advantages nan for sample p@0/0 at token 3"),
    (too_long, r"advantage/ones returned advantages of shape \(6,\) for sample p@0/0 of 5 tokens"),
]


@pytest.mark.parametrize(("advantage", "message"), BAD_ADVANTAGES)
def test_bad_advantages_are_named(advantage, message):
    with pytest.raises(ContractError, match=message):
        batches_of([make_group([0.0, 1.0])], advantage=advantage)


def test_a_correction_used_twice_has_metrics_of_its_own():
    batch = prepare([make_group([0.0], response=4)])
    apply_advantages(batch, [("ones", ones)])
    make_batches(
        batch, TrainTable(), corrections=[("a", drop_last, "keep"), ("b", double, "keep"), ("a", drop_last, "keep")]
    )
    assert batch.metrics["correction/a/dropped"] == batch.metrics["correction/a#2/dropped"] == (1, 1, "sum")


def test_what_a_correction_raises_names_it():
    def broken(inputs):
        raise ZeroDivisionError("no")

    with pytest.raises(RunFailed, match="correction/x raised ZeroDivisionError: no"):
        batches_of([make_group([0.0])], corrections=[("x", broken, "keep")])


def test_the_decorator_carries_denominator_needs_and_options():
    @miles_core.correction("half", denominator="shrink", needs={"old_logprobs"})
    def half(inputs, *, factor: float = 0.5):
        """Multiplies with a factor.

        factor: what every token's loss is multiplied with.
        """
        return CorrectionOutput(mask=inputs.mask, multiplier=[np.full(len(m), factor, np.float32) for m in inputs.mask])

    assert half.traits["denominator"] == "shrink" and half.needed(half.config()) == {"old_logprobs"}
    assert half.config.model_fields["factor"].description.startswith("what every token")
    built = half.build(half.config(factor=0.25), None)
    (batch,) = batches_of([make_group([0.0])], corrections=[("half", built, half.traits["denominator"])])
    assert batch.columns["multiplier"][0].tolist() == [0, 0, 0, 0.25, 0.25]


def test_F7_an_engines_nan_is_named_before_any_correction():
    group = make_group([0.0, 1.0])
    group.samples[1].logprobs[4] = np.nan
    with pytest.raises(ContractError, match=r"engine returned rollout_logprobs nan for sample p@0/1 at token 4"):
        prepare([group])
