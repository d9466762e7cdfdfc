"""What a plugin registers: a `Component`, its options, and what it is given when it is built."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from miles_core.fields import FieldSpec
from miles_core.types import Metric, Reduce

T = TypeVar("T")

Requires = tuple[Any, ...]
"""Capabilities that must all be provided; a nested tuple is a choice: ("role/reference", ("engine/a", "engine/b"))."""

KINDS = (
    "data", "sampler", "tokenizer", "engine", "rollout", "reward", "filter", "correction", "advantage", "loss",
    "trainer", "model", "source", "precision", "transport", "extension", "launcher", "metric", "tracker", "field",
)  # fmt: skip
"""Every kind of component, as it is written in config and in `<kind>/<name>`."""


class ComponentConfig(BaseModel):
    """Base of a component's options: unknown keys, wrong types, NaN and infinity are refused, nothing is converted
    silently. Sequences are tuples, and every option has a docstring (the contract suite checks both)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


class NoOptions(ComponentConfig):
    """For a component that has no options."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Environment:
    """What `Component.check` may look at, in the process where the component will run."""

    run_dir: Path | None = None
    model_path: Path | None = None
    python: str = ""
    where: str = ""
    """Location of the component's table in the user's config, to start error messages with."""
    run_config: Any = None
    """The whole resolved `RunConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component(Generic[T]):
    """One named piece that a run may select.

    `build(config, context)` does the heavy imports and is called only when the component is selected. `needs(config)`
    names the columns it reads, so that the loop computes the union once. `parts` holds further builders with the same
    signature for pieces that live elsewhere: `{"sender": ...}` of a transport is built inside every trainer rank.
    """

    name: str
    summary: str
    build: Callable[[Any, BuildContext], T]
    config: type[ComponentConfig] = NoOptions
    provides: frozenset[str] | Callable[[Any], frozenset[str]] = frozenset()
    requires: Requires | Callable[[Any], Requires] = ()
    needs: Callable[[Any], frozenset[str]] | None = None
    secrets: tuple[str, ...] = ()
    traits: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any, Environment], None] | None = None
    parts: Mapping[str, Callable[[Any, BuildContext], Any]] = field(default_factory=dict)

    def provided(self, config: Any) -> frozenset[str]:
        return self.provides(config) if callable(self.provides) else self.provides

    def required(self, config: Any) -> Requires:
        return self.requires(config) if callable(self.requires) else self.requires

    def needed(self, config: Any) -> frozenset[str]:
        return self.needs(config) if self.needs is not None else frozenset()


@dataclass(slots=True, kw_only=True)
class BuildContext:
    """What a component is given when it is built. It exists on the driver and, rebuilt from config, in every worker."""

    component: str
    """"<kind>/<name>" of the component being built."""
    run_dir: Path
    seed: int
    run_config: Any
    """The resolved `RunConfig` of the whole run."""
    model_path: Path | None = None
    """The model as a local folder; `[model] path` has been fetched and converted by now."""
    tokenizer: Any = None
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Only those that the component declared."""
    role: str = "driver"
    """"driver", "engine", "policy", "reference", "critic", ..."""
    index: int = 0
    """Index of an engine replica, or rank of a trainer worker."""
    world_size: int = 1
    rendezvous: str = ""
    """Where the ranks of this role meet, as torch.distributed's `init_method`: "file:///path" or "tcp://host:port";
    empty when there is one rank."""
    device: str = "auto"
    needs: frozenset[str] = frozenset()
    """Union of the columns that the selected advantages, corrections and losses read."""
    loss_needs: frozenset[str] | None = None
    """Those that losses read alone: what a trainer computes in its training pass. None: not told apart."""
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    """Declared side channels by name: a trainer rank packs by these what a loss asks of `LossInputs.get`."""
    select: Callable[[str], Sequence[Any]] | None = None
    """`select(kind)` builds the selected components of another kind in this process, as (name, object) pairs; a trainer
    rank gets its losses, extensions and model spec this way."""
    metrics: dict[str, Metric] = field(default_factory=dict)

    @property
    def rng(self) -> np.random.Generator:
        """A generator of this component's own: the same for the same run seed, whatever else is selected."""
        return np.random.default_rng([self.seed, zlib.crc32(self.component.encode()), self.index])

    @property
    def logger(self) -> logging.Logger:
        return logging.getLogger("miles." + self.component.replace("/", "."))

    def metric(self, name: str, value: float, reduce: Reduce = "mean") -> None:
        """Adds to a metric, merged over ranks and logged as `<kind>/<name>/<metric>`."""
        key = f"{self.component}/{name}"
        self.metrics[key] = merge_metric(self.metrics.get(key), (float(value), 1.0, reduce))


def merge_metric(old: Metric | None, new: Metric) -> Metric:
    """The sum of two (sum, count, reduce) triples; for max and min, the extremum."""
    if old is None:
        return new
    if new[2] == "max":
        return (max(old[0], new[0]), old[1] + new[1], "max")
    if new[2] == "min":
        return (min(old[0], new[0]), old[1] + new[1], "min")
    return (old[0] + new[0], old[1] + new[1], new[2])


def metric_value(metric: Metric) -> float | None:
    """The number to log, or None when nothing was counted: a metric is finite or absent, never NaN."""
    total, count, reduce = metric
    if count == 0:
        return None
    return total / count if reduce == "mean" else total
