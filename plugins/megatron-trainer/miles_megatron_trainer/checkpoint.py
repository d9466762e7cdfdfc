"""The trainer's state on disk under Hugging Face names, so that any layout of ranks loads it. Nothing is a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_core.errors import RunFailed
from miles_megatron_trainer import weights
from miles_megatron_trainer.names import Weight
from miles_megatron_trainer.optim import MOMENTS


def save(folder: Path, role: Any, device: torch.device) -> None:
    """`policy-*.safetensors`, `policy-optimizer-*.safetensors` (moments as "exp_avg.<tensor>"), `rng.safetensors`,
    `trainer.json`, which names them all. Collective; rank 0 writes."""
    publish = dist.get_rank() == 0
    files = set(weights.write(folder, "policy", _gathered(role, ("weights",), device), publish).values())
    if role.optimizer.step_count:
        files |= set(weights.write(folder, "policy-optimizer", _gathered(role, MOMENTS, device), publish).values())
    if not publish:
        return
    weights.write(folder, "rng", [("cpu", torch.get_rng_state())], publish=True)
    state = {"format": 1, "optimizer_steps": role.optimizer.step_count, "files": sorted(files)}
    (folder / "trainer.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def _gathered(role: Any, kinds: Sequence[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for weight in role.plan:
        for kind in kinds:
            take = lambda w, kind=kind: role.optimizer.tensor(role.parameters[w.name], kind)  # noqa: E731
            for name, tensor in weights.whole(weight, take, torch.float32, device):
                yield name if kind == "weights" else f"{kind}.{name}", tensor


def load(folder: Path, role: Any, own: list[Weight], *, weights_only: bool) -> None:
    """The reverse of `save`; every rank reads its own part. Raises RunFailed that lists every missing or unexpected key,
    before anything has been changed."""
    state = _read_state(folder)
    shapes = {name: shape for weight in role.plan for name, shape in weight.hf}
    model = weights.Source(folder, [f for f in state["files"] if "-optimizer-" not in f], "checkpoint: weights of policy")
    model.check(shapes)
    count, moments, generator = state["optimizer_steps"], None, None
    if not weights_only:
        generator = weights.Source(folder, ["rng-00001.safetensors"], "checkpoint: random state").get("cpu")
        names = [f for f in state["files"] if "-optimizer-" in f]
        moments = weights.Source(folder, names, "checkpoint: optimizer state of policy")
        moments.check({f"{m}.{n}": s for m in MOMENTS for n, s in shapes.items()} if count else {})
    for weight in own:
        role.optimizer.set_weights(role.parameters[weight.name], model.part(weight))
    if moments is None:
        return
    role.optimizer.restore_count(count)
    for weight in own:
        found = {m: moments.part(weight, f"{m}.") for m in MOMENTS} if count else {}
        role.optimizer.set_moments(role.parameters[weight.name], found)
    torch.set_rng_state(generator)


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / "trainer.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise RunFailed(f"checkpoint: trainer state is missing or damaged: {file}", str(error)) from error
    if missing := {"files", "optimizer_steps"} - state.keys():
        raise RunFailed(f"checkpoint: {file} has no {', '.join(sorted(missing))}")
    return state
