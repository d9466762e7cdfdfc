"""Token weights. L is a per-token loss; every number has its derivation beside it."""

import time

import numpy as np
import pytest
from batching import batches_of, total
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.batch import token_weights
from miles_core.errors import ContractError
from miles_core.settings import TrainTable
from miles_core.testing.samples import group_of, make_group, make_sample

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length")

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
