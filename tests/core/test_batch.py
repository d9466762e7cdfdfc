"""Masks, minibatches and columns. Every number has its derivation beside it."""

import math

import numpy as np
import pytest
from batching import batches_of, total

from miles_core.batch import (
    base_mask,
    live_part,
    make_batches,
    needs_old_forward,
    prepare,
    rollout_metrics,
    skip_reason,
    split_minibatches,
    token_lags,
)
from miles_core.errors import ContractError
from miles_core.fields import FieldSpec
from miles_core.settings import TrainTable
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import VersionSpan

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
    pairs = [(1, "x", 1.0), (2, "y", 0.0), (3, "x", 0.0), (2, "y", 1.0)]
    samples = [make_sample(n, index=i, metadata={"pair": pair}, reward=r) for i, (n, pair, r) in enumerate(pairs)]
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


def test_samples_without_advantage_are_left_out_and_weights_stay():
    """Three samples of 2 trainable tokens, token-mean: every weight is 1/6, also after the middle one is gone."""
    groups = [make_group([1.0, 0.0, 0.5])]
    batch = prepare(groups)
    batch.columns["advantages"] = [
        np.where(m, a, 0).astype(np.float32) for m, a in zip(batch.mask, (1, 0, -1), strict=True)
    ]
    (whole,) = make_batches(batch, TrainTable())
    live = live_part(whole)
    assert [s.index for s in live.samples] == [0, 2]
    for row, old in zip(live.token_weights["policy"], (whole.token_weights["policy"][i] for i in (0, 2)), strict=True):
        np.testing.assert_array_equal(row, old)


def test_a_batch_without_any_advantage_stays_whole():
    batch = prepare([make_group([1.0, 1.0])])
    batch.columns["advantages"] = [np.zeros(len(m), np.float32) for m in batch.mask]
    (whole,) = make_batches(batch, TrainTable())
    assert live_part(whole) is whole
