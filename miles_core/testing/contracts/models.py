"""Suites of the kinds source, and (provisional) model, precision, extension."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import MilesError, RuntimeMissing
from miles_core.testing.contracts.base import ComponentContract, no_error, refused
from miles_core.transport import as_bytes
from miles_core.types import Bucket, TensorSpec


class SourceContract(ComponentContract):
    """A `ModelSource`. Set `reference` (something small that needs no network) and `wrong_reference`."""

    reference: str = ""
    """What is fetched; the rules about fetching are skipped without one."""
    revision: str | None = None
    wrong_reference: str = ":no such thing:"
    """What names no model."""

    def unreachable(self, folder: Path) -> tuple[Any, str] | None:
        """(source, reference) that would need a network which is not there, or None where none is ever needed."""
        return None

    def fetched(self, folder: Path) -> Path:
        if not self.reference:
            pytest.skip("no `reference` was given")
        with no_error(f"fetching {self.reference}"):
            return self.build(folder).fetch(self.reference, self.revision, lambda phase, done, total: None)

    def test_it_gives_a_model_folder(self, tmp_path: Path) -> None:
        """An existing folder whose config.json names an architecture."""
        folder = self.fetched(tmp_path)
        assert isinstance(folder, Path) and (folder / "config.json").is_file(), f"{folder} has no config.json"
        config = json.loads((folder / "config.json").read_text("utf-8"))
        assert config.get("architectures"), f"{folder / 'config.json'} names no architecture"

    def test_fetching_again_gives_the_same(self, tmp_path: Path) -> None:
        """It is idempotent: the same folder, with the same files."""
        first = self.fetched(tmp_path)
        files = {p.name: p.stat().st_mtime_ns for p in first.iterdir()}
        assert self.fetched(tmp_path) == first
        assert {p.name: p.stat().st_mtime_ns for p in first.iterdir()} == files, (
            "fetched again, the files are written again"
        )

    def test_two_runs_may_fetch_at_once(self, tmp_path: Path) -> None:
        """Both get a whole folder."""
        if not self.reference:
            pytest.skip("no `reference` was given")
        results: list[Any] = []

        def fetch() -> None:
            try:
                folder = self.build(tmp_path).fetch(self.reference, self.revision, lambda *_: None)
                results.append(json.loads((folder / "config.json").read_text("utf-8")))
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=fetch, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout_s)
        assert len(results) == 3 and all(isinstance(r, dict) for r in results), results

    def test_progress_is_reported(self, tmp_path: Path) -> None:
        """`report(phase, done_bytes, total_bytes)` gets a text and two numbers that are not negative."""
        if not self.reference:
            pytest.skip("no `reference` was given")
        calls: list[tuple[Any, ...]] = []
        self.build(tmp_path).fetch(self.reference, self.revision, lambda *call: calls.append(call))
        odd = [c for c in calls if not (len(c) == 3 and isinstance(c[0], str) and c[0] and min(c[1:]) >= 0)]
        assert not odd, f"report was called with {odd}"

    def test_a_wrong_reference_is_refused(self, tmp_path: Path) -> None:
        """What names no model is refused with a MilesError that repeats it."""
        with refused(MilesError, f"fetching {self.wrong_reference}") as caught:
            self.build(tmp_path).fetch(self.wrong_reference, None, lambda *_: None)
        assert self.wrong_reference in str(caught[0]), f"{self.wrong_reference!r} is not named: {caught[0]}"

    def test_without_a_network_the_alternative_is_named(self, tmp_path: Path) -> None:
        """RuntimeMissing that says that a local folder would do (it names `model.path`)."""
        if (offline := self.unreachable(tmp_path)) is None:
            pytest.skip("this source needs no network (unreachable gives None)")
        source, reference = offline
        with refused(RuntimeMissing, "fetching without a network") as caught:
            source.fetch(reference, None, lambda *_: None)
        assert "model" in str(caught[0]) and "path" in str(caught[0]), f"no alternative is named: {caught[0]}"


class ModelContract(ComponentContract):
    """A `ModelSpec` (provisional). Set `names`: some parameter names of the training backend."""

    names: tuple[str, ...] = ()

    def test_it_serves_architectures(self, tmp_path: Path) -> None:
        """`architectures` is a tuple of names as config.json has them, the same as the trait by which it is found."""
        listed = self.build(tmp_path).architectures
        assert isinstance(listed, tuple) and listed and all(isinstance(a, str) and a for a in listed), repr(listed)
        assert set(self.component.traits.get("architectures", ())) == set(listed), "the trait `architectures` differs"

    def test_names_map_both_ways(self, tmp_path: Path) -> None:
        """What a name becomes on Hugging Face's side leads back to it, and no two names to the same."""
        spec = self.build(tmp_path)
        assert self.names, "set `names`"
        for name in self.names:
            there = spec.to_hf(name)
            assert isinstance(there, tuple) and there, f"to_hf({name!r}) gave {there!r}"
            back = {n for other in there for n in spec.from_hf(other)}
            assert name in back, f"{name} becomes {there}, which becomes {sorted(back)}"
        owners = [other for name in self.names for other in spec.to_hf(name)]
        assert len(set(owners)) == len(owners), f"two names become the same: {owners}"


class PrecisionContract(ComponentContract):
    """A `PrecisionRecipe` (provisional)."""

    backends: tuple[str, ...] = ("fsdp",)
    engines: tuple[str, ...] = ("torch",)

    def buckets(self) -> Iterator[Bucket]:
        for index in range(2):
            values = {f"layer.{index}.weight": np.ones((4, 8), np.float32), f"layer.{index}.norm": np.ones(8, np.float32)}
            data = np.concatenate([v.reshape(-1).view(np.uint8) for v in values.values()])
            starts = np.cumsum([0, *(v.nbytes for v in values.values())])
            specs = [
                TensorSpec(name=n, dtype="float32", shape=v.shape, offset=int(at))
                for (n, v), at in zip(values.items(), starts, strict=False)
            ]
            sha = hashlib.sha256(data).hexdigest()
            yield Bucket(index=index, tensors=tuple(specs), data=data, sha=sha, nbytes=data.nbytes)

    def test_options_are_mappings(self, tmp_path: Path) -> None:
        """Options for each backend and engine are a mapping with names as keys; an unknown one gets nothing special."""
        recipe = self.build(tmp_path)
        pairs = [(recipe.trainer_options, n) for n in (*self.backends, "unknown")]
        for function, name in [*pairs, *((recipe.engine_options, n) for n in (*self.engines, "unknown"))]:
            with no_error(f"{function.__name__}({name!r})"):
                options = function(name)
            assert isinstance(options, Mapping) and all(isinstance(k, str) for k in options), f"{options!r}"

    def test_export_keeps_every_tensor(self, tmp_path: Path) -> None:
        """Every Hugging Face name that goes in comes out, once; further ones (scales) may come with it."""
        wanted = {spec.name for bucket in self.buckets() for spec in bucket.tensors}
        names = [spec.name for bucket in self.build(tmp_path).export(self.buckets()) for spec in bucket.tensors]
        assert len(set(names)) == len(names), f"twice: {sorted(n for n in names if names.count(n) > 1)}"
        assert wanted <= set(names), f"lost: {sorted(wanted - set(names))}"

    def test_export_is_collective(self, tmp_path: Path) -> None:
        """It takes every bucket, one at a time, also those without tensors of a rank that publishes nothing."""
        taken = []

        def silent() -> Iterator[Bucket]:
            for bucket in self.buckets():
                taken.append(bucket.index)
                yield Bucket(index=bucket.index, tensors=(), data=None)

        with no_error("export of buckets without tensors"):
            for _ in self.build(tmp_path).export(silent()):
                pass
        assert taken == [0, 1], f"of two buckets it took {taken}"

    def test_hashes_stay_true(self, tmp_path: Path) -> None:
        """A bucket whose bytes it changed has their hash, or none."""
        for bucket in self.build(tmp_path).export(self.buckets()):
            assert bucket.sha in ("", hashlib.sha256(as_bytes(bucket.data)).hexdigest()), "the hash of other bytes"


class ExtensionContract(ComponentContract):
    """A `TrainExtension` (provisional). Override `trainer` and `microbatch` with what it needs of them."""

    place: Mapping[str, Any] = {"role": "policy", "pp_rank": 0, "model_chunk": 0, "microbatch_id": 0, "recompute": False}

    def trainer(self) -> Any:
        """What `setup` is given."""
        return None

    def microbatch(self) -> Any:
        return None

    def around(self, folder: Path) -> list[tuple[str, AbstractContextManager[None]]]:
        made = self.build(folder)
        with no_error("setup"):
            made.setup(self.trainer())
        names = ("around_forward", "around_backward")
        return [(name, getattr(made, name)(self.microbatch(), self.place)) for name in names]

    def test_it_wraps_both_passes(self, tmp_path: Path) -> None:
        """`around_forward` and `around_backward` give context managers that open and close."""
        for name, manager in self.around(tmp_path):
            with no_error(name):
                assert hasattr(manager, "__enter__"), f"{name} gave a {type(manager).__name__}"
                with manager:
                    pass

    def test_errors_pass_through(self, tmp_path: Path) -> None:
        """What a pass raises is not swallowed."""
        for name, manager in self.around(tmp_path):
            with refused(ZeroDivisionError, f"an error inside {name}"), manager:
                raise ZeroDivisionError

    def test_passes_may_repeat(self, tmp_path: Path) -> None:
        """Two microbatches in a row, and a recomputed forward pass inside a backward pass."""
        made = self.build(tmp_path)
        made.setup(self.trainer())
        with no_error("two microbatches, the second recomputed"):
            for number in range(2):
                place = {**self.place, "microbatch_id": number}
                with made.around_forward(self.microbatch(), place):
                    pass
                with (
                    made.around_backward(self.microbatch(), place),
                    made.around_forward(self.microbatch(), {**place, "recompute": True}),
                ):
                    pass
