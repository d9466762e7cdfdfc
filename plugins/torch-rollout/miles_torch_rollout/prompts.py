"""Which part of each waiting prompt is computed: beginnings that several share only once, and nothing that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from miles_torch_rollout.kv import Prefix

KEY_BYTES = 4


@dataclass(slots=True)
class Prompt:
    """A prompt to compute. Its first `depth` tokens are those of `kept`, or of the prompt before it when that is None."""

    ids: torch.Tensor
    """int64[P]"""
    depth: int = 0
    kept: Prefix | None = None


def prompt_key(ids: np.ndarray) -> bytes:
    """Bytes whose order is the lexicographic order of the token ids, which are never negative."""
    return ids.astype(">u4").tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two keys share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.frombuffer(a[:size], np.uint32) != np.frombuffer(b[:size], np.uint32))
    return int(differ[0]) if len(differ) else size // KEY_BYTES


def plan_prompts(
    contexts: Sequence[np.ndarray], longest: Callable[[bytes], tuple[Prefix | None, int]], device: torch.device
) -> tuple[list[int], list[Prompt]]:
    """The order in which different contexts are computed, and how. `longest` finds the kept prompt that begins most like
    a key (`PrefixCache.longest`).

    In lexicographic order the longest beginning that a prompt shares with any before it is the one it shares with its
    neighbour, so no search is needed. The last token is always computed: its logits are wanted.
    """
    keys = [prompt_key(context) for context in contexts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    prompts: list[Prompt] = []
    before = b""
    for index in order:
        last = len(contexts[index]) - 1
        kept, depth = longest(keys[index])
        shared = min(common_tokens(before, keys[index]), last)
        if shared >= min(depth, last):
            kept, depth = None, shared
        ids = torch.from_numpy(contexts[index].astype(np.int64)).to(device)
        prompts.append(Prompt(ids, min(depth, last), kept))
        before = keys[index]
    return order, prompts
