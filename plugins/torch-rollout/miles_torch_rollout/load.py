"""From a folder to a model that samples: device, data type, and which forward pass serves it."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import ConfigError, EngineFailed, RuntimeMissing
from miles_torch_rollout import TorchEngineConfig
from miles_torch_rollout.fused import FusedModel, unsupported
from miles_torch_rollout.generic import GenericModel
from miles_torch_rollout.prompts import Prompt

FULL_ATTENTION = frozenset({"full_attention", "sliding_attention"})


def check_environment(config: TorchEngineConfig, where: str = "engine.torch") -> None:
    """Raises RuntimeMissing when the device that was asked for is not here."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeMissing(
            f'{where} asks for device "{config.device}", and PyTorch sees no CUDA device here',
            'use device = "cpu" or "auto"',
        )


def pick_device(config: TorchEngineConfig, given: str) -> torch.device:
    """The option, else what the launcher gave, else CUDA where there is one."""
    for name in (config.device, given):
        if name and name != "auto":
            return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


_one_at_a_time = threading.Lock()
"""transformers changes torch's default dtype while it loads, for the whole process."""


def load_model(folder: Path, config: TorchEngineConfig, device: torch.device) -> Any:
    """The causal language model of a folder, frozen, on the device. Raises EngineFailed with the reason."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would write over the run's own display
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = default if config.dtype == "auto" else getattr(torch, config.dtype)
    if not (folder / "config.json").is_file():
        raise EngineFailed(f"there is no model in {folder}: it has no config.json")
    try:
        with _one_at_a_time:
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, attn_implementation=config.attention, local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise EngineFailed(f"cannot load the model in {folder}: {error}") from error
    model.requires_grad_(False).eval()
    return model.to(device)


def max_positions(model: Any) -> int:
    """The longest context that the model serves here. Layers with an attention window are right up to that window."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - FULL_ATTENTION:
        raise EngineFailed(
            f"the engine torch cannot serve {config.model_type}: it has layers of other kinds than attention "
            f"({', '.join(sorted(kinds - FULL_ATTENTION))})"
        )
    limit = getattr(config, "max_position_embeddings", None) or 1 << 30
    window = getattr(config, "sliding_window", None)
    if window and (not kinds or "sliding_attention" in kinds) and getattr(config, "use_sliding_window", True):
        limit = min(limit, window)
    return limit


def eos_ids(folder: Path) -> frozenset[int]:
    """The ids at which the model itself says that it ends."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def make_decoder(model: Any, choice: str, log: logging.Logger) -> FusedModel | GenericModel:
    """The fused pass where it serves the model and gives the same logits, else the model's own. Raises ConfigError when
    the fused one was demanded and does not."""
    problem = unsupported(model)
    if choice == "generic" or (choice == "auto" and problem):
        return GenericModel(model)
    if not problem:
        reference = _probe(GenericModel(model), model)
        decoder = FusedModel(model)
        got = _probe(decoder, model)
        tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
        gap = float((got - reference).abs().max() / reference.abs().max().clamp(min=1.0))
        if gap <= tolerance:
            return decoder
        problem = f"its logits differ from the model's own by {gap:.2g} of their size"
    if choice == "fused":
        raise ConfigError(f"engine.torch.forward is fused, but {problem}", 'use forward = "auto" or "generic"')
    log.warning("the fused forward pass is not used: %s", problem)
    return GenericModel(model)


@torch.inference_mode()
def _probe(decoder: Any, model: Any) -> torch.Tensor:
    """float32[2, V] logits after two fixed contexts of different lengths."""
    vocab = model.config.vocab_size
    contexts = [torch.arange(n, device=model.device) * 7919 % vocab for n in (7, 12)]
    return torch.stack([prefix.logits for prefix in decoder.prefill([Prompt(ids) for ids in contexts])])
