"""Suite of the kind loss. N: tokens of a microbatch, K: entries of a top-k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.testing.contracts.base import ComponentContract, no_error
from miles_core.testing.toy_arrays import ToyArray
from miles_core.types import LossInputs, LossOutput

DIFFERENTIABLE = ("logprobs", "entropy", "logsumexp", "values")
DIVERGENCES = ("reverse_kl:", "forward_kl:")
"""Beginnings of differentiable names: divergences from the whole distribution of another role."""
JUNK = (float("nan"), float("inf"), -float("inf"), -1e30)
LENGTHS = (4, 3, 5, 4)
"""Tokens of each sequence. For losses of scope "pair" the first two are a pair, and so are the last two."""
FIRST_PART = 2
"""Sequences of the first of two microbatches."""


@dataclass(slots=True)
class Microbatch:
    """Plain numbers of one microbatch; `arrays` makes of them what a trainer would hand to a loss."""

    columns: dict[str, np.ndarray]
    mask: np.ndarray
    seq_ids: np.ndarray
    advantages: np.ndarray
    multiplier: np.ndarray
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def part(self, chosen: np.ndarray) -> Microbatch:
        rows = {name: getattr(self, name)[chosen] for name in self.__slots__ if name != "columns"}
        return Microbatch(columns={n: c[chosen] for n, c in self.columns.items()}, **rows)


@dataclass(slots=True)
class Result:
    """`value` [N], and the gradient of sum(weights * value) by each differentiable column [N]."""

    value: np.ndarray
    gradients: dict[str, np.ndarray]
    output: LossOutput
    asked: set[str]


class LossContract(ComponentContract):
    """A `Loss`. It is run on torch tensors where torch is installed, else on the toy trainer's arrays."""

    arrays: str = "auto"
    """"torch", "toy", or "auto"."""

    # --- Inputs ---

    def microbatch(self, seed: int = 0, gap: float = 0.3) -> Microbatch:
        """Four sequences; every column random, old and reference log-probabilities `gap` nats around the current ones."""
        rng = np.random.default_rng(seed)
        num = sum(LENGTHS)
        names = sorted(self.component.needed(self.config))  # a set has another order in each process
        columns = {name: rng.normal(size=num) for name in names if not is_topk(name)}
        logprobs = -np.abs(rng.normal(size=num)) - 0.1
        for name in [n for n in columns if n.endswith("logprobs")]:
            columns[name] = logprobs + gap * rng.choice([-1.0, 1.0], size=num) * (name != "logprobs")
        for name in [n for n in columns if n in ("entropy", "logsumexp") or n.startswith(DIVERGENCES)]:
            columns[name] = np.abs(columns[name])
        mask = np.ones(num, dtype=bool)
        mask[[0, 1, 4, 7, 9, 12]] = False
        pairs = {"pair_ids": [1, 1, 2, 2], "pair_sign": [1, -1, -1, 1]}
        for name in pairs.keys() & columns.keys():
            columns[name] = np.repeat(np.array(pairs[name], dtype=np.float64), LENGTHS) * mask
        advantages = np.repeat([1.0, -0.5, 2.0, 0.0], LENGTHS)
        seq_ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        return Microbatch(columns, mask, seq_ids, advantages, np.ones(num), mask / mask.sum())

    def result(self, folder: Path, batch: Microbatch) -> Result:
        """Value and gradient of the loss on `batch`."""
        asked: set[str] = set()
        run = on_toy_arrays if self._arrays() == "toy" else on_torch
        with no_error("the loss"):
            return run(self.build(folder), batch, asked)

    def _arrays(self) -> str:
        if any(is_topk(name) for name in self.component.needed(self.config)):
            pytest.skip("the suite makes no top-k columns")
        return self.arrays if self.arrays != "auto" else "torch" if find_spec("torch") else "toy"

    # --- Rules ---

    def test_it_gives_one_number_per_token(self, tmp_path: Path) -> None:
        """`per_token` is fp32 [N], finite, unweighted and not yet summed."""
        batch = self.microbatch()
        result = self.result(tmp_path, batch)
        assert result.value.shape == batch.mask.shape, f"shape {result.value.shape} for {len(batch.mask)} tokens"
        if self._arrays() == "torch":
            assert str(result.output.per_token.dtype) == "torch.float32", result.output.per_token.dtype
        assert np.isfinite(result.value).all(), result.value

    def test_masked_tokens_count_for_nothing(self, tmp_path: Path) -> None:
        """A masked token has loss 0 and exactly zero gradient, and changes no other token, whatever stands there: also NaN
        and infinity."""
        clean = self.result(tmp_path, self.microbatch())
        for junk in JUNK:
            batch = self.microbatch()
            for row in (*batch.columns.values(), batch.advantages, batch.multiplier):
                row[~batch.mask] = junk
            dirty = self.result(tmp_path, batch)
            assert not dirty.value[~batch.mask].any(), f"masked tokens with {junk}: loss {dirty.value[~batch.mask]}"
            np.testing.assert_allclose(dirty.value, clean.value, rtol=1e-6, err_msg=f"{junk} in a masked token")
            for name, gradient in dirty.gradients.items():
                assert not gradient[~batch.mask].any(), f"masked tokens with {junk}: gradient {gradient[~batch.mask]}"
                np.testing.assert_allclose(gradient, clean.gradients[name], rtol=1e-6, err_msg=f"{junk}: by {name}")

    def test_microbatches_do_not_matter(self, tmp_path: Path) -> None:
        """The weighted sum over all tokens and its gradient are the same when the sequences are split into two."""
        batch = self.microbatch()
        whole = self.result(tmp_path, batch)
        first = batch.seq_ids < FIRST_PART
        parts = [self.result(tmp_path, batch.part(chosen)) for chosen in (first, ~first)]
        total = sum((batch.weights[c] * p.value).sum() for c, p in zip((first, ~first), parts, strict=True))
        np.testing.assert_allclose(total, (batch.weights * whole.value).sum(), rtol=1e-5, atol=1e-7)
        for name, gradient in whole.gradients.items():
            np.testing.assert_allclose(np.concatenate([p.gradients[name] for p in parts]), gradient, rtol=1e-5, atol=1e-9)

    def test_a_gradient_reaches_the_model(self, tmp_path: Path) -> None:
        """Some differentiable input gets a gradient that is not zero, and all are finite."""
        gradients = self.result(tmp_path, self.microbatch()).gradients
        assert all(np.isfinite(g).all() for g in gradients.values())
        assert any(g.any() for g in gradients.values()), f"no gradient by any of {sorted(gradients)}"

    def test_no_advantage_gives_no_gradient_where_promised(self, tmp_path: Path) -> None:
        """With the trait `zero_advantage = "no-gradient"` a sequence without advantages has exactly zero gradient, whatever
        the others have: such samples are not computed at all."""
        if self.component.traits.get("zero_advantage") != "no-gradient":
            pytest.skip("it makes no promise about tokens without advantage")
        batch = self.microbatch()
        dead = batch.seq_ids % 2 == 1
        batch.advantages[dead] = 0.0
        for name, gradient in self.result(tmp_path, batch).gradients.items():
            assert not gradient[dead].any(), f"gradient by {name} without advantage: {gradient[dead]}"

    def test_far_apart_policies_stay_finite(self, tmp_path: Path) -> None:
        """Loss and gradient are finite where two log-probabilities differ by a thousand nats: exp(89) is inf in fp32."""
        result = self.result(tmp_path, self.microbatch(gap=1000.0))
        assert np.isfinite(result.value).all(), result.value
        assert all(np.isfinite(g).all() for g in result.gradients.values()), result.gradients

    def test_nothing_trainable_gives_zeros(self, tmp_path: Path) -> None:
        """A microbatch without a trainable token has loss, gradient and metrics of zero or nothing, and no NaN."""
        batch = self.microbatch()
        batch.mask[:] = False
        result = self.result(tmp_path, batch)
        assert not result.value.any() and not any(g.any() for g in result.gradients.values())
        for name, (total, count, _) in metrics_of(result.output).items():
            assert np.isfinite(total) and count == 0, f"metric {name}: {total} over {count} tokens"

    def test_it_reads_what_it_announced(self, tmp_path: Path) -> None:
        """`x.get` is asked for names of `needs`, and for nothing else."""
        needed = self.component.needed(self.config)
        more = self.result(tmp_path, self.microbatch()).asked - needed
        assert not more, f"{sorted(more)} are read, and `needs` gives {sorted(needed)}"

    def test_the_scope_is_the_one_of_the_trait(self, tmp_path: Path) -> None:
        """The output's scope is the trait `scope`, for which the driver made token weights; "policy" without one."""
        scope = self.result(tmp_path, self.microbatch()).output.scope
        trait = self.component.traits.get("scope", "policy")
        assert scope == trait, f'scope "{scope}", and the trait says "{trait}"'

    def test_metrics_can_be_merged(self, tmp_path: Path) -> None:
        """A metric is (sum, count, reduce), detached and finite; those of two microbatches add up to that of both. None is
        named "value", under which a trainer reports the weighted loss itself."""
        batch = self.microbatch()
        whole, first = metrics_of(self.result(tmp_path, batch).output), batch.seq_ids < FIRST_PART
        parts = [metrics_of(self.result(tmp_path, batch.part(chosen)).output) for chosen in (first, ~first)]
        assert "value" not in whole, 'the metric "value" is the weighted loss itself; call this one otherwise'
        for name, (total, count, reduce) in whole.items():
            assert reduce in ("mean", "sum", "max", "min") and np.isfinite(total), f"metric {name}: {total}, {reduce}"
            if reduce in ("mean", "sum"):
                got = [sum(p[name][i] for p in parts) for i in (0, 1)]
                np.testing.assert_allclose(got, (total, count), rtol=1e-4, atol=1e-6, err_msg=f"metric {name}")


def is_topk(name: str) -> bool:
    return name.startswith("topk:")


def metrics_of(output: LossOutput) -> dict[str, tuple[float, float, str]]:
    for name, metric in output.metrics.items():
        assert isinstance(metric, tuple) and len(metric) == 3, f"metric {name} is {metric!r}, not (sum, count, reduce)"
        attached = getattr(metric[0], "requires_grad", False) or np.any(getattr(metric[0], "slope", False))
        assert not attached, f"metric {name} keeps the graph alive; detach() it"
    return {name: (float(m[0]), float(m[1]), m[2]) for name, m in output.metrics.items()}


def on_toy_arrays(loss: Any, batch: Microbatch, asked: set[str]) -> Result:
    def get(name: str) -> ToyArray:
        asked.add(name)
        values = known(batch.columns, name)
        return ToyArray(values, np.ones(len(values)) if name == "logprobs" else None)

    arrays = {n: ToyArray(getattr(batch, n)) for n in ("mask", "advantages", "multiplier")}
    with np.errstate(all="ignore"):  # NaN is put into masked tokens on purpose
        output = loss(LossInputs(tokens=batch.seq_ids * 0, seq_ids=batch.seq_ids, seq=None, get=get, **arrays))
    assert isinstance(output.per_token, ToyArray), f"per_token is a {type(output.per_token).__name__}"
    slope = batch.weights * output.per_token.slope
    return Result(output.per_token.value, {"logprobs": slope} if "logprobs" in batch.columns else {}, output, asked)


def on_torch(loss: Any, batch: Microbatch, asked: set[str]) -> Result:
    from importlib import import_module

    torch = import_module("torch")  # by name: nothing in the core imports it
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in batch.columns.items()}
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if n in DIFFERENTIABLE or n.startswith(DIVERGENCES)}

    def get(name: str) -> Any:
        asked.add(name)
        return known(tensors, name)

    seq_ids, mask = torch.tensor(batch.seq_ids), torch.tensor(batch.mask)
    _, local = torch.unique(seq_ids, return_inverse=True)
    rows = {n: torch.tensor(getattr(batch, n), dtype=torch.float32) for n in ("advantages", "multiplier")}
    seq = Sequences(torch, local, mask)
    output = loss(LossInputs(tokens=torch.zeros_like(seq_ids), mask=mask, seq_ids=local, seq=seq, get=get, **rows))
    value = output.per_token
    assert isinstance(value, torch.Tensor), f"per_token is a {type(value).__name__}"
    weights = torch.tensor(batch.weights, dtype=torch.float32)
    gradients = dict.fromkeys(leaves)
    if value.requires_grad and value.shape == weights.shape:
        found = torch.autograd.grad((weights * value).sum(), [*leaves.values()], allow_unused=True)
        gradients = dict(zip(leaves, found, strict=True))
    plain = {n: np.zeros(len(batch.mask)) if g is None else g.numpy().astype(np.float64) for n, g in gradients.items()}
    return Result(value.detach().numpy().astype(np.float64), plain, output, asked)


def known(columns: Mapping[str, Any], name: str) -> Any:
    assert name in columns, f'the loss asks for "{name}", and `needs` gives {sorted(columns)}'
    return columns[name]


class Sequences:
    """`LossInputs.seq` on torch tensors: reductions over the masked tokens of each of S sequences."""

    def __init__(self, torch: Any, seq_ids: Any, mask: Any) -> None:
        self.torch, self.seq_ids, self.mask = torch, seq_ids, mask
        self.count = int(seq_ids.max()) + 1 if len(seq_ids) else 0

    def sum(self, values: Any) -> Any:
        kept = values.where(self.mask, values.new_zeros(()))
        return values.new_zeros(self.count).index_add(0, self.seq_ids, kept)

    def mean(self, values: Any) -> Any:
        return self.sum(values) / self.sum(self.torch.ones_like(values)).clamp(min=1)

    def broadcast(self, values: Any) -> Any:
        return values.index_select(0, self.seq_ids)
