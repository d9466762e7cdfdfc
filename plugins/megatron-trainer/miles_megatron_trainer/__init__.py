"""Trainer `megatron`. This module imports neither torch nor megatron: options, the cheap checks, the way to the rank."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl
from miles_core.errors import ConfigError, RuntimeMissing

OUTPUTS = ("logprobs", "entropy", "logsumexp")
"""What its models compute for a loss."""
INSTALL = (
    'install the runtime: pip install "miles-megatron-trainer[runtime]" on Python 3.12 or newer; on Python 3.11 '
    "megatron-core comes from its sources (the plugin's README has the line)"
)


class MegatronConfig(ComponentConfig):
    """Options of the trainer `megatron`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Megatron's own arguments by name (`tensor_model_parallel_size`, `lr`, `clip_grad`, ...), parsed and validated by
    the installed Megatron. What describes the model comes from the model's folder, and is refused here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; "auto" takes a GPU when there is one."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens in one forward pass, shared tokens counted once; 0 takes 1024 on a CPU and 16384 on a GPU. A single
    sample may exceed it. Changes memory and speed, never the result."""
    shared_prefix: bool = True
    """Compute every common beginning of the samples of a microbatch once, the prompt of a group above all."""
    logit_rows: int = Field(default=512, gt=0)
    """Rows of [rows, vocabulary / tensor ranks] logits that exist at a time, in the backward pass too."""


def _check(config: MegatronConfig, env: Environment) -> None:
    """Everything that can be known without loading a model. Raises ConfigError or RuntimeMissing."""
    needed = ("torch", "transformers", "safetensors", "megatron", "psutil", "miles_fsdp_trainer")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise RuntimeMissing(f"trainer megatron needs {', '.join(missing)}, not installed in this environment", INSTALL)
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise RuntimeMissing(
                'trainer megatron: device = "cuda", but torch sees no GPU here', 'use device = "auto" or device = "cpu"'
            )
    from miles_megatron_trainer import arguments, names

    where = env.where or "trainer.megatron"
    run = env.run_config
    for role, table in (run.roles if run is not None else {}).items():
        if role != "reference":
            raise ConfigError(
                f"roles.{role}: trainer megatron holds a policy and a reference",
                f'use trainer.use = "fsdp" for a {role}',
            )
        if table.path:
            names.read_config(Path(table.path).expanduser(), f"roles.{role}.path")
    if env.model_path is None:
        arguments.parse_table(config.args, where)
        return
    hf = names.read_config(env.model_path, "model.path")
    workers, steps = (run.trainer.num_workers, optimizer_steps(run)) if run is not None else (1, 1 << 30)
    arguments.resolve(config.args, hf, world_size=workers, total_steps=steps, where=where)


def optimizer_steps(run: Any) -> int:
    """Of the whole run, without any that is skipped."""
    return run.steps * run.train.minibatches * run.train.epochs


def _build(config: MegatronConfig, context: BuildContext) -> Any:
    from miles_megatron_trainer.rank import MegatronRank

    return MegatronRank(config, context)


@hookimpl
def miles_trainers() -> Iterable[Component[Any]]:
    return [
        Component(
            name="megatron",
            summary="Megatron-Core: dense models; tensor, pipeline, context and data parallel; GPUs or CPUs",
            config=MegatronConfig,
            build=_build,
            check=_check,
            traits={"outputs": frozenset(OUTPUTS)},
        )
    ]
