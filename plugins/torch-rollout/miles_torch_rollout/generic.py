"""Any causal language model through its own forward pass, with the same rows and prompts as the fused one.

Legend: N rows, H key-value heads, S slots, D head size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from miles_torch_rollout.kv import Prefix, Rows, StepPlan
from miles_torch_rollout.prompts import Prompt


class GenericModel:
    """Prompts are computed one by one, each after the beginning that it shares; a decoding step feeds one token per row
    with a mask of its own."""

    share_prompts = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_layers = model.config.num_hidden_layers
        # transformers renamed the argument during its version 5; the old name goes in 5.40
        known = inspect.signature(model.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"

    def prefill(self, prompts: Sequence[Prompt]) -> list[Prefix]:
        made: list[Prefix] = []
        for prompt in prompts:
            begin = prompt.kept or (made[-1] if prompt.depth else None)
            made.append(self._prefill_one(prompt, begin))
        return made

    def _prefill_one(self, prompt: Prompt, begin: Prefix | None) -> Prefix:
        store = _Collect(self.num_layers, begin, prompt.depth)
        places = torch.arange(len(prompt.ids), device=prompt.ids.device)[None]
        out = self.model(
            input_ids=prompt.ids[None, prompt.depth :],
            **{self._cache: store},
            use_cache=True,
            position_ids=places[:, prompt.depth :],
            attention_mask=_causal(prompt.ids, self.model.dtype)[:, :, prompt.depth :],
            logits_to_keep=1,
        )
        return Prefix(torch.stack(store.keys), torch.stack(store.values), out.logits[0, -1].float())

    def hidden(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Logits already: models scale or cap them in ways of their own, so `head` has nothing left to do."""
        masks = [_causal(ids, self.model.dtype) for ids in sequences]
        pairs = zip(sequences, masks, strict=True)
        return [self.model(input_ids=ids[None], use_cache=False, attention_mask=mask).logits[0] for ids, mask in pairs]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()

    def decode(self, tokens: torch.Tensor, rows: Rows, plan: StepPlan) -> torch.Tensor:
        mask = plan.mask
        if mask is None:
            mask = torch.zeros(len(tokens), 1, 1, plan.num_slots, dtype=rows.dtype, device=rows.device)
        out = self.model(
            input_ids=tokens[:, None],
            **{self._cache: _Append(rows, plan)},
            use_cache=True,
            position_ids=plan.positions[:, None],
            attention_mask=mask,
            logits_to_keep=1,
        )
        rows.advance()
        return out.logits[:, -1].float()


class _Store:
    """What a model asks of a cache besides `update`. Masks and positions are given, so the lengths do not matter."""

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        raise NotImplementedError("this model builds attention masks of its own; the engine torch cannot serve it")


class _Collect(_Store):
    """Keeps what a prompt produces, after the `depth` tokens of `begin`: k and v [H, P, D] per layer."""

    def __init__(self, num_layers: int, begin: Prefix | None, depth: int) -> None:
        self.keys: list[Any] = [None] * num_layers
        self.values: list[Any] = [None] * num_layers
        self._begin, self._depth = begin, depth

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._depth:
            k = torch.cat([self._begin.k[layer_idx, None, :, : self._depth], k], dim=2)
            v = torch.cat([self._begin.v[layer_idx, None, :, : self._depth], v], dim=2)
        self.keys[layer_idx], self.values[layer_idx] = k[0], v[0]
        return k, v


class _Append(_Store):
    """Writes one token per row and shows the model all slots in use."""

    def __init__(self, rows: Rows, plan: StepPlan) -> None:
        self.rows, self.plan = rows, plan

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        rows, plan, count = self.rows, self.plan, len(k)
        rows.k[layer_idx][plan.rows, :, plan.slots] = k[:, :, 0]
        rows.v[layer_idx][plan.rows, :, plan.slots] = v[:, :, 0]
        return rows.k[layer_idx, :count, :, : plan.num_slots], rows.v[layer_idx, :count, :, : plan.num_slots]


def _causal(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, 1, T, T], 0 where a query may look and -inf elsewhere: understood by every kind of attention."""
    hidden = torch.full((len(ids), len(ids)), float("-inf"), dtype=dtype, device=ids.device)
    return hidden.triu(1)[None, None]
