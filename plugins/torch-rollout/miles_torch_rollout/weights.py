"""New weights for a running model: begin, data, commit. Every name, shape and data type is checked, and a version is served
only when all parameters have come."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_core.errors import WeightSyncFailed
from miles_core.types import TensorSpec, WeightMessage

PER_EXPERT = frozenset({"qwen2_moe", "qwen3_moe"})
"""Model types whose checkpoints name each expert, while transformers keeps all experts of a layer in one parameter."""

LISTED = 8
"""Names listed in one error."""


@dataclass(slots=True, eq=False)
class Target:
    """Where a tensor of a given name goes: a parameter, or a part of it."""

    parameter: str
    tensor: torch.Tensor


class WeightUpdate:
    """One update of a model in place, from "begin" to "commit"; until then the model is a mixture."""

    def __init__(self, model: Any, version: int) -> None:
        self.version = version
        self._targets, self._sizes = _targets(model)
        self._written: dict[str, int] = {}  # elements per parameter
        self._names: set[str] = set()

    def write(self, spec: TensorSpec, data: torch.Tensor) -> None:
        """Copies uint8 `data` into the parameter that `spec` names. A second name of a tied parameter must bring the
        same values."""
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncFailed(f'{spec.name} has the unknown data type "{spec.dtype}"')
        self.write_tensor(spec.name, _view(data, spec, dtype))

    def write_tensor(self, name: str, value: torch.Tensor) -> None:
        target = self._targets.get(name)
        if target is None:
            known = ", ".join(sorted(self._targets)[:3])
            raise WeightSyncFailed(f'the model has no parameter "{name}" (it has {known}, ...)')
        own = target.tensor
        if tuple(value.shape) != tuple(own.shape):
            raise WeightSyncFailed(f"{name} came with shape {tuple(value.shape)}, and the model has {tuple(own.shape)}")
        if value.dtype != own.dtype and not (value.dtype == torch.float32 and own.is_floating_point()):
            raise WeightSyncFailed(f"{name} came as {value.dtype}, and the model holds {own.dtype}")
        if name in self._names:
            raise WeightSyncFailed(f"{name} came twice")
        self._names.add(name)
        if self._written.get(target.parameter, 0) >= self._sizes[target.parameter]:
            if not torch.equal(own, value.to(own.device, own.dtype)):
                raise WeightSyncFailed(f"{name} is tied to {target.parameter}, but they came with different values")
            return
        own.copy_(value)
        self._written[target.parameter] = self._written.get(target.parameter, 0) + own.numel()

    def read_folder(self, folder: Path) -> None:
        """All tensors of a folder's safetensors files."""
        from safetensors import SafetensorError, safe_open

        try:
            for path in _safetensors_files(folder):
                with safe_open(path, framework="pt") as file:
                    for name in list(file.keys()):
                        self.write_tensor(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise WeightSyncFailed(f"cannot read weights from {folder}: {error}") from error

    def finish(self) -> None:
        """Raises WeightSyncFailed naming the parameters that did not come, or came in part."""
        missing = sorted(name for name, size in self._sizes.items() if self._written.get(name, 0) < size)
        if missing:
            more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
            raise WeightSyncFailed(
                f"version {self.version} is incomplete: {len(missing)} of {len(self._sizes)} parameters did not come: "
                f"{', '.join(missing[:LISTED])}{more}"
            )


def open_data(message: WeightMessage, device: torch.device) -> tuple[torch.Tensor, str]:
    """A bucket's bytes as a uint8 tensor, and their SHA-256 as received: "" for a handle whose sender did not hash, since
    no byte moved. Raises WeightSyncFailed when they are not what the sender hashed."""
    from miles_core.transport import hash_bytes, resolve

    data = resolve(message.body)
    sha = hash_bytes(data) if message.sha or "handle" not in message.body else ""
    if message.sha and sha != message.sha:
        raise WeightSyncFailed(f"bucket {message.bucket} was sent as SHA-256 {message.sha[:12]} and arrived as {sha[:12]}")
    if isinstance(data, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mapping is read-only, and it is only read
            data = torch.from_numpy(data)
    return data.reshape(-1).view(torch.uint8), sha


def state_hash(model: Any) -> str:
    """SHA-256 over the bytes of all parameters, in the order of their names; a tied parameter counts once."""
    digest = hashlib.sha256()
    for _, tensor in sorted(_unique(model).items()):
        digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _targets(model: Any) -> tuple[dict[str, Target], dict[str, int]]:
    """Name -> target, and elements per parameter (under the first of its names)."""
    state = model.state_dict(keep_vars=True)
    unique = _unique(model)
    first = {id(tensor): name for name, tensor in unique.items()}
    targets = {name: Target(first[id(tensor)], tensor.data) for name, tensor in state.items()}
    if model.config.model_type in PER_EXPERT:
        for name, tensor in unique.items():
            targets.update((part, Target(name, view)) for part, view in _experts(name, tensor.data))
    return targets, {name: tensor.numel() for name, tensor in unique.items()}


def _unique(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer once, under the first of its names."""
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not (id(tensor) in seen or seen.add(id(tensor)))}


def _experts(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """The names that a checkpoint uses for the parts of a fused expert parameter [experts, out, in]."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts"):
        return
    for index, expert in enumerate(tensor):
        if kind == "gate_up_proj":
            gate, up = expert.chunk(2)
            yield f"{stem}.{index}.gate_proj.weight", gate
            yield f"{stem}.{index}.up_proj.weight", up
        elif kind == "down_proj":
            yield f"{stem}.{index}.down_proj.weight", expert


def _view(data: torch.Tensor, spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    nbytes = int(np.prod(spec.shape)) * dtype.itemsize
    if spec.offset < 0 or spec.offset + nbytes > data.numel():
        raise WeightSyncFailed(f"{spec.name} lies outside its bucket of {data.numel()} bytes")
    part = data[spec.offset : spec.offset + nbytes]
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()  # a view under another data type needs an aligned start
    return part.view(dtype).reshape(spec.shape)


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncFailed(f"there are no safetensors files in {folder}")
    return files
