"""Token trees against the plain definition: equal beginnings have equal places."""

import numpy as np
import pytest
from fsdp_support import batch_of, random_batch, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import ContractError
from miles_fsdp_trainer.microbatch import masks_of, split_by_tokens, used_lengths
from miles_fsdp_trainer.tree import attention_blocks, build_tree

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=8).map(lambda s: np.array(s, dtype=np.int32)), max_size=9)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES)
def test_two_positions_share_a_place_exactly_when_their_beginnings_are_equal(sequences):
    tree = build_tree(sequences)
    place = {}
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert len(path) == len(sequence)
        for t in range(len(sequence)):
            assert place.setdefault(tuple(sequence[: t + 1]), path[t]) == path[t]
            assert tree.tokens[path[t]] == sequence[t] and tree.positions[path[t]] == t
    assert len(set(place.values())) == len(place) == len(tree.tokens)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.booleans())
def test_every_token_attends_to_its_own_beginning_and_nothing_else(sequences, share):
    tree = build_tree(sequences, share=share)
    blocks, inverse = attention_blocks(tree)
    rows = [
        (block.queries[b, q], block.keys[b, : min(block.num_keys[b], block.query_positions[b, q] + 1)])
        for block in blocks
        for b in range(block.queries.shape[0])
        for q in range(block.queries.shape[1])
    ]
    ancestors = {int(path[t]): path[: t + 1].tolist() for path in tree.paths for t in range(len(path))}
    for token, row in enumerate(inverse):
        query, keys = rows[row]
        assert query == token and keys.tolist() == ancestors[token]


def test_a_group_is_computed_once():
    prompt, answers = np.arange(10), [[11, 12], [11, 13], [14]]
    tree = build_tree([np.array([*prompt, *a]) for a in answers])
    assert len(tree.tokens) == 10 + 4  # the prompt, 11 once, 12, 13, 14


def test_without_sharing_every_token_is_computed():
    assert len(build_tree([np.arange(5), np.arange(5)], share=False).tokens) == 10


def test_microbatches_keep_to_the_budget_and_to_shared_units():
    batch = random_batch(groups=4, per_group=4)
    batch.shared = [(0, 9), (3, 4)]
    used = used_lengths(masks_of(batch))
    parts = split_by_tokens(batch, used, 30, True)
    assert sorted(i for part in parts for i in part) == list(range(16)) and len(parts) > 1
    assert all(any(set(unit) <= set(part) for part in parts) for unit in batch.shared)
    for part in parts:
        if len(part) > 2:
            assert len(build_tree([batch.samples[i].tokens[: used[i]] for i in part]).tokens) <= 30


def test_samples_without_anything_to_train_are_left_out():
    batch = batch_of([sample("a", 0, [1, 2], [3]), sample("a", 1, [1, 2], []), sample("a", 2, [1, 2], [3], mask=[False])])
    assert split_by_tokens(batch, used_lengths(masks_of(batch)), 100, True) == [[0]]


def test_T7_the_first_token_cannot_be_trained():
    batch = batch_of([sample("a", 0, [], [3, 4])])
    with pytest.raises(ContractError, match="a/0 is True at its first token"):
        masks_of(batch)
