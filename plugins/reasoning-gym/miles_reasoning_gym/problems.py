"""Problems by number. A prompt carries the coordinates of its problem, and the reward makes the problem again from them."""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from reasoning_gym.factory import create_dataset

CHUNK = 500
"""Problems per dataset object of an endless stream: several datasets make all of them at once, or limit how many."""
METADATA = "reasoning_gym"
"""Key of `Prompt.metadata` that holds the coordinates."""


class Problem(NamedTuple):
    """Where a problem comes from; equal coordinates give an equal problem, in every process."""

    dataset: str
    params: str
    """JSON of the dataset's parameters."""
    seed: int
    size: int
    index: int


def dataset_seed(run_seed: int, offset: int, dataset: str, chunk: int) -> int:
    """A seed in [0, 2**31). Most datasets seed problem i with seed + i, so that neighbouring seeds give the same problems
    shifted by one; hashed seeds keep chunks, training and evaluation apart."""
    text = f"{run_seed}|{offset}|{chunk}|{dataset}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


@lru_cache(maxsize=4)
def open_dataset(dataset: str, params: str, seed: int, size: int) -> Any:
    """Raises what reasoning-gym raises for an unknown dataset or parameter."""
    return create_dataset(dataset, **json.loads(params), seed=seed, size=size)


@lru_cache(maxsize=64)
def entry_of(problem: Problem) -> dict[str, Any]:
    """The dataset's entry: question, answer, metadata. All samples of a group ask for the same one."""
    return open_dataset(problem.dataset, problem.params, problem.seed, problem.size)[problem.index]
