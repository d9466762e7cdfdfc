"""Weights and optimizer state on their way out and in: buckets for engines, checkpoints, Hugging Face folders.

Everything that gathers is collective under FSDP: every rank goes through the same parameters in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from miles_core.errors import RunFailed
from miles_core.types import Bucket, TensorSpec

ALIGNMENT = 64
"""Bytes; each tensor of a bucket starts at a multiple, so that a receiver may view it in place."""


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank; a collective if it is sharded, the tensor itself if not."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid out on device and ranks like `target`; no communication."""
    tensor = tensor.to(device=target.device, dtype=target.dtype)
    if not isinstance(target, DTensor):
        return tensor
    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)


def hf_tensors(lm: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) as a Hugging Face checkpoint has them: tied weights once, under their first name, and fused
    expert weights taken apart again."""
    persistent = set(lm.state_dict())
    parameters: Iterable[tuple[str, torch.Tensor]] = lm.named_parameters()
    buffers = ((name, b) for name, b in lm.named_buffers() if name in persistent)
    for source in (parameters, buffers):
        for name, tensor in source:
            whole = full(tensor)
            if dtype is not None and whole.is_floating_point():
                whole = whole.to(dtype)
            yield from sorted(revert_weight_conversion(lm, {name: whole}).items())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def buckets(lm: Any, bucket_bytes: int, dtype: torch.dtype | None, *, publish: bool) -> Iterator[Bucket]:
    """The policy as flat uint8 buckets of at most `bucket_bytes` (a larger tensor has one of its own).

    One buffer serves all buckets: the data of a bucket is valid until the next one is asked for. Ranks that do not
    `publish` take part in every gather and yield the same buckets without tensors.
    """
    held: list[tuple[str, torch.Tensor, int]] = []
    size, index = 0, 0
    buffer: torch.Tensor | None = None

    def emit() -> Bucket:
        nonlocal buffer
        if not publish:
            return Bucket(index=index, tensors=(), data=None)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(
                max(size, min(bucket_bytes, _total_bytes(lm))), dtype=torch.uint8, device=held[0][1].device
            )
        specs = []
        for name, tensor, offset in held:
            specs.append(TensorSpec(name=name, dtype=_dtype_name(tensor.dtype), shape=tuple(tensor.shape), offset=offset))
            target = buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
            target.copy_(tensor.reshape(-1))
        return Bucket(index=index, tensors=tuple(specs), data=buffer[:size], nbytes=size)

    for name, tensor in hf_tensors(lm, dtype):
        offset = -(-size // ALIGNMENT) * ALIGNMENT
        if held and offset + tensor.nbytes > bucket_bytes:
            yield emit()
            held, index, offset = [], index + 1, 0
        held.append((name, tensor if publish else tensor[:0] if tensor.dim() else tensor, offset))
        size = offset + tensor.nbytes
    if held:
        yield emit()


def _total_bytes(lm: nn.Module) -> int:
    return sum(p.numel() * p.element_size() + ALIGNMENT for p in lm.parameters())


def hash_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and bytes in name order."""
    digests = {
        name: hashlib.sha256(t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()).digest()
        for name, t in tensors
    }
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(name.encode() + b"\0" + digests[name])
    return total.hexdigest()


def write(file: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, publish: bool) -> None:
    """Whole tensors into one safetensors file; every rank gathers, `publish` ranks keep and write."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        whole = full(tensor)
        if publish:
            kept[name] = whole.contiguous().cpu()
    if publish:
        save_file(kept, file, metadata={"format": "pt"})


def read_into(file: Path, targets: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, laid out like `targets`. Raises RunFailed that lists every missing, unexpected or misshapen
    key, before anything has been changed."""
    if not file.is_file():
        raise RunFailed(f"checkpoint: {what} is missing: no file {file}")
    try:
        with safe_open(file, framework="pt") as source:
            names = set(source.keys())
            problems = [f"missing: {n}" for n in sorted(targets.keys() - names)]
            problems += [f"unexpected: {n}" for n in sorted(names - targets.keys())]
            for name in sorted(names & targets.keys()):
                shape = tuple(source.get_slice(name).get_shape())
                if shape != tuple(targets[name].shape):
                    problems.append(f"shape of {name}: {shape} in the file, {tuple(targets[name].shape)} in the model")
            if problems:
                raise RunFailed(f"checkpoint: {what} in {file} does not fit", *problems)
            return {name: like(source.get_tensor(name), target) for name, target in targets.items()}
    except SafetensorError as error:
        raise RunFailed(f"checkpoint: {file} is damaged", str(error)) from error


def write_hf_folder(lm: Any, folder: Path, dtype: torch.dtype, *, publish: bool, shard_bytes: int = 5 << 30) -> None:
    """A Hugging Face folder: safetensors (sharded above `shard_bytes`), config and generation config, no tokenizer."""
    files: list[dict[str, torch.Tensor]] = [{}]
    total, size = 0, 0
    for name, tensor in hf_tensors(lm, dtype):
        total += tensor.nbytes
        if not publish:
            continue
        if size and size + tensor.nbytes > shard_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor.contiguous().cpu()
        size += tensor.nbytes
    if not publish:
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = type(lm.config).from_dict(lm.config.to_dict())
    config.dtype, config.architectures = dtype, [type(lm).__name__]
    config.save_pretrained(folder)
    if getattr(lm, "generation_config", None) is not None:
        lm.generation_config.save_pretrained(folder)
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
