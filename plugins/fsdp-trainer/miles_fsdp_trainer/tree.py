"""Packing without padding and without repetition: the samples of a microbatch as a tree of tokens.

A token's hidden state depends on the tokens before it and nothing else, so a beginning that several samples share -
the system prompt of all groups, the prompt of one group, equal openings of answers - is computed once. Each sample
keeps its `path`: where its tokens 0, 1, 2, ... lie in the packed row. Gradients are exact, because a shared state
simply receives the sum of what its readers send back.

Letters: N packed tokens, T tokens of one path, B blocks of one attention batch, Q queries and K keys of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_ELEMENTS = 1 << 24
"""Most entries of one [B, Q, K] attention mask; bounds what the attention of a microbatch takes at a time."""


@dataclass(slots=True)
class Run:
    """Packed tokens [start, stop), each the successor of the one before; `path` ends with them."""

    start: int
    stop: int
    path: np.ndarray

    @property
    def depth(self) -> int:
        """Position of the run's first token in its path: how many tokens it shares with earlier runs."""
        return len(self.path) - (self.stop - self.start)


@dataclass(slots=True)
class TokenTree:
    tokens: np.ndarray
    """int64[N]"""
    positions: np.ndarray
    """int64[N]: place of each token in its own sample."""
    paths: list[np.ndarray]
    """int64[T] per sequence, in the order given: packed index of each of its tokens."""
    runs: list[Run]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries of two int arrays are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def sort_key(tokens: np.ndarray) -> bytes:
    """Bytes whose order is the lexicographic order of token ids (never negative)."""
    return tokens.astype(">u4").tobytes()


def build_tree(sequences: Sequence[np.ndarray], *, share: bool = True) -> TokenTree:
    """Packs int sequences; with `share`, common beginnings of any of them are stored once.

    In lexicographic order the longest common beginning with any earlier sequence is the one with the sequence just
    before, so one pass over neighbours builds the whole tree.
    """
    order = sorted(range(len(sequences)), key=lambda i: sort_key(sequences[i])) if share else range(len(sequences))
    paths: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    runs: list[Run] = []
    size, previous = 0, -1
    for i in order:
        sequence = sequences[i]
        shared = common_prefix(sequences[previous], sequence) if share and previous >= 0 else 0
        new = len(sequence) - shared
        head = paths[previous][:shared] if shared else paths[i]
        paths[i] = np.concatenate([head, np.arange(size, size + new)])
        if new:
            tokens.append(sequence[shared:].astype(np.int64))
            positions.append(np.arange(shared, len(sequence)))
            runs.append(Run(size, size + new, paths[i]))
        size, previous = size + new, i
    empty = np.zeros(0, dtype=np.int64)
    return TokenTree(
        tokens=np.concatenate(tokens) if tokens else empty,
        positions=np.concatenate(positions) if positions else empty,
        paths=paths,
        runs=runs,
    )


@dataclass(slots=True)
class Block:
    """A batch of runs of similar size that attend in one call. Padding queries and keys point at token 0 of the row."""

    queries: np.ndarray
    """int64[B, Q]: packed indices."""
    keys: np.ndarray
    """int64[B, K]"""
    query_positions: np.ndarray
    """int64[B, Q]"""
    num_keys: np.ndarray
    """int64[B]: keys beyond this are padding."""
    causal: bool
    """True when every run starts at position 0: then plain causal attention is right without a mask."""


def _bucket(n: int, smallest: int) -> int:
    size = smallest
    while size < n:
        size *= 2
    return size


def attention_blocks(tree: TokenTree) -> tuple[list[Block], np.ndarray]:
    """The attention of a tree as few dense batches, and int64[N]: where each packed token's result lies in the
    concatenation of all batches' [B * Q] rows.

    A run's queries see its whole path up to themselves, which is all that causality means in a tree.
    """
    groups: dict[tuple[bool, int, int], list[Run]] = {}
    for run in tree.runs:
        key = (run.depth == 0, _bucket(run.stop - run.start, 16), _bucket(len(run.path), 64))
        groups.setdefault(key, []).append(run)
    blocks: list[Block] = []
    inverse = np.zeros(len(tree.tokens), dtype=np.int64)
    offset = 0
    for (causal, _, _), runs in sorted(groups.items(), key=lambda item: item[0]):
        num_q = max(run.stop - run.start for run in runs)
        num_k = max(len(run.path) for run in runs)
        per_call = max(1, BLOCK_ELEMENTS // (num_q * num_k))
        for first in range(0, len(runs), per_call):
            part = runs[first : first + per_call]
            blocks.append(_block(part, num_q, num_k, causal))
            for row, run in enumerate(part):
                inverse[run.start : run.stop] = offset + row * num_q + np.arange(run.stop - run.start)
            offset += len(part) * num_q
    return blocks, inverse


def _block(runs: Sequence[Run], num_q: int, num_k: int, causal: bool) -> Block:
    queries = np.zeros((len(runs), num_q), dtype=np.int64)
    positions = np.zeros((len(runs), num_q), dtype=np.int64)
    keys = np.zeros((len(runs), num_k), dtype=np.int64)
    for row, run in enumerate(runs):
        size = run.stop - run.start
        queries[row, :size] = np.arange(run.start, run.stop)
        positions[row, :size] = run.depth + np.arange(size)
        keys[row, : len(run.path)] = run.path
    return Block(queries, keys, positions, np.array([len(run.path) for run in runs]), causal)
