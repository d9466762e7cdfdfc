"""A rank's state on disk: weights, optimizers, random state, counters. Nothing is a pickle; ranks may change in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import RunFailed
from miles_fsdp_trainer import weights
from miles_fsdp_trainer.optim import MOMENTS
from miles_fsdp_trainer.roles import Role


def save(folder: Path, roles: Mapping[str, Role], steps: int, *, publish: bool) -> None:
    """Of every trained role `<role>.safetensors` and `<role>-optimizer.safetensors`; `rng.safetensors`, `trainer.json`."""
    state: dict[str, Any] = {"format": 2, "steps": steps, "optimizer_steps": {}, "unstepped": {}}
    for name, role in trained(roles).items():
        role.gather_nothing()
        weights.write(folder / f"{name}.safetensors", role.parameters.items(), publish=publish)
        moments = role.optimizer.moments()
        weights.write(folder / f"{name}-optimizer.safetensors", moments.items(), publish=publish)
        state["optimizer_steps"][name] = role.optimizer.step_count
        if role.optimizer.step_count:
            state["unstepped"][name] = [n for n in role.optimizer.named if f"{MOMENTS[0]}.{n}" not in moments]
    if publish:
        weights.write(folder / "rng.safetensors", [("cpu", torch.get_rng_state())], publish=True)
        (folder / "trainer.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def load(folder: Path, roles: Mapping[str, Role], *, weights_only: bool = False) -> int | None:
    """The reverse of `save`; the steps taken, or None with `weights_only`. Raises RunFailed that lists every missing or
    unexpected key, before anything has been changed."""
    owners = trained(roles)
    for role in owners.values():
        role.gather_nothing()
    staged = [
        (role.parameters, weights.read_into(folder / f"{name}.safetensors", role.parameters, f"weights of {name}"))
        for name, role in owners.items()
    ]
    state: dict[str, Any] = {} if weights_only else _read_state(folder, owners)
    restored = [(role.optimizer, *_read_moments(folder, role, state)) for role in owners.values() if not weights_only]
    generator = {"cpu": torch.get_rng_state()}
    if not weights_only:
        generator = weights.read_into(folder / "rng.safetensors", generator, "random state")
    with torch.no_grad():  # everything has been read and checked: from here on nothing can fail half way
        for own, loaded in staged:
            for name, parameter in own.items():
                parameter.copy_(loaded[name])
    for optimizer, moments, count in restored:
        optimizer.restore(moments, count)
    if weights_only:
        return None
    torch.set_rng_state(generator["cpu"])
    return state["steps"]


def trained(roles: Mapping[str, Role]) -> dict[str, Role]:
    return {name: role for name, role in roles.items() if role.optimizer is not None}


def _read_state(folder: Path, owners: Mapping[str, Role]) -> dict[str, Any]:
    file = folder / "trainer.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise RunFailed(f"checkpoint: trainer state is missing or damaged: {file}", str(error)) from error
    if missing := owners.keys() - state.get("optimizer_steps", {}).keys():
        raise RunFailed(f"checkpoint: {file} has no optimizer state of {', '.join(sorted(missing))}")
    return state


def _read_moments(folder: Path, role: Role, state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    count = state["optimizer_steps"][role.name]
    unstepped = set(state.get("unstepped", {}).get(role.name, ()))
    targets = {
        f"{moment}.{name}": p
        for name, p in role.optimizer.named.items()
        if count and name not in unstepped
        for moment in MOMENTS
    }
    file = folder / f"{role.name}-optimizer.safetensors"
    return weights.read_into(file, targets, f"optimizer state of {role.name}"), count
