"""Keys and values: prompts that are computed once and kept, and the rows of the running batch.

Legend: L layers, R rows allocated, N rows in use, H key-value heads, S slots per row, P tokens of a prompt, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

SLOT_STEP = 64
"""Slots per row grow in steps of this."""
SHARE_MIN_TOKENS = 256
"""A prompt is attended to in place, once for all its rows, when rows * P reaches this; below, copying it into each row
costs less than the additional operations. Measured on two CPU cores."""


@dataclass(slots=True, eq=False)
class Prefix:
    """A computed prompt: k and v [L, H, P, D], and the float32[V] logits of what comes next."""

    k: torch.Tensor
    v: torch.Tensor
    logits: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.k.shape[2]


class PrefixCache:
    """The most recently used prompts by their token ids, up to a number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()
        self._tokens = 0

    def get(self, key: bytes) -> Prefix | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, prefix: Prefix) -> None:
        if prefix.num_tokens > self.max_tokens or key in self._entries:
            return
        self._entries[key] = prefix
        self._tokens += prefix.num_tokens
        while self._tokens > self.max_tokens:
            _, old = self._entries.popitem(last=False)
            self._tokens -= old.num_tokens

    def clear(self) -> None:
        self._entries.clear()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(slots=True)
class StepPlan:
    """What a decoding step needs to know about the rows; the same for all layers."""

    positions: torch.Tensor  # int64[N]: position of the token that is fed now
    slots: torch.Tensor  # int64[N]: where its key and value go
    rows: torch.Tensor  # int64[N]: 0..N-1
    num_slots: int  # slots in use by the longest row, this step's token included
    mask: torch.Tensor | None  # [N, 1, 1, num_slots], 0 or -inf; None when all rows have the same length
    groups: list[tuple[Prefix, int]]  # prompts attended to in place, and how many rows each has
    order: torch.Tensor | None  # int64[M]: the rows of the groups, group after group


class Rows:
    """The running batch. Rows 0..N-1 are in use: a row that ends is overwritten by the last one."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, share: bool) -> None:
        self.device, self.dtype, self.share = device, dtype, share
        self.k: torch.Tensor | None = None  # [L, R, H, S, D]
        self.v: torch.Tensor | None = None
        self.used: list[int] = []  # filled slots of each row
        self.prefix: list[Prefix | None] = []  # prompts attended to in place

    def __len__(self) -> int:
        return len(self.used)

    def add(self, prefix: Prefix, count: int) -> None:
        """`count` rows that continue `prefix`."""
        shared = self.share and count > 1 and count * prefix.num_tokens >= SHARE_MIN_TOKENS
        used = 0 if shared else prefix.num_tokens
        first = len(self)
        self._reserve(first + count, used + 1, prefix)
        if used:
            self.k[:, first : first + count, :, :used] = prefix.k[:, None]
            self.v[:, first : first + count, :, :used] = prefix.v[:, None]
        self.used += [used] * count
        self.prefix += [prefix if shared else None] * count

    def remove(self, row: int) -> int:
        """Frees a row; returns the number of the row that took its place (`row` itself if it was the last)."""
        last = len(self) - 1
        if row != last:
            used = self.used[last]
            self.k[:, row, :, :used] = self.k[:, last, :, :used]
            self.v[:, row, :, :used] = self.v[:, last, :, :used]
            self.used[row], self.prefix[row] = used, self.prefix[last]
        self.used.pop()
        self.prefix.pop()
        return last

    def clear(self) -> None:
        """Drops all rows and their memory."""
        self.k = self.v = None
        self.used, self.prefix = [], []

    def plan(self) -> StepPlan:
        """Room for one more token in every row, and the plan of the step that computes it."""
        self._reserve(len(self), max(self.used) + 1)
        used = torch.tensor(self.used, device=self.device)
        shared = torch.tensor([p.num_tokens if p else 0 for p in self.prefix], device=self.device)
        num_slots = max(self.used) + 1
        mask = None
        if min(self.used) + 1 < num_slots:
            hidden = torch.arange(num_slots, device=self.device) > used[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        groups: dict[int, list[int]] = {}
        for row, prefix in enumerate(self.prefix):
            if prefix is not None:
                groups.setdefault(id(prefix), []).append(row)
        members = [row for rows in groups.values() for row in rows]
        return StepPlan(
            positions=used + shared,
            slots=used,
            rows=torch.arange(len(self), device=self.device),
            num_slots=num_slots,
            mask=mask,
            groups=[(self.prefix[rows[0]], len(rows)) for rows in groups.values()],
            order=torch.tensor(members, device=self.device) if members else None,
        )

    def advance(self) -> None:
        """The step's token is now in every row."""
        self.used = [n + 1 for n in self.used]

    def _reserve(self, rows: int, slots: int, like: Prefix | None = None) -> None:
        if self.k is not None and rows <= self.k.shape[1] and slots <= self.k.shape[3]:
            return
        old_k, old_v = self.k, self.v
        rows = max(rows, old_k.shape[1] if old_k is not None else 0)
        slots = max(slots, old_k.shape[3] if old_k is not None else 0)
        slots = -(-slots // SLOT_STEP) * SLOT_STEP
        self.k = self._grown(old_k, like.k if like is not None else None, rows, slots)
        self.v = self._grown(old_v, like.v if like is not None else None, rows, slots)

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor | None, rows: int, slots: int) -> torch.Tensor:
        shape = (old if old is not None else like).shape
        layers, heads, size = shape[0], shape[-3], shape[-1]
        # Zeros, because slots that no row has filled are multiplied with weight 0, and 0 * NaN is NaN.
        new = torch.zeros(layers, rows, heads, slots, size, dtype=self.dtype, device=self.device)
        if old is not None:
            count = len(self)
            new[:, :count, :, : old.shape[3]] = old[:, :count]
        return new
