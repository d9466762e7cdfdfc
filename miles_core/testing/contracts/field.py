"""Suite of the kind field: a `FieldSpec`, which is no component."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest

from miles_core.errors import ContractError
from miles_core.fields import FieldSpec, check_field, fill_field, num_rows, pack_field, trim_field
from miles_core.testing.contracts.base import no_error, refused


class FieldContract:
    """A `FieldSpec`: set `spec`, and `value` where the axes after the first are not all of size 3."""

    spec: ClassVar[Any] = None

    def value(self, num_tokens: int) -> Any:
        """What an engine or a rollout would put into `Sample.extras` for a sample of `num_tokens`."""
        rows = num_rows(self.spec, num_tokens)
        shape = (*(() if rows is None else (rows,)), *(3 for _ in self.spec.axes))
        return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(self.spec.dtype)

    def _array(self) -> None:
        if self.spec.align == "ragged":
            pytest.skip("a ragged field is opaque")

    def test_it_is_named(self) -> None:
        """It is a FieldSpec whose name is lower case words, and so are its axes, each once."""
        assert isinstance(self.spec, FieldSpec), f"set `spec` in {type(self).__name__}"
        names = [self.spec.name, *self.spec.axes]
        odd = [n for n in names if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", n)]
        assert not odd and len(set(names)) == len(names), f"names {names}"

    def test_the_data_type_exists(self) -> None:
        """`dtype` is one of numpy's, of numbers or booleans."""
        with no_error(f'data type "{self.spec.dtype}"'):
            assert np.dtype(self.spec.dtype).kind in "biuf", f'data type "{self.spec.dtype}" is no number'

    def test_missing_values_can_be_treated(self) -> None:
        """`missing` is "error", "mask" or "fill:<number>", and a filled value passes the field's own check."""
        if self.spec.missing in ("error", "mask"):
            return
        assert re.fullmatch(r"fill:-?\d+(\.\d+)?", self.spec.missing), f'missing = "{self.spec.missing}"'
        filled = fill_field(self.spec, 5, tuple(3 for _ in self.spec.axes))
        with no_error("the check of a filled value"):
            check_field(self.spec, filled, 5, "p@0/0")

    def test_its_values_fit(self) -> None:
        """Values for samples of any length pass the check, unchanged; also for a sample of one token."""
        for num_tokens in (1, 2, 9):
            with no_error(f"the check of a value for {num_tokens} tokens"):
                value = check_field(self.spec, self.value(num_tokens), num_tokens, "p@0/0")
            assert np.array_equal(value, self.value(num_tokens)), "the check changed the value"

    def test_a_wrong_length_is_refused(self) -> None:
        """A value for one token more is refused: a side channel is never shifted."""
        self._array()
        if self.spec.align == "sample":
            pytest.skip("a field per sample has no token axis")
        with refused(ContractError, "a value with a row too many"):
            check_field(self.spec, self.value(6), 5, "p@0/0")

    def test_it_can_be_cut_and_packed(self) -> None:
        """Cut to fewer tokens it is what a shorter sample has, and packed it has one row per token."""
        self._array()
        assert trim_field(self.spec, self.value(9), 4).shape == self.value(4).shape
        packed = pack_field(self.spec, [self.value(4), self.value(2)], [4, 2])
        assert len(packed) == (2 if self.spec.align == "sample" else 6), f"{len(packed)} rows for 4 + 2 tokens"
