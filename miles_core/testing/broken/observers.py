"""Broken trackers, metrics and fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.interfaces import Tracker
from miles_core.testing import fakes, suites
from miles_core.testing.broken import Shelf
from miles_core.types import SampleGroup

TRACKER = Shelf(suites.JsonlTracker, lambda cls: lambda config, context: cls(context.run_dir))


class Notes(Tracker):
    """A good tracker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.note({name: repr(value) for name, value in metrics.items()})

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        self.note([s.response[:100] for group in groups for s in group.samples])

    def note(self, what: Any) -> None:
        with open(self.folder / "notes", "a") as file:
            file.write(json.dumps(what, allow_nan=False) + "\n")


@TRACKER.breaks("test_odd_numbers_are_logged")
class RefusesNan(Notes):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.note({name: float(value) for name, value in metrics.items()})


@TRACKER.breaks("test_odd_samples_are_shown")
class ShowsTheFirst(Notes):
    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        self.note([group.samples[0].response for group in groups])


@TRACKER.breaks("test_odd_samples_are_shown")
class WritesUtf8(Notes):
    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        for group in groups:
            for sample in group.samples:
                (self.folder / "samples").write_text(sample.response, encoding="utf-8")


@TRACKER.breaks("test_nothing_is_changed")
class ShortensInPlace(Notes):
    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        for group in groups:
            del group.samples[1:]


@TRACKER.breaks("test_close_may_be_called_twice")
class ClosesItsFile(Notes):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = None

    def close(self) -> None:
        self.file.close()


METRIC = Shelf(suites.Metric, lambda function: lambda config, context: function)


@METRIC.breaks("test_values_are_numbers")
def mean_reward(groups: list[SampleGroup], batch: Any, reports: Any) -> Mapping[str, float]:
    rewards = [s.reward for group in groups for s in group.samples if s.reward is not None]
    return {"mean": float(np.sum(rewards)) / len(rewards) if rewards else float("nan")}


@METRIC.breaks("test_an_empty_step_is_fine")
def last_loss(groups: list[SampleGroup], batch: Any, reports: Any) -> Mapping[str, float]:
    return {"loss": reports[-1].loss}


@METRIC.breaks("test_nothing_is_changed")
def sorts(groups: list[SampleGroup], batch: Any, reports: Any) -> Mapping[str, float]:
    for group in groups:
        group.samples.sort(key=lambda s: -(s.reward or 0.0))
    return fakes.lengths(groups, batch, reports)


FIELD = Shelf(suites.Field)


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": replace(fakes.EXPERTS, **fields)}


FIELD.add("test_it_is_named", "spaces", **spec(name="Routed Experts"))
FIELD.add("test_it_is_named", "one-axis-twice", **spec(axes=("layer", "layer")))
FIELD.add("test_the_data_type_exists", "unknown", **spec(dtype="bfloat17"))
FIELD.add("test_the_data_type_exists", "objects", **spec(dtype="object"))
FIELD.add("test_missing_values_can_be_treated", "fill-without-number", **spec(missing="fill"))
FIELD.add("test_its_values_fit", "one-axis-too-few", value=lambda suite, n: np.zeros((n - 1, 3), np.int16))
FIELD.add("test_a_wrong_length_is_refused", "one-length-for-all", value=lambda suite, n: np.zeros((4, 3, 3), np.int16))
FIELD.add("test_it_can_be_cut_and_packed", "a-row-per-token", value=lambda suite, n: np.zeros((n, 3, 3), np.int16))
