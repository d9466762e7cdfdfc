"""Weights and moments on their way out and in, under Hugging Face names: buckets for engines, checkpoints, folders.

Everything leaves through rank 0, one parameter at a time: joined over tensor ranks on the stage that owns it, then sent to
rank 0. That makes a checkpoint independent of the layout. All of it is collective over the ranks of the first data-parallel
and context rank; the others only follow the same list.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles_core.errors import ConfigError, RunFailed
from miles_core.types import Bucket, TensorSpec
from miles_fsdp_trainer.weights import ALIGNMENT
from miles_megatron_trainer import names
from miles_megatron_trainer.names import Weight

FILE_BYTES = 4 << 30
"""Most bytes that rank 0 holds of a checkpoint at a time, and that one file has, unless a single tensor is larger."""

Take = Callable[[Weight], torch.Tensor]
"""This rank's part of a parameter, or of what belongs to it (a moment)."""


def whole(weight: Weight, take: Take, dtype: torch.dtype, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """(name, full tensor) on rank 0 and nothing elsewhere. `take` is called on every rank of the stage that owns it, also
    of other data-parallel ranks, since it may be collective among them."""
    stage, tp = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    own = take(weight).detach().contiguous() if weight.stage == stage else None
    if mpu.get_data_parallel_rank(with_context_parallel=True) != 0:
        return []
    tensors: list[torch.Tensor] = []
    if own is not None:
        shards = [own]
        if weight.kind != "copy" and tp > 1:
            shards = [torch.empty_like(own) for _ in range(tp)]
            dist.all_gather(shards, own, group=mpu.get_tensor_model_parallel_group())
        if mpu.get_tensor_model_parallel_rank() == 0:
            tensors = [t.to(dtype).contiguous() for t in names.join(weight, shards)]
    if weight.stage != 0 and mpu.get_tensor_model_parallel_rank() == 0:
        group = mpu.get_pipeline_model_parallel_group()
        if stage == weight.stage:
            for tensor in tensors:
                dist.send(tensor, group=group, group_dst=0)
        elif stage == 0:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for _, shape in weight.hf]
            for tensor in tensors:
                dist.recv(tensor, group=group, group_src=weight.stage)
    if dist.get_rank() != 0:
        return []
    return [(name, tensor) for (name, _), tensor in zip(weight.hf, tensors, strict=True)]


def _flat(tensors: list[tuple[str, torch.Tensor]], index: int) -> Bucket:
    specs, size = [], 0
    for name, tensor in tensors:
        offset = -(-size // ALIGNMENT) * ALIGNMENT
        kind = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=kind, shape=tuple(tensor.shape), offset=offset))
        size = offset + tensor.nbytes
    data = torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device)
    for spec, (_, tensor) in zip(specs, tensors, strict=True):
        data[spec.offset : spec.offset + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return Bucket(index=index, tensors=tuple(specs), data=data, nbytes=size)


def cuts(plan: Iterable[Weight], bucket_bytes: int, item: int) -> list[list[tuple[Weight, list[str]]]]:
    """Which tensors go into which bucket: of each bucket the parameters with the names that it takes of them. Known to all
    ranks beforehand. A tensor larger than a bucket has one of its own."""
    buckets: list[list[tuple[Weight, list[str]]]] = [[]]
    size = 0
    for weight in plan:
        for name, shape in weight.hf:
            numel = item
            for side in shape:
                numel *= side
            offset = -(-size // ALIGNMENT) * ALIGNMENT
            if buckets[-1] and offset + numel > bucket_bytes:
                buckets.append([])
                offset = 0
            if not buckets[-1] or buckets[-1][-1][0] is not weight:
                buckets[-1].append((weight, []))
            buckets[-1][-1][1].append(name)
            size = offset + numel
    return buckets


def buckets(plan: Iterable[Weight], gather: Callable[[Weight], Any], bucket_bytes: int, item: int) -> Iterator[Bucket]:
    """The model as buckets from rank 0, and as many empty ones from the others. A parameter that is cut between two buckets
    is gathered once and kept."""
    last: Weight | None = None
    tensors: dict[str, torch.Tensor] = {}
    for index, content in enumerate(cuts(plan, bucket_bytes, item)):
        held = []
        for weight, wanted in content:
            if weight is not last:
                last, tensors = weight, dict(gather(weight))
            held += [(name, tensors[name]) for name in wanted if name in tensors]
        yield _flat(held, index) if held else Bucket(index=index, tensors=(), data=None)


# --- files -----------------------------------------------------------------------------------------------------------


def write(folder: Path, stem: str, tensors: Iterable[tuple[str, torch.Tensor]], publish: bool) -> dict[str, str]:
    """Writes files of at most `FILE_BYTES` on the publishing rank; {tensor name: file}. Every rank exhausts `tensors`."""
    index: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    size, number = 0, 0

    def flush() -> None:
        nonlocal held, size, number
        number += 1
        file = f"{stem}-{number:05d}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(held, file))
        held, size = {}, 0

    for name, tensor in tensors:
        if not publish:
            continue
        if held and size + tensor.nbytes > FILE_BYTES:
            flush()
        held[name] = tensor.contiguous().cpu()
        size += tensor.nbytes
    if held:
        flush()
    return index


class Source:
    """Tensors of some safetensors files by name, read one at a time."""

    def __init__(self, folder: Path, files: Iterable[str], what: str) -> None:
        self.folder, self.what = folder, what
        self.where: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(files)):
            if not (folder / file).is_file():
                raise RunFailed(f"{what} is missing: no file {folder / file}")
            try:
                with safe_open(folder / file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        self.where[name] = file
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
            except SafetensorError as error:
                raise RunFailed(f"{what}: {folder / file} is damaged", str(error)) from error

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Raises RunFailed that lists every missing, unexpected and misshapen tensor."""
        problems = [f"missing: {n}" for n in sorted(wanted.keys() - self.shapes.keys())]
        problems += [f"unexpected: {n}" for n in sorted(self.shapes.keys() - wanted.keys())]
        for name in sorted(wanted.keys() & self.shapes.keys()):
            if self.shapes[name] != tuple(wanted[name]):
                problems.append(f"shape of {name}: {self.shapes[name]} in the file, {tuple(wanted[name])} in the model")
        if problems:
            raise RunFailed(f"{self.what} in {self.folder} does not fit", *problems)

    def get(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.where[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def part(self, weight: Weight, prefix: str = "") -> torch.Tensor:
        """This tensor rank's part of a parameter."""
        tensors = [self.get(prefix + name) for name, _ in weight.hf]
        tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        return names.shard(weight, tensors, tp, rank)


def hf_source(folder: Path, plan: Iterable[Weight], where: str, tied: bool) -> Source:
    """The tensors of a Hugging Face folder, checked against the plan. Raises ConfigError that starts with `where`."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    try:
        source = Source(folder, files, "the model")
        for name in [n for n in source.shapes if n.endswith("rotary_emb.inv_freq") or (tied and n == "lm_head.weight")]:
            del source.shapes[name]
        source.check({name: shape for weight in plan for name, shape in weight.hf})
    except RunFailed as error:
        raise ConfigError(f"{where}: {folder} does not load", *str(error).splitlines()) from error
    return source


def write_hf_folder(
    folder: Path, origin: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, publish: bool
) -> None:
    """A Hugging Face folder with the configuration of `origin`: safetensors, config and generation config."""
    if publish:
        folder.mkdir(parents=True, exist_ok=True)
    files = write(folder, "model", tensors, publish)
    if not publish:
        return
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if (origin / "generation_config.json").is_file():
        shutil.copyfile(origin / "generation_config.json", folder / "generation_config.json")
    if len(set(files.values())) == 1:
        (folder / next(iter(files.values()))).rename(folder / "model.safetensors")
        return
    total = sum((folder / file).stat().st_size for file in set(files.values()))
    content = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
