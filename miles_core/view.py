"""What the loop tells whoever watches. The command line shows it live; this base class ignores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.types import SampleGroup


class RunView:
    """All methods are called on the driver's event loop and must return at once."""

    def started(self, info: Mapping[str, Any]) -> None:
        """`info`: name, run_dir, steps, first_step, plugins (list of "name version"), components (kind -> names),
        parameters of the batch (groups_per_step, samples_per_group), resumed (bool)."""

    def phase(self, name: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """A phase began or moved on: "fetch model", "load trainer", "start engines", "rollout", "train", "sync",
        "evaluate", "save". `total` 0 means unknown."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (1-based) has ended with these metrics."""

    def evaluated(self, name: str, step: int, metrics: Mapping[str, float], groups: Sequence[SampleGroup]) -> None: ...

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """The groups that were trained in this step."""

    def note(self, text: str, level: str = "info") -> None:
        """One line for people: level "info", "warning" or "error"."""

    def ended(self, reason: str, summary: Mapping[str, Any]) -> None:
        """reason: "done", "failed", "interrupted", "already complete". Summary: run_dir, model_dir,
        seconds, steps, started (groups), dropped (rows of reason, rewards of the group, number)."""
