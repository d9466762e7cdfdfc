"""One update of an engine's weights: what may come, what has come, and what the server is told about a bucket.

SGLang answers success to tensors whose names it does not know, and keeps what it had. So names and shapes are compared
here with the safetensors headers of the folder that the server loaded, before anything is sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_core.errors import WeightSyncFailed
from miles_core.transport import SHM, SharedSegment, as_bytes, resolve
from miles_core.types import TensorSpec, WeightMessage

LISTED = 5
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OPTIONAL_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors of some checkpoints that engines compute themselves."""

Shapes = dict[str, tuple[int, ...]]


def safetensors_header(file: Path) -> Shapes:
    """Name -> shape of the tensors in a safetensors file. Raises WeightSyncFailed when it is none."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise WeightSyncFailed(f"{file} is no safetensors file: {error}") from error
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def folder_shapes(folder: Path) -> Shapes:
    """Name -> shape of every tensor in a folder's safetensors files; empty when it has none."""
    found: Shapes = {}
    for file in safetensors_files(folder):
        found |= safetensors_header(file)
    return found


def safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return sorted(folder.glob("*.safetensors"))


def expected_shapes(model: Path) -> Shapes:
    """What a whole update consists of: the tensors of the model's folder, without those that an engine computes, and
    without the head where it is tied to the embedding."""
    shapes = {n: s for n, s in folder_shapes(model).items() if not n.endswith(OPTIONAL_SUFFIXES)}
    if EMBEDDING in shapes and tied(model):
        shapes.pop(HEAD, None)
    return shapes


def tied(model: Path) -> bool:
    file = model / "config.json"
    return file.is_file() and bool(json.loads(file.read_text(encoding="utf-8")).get("tie_word_embeddings"))


class Update:
    """From "begin" to "commit". `expected` is empty where names are not compared."""

    def __init__(self, version: int, expected: Mapping[str, tuple[int, ...]], *, tied_head: bool) -> None:
        self.version, self._expected, self._tied = version, expected, tied_head
        self._seen: set[str] = set()

    def admit(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Notes that these come now. Raises WeightSyncFailed for an unknown or repeated name and for a wrong shape."""
        for name, shape in tensors:
            if name in self._seen:
                raise WeightSyncFailed(f"{name} came twice")
            self._seen.add(name)
            if not self._expected or name.endswith(OPTIONAL_SUFFIXES):
                continue
            want = self._expected.get(name)
            if want is None and name == HEAD and self._tied:
                want = self._expected[EMBEDDING]
            if want is None:
                known = ", ".join(sorted(self._expected)[:3])
                raise WeightSyncFailed(
                    f'the model that the server loaded has no tensor "{name}" (it has {known}, ...): it would be ignored'
                )
            if tuple(shape) != tuple(want):
                raise WeightSyncFailed(f"{name} came with shape {tuple(shape)}, and the model has {tuple(want)}")

    def finish(self) -> None:
        """Raises WeightSyncFailed naming what did not come."""
        missing = sorted(self._expected.keys() - self._seen)
        if missing:
            more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
            raise WeightSyncFailed(
                f"version {self.version} is incomplete: {len(missing)} of {len(self._expected)} tensors did not come: "
                f"{', '.join(missing[:LISTED])}{more}"
            )


class Mailbox:
    """Instructions to our loader inside the server (`serverside/miles_sglang_weights.py`), and its answers."""

    def __init__(self) -> None:
        self._made: tuple[Path, SharedSegment] | None = None
        self._count = 0

    def _place(self) -> tuple[Path, SharedSegment]:
        """A folder for answers and a segment for bytes, made when first needed."""
        if self._made is None:
            folder = Path(tempfile.mkdtemp(prefix="miles-sglang-", dir=SHM if SHM.is_dir() else None))
            self._made = folder, SharedSegment(f"{folder.name}-bucket")
        return self._made

    def load_order(self, message: WeightMessage) -> dict[str, Any]:
        """The instruction for an "ipc" message. Bytes that another process cannot see yet are copied into shared memory."""
        body = message.body
        order: dict[str, Any] = {
            "op": "load",
            "tensors": [_plain(spec) for spec in message.tensors],
            "nbytes": body.get("nbytes", 0),
            "sha": message.sha,
        }
        if "cuda" in body:
            return order | {"cuda": dict(body["cuda"])}
        if "shm" in body:
            return order | {"file": str(SHM / body["shm"])}
        raw = as_bytes(resolve(body))
        _, segment = self._place()
        segment.write(raw)
        return order | {"file": str(segment.path), "nbytes": raw.nbytes}

    def received_order(self, message: WeightMessage) -> dict[str, Any]:
        """The instruction for a "broadcast" message."""
        return {
            "op": "load",
            "tensors": [_plain(spec) for spec in message.tensors],
            "nbytes": message.body["nbytes"],
            "sha": message.sha,
            "group": message.body["group"],
            "timeout_s": message.timeout_s,
        }

    def address(self) -> str:
        """Where the answers to the next instruction go."""
        self._count += 1
        return str(self._place()[0] / f"answer-{self._count}")

    def answers(self, address: str, ranks: int) -> list[dict[str, Any]]:
        """What each rank wrote. Raises WeightSyncFailed for an error of one, or when one did not write."""
        result = Path(address)
        found = []
        for file in sorted(result.parent.glob(f"{result.name}.*")):
            if file.suffix[1:].isdigit():
                found.append(json.loads(file.read_text(encoding="utf-8")))
                file.unlink()
        errors = [answer["error"] for answer in found if not answer["ok"]]
        if errors:
            raise WeightSyncFailed(errors[0])
        if len(found) < ranks:
            raise WeightSyncFailed(f"{len(found)} of {ranks} ranks of the server took the bucket")
        return found

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made[1].close()
            shutil.rmtree(made[0], ignore_errors=True)


def _plain(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype, list(spec.shape), spec.offset]


def instruction(order: Mapping[str, Any]) -> str:
    """base64 of the pickle that SGLang's tensor update wants: one empty tensor whose name is the instruction. Written by
    hand, so that this process needs no torch."""
    text = json.dumps(order).encode()
    raw = b"\x80\x02]" + b"X" + struct.pack("<I", len(text)) + text + b"ctorch\nempty\nK\x00\x85R\x86a."
    return base64.b64encode(raw).decode()


def same_hash(answers: Iterable[Mapping[str, Any]]) -> str:
    """Ranks of one server hold different shards: one hash over theirs, in order."""
    hashes = sorted(str(answer["sha"]) for answer in answers)
    return hashes[0] if len(set(hashes)) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
