"""The ranks' end: the source of the broadcasts.

The group is formed as torch's own helper and SGLang around it form theirs, down to the prefixes under which peers look
for each other in the store; rank 0 is the trainer's source, engines follow.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from miles_core.errors import WeightSyncFailed
from miles_core.interfaces import WeightSender
from miles_core.types import Bucket, SendPlan, TensorSpec, WeightMessage

CHUNK = 1 << 24
"""Words that are summed at once: bounds the memory of a checksum."""


class BroadcastSender(WeightSender):
    """The source is the rank whose buckets have tensors; it must be the same one for a whole send. Options of the plan:
    group (a name), world_size, fresh (whether the group is to be formed), backend, host, checksum, timeout_s and
    join_timeout_s.
    Those limits must be shorter than the driver's for the same pull: a source that the driver has given up on blocks
    the next attempt.

    Yields, on the source: [join], then one "broadcast" per bucket; the pull after each performs what it announced. The
    other ranks yield None as often, so that all end together.
    """

    def __init__(self) -> None:
        self._name = ""
        self._group: Any = None
        self._limit = datetime.timedelta(0)

    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        self._limit = datetime.timedelta(seconds=plan.options["timeout_s"])
        bucket = next(buckets)
        source = bool(bucket.tensors)
        if plan.options["fresh"]:
            yield from self._form(plan, bucket) if source else (None,)
        elif source and self._name != plan.options["group"]:
            raise WeightSyncFailed(f"the source has left the group {plan.options['group']}")
        while bucket is not None:
            if bool(bucket.tensors) is not source:
                raise WeightSyncFailed(
                    f"bucket {bucket.index} comes from another rank than the first; a group has one source"
                )
            if not source:
                yield None
            else:
                tensors, flat = flatten(bucket)
                body = {"group": self._name, "nbytes": flat.numel()}
                sha = f"sum64:{checksum(flat)}" if plan.options["checksum"] else ""
                yield WeightMessage(
                    kind="broadcast", version=plan.version, bucket=bucket.index, tensors=tensors, sha=sha, body=body
                )
                self._broadcast(flat, bucket.index)
            bucket = next(buckets, None)

    def _form(self, plan: SendPlan, bucket: Bucket) -> Iterator[WeightMessage]:
        import torch.distributed as dist

        self.close()
        options = plan.options
        name, size, limit = options["group"], options["world_size"], datetime.timedelta(seconds=options["join_timeout_s"])
        nccl = options["backend"] == "nccl" or (options["backend"] == "auto" and getattr(bucket.data, "is_cuda", False))
        store = dist.TCPStore(options["host"], 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        body = {
            "host": options["host"],
            "port": store.port,
            "group": name,
            "world_size": size,
            "backend": "nccl" if nccl else "gloo",
        }
        yield WeightMessage(kind="join", version=plan.version, body=body)
        for prefix in (name, f"{name}/", "cuda/" if nccl else "cpu/"):
            store = dist.PrefixStore(prefix, store)
        try:
            self._group = make_group(store, size, limit, nccl)
        except Exception as error:
            raise WeightSyncFailed(f"group {name} did not form within {limit}: {error}") from error
        self._name = name

    def _broadcast(self, flat: Any, index: int) -> None:
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._limit
        try:
            self._group.broadcast([flat], options).wait()
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)  # the bucket's memory is used again
        except Exception as error:
            self.close()
            raise WeightSyncFailed(f"broadcast of bucket {index} failed: {error}") from error

    def close(self) -> None:
        """Leaves the group; whoever still waits in it is told by the closed connection."""
        group, self._group, self._name = self._group, None, ""
        if group is not None and hasattr(group, "abort"):
            group.abort()


def make_group(store: Any, size: int, limit: datetime.timedelta, nccl: bool) -> Any:
    """Rank 0 of a process group, which is not the process's default one."""
    import torch.distributed as dist

    if not nccl:
        return dist.ProcessGroupGloo(store, 0, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, 0, size, options)


def flatten(bucket: Bucket) -> tuple[tuple[TensorSpec, ...], Any]:
    """The bucket's tensors without gaps, as receivers lay them out, the widest data types first so that each is aligned."""
    import torch

    def size(spec: TensorSpec) -> int:
        return torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize

    order = sorted(bucket.tensors, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
    at, specs = 0, []
    for spec in order:
        specs.append(TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape, offset=at))
        at += size(spec)
    data = torch.as_tensor(bucket.data)
    if [spec.offset for spec in order] == [spec.offset for spec in specs] and data.numel() == at:
        return tuple(specs), data
    return tuple(specs), torch.cat([data[spec.offset : spec.offset + size(spec)] for spec in order])


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
