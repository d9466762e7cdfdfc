"""Broken model sources, model specs, precision recipes and train extensions."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import RuntimeMissing
from miles_core.testing import fakes, suites
from miles_core.testing.broken import Shelf
from miles_core.types import Bucket

COUNTER = itertools.count()

SOURCE = Shelf(suites.Source, lambda cls: lambda config, context: cls(context.run_dir))


@SOURCE.breaks("test_it_gives_a_model_folder")
class WeightsAlone(fakes.FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        folder = super().fetch(reference, revision, report)
        (folder / "config.json").write_text("{}")
        return folder


@SOURCE.breaks("test_fetching_again_gives_the_same")
class FetchesEachTime(fakes.FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        folder = super().fetch(reference, revision, report)
        (folder / f"fetched-{next(COUNTER)}").touch()
        return folder


@SOURCE.breaks("test_two_runs_may_fetch_at_once")
class WritesInPlace(fakes.FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        folder = self.root / f"toy-{reference}"
        if not folder.is_dir():
            folder.mkdir()
            time.sleep(0.3)
            (folder / "config.json").write_text(json.dumps({"architectures": ["ToyPolicy"]}))
        return folder


@SOURCE.breaks("test_progress_is_reported")
class ReportsPercent(fakes.FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        return super().fetch(reference, revision, lambda phase, done, total: report(done / total))


@SOURCE.breaks("test_a_wrong_reference_is_refused")
class FileNotFound(fakes.FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        if not reference.isdigit():
            raise FileNotFoundError(reference)
        return super().fetch(reference, revision, report)


class Silent(fakes.FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        raise RuntimeMissing("connection refused")


SOURCE.add(
    "test_without_a_network_the_alternative_is_named",
    "says-only-what-failed",
    unreachable=lambda suite, folder: (Silent(folder), "3"),
)


MODEL = Shelf(suites.Model)


@MODEL.breaks("test_it_serves_architectures")
class ServesOthers(fakes.SplitHeads):
    architectures = ("LlamaForCausalLM",)


@MODEL.breaks("test_names_map_both_ways")
class OneWay(fakes.SplitHeads):
    def from_hf(self, name: str) -> tuple[str, ...]:
        return (name,)


@MODEL.breaks("test_names_map_both_ways")
class Collides(fakes.SplitHeads):
    def to_hf(self, name: str) -> tuple[str, ...]:
        return super().to_hf("layers.0.norm.weight" if name == "embed" else name)

    def from_hf(self, name: str) -> tuple[str, ...]:
        return (*super().from_hf(name), "embed")


PRECISION = Shelf(suites.Precision)


@PRECISION.breaks("test_options_are_mappings")
class KnowsOneBackend(fakes.AsIs):
    def trainer_options(self, backend: str) -> Mapping[str, Any]:
        return {"fsdp": {"dtype": "bfloat16"}}[backend]


@PRECISION.breaks("test_export_keeps_every_tensor")
class DropsNorms(fakes.AsIs):
    def export(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            yield replace(bucket, tensors=tuple(s for s in bucket.tensors if "norm" not in s.name))


@PRECISION.breaks("test_export_is_collective")
class StopsAtEmpty(fakes.AsIs):
    def export(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        yield from itertools.takewhile(lambda bucket: bucket.tensors, buckets)


@PRECISION.breaks("test_hashes_stay_true")
class OldHash(fakes.AsIs):
    def export(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in buckets:
            yield replace(bucket, data=np.zeros_like(bucket.data))


EXTENSION = Shelf(suites.Extension)


@EXTENSION.breaks("test_it_wraps_both_passes")
class Hook(fakes.Counting):
    def around_backward(self, microbatch: Any, context: Mapping[str, Any]) -> Any:
        self.passes += 1


@EXTENSION.breaks("test_errors_pass_through")
class Swallows(fakes.Counting):
    def around_forward(self, microbatch: Any, context: Mapping[str, Any]) -> AbstractContextManager[None]:
        return suppress(Exception)


@EXTENSION.breaks("test_passes_may_repeat")
class NotNested(fakes.Counting):
    inside = False

    @contextmanager
    def around_forward(self, microbatch: Any, context: Mapping[str, Any]) -> Iterator[None]:
        assert not self.inside, "already inside"
        yield

    def around_backward(self, microbatch: Any, context: Mapping[str, Any]) -> AbstractContextManager[None]:
        self.inside = True
        return nullcontext()
