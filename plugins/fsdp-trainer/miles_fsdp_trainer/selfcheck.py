"""A look at the model before the run: does it give the same log-probabilities packed as by its own plain forward?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from miles_core.errors import ConfigError
from miles_core.types import Sample, TrainBatch
from miles_fsdp_trainer import FsdpConfig
from miles_fsdp_trainer.microbatch import make_microbatch, masks_of, used_lengths

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats. Rounding stays far below; a wrong mask, position or head does not."""


def check_packing(model: Any, config: FsdpConfig, device: torch.device, role: str = "policy") -> None:
    """Compares two short samples with a common beginning, packed and one by one. Architectures differ in more than can
    be known here - attention variants, positions, scaled logits -, and a silent difference would poison the training.

    A value model, whose head is zero at first, is compared by its hidden states, relative to the largest. Raises
    ConfigError that names the role, the model class and the option. Costs three passes over at most 21 tokens.
    """
    vocabulary = model.lm.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, 9)
    tokens = [np.concatenate([prompt, rng.integers(0, vocabulary, n)]) for n in (4, 7)]
    samples = [_sample(i, t) for i, t in enumerate(tokens)]
    batch = TrainBatch(samples=samples)
    masks = masks_of(batch)
    micro = make_microbatch(
        batch, [0, 1], masks, used_lengths(masks), device=device, packing=config.packing, share=config.shared_prefix
    )
    with torch.no_grad():
        name = "logprobs" if model.language else "hidden"
        packed = model(micro.inputs, frozenset({name}))[name].float()
        plain = torch.cat([model.plain(torch.as_tensor(t, device=device)[None])[0] for t in tokens])
    difference = (packed - plain).abs().max().item() / (1 if model.language else plain.abs().max().item())
    if not difference <= TOLERANCE[config.dtype]:
        what, unit = ("log-probabilities", " nats") if model.language else ("hidden states", " of the largest")
        raise ConfigError(
            f"trainer fsdp: the {role}'s {type(model.lm).__name__} gives other {what} "
            f"{'packed' if config.packing else 'by its hidden states'} than by its own forward ({difference:.3g}{unit})",
            "set packing = false" if config.packing else "this architecture is not supported",
        )


def _sample(index: int, tokens: np.ndarray) -> Sample:
    mask = np.ones(len(tokens), dtype=bool)
    mask[0] = False
    return Sample(
        group_id="check",
        trajectory_id=f"check/{index}",
        index=index,
        tokens=tokens.astype(np.int32),
        prompt_len=1,
        loss_mask=mask,
        logprobs=np.zeros(len(tokens), np.float32),
    )
