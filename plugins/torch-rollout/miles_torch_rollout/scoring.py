"""Log-probabilities of given tokens at temperature 1.

Legend: T tokens of one sequence, K entries of a top-k, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

HEAD_ROWS = 256
"""Positions whose logits exist at one time."""


def score_sequences(
    decoder: Any, token_ids: Sequence[np.ndarray], topk: int, device: torch.device, max_tokens: int
) -> list[dict[str, np.ndarray]]:
    """See `EngineReplica.score`."""
    results: list[dict[str, np.ndarray]] = []
    for chunk in _chunks(token_ids, max_tokens):
        sequences = [torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(device) for ids in chunk]
        for ids, hidden in zip(sequences, decoder.hidden(sequences), strict=True):
            results.append(_score_one(decoder, ids, hidden, topk))
    return results


def _score_one(decoder: Any, ids: torch.Tensor, hidden: torch.Tensor, topk: int) -> dict[str, np.ndarray]:
    scored = {"logprobs": torch.zeros(len(ids))}
    if topk:
        scored["topk_ids"] = torch.zeros(len(ids), topk, dtype=torch.int32)
        scored["topk_logprobs"] = torch.zeros(len(ids), topk)
    for start in range(0, len(ids) - 1, HEAD_ROWS):
        stop = min(start + HEAD_ROWS, len(ids) - 1)
        logprobs = torch.log_softmax(decoder.head(hidden[start:stop]), dim=-1)
        scored["logprobs"][start + 1 : stop + 1] = logprobs.gather(1, ids[start + 1 : stop + 1, None]).squeeze(1).cpu()
        if topk:
            best = logprobs.topk(topk, dim=-1)
            scored["topk_ids"][start + 1 : stop + 1] = best.indices.to(torch.int32).cpu()
            scored["topk_logprobs"][start + 1 : stop + 1] = best.values.cpu()
    return {name: tensor.numpy() for name, tensor in scored.items()}


def _chunks(token_ids: Sequence[np.ndarray], max_tokens: int) -> Iterator[list[np.ndarray]]:
    """Runs of sequences with at most `max_tokens` together; one alone may be longer. Empty ones are an error."""
    chunk: list[np.ndarray] = []
    size = 0
    for ids in token_ids:
        if not len(ids):
            raise ValueError("cannot score an empty sequence")
        if chunk and size + len(ids) > max_tokens:
            yield chunk
            chunk, size = [], 0
        chunk.append(ids)
        size += len(ids)
    if chunk:
        yield chunk
