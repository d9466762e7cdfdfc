"""What travels between the driver and its reward workers: JSON with arrays as raw bytes behind it, never a pickle.

A frame is two lengths, a JSON header and a body. `Sample.extras` do not travel: rewards see text, tokens and metadata.
Tuples inside labels and metadata arrive as lists, and their dictionaries must have string keys, as in any JSON.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from miles_core.errors import ContractError
from miles_core.types import Prompt, Sample, SampleGroup, Score, VersionSpan

_FRAME = struct.Struct("<IQ")
_ARRAY, _BYTES = "\0array", "\0bytes"
_NOT_SENT = {"scores", "extras", "prompt", "reward"}
_SAMPLE_FIELDS = tuple(f.name for f in fields(Sample) if f.name not in _NOT_SENT | {"versions"})
_PROMPT_FIELDS = tuple(f.name for f in fields(Prompt))

Kind = Literal["ok", "none", "error", "timeout"]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of scoring one sample. `traceback` is text: an exception object never leaves its process."""

    kind: Kind
    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    traceback: str = ""
    seconds: float = 0.0

    def to_json(self) -> list[Any]:
        return [self.kind, self.value, self.parts, self.reason, self.traceback, self.seconds]

    @classmethod
    def from_json(cls, row: list[Any]) -> Outcome:
        kind, value, parts, reason, traceback, seconds = row
        return cls(kind=kind, value=value, parts=parts, reason=reason, traceback=traceback, seconds=seconds)

    def score(self) -> Score:
        return Score(value=self.value, parts=self.parts, reason=self.reason, seconds=self.seconds)


def encode_group(group: SampleGroup, samples: list[Sample]) -> bytes:
    """`group` with `samples` in place of its own.

    Raises ContractError naming the group when a label or metadata holds something that JSON has no form for.
    """
    body = bytearray()

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != object:
            raw = np.ascontiguousarray(value)
            start = len(body)
            body.extend(raw.tobytes())
            return {_ARRAY: [raw.dtype.str, list(raw.shape), start]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, bytes):
            start = len(body)
            body.extend(value)
            return {_BYTES: [start, len(value)]}
        raise TypeError(f"a value of type {type(value).__qualname__}")

    tree = {
        "id": group.id,
        "num_samples": group.num_samples,
        "born_version": group.born_version,
        "order": group.order,
        "prompt": {name: getattr(group.prompt, name) for name in _PROMPT_FIELDS},
        "samples": [
            {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
            | {"versions": [(span.start, span.stop, span.version) for span in sample.versions]}
            for sample in samples
        ],
    }
    try:
        header = json.dumps(tree, default=pack).encode()
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"group {group.id} cannot be sent to a reward worker: {error} is not JSON",
            "labels and metadata of prompts and samples hold text, numbers, lists, dictionaries, bytes and numpy arrays",
        ) from None
    return _FRAME.pack(len(header), len(body)) + header + bytes(body)


def decode_group(data: bytes) -> SampleGroup:
    """The reverse of `encode_group`; every sample gets the group's prompt."""
    header_len, _ = _FRAME.unpack_from(data)
    body = memoryview(data)[_FRAME.size + header_len :]

    def unpack(node: dict[str, Any]) -> Any:
        if _ARRAY in node:
            dtype, shape, start = node[_ARRAY]
            count = int(np.prod(shape, dtype=np.int64))
            return np.frombuffer(body, dtype=dtype, count=count, offset=start).reshape(shape).copy()
        if _BYTES in node:
            start, length = node[_BYTES]
            return bytes(body[start : start + length])
        return node

    tree = json.loads(data[_FRAME.size : _FRAME.size + header_len], object_hook=unpack)
    prompt = Prompt(**tree["prompt"] | {"tools": tuple(tree["prompt"]["tools"]), "images": tuple(tree["prompt"]["images"])})
    samples = []
    for row in tree["samples"]:
        versions = tuple(VersionSpan(start=a, stop=b, version=v) for a, b, v in row.pop("versions"))
        samples.append(Sample(**row, versions=versions, prompt=prompt))
    return SampleGroup(
        id=tree["id"],
        prompt=prompt,
        samples=samples,
        num_samples=tree["num_samples"],
        born_version=tree["born_version"],
        order=tree["order"],
    )


def send_frame(sock: socket.socket, header: Any, body: bytes = b"") -> None:
    raw = json.dumps(header).encode()
    sock.sendall(_FRAME.pack(len(raw), len(body)) + raw + body)


def read_frame(sock: socket.socket) -> tuple[Any, bytes] | None:
    """One frame, or None when the other end is gone."""
    head = _read(sock, _FRAME.size)
    if head is None:
        return None
    header_len, body_len = _FRAME.unpack(head)
    data = _read(sock, header_len + body_len)
    return None if data is None else (json.loads(data[:header_len]), bytes(data[header_len:]))


def _read(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view, have = memoryview(data), 0
    while have < count:
        got = sock.recv_into(view[have:])
        if not got:
            return None
        have += got
    return bytes(data)
