"""Masks, minibatches and token weights. L is a per-token loss; every number has its derivation beside it."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.batch import (
    apply_advantages,
    base_mask,
    logprob_gap,
    make_batches,
    needs_old_forward,
    prepare,
    rollout_metrics,
    skip_reason,
    split_minibatches,
    token_lags,
    token_weights,
)
from miles_core.errors import ContractError
from miles_core.fields import FieldSpec
from miles_core.settings import TrainTable
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import AdvantageOutput, CorrectionOutput, Score, VersionSpan

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length")


def ones(inputs):
    """An advantage of 1 for every trainable token."""
    return AdvantageOutput(advantages=[m.astype(np.float32) for m in inputs.mask])


def batches_of(groups, *, train=None, advantage=ones, prepared=None, **options):
    batch = prepare(groups, **(prepared or {}))
    apply_advantages(batch, [("ones", advantage)])
    return make_batches(batch, train or TrainTable(), **options)


def total(weights, losses):
    return sum(float((w.astype(np.float64) * loss).sum()) for w, loss in zip(weights, losses, strict=True))


# --- Token weights ---------------------------------------------------------------------------------------------------

F4_TABLE = [
    ("token-mean", 1.5),  # (3 + 1 + 1 + 1) / 4
    ("sequence-mean-token-mean", 2.0),  # (3 + 3/3) / 2
    ("sequence-mean-token-sum", 3.0),  # (3 + 3) / 2
    ("constant-length", 0.75),  # (3 + 3) / (2 * 4)
]
F4_SPLITS = {
    "one microbatch of two": [[0, 1]],
    "two microbatches of one": [[0], [1]],
    "other order": [[1], [0]],
    "with a padding-only microbatch": [[0], [2], [1]],
}


@pytest.mark.parametrize("split", F4_SPLITS.values(), ids=F4_SPLITS.keys())
@pytest.mark.parametrize(("aggregation", "value"), F4_TABLE)
def test_F4_every_split_gives_the_same_loss(aggregation, value, split):
    # Sequence A: 1 token with L = 3; B: 3 tokens with L = 1; C: nothing trainable.
    a, b, c = make_sample(1, index=0), make_sample(3, index=1), make_sample(2, index=2, status="error")
    (batch,) = batches_of([group_of([a, b, c])], train=TrainTable(aggregation=aggregation, constant_length=4))
    losses = [np.full(4, 3.0), np.ones(6), np.full(5, 100.0)]
    parts = [batch.select(rows) for rows in split]
    loss = sum(total(p.token_weights["policy"], [losses[i] for i in rows]) for p, rows in zip(parts, split, strict=True))
    assert loss == pytest.approx(value, rel=1e-6)


def test_T3_segments_of_a_trajectory_are_one_sequence():
    # Trajectory A in two segments of 1 and 3 tokens, B with 2: two sequences, of 4 and 2 tokens.
    masks = [np.array([0, 1], bool), np.array([0, 1, 1, 1], bool), np.array([0, 1, 1], bool)]
    weights = token_weights(masks, ["a", "a", "b"], "sequence-mean-token-mean")
    assert [w[1] for w in weights] == pytest.approx([1 / 8, 1 / 8, 1 / 4])  # 1 / (2 * 4), twice; 1 / (2 * 2)
    summed = token_weights(masks, ["a", "a", "b"], "sequence-mean-token-sum")
    assert [w[1] for w in summed] == pytest.approx([0.5, 0.5, 0.5])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_F6_nothing_trainable_gives_zero_weights(aggregation):
    weights = token_weights([np.zeros(3, bool), np.zeros(0, bool)], ["a", "b"], aggregation, 4)
    assert [w.tolist() for w in weights] == [[0, 0, 0], []]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_F6_an_empty_sequence_changes_nothing(aggregation):
    mask = np.array([0, 1, 1], bool)
    alone = token_weights([mask], ["a"], aggregation, 4)[0]
    assert token_weights([mask, np.zeros(5, bool)], ["a", "b"], aggregation, 4)[0].tolist() == alone.tolist()


def test_constant_length_needs_a_length():
    with pytest.raises(ContractError, match="constant_length"):
        token_weights([np.ones(2, bool)], ["a"], "constant-length")


@st.composite
def masked_sequences(draw):
    count = draw(st.integers(1, 6))
    masks = [np.array([False, *draw(st.lists(st.booleans(), min_size=1, max_size=8))]) for _ in range(count)]
    return masks, [draw(st.integers(0, count - 1)) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(masked_sequences(), st.sampled_from(AGGREGATIONS[:2]), st.randoms(use_true_random=False))
def test_means_weigh_one_in_all_and_do_not_depend_on_the_order(sequences, aggregation, random):
    masks, ids = sequences
    weights = token_weights(masks, ids, aggregation)
    assert all(not w[~m].any() for w, m in zip(weights, masks, strict=True))
    assert sum(w.sum(dtype=np.float64) for w in weights) == pytest.approx(float(any(m.any() for m in masks)), rel=1e-6)
    order = list(range(len(masks)))
    random.shuffle(order)
    again = token_weights([masks[i] for i in order], [ids[i] for i in order], aggregation)
    assert all((again[place] == weights[i]).all() for place, i in enumerate(order))


def test_ten_thousand_samples_of_a_thousand_tokens_take_seconds():
    groups = [make_group([0.0, 1.0] * 4, name=f"p{g}", response=900, prompt_len=100) for g in range(1250)]
    began = time.perf_counter()
    (batch,) = batches_of(groups)
    assert batch.num_trainable == 9_000_000
    assert time.perf_counter() - began < 20  # about 1 s on a quiet core


# --- Masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("response", "finish"), [([7, 8, 9], "length"), ([7, 2], "stop"), ([2, 2, 7], "length")])
def test_T4_the_mask_comes_from_lengths_whatever_the_tokens_are(response, finish):
    # 2 is EOS and padding at once: every returned token is trained, and there is no place for padding in a sample.
    sample = make_sample(response, status=finish)
    assert base_mask(sample).tolist() == [False] * 3 + [True] * len(response)
    sample.tokens[:] = 2
    assert base_mask(sample).sum() == len(response)


def test_T6_tool_tokens_are_outside_mask_and_denominator():
    sample = make_sample(7, prompt_len=1, mask=[1, 1, 0, 0, 0, 1, 1])
    (batch,) = batches_of([group_of([sample])])
    assert batch.token_weights["policy"][0].tolist() == [0, 0.25, 0.25, 0, 0, 0, 0.25, 0.25]  # denominator 4


@pytest.mark.parametrize("junk", [math.nan, -math.inf, -50.0])
def test_T6_logprobs_of_tool_tokens_reach_nobody(junk):
    sample = make_sample(7, prompt_len=1, mask=[1, 1, 0, 0, 0, 1, 1])
    (want,) = batches_of([group_of([sample])])
    sample.logprobs[3:6] = junk
    (batch,) = batches_of([group_of([sample])])
    assert batch.columns["rollout_logprobs"][0].tobytes() == want.columns["rollout_logprobs"][0].tobytes()


def test_T7_the_mask_has_no_shift():
    # Prompt 3, response 2. Entry t speaks of tokens[t] given tokens[:t]: the next-token positions 0..3 predict 1..4.
    (batch,) = batches_of([group_of([make_sample(2, prompt_len=3)])])
    assert batch.mask[0][1:].tolist() == [False, False, True, True]


def test_F5_truncated_samples_leave_numerator_and_denominator():
    group = group_of([make_sample(25, index=0), make_sample(5, index=1, status="length")])
    (off,) = batches_of([group], prepared={"train_truncated": False})
    (on,) = batches_of([group])
    assert (off.num_trainable, on.num_trainable) == (25, 30)
    for batch in (off, on):  # L = 1: 25 / 25 and 30 / 30, not 25 / 30
        assert total(batch.token_weights["policy"], [np.ones(28), np.ones(8)]) == pytest.approx(1.0, rel=1e-6)


def test_F5_lengths_are_true_lengths_and_truncated_rewards_count():
    group = group_of([make_sample(25, index=0, reward=1.0), make_sample(5, index=1, status="length", reward=0.0)])
    batches_of([group], prepared={"train_truncated": False})
    metrics = rollout_metrics([group])
    got = {k: metrics[f"response_length/{k}"] for k in ("mean", "min", "max")}
    assert got == {"mean": 15, "min": 5, "max": 25}
    assert metrics["truncated"] == 0.5
    assert metrics["reward/mean"] == 0.5
    assert prepare([group], train_truncated=False).rewards == [1.0, 0.0]


@pytest.mark.parametrize("status", ["error", "timeout", "aborted"])
def test_failed_samples_are_not_trained_and_have_no_verdict(status):
    batch = prepare([group_of([make_sample(index=0, status=status, reward=1.0), make_sample(index=1, reward=0.0)])])
    assert batch.rewards == [None, 0.0]
    assert [m.any() for m in batch.mask] == [False, True]


def test_R2_a_sample_without_verdict_is_not_trained():
    batch = prepare([make_group([1.0, None])])
    assert [int(m.sum()) for m in batch.mask] == [2, 0]


def test_T3_the_last_segment_speaks_for_the_trajectory():
    first = make_sample(2, index=0, segment=0, reward=None)
    last = make_sample(2, index=0, segment=1, reward=1.0)
    batch = prepare([group_of([first, last, make_sample(2, index=1, reward=0.0)])])
    assert batch.rewards == [1.0, 1.0, 0.0]
    assert all(m.sum() == 2 for m in batch.mask)


def test_A3_tokens_beyond_the_lag_bound_leave_the_denominator():
    # 12 tokens of version 3, then 8 of version 5, trained at version 5 with max_lag 1: only the last 8 count.
    spans = (VersionSpan(start=3, stop=15, version=3), VersionSpan(start=15, stop=23, version=5))
    sample = make_sample(20, prompt_len=3, versions=spans)
    assert token_lags(sample, 5).tolist() == [0] * 3 + [2] * 12 + [0] * 8
    (batch,) = batches_of([group_of([sample])], prepared={"version": 5, "max_lag": 1})
    assert batch.num_trainable == 8
    assert batch.token_weights["policy"][0][-1] == pytest.approx(1 / 8)
    assert prepare([group_of([sample])], version=5, max_lag=1).metrics["stale_tokens"] == (12, 1, "sum")


MALFORMED = [
    ({"logprobs": np.zeros(4, np.float32)}, "p@0/0 has 5 tokens, 5 loss_mask entries and 4 logprobs"),
    ({"loss_mask": np.zeros(6, bool)}, "6 loss_mask entries"),
    ({"loss_mask": np.ones(5, bool)}, r"loss_mask\[0\] of sample p@0/0"),
    ({"loss_mask": np.zeros(5)}, "is float64, not bool"),
    ({"status": "running"}, "p@0/0 is still running"),
    ({"logprobs": np.array([0, 0, 0, -1, np.nan], np.float32)}, "engine returned rollout_logprobs nan.*p@0/0 at token 4"),
]


@pytest.mark.parametrize(("fields", "message"), MALFORMED)
def test_malformed_samples_are_named(fields, message):
    with pytest.raises(ContractError, match=message):
        prepare([group_of([make_sample(2, **fields)])])


# --- Nothing to train ------------------------------------------------------------------------------------------------


def test_F6_a_step_with_nothing_to_train_is_flagged():
    def never(inputs):
        raise AssertionError("no column was computed, so nothing may be asked")

    group = group_of([make_sample(index=i, status="length") for i in range(4)])
    (batch,) = batches_of(
        [group], advantage=never, prepared={"train_truncated": False}, corrections=[("never", never, "shrink")]
    )
    assert skip_reason(batch) == "nothing-trainable"
    assert all(not w.any() for w in batch.token_weights["policy"])
    assert skip_reason(batches_of([make_group([0.0])])[0]) is None


def test_F6_no_groups_give_no_batches_and_no_metrics():
    assert batches_of([]) == []
    assert rollout_metrics([]) == {}


def test_F6_metrics_are_finite_or_absent():
    metrics = rollout_metrics([make_group([None, None], response=0)])
    assert all(math.isfinite(v) for v in metrics.values())
    assert "reward/mean" not in metrics
    assert metrics["groups/no_verdict"] == 1


def test_E1_empty_responses_count_in_the_mean_and_add_no_token():
    group = group_of([make_sample(0, index=0, reward=1.0), make_sample([2], index=1, reward=0.0)])
    (batch,) = batches_of([group])
    assert batch.num_trainable == 1
    assert batch.token_weights["policy"][1][-1] == 1.0  # denominator 1: the empty response adds nothing
    metrics = rollout_metrics([group])
    assert (metrics["reward/mean"], metrics["response_length/mean"], metrics["response_length/empty"]) == (0.5, 0.5, 1)


def test_E1_a_batch_of_empty_responses_is_skipped():
    (batch,) = batches_of([make_group([0.0, 1.0], response=0)])
    assert skip_reason(batch) == "nothing-trainable"


# --- Minibatches and epochs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "minibatches", "sizes"), [(8, 2, [4, 4]), (5, 3, [2, 2, 1]), (2, 4, [1, 1]), (0, 2, [])]
)
def test_minibatches_are_even_and_never_empty(groups, minibatches, sizes):
    parts = split_minibatches(range(groups), minibatches, np.random.default_rng(0))
    assert [len(p) for p in parts] == sizes
    assert sorted(g for p in parts for g in p) == list(range(groups))


def test_groups_stay_whole_and_every_epoch_has_an_order_of_its_own():
    groups = [make_group([0.0, 1.0], name=f"p{g}") for g in range(8)]
    options = {"train": TrainTable(minibatches=2, epochs=2), "seed": 3, "step": 7}
    batches = batches_of(groups, **options)
    ids = [[s.group_id for s in b.samples] for b in batches]
    assert all(row[::2] == row[1::2] for row in ids)
    assert [(b.epoch, b.minibatch, b.step) for b in batches] == [(0, 0, 7), (0, 1, 7), (1, 0, 7), (1, 1, 7)]
    assert sorted(ids[0] + ids[1]) == sorted(ids[2] + ids[3])
    assert ids[:2] != ids[2:]
    assert [[s.group_id for s in b.samples] for b in batches_of(groups, **options)] == ids


def test_weights_are_exact_within_each_minibatch():
    # Groups of 1 and of 9 tokens, two minibatches: each is a mean of its own.
    groups = [make_group([0.0], name="a", response=1), make_group([0.0], name="b", response=9)]
    batches = batches_of(groups, train=TrainTable(minibatches=2))
    assert sorted(float(b.token_weights["policy"][0].max()) for b in batches) == pytest.approx([1 / 9, 1.0])


# --- Corrections -----------------------------------------------------------------------------------------------------


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


BAD_CORRECTIONS = [
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


BAD_ADVANTAGES = [
    (nowhere, "advantage/ones gave an advantage to a masked token of sample p@0/0"),
    (not_a_number, "advantage/ones returned advantages nan for sample p@0/0 at token 3"),
    (too_long, r"advantage/ones returned advantages of shape \(6,\) for sample p@0/0 of 5 tokens"),
]


@pytest.mark.parametrize(("advantage", "message"), BAD_ADVANTAGES)
def test_bad_advantages_are_named(advantage, message):
    with pytest.raises(ContractError, match=message):
        batches_of([make_group([0.0, 1.0])], advantage=advantage)


# --- Old log-probabilities, scopes, fields ---------------------------------------------------------------------------

OLD = frozenset({"old_logprobs"})
OLD_FORWARD = [
    (TrainTable(), {"loss_needs": OLD}, False),  # the only step finds them in its own pass
    (TrainTable(minibatches=2), {"loss_needs": OLD}, True),
    (TrainTable(epochs=2), {"loss_needs": OLD}, True),
    (TrainTable(), {"loss_needs": OLD, "driver_needs": OLD}, True),  # a correction comes before any pass
    (TrainTable(epochs=2), {"loss_needs": frozenset({"logprobs"})}, False),
    (TrainTable(epochs=2, old_logprobs="rollout"), {"loss_needs": OLD, "driver_needs": OLD}, False),
]


@pytest.mark.parametrize(("train", "needs", "forward"), OLD_FORWARD)
def test_when_old_logprobs_cost_a_forward_pass(train, needs, forward):
    assert needs_old_forward(train, **needs) is forward


def test_the_only_optimizer_step_is_told_that_old_is_current():
    (batch,) = batches_of([make_group([0.0])], needs=OLD)
    assert batch.old_is_current
    assert not batches_of([make_group([0.0])])[0].old_is_current
    with pytest.raises(ContractError, match="2 optimizer steps need old_logprobs"):
        batches_of([make_group([0.0])], needs=OLD, train=TrainTable(epochs=2))


def test_old_logprobs_from_the_rollout_are_the_engines():
    (batch,) = batches_of([make_group([0.0])], needs=OLD, train=TrainTable(old_logprobs="rollout"))
    assert not batch.old_is_current
    assert batch.columns["old_logprobs"][0].tolist() == [0, 0, 0, -1, -1]


def test_pairs_share_a_microbatch_and_weigh_as_one_sequence():
    # Pair "x": 1 + 3 tokens, pair "y": 2 + 2, and one sample without a pair: 1 / (2 * 4) everywhere in a pair.
    samples = [make_sample(n, index=i, metadata={"pair": pair}) for i, (n, pair) in enumerate([(1, "x"), (2, "y")])]
    samples += [make_sample(n, index=i + 2, metadata={"pair": pair}) for i, (n, pair) in enumerate([(3, "x"), (2, "y")])]
    samples.append(make_sample(5, index=4))
    (batch,) = batches_of([group_of(samples)], scopes=("policy", "pair"))
    assert batch.shared == [(0, 2), (1, 3)]
    assert [float(w[-1]) for w in batch.token_weights["pair"]] == pytest.approx([1 / 8] * 4 + [0])
    assert set(batch.token_weights) == {"policy", "pair"}
    with pytest.raises(ContractError, match='metadata\\["pair"\\]'):
        batches_of([make_group([0.0])], scopes=("pair",))


def test_missing_fields_follow_their_declaration():
    spec = {"name": "routes", "dtype": "int32", "axes": ("layer",)}
    rows = np.ones((5, 2), np.int32)

    def samples():
        return [make_sample(2, index=0, extras={"routes": rows}), make_sample(2, index=1)]

    with pytest.raises(ContractError, match='field "routes" is missing'):
        prepare([group_of(samples())], fields=[FieldSpec(**spec)])
    masked = prepare([group_of(samples())], fields=[FieldSpec(**spec, missing="mask")])
    assert [m.any() for m in masked.mask] == [True, False]
    filled = prepare([group_of(samples())], fields=[FieldSpec(**spec, missing="fill:7")])
    assert filled.samples[1].extras["routes"].tolist() == [[7, 7]] * 5
    with pytest.raises(ContractError, match="shape is unknown"):
        prepare([group_of(samples()[1:])], fields=[FieldSpec(**spec, missing="fill:7")])


# --- Statistics ------------------------------------------------------------------------------------------------------


def test_T3_reward_statistics_count_trajectories():
    samples = [make_sample(index=0, segment=s, reward=1.0, scores={"m": Score(value=1.0)}) for s in range(3)]
    samples.append(make_sample(index=1, reward=0.0, scores={"m": Score(value=0.0)}))
    metrics = rollout_metrics([group_of(samples)])
    assert metrics["reward/mean"] == 0.5  # two votes, not four
    assert metrics["score/m/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5))  # ddof=1 over 1, 0


def test_groups_are_counted_by_kind():
    rewards = {"zero": [0.0, 0.0], "one": [1.0, 1.0], "half": [0.5, 0.5], "mixed": [0.0, 1.0], "none": [None, None]}
    metrics = rollout_metrics([make_group(r, name=n) for n, r in rewards.items()])
    got = {k: metrics[f"groups/{k}"] for k in ("dead", "all_zero", "all_one", "no_verdict")}
    assert got == {"dead": 3, "all_zero": 1, "all_one": 1, "no_verdict": 1}
    assert metrics["reward/no_verdict"] == 2


def test_statuses_are_counted():
    group = group_of([make_sample(index=i, status=s) for i, s in enumerate(["error", "timeout", "stop", "aborted"])])
    metrics = rollout_metrics([group])
    got = {k: metrics[f"status/{k}"] for k in ("error", "timeout", "aborted")}
    assert got == {"error": 1, "timeout": 1, "aborted": 1}


# d = trainer - rollout. k3 = e^d - 1 - d: ln 2 -> 2 - 1 - 0.6931, -ln 2 -> 0.5 - 1 + 0.6931, 100 -> clamped at 20.
@pytest.mark.parametrize(
    ("d", "k1", "k3"),
    [(0.0, 0, 0), (math.log(2), -0.6931, 0.3069), (-math.log(2), 0.6931, 0.1931), (100.0, -100, math.exp(20) - 21)],
)
def test_F7_gap_estimates(d, k1, k3):
    gap = logprob_gap([np.array([9, -1.0])], [np.array([9, d - 1.0])], [np.array([False, True])])
    assert gap["kl_k1"] == pytest.approx(k1, abs=1e-4)
    assert gap["kl_k3"] == pytest.approx(k3, rel=1e-6, abs=1e-4)
    assert gap["clamped"] == (abs(d) > 20)


def test_P1_the_gap_reports_tail_and_mean():
    # 100 tokens, one off by 0.5: mean 0.005, maximum 0.5; the 95th percentile does not see it.
    rollout, trainer = np.zeros(100, np.float32), np.zeros(100, np.float32)
    trainer[3] = -0.5
    gap = logprob_gap([rollout], [trainer], [np.ones(100, bool)])
    assert (gap["mean_abs"], gap["p95_abs"], gap["max_abs"]) == (pytest.approx(0.005), 0.0, 0.5)


def test_F7_a_nan_gap_is_an_error_and_an_empty_one_absent():
    mask = np.array([False, True])
    with pytest.raises(ContractError, match="1 of 1 log-probabilities are not finite"):
        logprob_gap([np.zeros(2)], [np.array([0, np.nan])], [mask])
    assert logprob_gap([np.zeros(2)], [np.array([np.nan, 0])], [np.zeros(2, bool)]) == {}
