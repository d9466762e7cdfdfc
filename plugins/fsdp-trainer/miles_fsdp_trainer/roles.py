"""The models that a rank holds, one per role, and who trains which parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from miles_core import BuildContext
from miles_core.errors import ConfigError
from miles_fsdp_trainer import FsdpConfig
from miles_fsdp_trainer.model import PackedModel, load_model, shard
from miles_fsdp_trainer.optim import Optimizer

FROZEN = ("reference", "teacher")
VALUE_HEAD = "value_head."


@dataclass(slots=True)
class Role:
    """A model; `optimizer` is None for a frozen one. A shared critic has the policy's model, and of its parameters the
    value head, with an optimizer and a learning rate of its own."""

    name: str
    model: PackedModel
    optimizer: Optimizer | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """What this role trains and saves, as they were when nothing was gathered: FSDP shows others while it computes."""
    shared: bool = False

    def gather_nothing(self) -> None:
        """Gives back what FSDP keeps gathered of its root after a pass without gradient, so that what is read or written
        next are the sharded fp32 parameters."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


def load_roles(config: FsdpConfig, context: BuildContext, device: torch.device, world_size: int) -> dict[str, Role]:
    """Every role of the run. Raises ConfigError that names the role whose model does not load."""
    run = context.run_config
    critic = run.roles.get("critic")
    shared = critic is not None and critic.shared
    roles = {"policy": _load(config, context, "policy", device, world_size, value_head=shared)}
    for name in FROZEN:
        if name in run.roles:
            roles[name] = _load(config, context, name, device, world_size)
    if shared:
        roles["critic"] = Role("critic", roles["policy"].model, shared=True)
    elif critic is not None:
        roles["critic"] = _load(config, context, "critic", device, world_size, value_head=True)
    for role in roles.values():
        if role.name not in FROZEN:
            _own(role, config, run, shared)
    return roles


def _load(
    config: FsdpConfig, context: BuildContext, name: str, device: torch.device, world_size: int, value_head: bool = False
) -> Role:
    table = context.run_config.roles.get(name)
    own = table.path if table is not None else ""
    path = Path(own).expanduser() if own else context.model_path
    if path is None:
        raise ConfigError("trainer fsdp: the run has no model folder", "set [model] path")
    where = f"roles.{name}.path" if own else "model.path"
    single = world_size == 1
    model = load_model(path, config, single=single, language=name != "critic", value_head=value_head, where=where)
    if name in FROZEN:
        model.requires_grad_(False)
    if single:
        model.to(device)
    else:
        shard(model, dist.init_device_mesh(device.type, (world_size,)), config)
    return Role(name, model)


def _own(role: Role, config: FsdpConfig, run: Any, shared: bool) -> None:
    """Gives a trained role its parameters and its optimizer."""
    head_only = role.name == "critic" and role.shared
    role.parameters = {
        name: p
        for name, p in role.model.named_parameters()
        if (name.startswith(VALUE_HEAD) if head_only else not (shared and name.startswith(VALUE_HEAD)))
    }
    peak = config.lr
    steps = run.steps
    if role.name == "critic":
        peak = config.critic_lr or config.lr
    elif "critic" in run.roles:
        steps -= run.roles["critic"].warmup_steps
    total = steps * run.train.minibatches * run.train.epochs
    role.optimizer = Optimizer(role.parameters.items(), config, peak, total)


def check_vocabularies(roles: dict[str, Role], wanted: set[str], vocab_size: int | None) -> None:
    """Raises ConfigError unless policy and every role of `wanted`, whose whole distributions are compared, have a head over
    the same token ids. Models of one family may be padded to different sizes above the tokenizer's `vocab_size`."""
    policy = roles["policy"].model.vocab_size
    for name in sorted(wanted):
        other = roles[name].model.vocab_size
        if policy != other and (vocab_size is None or min(policy, other) < vocab_size):
            raise ConfigError(
                f"trainer fsdp: the {name}'s vocabulary has {other} tokens and the policy's {policy}",
                f"their distributions cannot be compared: choose a {name} with the policy's tokenizer",
            )
