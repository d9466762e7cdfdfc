"""The ranks' end: a bucket in device memory becomes a handle that another process on the same device can open."""

from __future__ import annotations

import base64
import gc
from collections.abc import Iterator
from typing import Any

from miles_core.transport import DirectSender
from miles_core.types import Bucket, SendPlan, WeightMessage

CHUNK = 1 << 24
"""Words that are summed at once: bounds the memory of a checksum."""


class IpcSender(DirectSender):
    """For buckets in device memory, {"cuda": handle}; for others what the transport `direct` sends. Options of the plan as
    there, and {"device": whether an engine takes device handles, "checksum": bool}."""

    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        first = next(buckets, None)
        if first is None:
            return
        buckets = _chain(first, buckets)
        if not (plan.options.get("device") and getattr(first.data, "is_cuda", False)):
            yield from super().send(plan, buckets)
            return
        for bucket in buckets:
            if not bucket.tensors:
                yield None
                continue
            sha = f"sum64:{checksum(bucket.data)}" if plan.options.get("checksum", True) else ""
            body = {"cuda": device_handle(bucket.data), "nbytes": bucket.data.numel()}
            yield WeightMessage(
                kind="ipc", version=plan.version, bucket=bucket.index, tensors=bucket.tensors, sha=sha, body=body
            )
        gc.collect()  # what engines have let go of is freed here


def _chain(first: Bucket, rest: Iterator[Bucket]) -> Iterator[Bucket]:
    yield first
    yield from rest


def device_handle(data: Any) -> dict[str, Any]:
    """A JSON-compatible handle of a flat uint8 tensor in device memory. The bytes must be there for good when it is given
    out: the other process opens the memory on a stream of its own."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize(data.device)
    _, args = reduce_tensor(data)
    (_, size, _, tensor_offset, _, _, device, handle, storage_bytes, storage_offset, _, *shared) = args
    ref_handle, ref_offset, event, event_sync = shared
    return {
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "size": int(size[0]),
        "tensor_offset": tensor_offset,
        "handle": base64.b64encode(handle).decode(),
        "storage_bytes": storage_bytes,
        "storage_offset": storage_offset,
        "ref_handle": base64.b64encode(ref_handle).decode(),
        "ref_offset": ref_offset,
        "event": base64.b64encode(event).decode(),
        "event_sync": event_sync,
    }


def checksum(tensor: Any) -> str:
    """Two sums over a tensor's bytes as 32-bit words, modulo 2**64: of the words, and of the words times their place.
    Computed where the bytes are; receivers compute the same ("sum64:" in `WeightMessage.sha`)."""
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.data_ptr() % 4 or raw.storage_offset() % 4:
        raw = raw.clone()
    rest = raw.numel() % 4
    words = raw[: raw.numel() - rest].view(torch.int32) if raw.numel() else raw.to(torch.int32)
    plain, placed = 0, 0
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=part.device, dtype=torch.int64)
        plain += int(part.sum())
        placed += int((part * place).sum())
    tail = int.from_bytes(bytes(raw[raw.numel() - rest :].cpu().tolist()), "little")
    return f"{plain % 2**64:016x}{placed % 2**64:016x}{tail:06x}"
