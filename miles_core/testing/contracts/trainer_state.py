"""The part of the trainer suite about weights: files, exports, hashes. And its settings and helpers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.builtin.losses import policy_gradient
from miles_core.component import BuildContext
from miles_core.errors import MilesError
from miles_core.testing.contracts.base import ComponentContract, refused
from miles_core.testing.samples import make_sample
from miles_core.transport import as_bytes
from miles_core.types import Sample, TensorSpec, TrainBatch

NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1}
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""How a pickle begins, and a zip file, in which torch.save hides one."""


class TrainerState(ComponentContract):
    """Settings, helpers, and the rules about weights; see `TrainerContract`."""

    vocab_size: int = 0
    microbatch_options: Mapping[str, Any] | None = None
    """Options that split `batch()` into several microbatches."""
    bucket_bytes: int = 4096
    """A bucket size that splits the export into several buckets."""

    # --- Helpers ---

    def make_context(self, folder: Path, **fields: Any) -> BuildContext:
        losses = [("contract", policy_gradient)]
        chosen = {
            "select": lambda kind: losses if kind == "loss" else [],
            "needs": frozenset({"logprobs"}),
            "role": "policy",
        }
        return super().make_context(folder, **(chosen | fields))

    def started(self, folder: Path, **fields: Any) -> Any:
        rank = self.build(folder, **fields)
        rank.start()
        return rank

    def batch(self, seed: int = 0) -> TrainBatch:
        """Two groups of three samples with different lengths, masks and advantages; token-mean weights."""
        assert self.vocab_size > 1, "set `vocab_size`"
        rng = np.random.default_rng(seed)
        samples = [self._sample(rng, group, index) for group in ("a@0", "b@0") for index in range(3)]
        masks = [s.loss_mask.copy() for s in samples]
        total = sum(int(m.sum()) for m in masks)
        columns = {
            "advantages": [np.where(m, rng.normal(), 0).astype(np.float32) for m in masks],
            "rollout_logprobs": [s.logprobs for s in samples],
            "old_logprobs": [s.logprobs for s in samples],
        }
        weights = [(m / total).astype(np.float32) for m in masks]
        return TrainBatch(samples=samples, columns=columns, token_weights={"policy": weights}, mask=masks, step=3)

    def _sample(self, rng: np.random.Generator, group: str, index: int) -> Sample:
        size = int(rng.integers(3, 8))
        mask = [1, *rng.integers(0, 2, size - 1)]
        made = make_sample(size, prompt_len=4, mask=mask, group=group, index=index)
        made.tokens[4:] = rng.integers(0, self.vocab_size, size)
        made.tokens[:4] = np.random.default_rng(ord(group[0])).integers(0, self.vocab_size, 4)  # siblings share the prompt
        return made

    def logprobs(self, rank: Any, batch: TrainBatch) -> list[np.ndarray]:
        return rank.forward(batch, "policy", frozenset({"logprobs"}))["logprobs"]

    def exported(self, rank: Any) -> dict[str, tuple[TensorSpec, bytes]]:
        """Name -> (spec, bytes) of everything that is published."""
        found = {}
        for bucket in rank.export("hf_full", self.bucket_bytes):
            data = as_bytes(bucket.data) if bucket.tensors else b""
            for spec in bucket.tensors:
                assert spec.name not in found, f"{spec.name} is exported twice"
                found[spec.name] = (spec, bytes(data[spec.offset : spec.offset + nbytes(spec)]))
        return found

    def hash(self, rank: Any) -> str:
        """What tells whether a weight moved: the rank's own hash, or that of its export where it has none."""
        if own := rank.state_hash():
            return own
        digest = hashlib.sha256()
        for name, (_, data) in sorted(self.exported(rank).items()):
            digest.update(name.encode() + data)
        return digest.hexdigest()

    # --- Rules ---

    def test_export_is_well_formed(self, tmp_path: Path) -> None:
        """Each tensor lies inside its bucket, without overlap; hashes are those of the bytes; a bucket exceeds
        `bucket_bytes` only for a single tensor."""
        indices = []
        for bucket in self.started(tmp_path).export("hf_full", self.bucket_bytes):
            if not bucket.tensors:
                continue
            data, end = as_bytes(bucket.data), 0
            indices.append(bucket.index)
            for spec in bucket.tensors:
                assert spec.offset >= end, f"{spec.name} overlaps with the one before it"
                end = spec.offset + nbytes(spec)
            assert end <= data.nbytes == bucket.nbytes, (
                f"{end} bytes of tensors, {data.nbytes} of data, {bucket.nbytes} said"
            )
            assert bucket.sha in ("", hashlib.sha256(data).hexdigest()), f"bucket {bucket.index} has another hash"
            assert len(bucket.tensors) == 1 or bucket.nbytes <= self.bucket_bytes, f"{bucket.nbytes} bytes in a bucket"
        assert indices == list(range(len(indices))), f"buckets are numbered {indices}"

    def test_export_has_the_same_names_each_time(self, tmp_path: Path) -> None:
        """Names, shapes and data types do not change from one push to the next; the bytes do, with a step."""
        rank = self.started(tmp_path)
        first = self.exported(rank)
        rank.step(self.batch())
        second = self.exported(rank)
        kinds = [{n: (s.shape, s.dtype) for n, (s, _) in export.items()} for export in (first, second)]
        assert first and kinds[0] == kinds[1]
        assert any(first[n][1] != second[n][1] for n in first), "a step changed nothing in the export"

    def test_export_changes_nothing(self, tmp_path: Path) -> None:
        """An export, also one given up half-way, leaves weights and optimizer alone; the next one is complete."""
        plain, rank = self.started(tmp_path), self.started(tmp_path)
        whole = self.exported(rank)
        stream = iter(rank.export("hf_full", self.bucket_bytes))
        next(stream)
        stream.close()
        assert self.exported(rank) == whole
        for one in (plain, rank):
            one.step(self.batch())
        assert self.hash(plain) == self.hash(rank)

    def test_export_is_what_save_model_writes(self, tmp_path: Path) -> None:
        """Every tensor of the Hugging Face folder is exported under the same name, with the same bytes."""
        rank = self._saved_model(tmp_path)
        exported, written = self.exported(rank), read_safetensors(tmp_path / "model")
        assert written, "save_model wrote no safetensors"
        for name, (dtype, shape, data) in written.items():
            assert name in exported, f"{name} is in the folder and not in the export"
            spec, raw = exported[name]
            assert tuple(spec.shape) == shape and len(raw) == len(data), (
                f"{name}: {spec} is exported, {dtype}{shape} written"
            )
            assert raw == data, f"{name}: other bytes are exported than written"

    def test_a_saved_model_is_the_same_policy(self, tmp_path: Path) -> None:
        """A trainer that starts from the folder of `save_model` has the same weights."""
        rank = self._saved_model(tmp_path)
        assert self.hash(self.started(tmp_path, model_path=tmp_path / "model")) == self.hash(rank)

    def _saved_model(self, folder: Path) -> Any:
        rank = self.started(folder)
        rank.step(self.batch())
        (folder / "model").mkdir()
        try:
            rank.save_model(folder / "model")
        except NotImplementedError:
            pytest.skip("this trainer writes no Hugging Face folder")
        return rank

    def test_save_and_load_continue_bit_for_bit(self, tmp_path: Path) -> None:
        """What is loaded goes on exactly: after the same next step, the weights are equal bit for bit (case C5)."""
        rank, other = self._saved(tmp_path), self.started(tmp_path, seed=5)
        other.load(tmp_path / "state")
        assert self.hash(other) == self.hash(rank), "load does not bring back the weights"
        reports = [one.step(self.batch(seed=1)) for one in (rank, other)]
        assert reports[0].lr == reports[1].lr, "load does not bring back the schedule"
        assert self.hash(rank) == self.hash(other), "load does not bring back the optimizer"

    def test_weights_alone_can_be_loaded(self, tmp_path: Path) -> None:
        """`load(weights_only=True)` brings the weights and leaves the optimizer as it starts."""
        rank, other = self._saved(tmp_path), self.started(tmp_path)
        other.load(tmp_path / "state", weights_only=True)
        assert self.hash(other) == self.hash(rank)

    def test_files_are_no_pickles(self, tmp_path: Path) -> None:
        """No file of `save` is a pickle: loading one runs whatever code is in it."""
        self._saved(tmp_path)
        files = [p for p in (tmp_path / "state").rglob("*") if p.is_file()]
        assert files, "save wrote nothing"
        for file in files:
            with file.open("rb") as stream:
                head = stream.read(4)
            assert not head.startswith(PICKLES), f"{file.name} is a pickle"

    def test_an_incomplete_save_is_refused(self, tmp_path: Path) -> None:
        """A folder in which any one of its files is missing is refused with a MilesError, not loaded in part."""
        self._saved(tmp_path)
        files = sorted(p.relative_to(tmp_path / "state") for p in (tmp_path / "state").rglob("*") if p.is_file())
        for number, file in enumerate(files):
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(tmp_path / "state", copy)
            (copy / file).unlink()
            with refused(MilesError, f"loading a folder without {file}"):
                self.started(tmp_path).load(copy)

    def _saved(self, folder: Path) -> Any:
        """A rank after two steps, saved in "state"."""
        rank = self.started(folder)
        for seed in (0, 4):
            rank.step(self.batch(seed=seed))
        (folder / "state").mkdir()
        rank.save(folder / "state")
        return rank

    def test_the_hash_changes_with_the_weights(self, tmp_path: Path) -> None:
        """`state_hash` is the same as long as no weight moves, and another after a step; or it is "" always."""
        rank = self.started(tmp_path)
        if not rank.state_hash():
            pytest.skip("this trainer gives no hash")
        before = [rank.state_hash(), rank.state_hash()]
        rank.step(self.batch())
        assert before[0] == before[1] != rank.state_hash(), f"hash {before[0]!r} before and after a step"


def nbytes(spec: TensorSpec) -> int:
    assert spec.dtype in NBYTES, f"{spec.name} has the unknown data type {spec.dtype}"
    return int(np.prod(spec.shape, dtype=np.int64)) * NBYTES[spec.dtype]


def read_safetensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype, shape, bytes) of all tensors in a folder, read without any library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[start + first : start + last])
    return found
