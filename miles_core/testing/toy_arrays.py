"""Arrays that know their derivative: enough of a tensor for elementwise losses, without an autograd library.

A `ToyArray` holds a value per token and its derivative with respect to the log-probability of the same token (forward
mode). It has the operators and tensor methods that losses use, so that one written for torch tensors, or for numpy
functions, runs unchanged. Anything that mixes tokens is refused: its derivative would not be elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from miles_core.errors import ConfigError

_Partials = Callable[..., tuple[Any, ...]]
_RULES: dict[np.ufunc, _Partials] = {
    np.add: lambda a, b: (1.0, 1.0),
    np.subtract: lambda a, b: (1.0, -1.0),
    np.multiply: lambda a, b: (b, a),
    np.divide: lambda a, b: (1.0 / b, -a / (b * b)),
    np.power: lambda a, b: (b * a ** (b - 1), a**b * np.log(a)),
    np.negative: lambda a: (-1.0,),
    np.exp: lambda a: (np.exp(a),),
    np.expm1: lambda a: (np.exp(a),),
    np.log: lambda a: (1.0 / a,),
    np.log1p: lambda a: (1.0 / (1.0 + a),),
    np.sqrt: lambda a: (0.5 / np.sqrt(a),),
    np.square: lambda a: (2.0 * a,),
    np.absolute: lambda a: (np.sign(a),),
    np.tanh: lambda a: (1.0 - np.tanh(a) ** 2,),
    np.minimum: lambda a, b: (np.less_equal(a, b) * 1.0, np.less(b, a) * 1.0),
    np.maximum: lambda a, b: (np.greater_equal(a, b) * 1.0, np.greater(b, a) * 1.0),
}


class ToyArray(NDArrayOperatorsMixin):
    """`value` [N] and `slope` [N]: d value[n] / d logprobs[n]."""

    __slots__ = ("slope", "value")

    def __init__(self, value: Any, slope: Any = None) -> None:
        self.value = np.asarray(value)
        self.slope = np.zeros(self.value.shape) if slope is None else np.broadcast_to(slope, self.value.shape)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> ToyArray:
        if method != "__call__" or kwargs:
            raise _not_elementwise(f"numpy.{ufunc.__name__}.{method}")
        arrays = [_array(x) for x in inputs]
        values = [a.value for a in arrays]
        out = ufunc(*values)
        if not any(a.slope.any() for a in arrays):
            return ToyArray(out)
        if ufunc in _RULES:
            # A constant takes no part: its partial derivative may be infinite, and infinity times 0 is NaN.
            pairs = zip(_RULES[ufunc](*values), arrays, strict=True)
            return ToyArray(out, sum(np.where(a.slope != 0, partial * a.slope, 0.0) for partial, a in pairs))
        if out.dtype == bool:
            return ToyArray(out)
        raise ConfigError(
            f"the toy trainer has no derivative for numpy.{ufunc.__name__}", "train this loss with another trainer"
        )

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> ToyArray:
        if function is np.where and len(args) == 3:
            return _array(args[1]).where(args[0], args[2])
        if function is np.clip and not kwargs:
            return _array(args[0]).clamp(*args[1:])
        raise _not_elementwise(f"numpy.{function.__name__}")

    def __getattr__(self, name: str) -> Any:
        raise _not_elementwise(name)

    def __getitem__(self, index: Any) -> Any:
        raise _not_elementwise("indexing")

    def detach(self) -> ToyArray:
        return ToyArray(self.value)

    def float(self) -> ToyArray:
        return ToyArray(self.value.astype(np.float64), self.slope)

    def new_zeros(self, shape: Any) -> ToyArray:
        return ToyArray(np.zeros(shape))

    def where(self, condition: Any, other: Any) -> ToyArray:
        """Own entries where `condition`, else those of `other`."""
        chosen, rest = _array(condition).value, _array(other)
        return ToyArray(np.where(chosen, self.value, rest.value), np.where(chosen, self.slope, rest.slope))

    def clamp(self, min: Any = None, max: Any = None) -> ToyArray:
        out = self if min is None else np.maximum(self, min)
        return out if max is None else np.minimum(out, max)

    def numel(self) -> int:
        return self.value.size

    def sum(self) -> ToyArray:
        return self._reduced(np.sum, "sum")

    def mean(self) -> ToyArray:
        return self._reduced(np.mean, "mean")

    def max(self) -> ToyArray:
        return self._reduced(np.max, "max")

    def min(self) -> ToyArray:
        return self._reduced(np.min, "min")

    def _reduced(self, function: Any, name: str) -> ToyArray:
        """Reductions are for metrics, of detached values: a sum of the loss itself would mix tokens."""
        if self.slope.any():
            raise _not_elementwise(f"{name}() of something that depends on logprobs (for a metric, detach() it first)")
        return ToyArray(function(self.value))

    def item(self) -> Any:
        return self.value.item()

    def __float__(self) -> Any:
        return float(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def exp(self) -> ToyArray:
        return np.exp(self)

    def expm1(self) -> ToyArray:
        return np.expm1(self)

    def log(self) -> ToyArray:
        return np.log(self)

    def abs(self) -> ToyArray:
        return np.absolute(self)

    def square(self) -> ToyArray:
        return np.square(self)

    def minimum(self, other: Any) -> ToyArray:
        return np.minimum(self, other)

    def maximum(self, other: Any) -> ToyArray:
        return np.maximum(self, other)


def _array(x: Any) -> ToyArray:
    return x if isinstance(x, ToyArray) else ToyArray(x)


class NotElementwise(ConfigError, AttributeError):
    """An AttributeError too, so that `hasattr` works on toy arrays."""


def _not_elementwise(what: str) -> NotElementwise:
    return NotElementwise(
        f"the toy trainer differentiates elementwise losses only, and this loss uses {what}",
        "train it with another trainer, for example fsdp",
    )
