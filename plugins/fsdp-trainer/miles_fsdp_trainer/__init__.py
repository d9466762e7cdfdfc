"""Trainer `fsdp`. This module imports no torch: options, the cheap checks, and the way to the rank's code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl
from miles_core.errors import ConfigError, RuntimeMissing

OUTPUTS = ("logprobs", "entropy", "logsumexp", "topk", "values", "reverse_kl", "forward_kl")
"""What its models compute for a loss, by the first part of the name."""


class FsdpConfig(ComponentConfig):
    """Options of the trainer `fsdp`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; "auto" takes a GPU when there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward. Master weights, gradients, moments and log-probabilities are fp32 in both."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic, or of the value head of a shared one; lr when absent."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; never applied to biases and norms (parameters with fewer than two dimensions)."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; 0 switches clipping off."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, until the run's last optimizer step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where "linear" and "cosine" end, as a fraction of lr."""
    max_tokens: int = Field(default=0, ge=0)
    """Most tokens in one forward pass, shared tokens counted once; 0 takes 1024 on a CPU and 16384 on a GPU. A single
    sample may exceed it. Changes memory and speed, never the result."""
    packing: bool = True
    """Pack samples without padding. False computes padded rows with the model's own attention, for architectures whose
    attention cannot be replaced."""
    shared_prefix: bool = True
    """Compute every common beginning of the samples of a microbatch once, the prompt of a group above all; with packing."""
    logit_rows: int = Field(default=512, gt=0)
    """Rows of [rows, vocabulary] logits that exist at a time; up to this many are kept for the backward pass, beyond it
    they are computed twice."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""


def _check(config: FsdpConfig, env: Environment) -> None:
    """Everything that can be known without loading a model. Raises ConfigError or RuntimeMissing."""
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise RuntimeMissing(
            f"trainer fsdp needs {', '.join(missing)}, not installed in this environment",
            'install the runtime with: pip install "miles-fsdp-trainer[runtime]"',
        )
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise RuntimeMissing(
                'trainer fsdp: device = "cuda", but torch sees no GPU here', 'use device = "auto" or device = "cpu"'
            )
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(f"{env.where or 'trainer.fsdp'}.betas: {list(config.betas)} must lie in [0, 1)")
    if env.model_path is not None:
        check_model_folder(env.model_path)
    for role, table in (env.run_config.roles if env.run_config is not None else {}).items():
        if table.path:
            check_model_folder(Path(table.path).expanduser(), f"roles.{role}.path")


def check_model_folder(path: Any, where: str = "model.path") -> None:
    """Raises ConfigError that starts with `where` unless `path` is a folder whose config.json names an architecture."""
    if not path.is_dir():
        raise ConfigError(f"{where}: no folder {path}", "give a Hugging Face folder, or <source>:<reference>")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{where}: {path} has no config.json", "it is not a Hugging Face model folder")
    try:
        architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{where}: {file} is not valid JSON", str(error)) from error
    if not architectures:
        raise ConfigError(f'{where}: {file} names no "architectures"', "a causal language model is needed")


def _build(config: FsdpConfig, context: BuildContext) -> Any:
    from miles_fsdp_trainer.rank import FsdpRank

    return FsdpRank(config, context)


@hookimpl
def miles_trainers() -> Iterable[Component[Any]]:
    return [
        Component(
            name="fsdp",
            summary="Hugging Face causal LMs on one process, or FSDP2 on several; shared prefixes computed once",
            config=FsdpConfig,
            build=_build,
            check=_check,
            traits={"uses": frozenset({"extension"}), "outputs": frozenset(OUTPUTS)},
        )
    ]
