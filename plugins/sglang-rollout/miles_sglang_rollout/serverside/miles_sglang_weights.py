"""Runs inside SGLang's scheduler processes as a custom weight loader: reads a bucket from shared memory or from another
process's device memory, hashes it as it arrived, and hands its tensors to the model.

SGLang calls `load(model, named_tensors)` on every rank of `/update_weights_from_tensor` with this function as load
format. The instruction stands as JSON in the name of the first (empty) tensor:

    {"op": "load", "result": PATH, "tensors": [[name, dtype, shape, offset], ...], "nbytes": N, "sha": TEXT,
     "file": PATH | "cuda": {...} | "group": NAME}
    {"op": "join", "result": PATH, "group", "host", "port", "rank", "world_size", "backend", "timeout_s"}
    {"op": "leave", "result": PATH, "group"}   {"op": "hash", "result": PATH}

An exception here would end the server, so none leaves: each rank writes {"ok", "error", "sha"} to "<result>.<pid>".
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

CHUNK = 1 << 24
"""Elements that are summed at once: bounds the memory of a checksum."""


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader."""
    order = json.loads(named_tensors[0][0])
    try:
        sha = OPERATIONS[order["op"]](model, order)
        answer = {"ok": True, "error": "", "sha": sha}
    except Exception as error:
        answer = {"ok": False, "error": f"{type(error).__name__}: {error}", "sha": ""}
    work = f"{order['result']}.tmp{os.getpid()}"
    with open(work, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(work, f"{order['result']}.{os.getpid()}")


def _load(model: Any, order: dict[str, Any]) -> str:
    if "file" in order:
        flat = _open_file(order)
    elif "cuda" in order:
        flat = _open_device(order["cuda"], order["nbytes"])
    else:
        flat = _receive(order, next(model.parameters()).device)
    sha = _hash(flat, order["sha"])
    if sha != order["sha"]:
        raise ValueError(f"the bucket was sent as {order['sha'][:19]} and arrived as {sha[:19]}")
    model.load_weights([(name, _view(flat, dtype, shape, offset)) for name, dtype, shape, offset in order["tensors"]])
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)  # the sender reuses the memory as soon as we have answered
    return sha


def _state(model: Any, order: dict[str, Any]) -> str:
    """A checksum of every parameter of this rank, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name}:{checksum(tensor)};".encode())
    return digest.hexdigest()


_groups: dict[str, Any] = {}
"""Process groups for weights that this rank is in."""


def _join(model: Any, order: dict[str, Any]) -> str:
    """Enters a group under the prefixes that torch's own helper and SGLang around it would use."""
    limit = datetime.timedelta(seconds=order["timeout_s"])
    nccl = order["backend"] == "nccl"
    name, rank, size = order["group"], order["rank"] + _own_rank(), order["world_size"]
    store = dist.TCPStore(order["host"], order["port"], size, is_master=False, timeout=limit)
    for prefix in (name, f"{name}/", "cuda/" if nccl else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        _groups[name] = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        _groups[name] = dist.ProcessGroupGloo(store, rank, size, limit)
    return ""


def _own_rank() -> int:
    """Of this process among those of its server."""
    from sglang.srt.distributed import parallel_state as state

    return state.get_pp_group().rank_in_group * state.get_tp_group().world_size + state.get_tp_group().rank_in_group


def _leave(model: Any, order: dict[str, Any]) -> str:
    group = _groups.pop(order["group"], None)
    if group is not None and hasattr(group, "abort"):
        group.abort()
    return ""


def _receive(order: dict[str, Any], device: torch.device) -> torch.Tensor:
    if order["group"] not in _groups:
        raise ValueError(f"this rank is not in the group {order['group']}")
    flat = torch.empty(order["nbytes"], dtype=torch.uint8, device=device)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = datetime.timedelta(seconds=order["timeout_s"])
    _groups[order["group"]].broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(device)
    return flat


OPERATIONS = {"load": _load, "hash": _state, "join": _join, "leave": _leave}


def _open_file(order: dict[str, Any]) -> torch.Tensor:
    with open(order["file"], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants to be able to write
    if len(mapped) < order["nbytes"]:
        raise ValueError(f"{order['file']} has {len(mapped)} bytes, and the bucket has {order['nbytes']}")
    return torch.from_numpy(np.frombuffer(mapped, np.uint8, count=order["nbytes"]))


def _open_device(handle: dict[str, Any], nbytes: int) -> torch.Tensor:
    """uint8[nbytes] on the sender's device, which this process sees under a number of its own."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = _device_of(handle["uuid"])
    torch.cuda.init()
    flat = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([handle["size"]]),
        (1,),
        handle["tensor_offset"],
        torch.UntypedStorage,
        torch.uint8,
        device,
        base64.b64decode(handle["handle"]),
        handle["storage_bytes"],
        handle["storage_offset"],
        False,
        base64.b64decode(handle["ref_handle"]),
        handle["ref_offset"],
        base64.b64decode(handle["event"]),
        handle["event_sync"],
    )
    return flat[:nbytes]


def _device_of(uuid: str) -> int:
    known = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in known:
        raise ValueError(f"the bucket lies on the GPU {uuid}, and this server sees {', '.join(known)}")
    return known.index(uuid)


def _view(flat: torch.Tensor, dtype: str, shape: Iterable[int], offset: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    shape = torch.Size(shape)
    part = flat[offset : offset + shape.numel() * kind.itemsize]
    if part.data_ptr() % kind.itemsize:
        part = part.clone()
    return part.view(kind).reshape(shape)


def _hash(flat: torch.Tensor, like: str) -> str:
    """A hash of the same kind as `like`: "sum64:..." is computed where the bytes are, all else is SHA-256."""
    if not like:
        return ""
    if like.startswith("sum64:"):
        return f"sum64:{checksum(flat)}"
    return hashlib.sha256(flat.cpu().numpy()).hexdigest()


def checksum(tensor: torch.Tensor) -> str:
    """Two sums over a tensor's bytes as 32-bit words, modulo 2**64: of the words, and of the words times their place.
    Any changed word changes the first; words that change places change the second."""
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
