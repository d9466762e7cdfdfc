"""Suites of the kinds metric and tracker."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.testing.contracts.base import ComponentContract, no_error
from miles_core.testing.contracts.judging import snapshots
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import Prompt, SampleGroup, Score, StepReport, TrainBatch

ODD_NUMBERS: Mapping[str, Any] = {
    "nan": float("nan"),
    "inf": -float("inf"),
    "numpy": np.float32(1.5),
    "integer": np.int64(7),
    "huge": 1e308,
    "a/b/c": 0,
    "ünïcode \u2028": 1.0,
}


def odd_groups() -> list[SampleGroup]:
    """No samples, no verdict, a failed sample, strange text, chat messages, labels of every type."""
    strange = [
        replace(make_sample(2, index=0, reward=None), response="\x00\x1b[2J\u202e \U0001f600"),
        make_sample(0, index=1, reward=float("nan"), status="error", reason="x" * 5000),
        replace(make_sample(2, index=2, reward=1.0), response="\ud800 a lone surrogate"),
        replace(make_sample(2, index=3, scores={"a": Score(value=None, reason="?")}), response="y" * 100_000),
    ]
    chat = make_group([0.0, 1.0], name="chat")
    chat.prompt = Prompt(id="chat", messages=[{"role": "user", "content": "\ud800"}], label={"a": {1, 2}}, tools=({},))
    return [group_of([], name="empty"), group_of(strange, name="strange/\\:*?"), chat, make_group([0.0], name="plain")]


class TrackerContract(ComponentContract):
    """A `Tracker`."""

    def test_odd_numbers_are_logged(self, tmp_path: Path) -> None:
        """NaN, infinity, numpy's numbers, no metrics at all, and a step that comes twice raise nothing."""
        made = self.build(tmp_path)
        for step, metrics in ((0, ODD_NUMBERS), (1, {}), (1, {"a": 1.0}), (10**12, {"a": 1.0})):
            with no_error(f"log({step}, {metrics})"):
                made.log(step, metrics)
        with no_error("close"):
            made.close()

    def test_odd_samples_are_shown(self, tmp_path: Path) -> None:
        """Groups without samples, failed ones, and text of every sort raise nothing."""
        made = self.build(tmp_path)
        with no_error("samples of no group"):
            made.samples(0, [])
        for step in range(4):
            for group in odd_groups():
                with no_error(f'samples of group "{group.prompt.id}"'):
                    made.samples(step, [group])
        with no_error("samples of all groups"):
            made.samples(4, odd_groups())
        made.close()

    def test_nothing_is_changed(self, tmp_path: Path) -> None:
        """A tracker reads: groups are trained after it has seen them."""
        made, groups, metrics = self.build(tmp_path), [make_group([0.0, 1.0])], {"a": 1.0}
        before = [snapshots(group) for group in groups]
        made.log(0, metrics)
        made.samples(0, groups)
        made.close()
        assert [snapshots(group) for group in groups] == before and metrics == {"a": 1.0}

    def test_close_may_be_called_twice(self, tmp_path: Path) -> None:
        """`close` is safe to call again, and on a tracker that logged nothing."""
        made = self.build(tmp_path)
        for _ in range(2):
            with no_error("close"):
                made.close()


class MetricContract(ComponentContract):
    """A `MetricFunction`."""

    def arguments(self, groups: list[SampleGroup]) -> tuple[list[SampleGroup], TrainBatch, list[StepReport]]:
        samples = [s for group in groups for s in group.samples]
        masks = [s.loss_mask for s in samples]
        report = StepReport(step=1, loss=0.5, grad_norm=1.0, lr=1e-3, tokens=sum(s.num_tokens for s in samples))
        return groups, TrainBatch(samples=samples, mask=masks, step=1), [report] if samples else []

    def compute(self, folder: Path, groups: list[SampleGroup]) -> Mapping[str, float]:
        with no_error(f"the metric of {len(groups)} groups"):
            return self.build(folder)(*self.arguments(groups))

    def test_values_are_numbers(self, tmp_path: Path) -> None:
        """A mapping from names to finite numbers; what cannot be computed is left out."""
        for groups in ([make_group([0.0, 1.0])], [make_group([None, None])], [group_of([])]):
            for name, value in self.compute(tmp_path, groups).items():
                assert isinstance(name, str) and isinstance(value, (int, float, np.number)), f"{name!r}: {value!r}"
                assert math.isfinite(value), f"{name} = {value}; leave it out instead"

    def test_an_empty_step_is_fine(self, tmp_path: Path) -> None:
        """A step that was skipped has no group, no sample and no report."""
        assert isinstance(self.compute(tmp_path, []), Mapping)

    def test_nothing_is_changed(self, tmp_path: Path) -> None:
        """A metric reads."""
        groups = [make_group([0.0, 1.0])]
        before = copy.deepcopy([snapshots(group) for group in groups])
        self.compute(tmp_path, groups)
        assert [snapshots(group) for group in groups] == before
