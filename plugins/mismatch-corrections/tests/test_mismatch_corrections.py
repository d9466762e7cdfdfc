"""What each correction does to masks, multipliers, denominators and gradients; each number is derived beside it.

Ratios r = trainer / engine are written directly: `minibatch([2, .5], ...)` is a sample of two tokens with these ratios.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miles_mismatch_corrections
from miles_core.batch import apply_advantages, make_batches, prepare
from miles_core.component import Environment
from miles_core.config import load
from miles_core.errors import ConfigError, ContractError
from miles_core.settings import TrainTable
from miles_core.testing.samples import group_of, make_sample
from miles_core.types import AdvantageOutput, CorrectionInputs

COMPONENTS = {c.name: c for c in miles_mismatch_corrections.miles_corrections()}
PROMPT = 3
"""Prompt tokens of `make_sample`."""


def build(name: str, **options):
    component = COMPONENTS[name]
    return component.build(component.config(**options), None)


def minibatch(*ratios, advantages=None, trajectories=None) -> CorrectionInputs:
    """One sample per row of ratios; an advantage per sample, 1 by default. The engine's log-probabilities are -1."""
    samples = [make_sample(len(row), index=i) for i, row in enumerate(ratios)]
    for sample, name in zip(samples, trajectories or [], strict=False):
        sample.trajectory_id = name
    masks = [s.loss_mask for s in samples]
    logs = [np.concatenate([np.zeros(PROMPT), np.log(np.array(row, np.float64))]) for row in ratios]
    rollout = [s.logprobs for s in samples]
    old = [(r + d).astype(np.float32) for r, d in zip(rollout, logs, strict=True)]
    columns = {"rollout_logprobs": rollout, "old_logprobs": old}
    values = advantages or [1.0] * len(samples)
    return CorrectionInputs(
        samples=samples,
        mask=masks,
        advantages=[m * np.float32(a) for m, a in zip(masks, values, strict=True)],
        columns=columns,
        version=0,
    )


def answer(rows):
    """Rows without their prompts, as lists."""
    return [row[PROMPT:].tolist() for row in rows]


def value(output, name):
    total, count, reduce = output.metrics[name]
    return total / count if reduce == "mean" else total


# --- Truncated importance sampling -----------------------------------------------------------------------------------

# Ratios .25, 1, 4: product 1, geometric mean 1. Ratios 2, 4, 8: product 64, geometric mean 64^(1/3) = 4.
TIS = [
    ({"level": "token"}, [[0.25, 1, 2], [2, 2, 2]]),
    ({"level": "token", "lower": 0.5, "upper": 3.0}, [[0.5, 1, 3], [2, 3, 3]]),
    ({"level": "sequence"}, [[1, 1, 1], [2, 2, 2]]),
    ({"level": "sequence", "upper": 100.0}, [[1, 1, 1], [64, 64, 64]]),
    ({"level": "geometric", "upper": 10.0}, [[1, 1, 1], [4, 4, 4]]),
]


@pytest.mark.parametrize(("options", "expected"), TIS)
def test_tis_weighs_tokens_sequences_or_their_means(options, expected):
    inputs = minibatch([0.25, 1, 4], [2, 4, 8])
    output = build("tis", **options)(inputs)
    assert answer(output.multiplier) == [pytest.approx(row, rel=1e-6) for row in expected]
    assert all(map(np.array_equal, output.mask, inputs.mask))


def test_tis_says_how_much_it_changed():
    # Weights of .25, 1, 4, 8 clipped to [.5, 2]: .5, 1, 2, 2. Two of four are cut above, one is raised.
    output = build("tis", lower=0.5)(minibatch([0.25, 1], [4, 8]))
    got = {name: value(output, name) for name in ("weight", "weight_max", "truncated", "raised", "log_ratio_clamped")}
    assert got == pytest.approx(
        {"weight": 5.5 / 4, "weight_max": 2, "truncated": 0.5, "raised": 0.25, "log_ratio_clamped": 0}
    )


def test_P1_a_ratio_of_e_is_truncated_to_2():
    assert answer(build("tis")(minibatch([math.e])).multiplier) == [[2.0]]


# --- Masked importance sampling and IcePop ---------------------------------------------------------------------------


def test_mis_masks_whole_sequences_by_their_product():
    # Products: 1.5 * 1.2 = 1.8 <= 2 is kept with weight 1.8; 1.5 * 1.5 = 2.25 > 2 is masked, though no token is above 2.
    output = build("mis")(minibatch([1.5, 1.2], [1.5, 1.5]))
    assert answer(output.mask) == [[True, True], [False, False]]
    assert answer(output.multiplier) == [pytest.approx([1.8, 1.8], rel=1e-6), [0, 0]]
    assert value(output, "masked_high") == 0.5 and value(output, "masked") == 0.5


def test_mis_by_geometric_mean():
    # sqrt(1.02 * .98) = .9998 is within [.99, 1.01]; sqrt(1.02 * 1.02) = 1.02 is above, sqrt(.98 * .98) below.
    output = build("mis", level="geometric", lower=0.99, upper=1.01)(minibatch([1.02, 0.98], [1.02, 1.02], [0.98, 0.98]))
    assert answer(output.mask) == [[True, True], [False, False], [False, False]]
    assert value(output, "masked_high") == value(output, "masked_low") == pytest.approx(1 / 3)
    assert answer(output.multiplier)[0] == pytest.approx([math.sqrt(1.02 * 0.98)] * 2, rel=1e-6)


def test_icepop_keeps_weights_between_one_half_and_five():
    output = build("icepop")(minibatch([0.4, 0.6, 1, 4, 6]))
    assert answer(output.mask) == [[False, True, True, True, False]]
    assert answer(output.multiplier) == [pytest.approx([0, 0.6, 1, 4, 0], rel=1e-6)]


def test_segments_of_a_trajectory_are_one_sequence():
    # 1.5 and 1.5 in two segments of one trajectory: 2.25 is masked. As two sequences each would be kept.
    together = build("mis")(minibatch([1.5], [1.5], trajectories=["t", "t"]))
    apart = build("mis")(minibatch([1.5], [1.5]))
    assert (answer(together.mask), answer(apart.mask)) == ([[False], [False]], [[True], [True]])


def test_a_geometric_bound_has_to_be_given():
    for name in ("mis", "rejection"):
        with pytest.raises(ValueError, match="needs `upper` to be given"):
            COMPONENTS[name].config(level="geometric")


# --- Rejection and veto ----------------------------------------------------------------------------------------------


def test_rejection_drops_sequences_outside_the_bounds_and_gives_no_weights():
    # Products 1.8, 2.25, .36: bounds [.5, 2] keep the first.
    output = build("rejection")(minibatch([1.5, 1.2], [1.5, 1.5], [0.6, 0.6]))
    assert answer(output.mask) == [[True, True], [False, False], [False, False]]
    assert output.multiplier is None and value(output, "rejected") == pytest.approx(2 / 3)


def test_a_veto_drops_a_sequence_for_one_hopeless_token():
    # Tokens are judged one by one: 3 is rejected alone; 1e-5 < 1e-4 takes its whole sequence along.
    output = build("rejection", level="token", lower=0.0)(minibatch([1, 3, 1], [1, 1e-5, 1], [1, 2e-4, 1]))
    assert answer(output.mask) == [[True, False, True], [False] * 3, [True] * 3]
    assert value(output, "vetoed") == pytest.approx(1 / 3) and value(output, "masked") == pytest.approx(4 / 9)


def test_a_veto_can_be_switched_off():
    output = build("rejection", level="token", lower=0.0, veto=0.0)(minibatch([1, 1e-5]))
    assert answer(output.mask) == [[True, True]]


def test_a_vetoed_segment_takes_its_trajectory_along():
    output = build("rejection", level="token", lower=0.0)(minibatch([1, 1], [1e-5], [1], trajectories=["t", "t", "u"]))
    assert answer(output.mask) == [[False, False], [False], [True]]


# --- Off-policy sequence masking -------------------------------------------------------------------------------------

# KL estimate: mean of -log r. (.5, 1): ln 2 / 2 = .347; (2, .5): 0; (2, 2): -.693.
OPSM = [
    ([0.5, 1], -1.0, False),  # far and bad
    ([0.5, 1], 1.0, True),  # far and good
    ([0.5, 1], 0.0, True),  # no gradient either way
    ([2, 0.5], -1.0, True),  # near, though its tokens are not
    ([2, 2], -1.0, True),  # the trainer likes it more than the engine did
]


@pytest.mark.parametrize(("ratios", "advantage", "kept"), OPSM)
def test_opsm_masks_bad_answers_that_are_off_policy(ratios, advantage, kept):
    output = build("opsm", delta=0.3)(minibatch(ratios, advantages=[advantage]))
    assert answer(output.mask) == [[kept, kept]]
    assert value(output, "kl") == pytest.approx(-np.mean(np.log(ratios)), abs=1e-6)


def test_opsm_judges_advantages_of_tokens_where_they_differ():
    inputs = minibatch([0.5, 0.5])
    inputs.advantages = [np.array([0, 0, 0, -1, 1], np.float32)]
    assert answer(build("opsm", delta=0.3)(inputs).mask) == [[False, True]]


# --- Denominators and gradients --------------------------------------------------------------------------------------


def weights_of(name, ratios, *, aggregation="token-mean", others=(), **options):
    """Weight times multiplier of each token, through `make_batches`: the gradient of each token's own loss."""
    inputs = minibatch(*ratios)
    batch = prepare([group_of(inputs.samples)])
    batch.columns |= inputs.columns
    apply_advantages(batch, [("a", lambda x: AdvantageOutput(advantages=inputs.advantages))])
    corrections = [(n, build(n, **o), COMPONENTS[n].traits["denominator"]) for n, o in ((name, options), *others)]
    (part,) = make_batches(batch, TrainTable(aggregation=aggregation), corrections=corrections)
    factors = part.columns.get("multiplier") or [np.ones(len(m)) for m in part.mask]
    return answer(w * f for w, f in zip(part.token_weights["policy"], factors, strict=True))


# Two sequences of 2 tokens; the second one has ratios (8, 1): product 8, and 8 alone is out of every bound.
GRADIENTS = [
    ("tis", {}, "token-mean", [1 / 4, 1 / 4, 2 / 4, 1 / 4]),  # 4 tokens
    ("tis", {"level": "sequence"}, "sequence-mean-token-mean", [1 / 4, 1 / 4, 2 / 4, 2 / 4]),  # 2 sequences of 2
    ("icepop", {}, "token-mean", [1 / 4, 1 / 4, 0, 1 / 4]),  # keep: still 4
    ("icepop", {}, "sequence-mean-token-mean", [1 / 4, 1 / 4, 0, 1 / 4]),
    ("mis", {}, "token-mean", [1 / 4, 1 / 4, 0, 0]),
    ("mis", {}, "sequence-mean-token-sum", [1 / 2, 1 / 2, 0, 0]),  # keep: still 2 sequences
    ("rejection", {}, "token-mean", [1 / 2, 1 / 2, 0, 0]),  # shrink: 2 tokens are left
    ("rejection", {}, "sequence-mean-token-sum", [1, 1, 0, 0]),  # 1 sequence is left
    ("rejection", {"level": "token"}, "token-mean", [1 / 3, 1 / 3, 0, 1 / 3]),
    ("rejection", {"level": "token"}, "sequence-mean-token-mean", [1 / 4, 1 / 4, 0, 1 / 2]),
]


@pytest.mark.parametrize(("name", "options", "aggregation", "expected"), GRADIENTS)
def test_denominators_keep_or_shrink_as_each_correction_says(name, options, aggregation, expected):
    got = weights_of(name, ([1, 1], [8, 1]), aggregation=aggregation, **options)
    assert [x for row in got for x in row] == pytest.approx(expected, rel=1e-6)


def test_tis_weighs_what_rejection_left():
    # rejection (shrink) leaves tokens 1, 2, 4 of ratios 1, 1.5, 8, 1; tis weighs them 1, 1.5, 1 over 3.
    got = weights_of("rejection", ([1, 1.5], [8, 1]), level="token", others=[("tis", {})])
    assert got == [pytest.approx([1 / 3, 1.5 / 3], rel=1e-6), pytest.approx([0, 1 / 3], rel=1e-6)]


# --- Extremes --------------------------------------------------------------------------------------------------------


def extreme(gap: float, *, masked: bool = False) -> CorrectionInputs:
    inputs = minibatch([1, 1])
    inputs.columns["old_logprobs"] = [np.array([0, 0, 0, -1, -1 + gap], np.float32)]
    if masked:
        inputs.mask = [np.array([0, 0, 0, 1, 0], bool)]
    return inputs


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "rejection"])
@pytest.mark.parametrize("gap", [89.0, -89.0, 1000.0, -1000.0])
def test_F7_ratios_that_overflow_are_finite_and_counted(name, gap):
    with np.errstate(over="raise", invalid="raise"):
        output = build(name)(extreme(gap))  # exp(89) is infinite in fp32, exp(1000) in fp64
    assert value(output, "log_ratio_clamped") == 1
    assert all(np.isfinite(row).all() for row in output.multiplier or ())


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "rejection", "opsm"])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf, 1000.0])
def test_F7_what_stands_on_a_masked_token_does_not_matter(name, what):
    options = {"delta": 0.1} if name == "opsm" else {}
    inputs = extreme(what, masked=True)
    output = build(name, **options)(inputs)
    assert output.mask[0].tolist() == [False, False, False, True, False]
    assert value(output, "log_ratio_clamped" if name != "opsm" else "kl") == 0


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "rejection", "opsm"])
@pytest.mark.parametrize(("column", "bad"), [("old_logprobs", np.nan), ("rollout_logprobs", -np.inf)])
def test_F7_log_probabilities_that_are_not_finite_name_sample_and_correction(name, column, bad):
    inputs = minibatch([1, 1], [1, 1, 1])
    inputs.columns[column][1] = np.array([0, 0, 0, -1, -1, bad], np.float32)
    options = {"delta": 0.1} if name == "opsm" else {}
    with pytest.raises(ContractError) as error:
        build(name, **options)(inputs)
    text = str(error.value)
    assert f"correction/{name}: {column} of sample p@0/1 is {bad} at token 5" in text and "1 of 5 trainable" in text


def test_E1_an_empty_segment_does_not_borrow_from_its_neighbour():
    # An empty segment of t stands between its other one, 1.5, and another trajectory with 4: t stays at 1.5 < 2.
    output = build("mis")(minibatch([1.5], [], [4], trajectories=["t", "t", "u"]))
    assert answer(output.mask) == [[True], [], [False]]
    assert value(build("mis")(minibatch([1.5], [], [4])), "masked_high") == 0.5  # of two sequences that have a token


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "rejection", "opsm"])
def test_nothing_to_compare_with_is_refused(name):
    component = COMPONENTS[name]
    config = component.config(**({"delta": 0.1} if name == "opsm" else {}))
    for old_logprobs in ("recompute", "rollout"):
        run = SimpleNamespace(train=SimpleNamespace(old_logprobs=old_logprobs))
        env = Environment(run_config=run, where="run.toml: correction[0]")
        if old_logprobs == "recompute":
            component.check(config, env)
            continue
        with pytest.raises(ConfigError, match=f'correction "{name}" compares old_logprobs with rollout_logprobs'):
            component.check(config, env)


RUN = """
steps = 1
plugins = ["mismatch-corrections"]
tokenizer.use = "toy"
data.use = "toy"
engine.use = "toy"
trainer.use = "toy"
rollout.groups_per_step = 1
rollout.samples_per_group = 2
[[reward]]
use = "toy"
[[loss]]
use = "policy-gradient"
[[correction]]
"""
TRUNCATED = [
    ("tis", "sequence", True),
    ("mis", "sequence", True),
    ("tis", "token", False),
    ("rejection", "sequence", False),
]


@pytest.mark.parametrize(("name", "level", "refused"), TRUNCATED)
@pytest.mark.parametrize("cut", ["top_p = 0.8", "top_k = 40"])
def test_F11_whole_answers_are_not_weighed_where_the_distribution_is_cut(tmp_path, name, level, refused, cut):
    config = tmp_path / "run.toml"
    config.write_text(f'{RUN}use = "{name}"\n{name}.level = "{level}"\n[rollout.sampling]\n{cut}\n')
    if not refused:
        assert load(config).all("correction")
        return
    with pytest.raises(ConfigError, match=f'correction "{name}".* weighs whole sequences'):
        load(config)


# --- Properties ------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.lists(st.floats(1e-6, 1e6), max_size=5), min_size=1, max_size=5)
NAMES = st.sampled_from(["tis", "mis", "icepop", "rejection"])


@settings(max_examples=60, deadline=None)
@given(NAMES, ROWS, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(name, rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    one, other = build(name)(minibatch(*rows)), build(name)(minibatch(*[rows[i] for i in order]))
    assert answer(other.mask) == [answer(one.mask)[i] for i in order]
    if one.multiplier is not None:
        assert answer(other.multiplier) == [answer(one.multiplier)[i] for i in order]


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from(["token", "sequence", "geometric"]))
def test_weights_stay_within_their_bounds_and_masks_only_mask(rows, level):
    inputs = minibatch(*rows)
    clipped = build("tis", level=level, lower=0.5, upper=2.0)(inputs)
    for row, mask in zip(clipped.multiplier, inputs.mask, strict=True):
        assert ((row[mask] >= 0.5) & (row[mask] <= 2.0)).all() and not row[~mask].any()
    masked = build("mis", level=level, lower=0.5, upper=2.0)(inputs)
    for row, new, old in zip(masked.multiplier, masked.mask, inputs.mask, strict=True):
        assert not (new & ~old).any() and not row[~new].any()
        assert ((row[new] >= 0.49999) & (row[new] <= 2.00001)).all()


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_a_batch_is_what_its_sequences_are_alone(rows):
    whole = build("mis", lower=0.5)(minibatch(*rows))
    alone = [build("mis", lower=0.5)(minibatch(row)) for row in rows]
    assert answer(whole.mask) == [answer(one.mask)[0] for one in alone]
