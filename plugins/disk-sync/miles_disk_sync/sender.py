"""The ranks' end: every bucket becomes a safetensors file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from miles_core.interfaces import WeightSender
from miles_core.transport import as_bytes
from miles_core.types import Bucket, SendPlan, TensorSpec, WeightMessage

DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int64": ("I64", 8),
    "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip
"""torch's name of a data type -> safetensors' name and bytes."""


class DiskSender(WeightSender):
    """Options of the plan: {"folder"}, into which files are written. Each file is announced to the driver when it is
    complete, with its size: {"file", "nbytes"}; engines hear of the folder alone."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        folder = Path(plan.options["folder"])
        for bucket in buckets:
            if not bucket.tensors:
                yield None
                continue
            file = folder / f"bucket-{bucket.index:05d}-of-rank-{self.rank}.safetensors"
            write_safetensors(file, bucket.tensors, as_bytes(bucket.data))
            body = {"file": file.name, "nbytes": bucket.nbytes or as_bytes(bucket.data).nbytes}
            yield WeightMessage(kind="path", version=plan.version, bucket=bucket.index, tensors=bucket.tensors, body=body)


def write_safetensors(file: Path, tensors: tuple[TensorSpec, ...], data: np.ndarray) -> None:
    """Writes tensors that lie in uint8 `data`, without the gaps between them, and forces them to the disk: another machine
    may read them next. Raises OSError; a file that is there is complete."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    parts = []
    for spec in tensors:
        name, size = DTYPES[spec.dtype]
        nbytes = math.prod(spec.shape) * size
        header[spec.name] = {"dtype": name, "shape": list(spec.shape), "data_offsets": [at, at + nbytes]}
        parts.append(data[spec.offset : spec.offset + nbytes])
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    work = file.with_suffix(".tmp")
    with work.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
    work.replace(file)
