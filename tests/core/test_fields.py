"""Side channels: checked, filled, trimmed, sliced and packed by their declaration. Shapes: rows, layers, top-k."""

import numpy as np
import pytest

from miles_core.errors import ContractError
from miles_core.fields import FieldRef, FieldSpec, check_field, fill_field, num_rows, pack_field, slice_axis, trim_field

ROUTES = FieldSpec(name="routes", dtype="int32", axes=("layer", "topk"), align="transition")
TOPK = FieldSpec(name="topk", dtype="float32", axes=("topk",), align="token")
IMAGE = FieldSpec(name="image", dtype="float32", axes=("channel",), align="sample")


def counted(*shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


@pytest.mark.parametrize(("spec", "tokens", "rows"), [(TOPK, 8, 8), (ROUTES, 8, 7), (ROUTES, 0, 0), (IMAGE, 8, None)])
def test_M2_rows_by_alignment(spec, tokens, rows):
    assert num_rows(spec, tokens) == rows


def test_M2_a_wrong_row_count_names_owner_and_both_lengths():
    # Prompt 5 + response 3 = 8 tokens: 7 rows. 8 rows would be a silent shift by one.
    assert check_field(ROUTES, counted(7, 2, 2), 8, "p@0/0").shape == (7, 2, 2)
    with pytest.raises(ContractError, match=r'"routes" of p@0/0 has shape \(8, 2, 2\), but 8 tokens need 7 rows'):
        check_field(ROUTES, counted(8, 2, 2), 8, "p@0/0")


def test_a_missing_axis_is_an_error():
    with pytest.raises(ContractError, match="axes"):
        check_field(ROUTES, counted(7, 2), 8, "p@0/0")


def test_references_are_not_opened():
    ref = FieldRef(store="shm", key="a", nbytes=4)
    assert check_field(ROUTES, ref, 8, "p@0/0") is ref


def test_check_converts_to_the_declared_dtype():
    assert check_field(TOPK, [[1, 2]], 1, "p@0/0").dtype == np.float32


def test_fill_follows_the_declaration():
    spec = {"name": "f", "dtype": "int32", "axes": ("layer",), "align": "transition"}
    assert fill_field(FieldSpec(**spec, missing="fill:-1"), 3, (2,)).tolist() == [[-1, -1], [-1, -1]]
    assert fill_field(FieldSpec(**spec, missing="mask"), 3, (2,)) is None
    with pytest.raises(ContractError, match='"f" is missing'):
        fill_field(FieldSpec(**spec), 3, (2,))


def test_trim_keeps_what_belongs_to_the_first_tokens():
    assert trim_field(ROUTES, counted(7, 1, 1), 4).ravel().tolist() == [0, 1, 2]  # 4 tokens: 3 transitions
    assert trim_field(TOPK, counted(7, 1), 4).ravel().tolist() == [0, 1, 2, 3]
    assert len(trim_field(IMAGE, counted(7), 4)) == 7


def test_slice_takes_a_part_of_a_named_axis():
    rows = counted(2, 4, 3)
    assert (slice_axis(ROUTES, rows, "layer", 1, 3) == rows[:, 1:3]).all()
    assert (slice_axis(ROUTES, rows, "topk", 0, 1) == rows[:, :, :1]).all()
    assert (slice_axis(IMAGE, counted(4), "channel", 2, 4) == [2, 3]).all()


def test_M2_pack_gives_one_row_per_input_token():
    # Samples of 3 and 2 tokens: 2 and 1 transitions, each followed by a zero row for the last token.
    packed = pack_field(ROUTES, [counted(2, 1, 1) + 1, counted(1, 1, 1) + 5], [3, 2])
    assert packed.ravel().tolist() == [1, 2, 0, 5, 0]
    assert pack_field(TOPK, [counted(3, 1), counted(2, 1)], [3, 2]).ravel().tolist() == [0, 1, 2, 0, 1]


def test_E1_pack_of_samples_without_tokens():
    assert pack_field(ROUTES, [counted(0, 1, 1), counted(1, 1, 1) + 5], [0, 2]).ravel().tolist() == [5, 0]
    assert len(pack_field(TOPK, [], [])) == 0


def test_pack_of_sample_fields_stacks_them():
    assert pack_field(IMAGE, [counted(2), counted(2)], [3, 5]).shape == (2, 2)
