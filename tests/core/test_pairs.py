"""Pairs of answers: which one is chosen, what a loss of scope "pair" finds, and what is left out."""

from __future__ import annotations

import numpy as np
import pytest
from batching import batches_of, ones

from miles_core.batch import apply_advantages, make_batches, prepare, skip_reason
from miles_core.errors import ContractError
from miles_core.settings import TrainTable
from miles_core.testing.samples import group_of, make_sample
from miles_core.weights import pair_sides


def pair(*pairs, **common):
    """One sample per dict: its index follows the order, its pair is "x" unless it says otherwise."""
    made = []
    for index, fields in enumerate(pairs):
        values = {"response": 2, "index": index} | common | fields
        metadata = {"pair": values.pop("pair", "x")} | ({"chosen": values.pop("chosen")} if "chosen" in values else {})
        made.append(make_sample(values.pop("response"), metadata=metadata, **values))
    return made


def sides(samples, tuples=((0, 1),)):
    return pair_sides(samples, list(tuples), [s.loss_mask for s in samples])


@pytest.mark.parametrize(
    ("samples", "want"),
    [
        (pair({"chosen": True}, {"chosen": False}), [1, -1]),
        (pair({"chosen": False, "reward": 1.0}, {"chosen": True, "reward": 0.0}), [-1, 1]),  # the mark, not the reward
        (pair({"reward": 0.25}, {"reward": 0.5}), [-1, 1]),
        (pair({"reward": 0.5}, {"reward": 0.5}), [0, 0]),  # nothing to prefer
        (pair({"reward": 0.5}, {"reward": None}), [0, 0]),
        (pair({"reward": 0.5}, {"reward": 0.0, "status": "error"}), [0, 0]),
        (pair({"chosen": True}, {"chosen": False, "response": 0}), [0, 0]),  # one side has nothing to train
    ],
)
def test_one_of_a_pair_is_chosen(samples, want):
    assert sides(samples) == want


def test_all_segments_of_an_answer_are_on_its_side():
    samples = pair({"reward": 1.0}, {"reward": 0.0}, {"reward": 0.0, "index": 1, "segment": 1})
    assert sides(samples, [(0, 1, 2)]) == [1, -1, -1]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (pair({}, {}, {}), "pair 'x' of group p@0 has 3 answers"),
        (pair({}), "has 1 answers"),
        (pair({"chosen": True}, {"chosen": True}), "exactly one is to be true"),
        (pair({"chosen": False}, {}), "exactly one is to be true"),
    ],
)
def test_what_is_no_pair_is_refused(samples, says):
    with pytest.raises(ContractError, match=says):
        sides(samples, [tuple(range(len(samples)))])


def test_a_loss_finds_its_pairs_in_two_columns():
    samples = pair({"reward": 0.0}, {"reward": 0.0, "pair": "y"}, {"reward": 1.0}, {"reward": 0.0, "pair": "y"})
    samples.append(make_sample(1, index=4))  # of no pair
    (batch,) = batches_of([group_of(samples)], scopes=("policy", "pair"))
    # Pair "x" is decided by reward, "y" is not. Tokens 3 and 4 are trained; the prompt has 0.
    assert [row.tolist() for row in batch.columns["pair_sign"]] == [
        [0, 0, 0, -1, -1], [0] * 5, [0, 0, 0, 1, 1], [0] * 5, [0] * 4,
    ]  # fmt: skip
    assert [row.max() for row in batch.columns["pair_ids"]] == [1, 0, 1, 0, 0]
    assert [float(row.sum()) for row in batch.token_weights["pair"]] == [0.5, 0, 0.5, 0, 0]  # one pair counts
    assert all(mask.any() for mask in batch.mask)  # the policy loss trains them all


def test_samples_without_a_decided_pair_are_not_computed_when_only_pairs_are_trained():
    samples = pair({"reward": 0.0}, {"reward": 1.0}, {"reward": 0.0, "pair": "y"}, {"reward": 0.0, "pair": "y"})
    (batch,) = batches_of([group_of(samples)], scopes=("pair",))
    assert [bool(mask.any()) for mask in batch.mask] == [True, True, False, False]
    assert sum(float(w.sum()) for w in batch.token_weights["pair"]) == pytest.approx(1)


def test_F6_no_decided_pair_is_nothing_to_train():
    (batch,) = batches_of([group_of(pair({"reward": 1.0}, {"reward": 1.0}))], scopes=("pair",))
    assert skip_reason(batch) == "nothing-trainable"
    assert not np.concatenate(batch.token_weights["pair"]).any()


def test_decided_and_undecided_pairs_are_counted():
    batch = prepare([group_of(pair({"reward": 0.0}, {"reward": 1.0}, {"pair": "y"}, {"pair": "y"}))])
    apply_advantages(batch, [("ones", ones)])
    make_batches(batch, TrainTable(), scopes=("pair",))
    assert {k: v for k, v in batch.metrics.items() if k.startswith("pairs/")} == {
        "pairs/trained": (1.0, 1.0, "sum"),
        "pairs/undecided": (1.0, 1.0, "sum"),
    }
