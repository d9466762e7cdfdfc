"""Keys and values: prompts that are computed once and kept, and the rows of the running batch.

Legend: L layers, R rows allocated, N rows in use, H key-value heads, S slots per row, P tokens of a prompt, D head size.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles_torch_rollout.prompts import common_tokens

SLOT_STEP = 8
"""Slots per row are rounded up to this."""
SLOTS_AHEAD = 256
"""Slots that a row gets at once when it may need as many; what long answers need beyond comes by doubling."""
KEEP_BYTES = 256 << 20
"""Row buffers up to this size are kept while nothing runs."""
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
    """The most recently used prompts by their token ids, up to a number of tokens. A new prompt finds the kept one with
    which it shares the longest beginning."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()  # the least recently used first
        self._sorted: list[bytes] = []
        self._tokens = 0

    def get(self, key: bytes) -> Prefix | None:
        """The prompt with exactly this key (see `prompt_key`)."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def longest(self, key: bytes) -> tuple[Prefix | None, int]:
        """The prompt that begins most like this one, and how many tokens they share; (None, 0) when no token is shared.
        In the order of keys it is a neighbour."""
        at = bisect.bisect_left(self._sorted, key)
        best, shared = None, 0
        for neighbour in self._sorted[max(0, at - 1) : at + 1]:
            common = common_tokens(neighbour, key)
            if common > shared:
                best, shared = neighbour, common
        return (None, 0) if best is None else (self.get(best), shared)

    def put(self, key: bytes, prefix: Prefix) -> None:
        if prefix.num_tokens > self.max_tokens or key in self._entries:
            return
        self._entries[key] = prefix
        bisect.insort(self._sorted, key)
        self._tokens += prefix.num_tokens
        while self._tokens > self.max_tokens:
            oldest, old = self._entries.popitem(last=False)
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
            self._tokens -= old.num_tokens

    def clear(self) -> None:
        self._entries.clear()
        self._sorted.clear()
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
        self._most = 0  # slots that the longest running row may come to need

    def __len__(self) -> int:
        return len(self.used)

    def add(self, groups: Sequence[tuple[Prefix, int, int]]) -> None:
        """Rows for several prompts at once: (prompt, number of rows, most tokens that one of them will still be fed)."""
        plans = [(prefix, count, self._in_place(prefix, count)) for prefix, count, _ in groups]
        starts = [0 if shared else prefix.num_tokens for prefix, _, shared in plans]
        self._most = max([self._most, *(used + group[2] for used, group in zip(starts, groups, strict=True))])
        self._reserve(len(self) + sum(group[1] for group in groups), max(starts) + 1, groups[0][0])
        for (prefix, count, shared), used in zip(plans, starts, strict=True):
            first = len(self)
            if used:
                self.k[:, first : first + count, :, :used] = prefix.k[:, None]
                self.v[:, first : first + count, :, :used] = prefix.v[:, None]
            self.used += [used] * count
            self.prefix += [prefix if shared else None] * count

    def _in_place(self, prefix: Prefix, count: int) -> bool:
        return self.share and count > 1 and count * prefix.num_tokens >= SHARE_MIN_TOKENS

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
        """Drops all rows. Their memory is kept for the next ones, unless it is large."""
        self.used, self.prefix, self._most = [], [], 0
        if self.k is not None and 2 * self.k.untyped_storage().nbytes() > KEEP_BYTES:
            self.release()

    def release(self) -> None:
        """Gives up the memory of an empty batch."""
        assert not self.used, "rows are in use"
        self.k = self.v = None

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
        """Room for that many rows and slots, and for what the rows may need soon."""
        if self.used and rows <= self.k.shape[1] and slots <= self.k.shape[3]:
            return
        ahead = max(SLOTS_AHEAD, 2 * self.k.shape[3]) if self.used else SLOTS_AHEAD
        slots = max(slots, min(self._most, slots + ahead))
        if self.used:
            rows, slots = max(rows, self.k.shape[1]), max(slots, self.k.shape[3])
        slots = -(-slots // SLOT_STEP) * SLOT_STEP
        self.k = self._grown(self.k, like.k if like is not None else None, rows, slots)
        self.v = self._grown(self.v, like.v if like is not None else None, rows, slots)

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor | None, rows: int, slots: int) -> torch.Tensor:
        shape = (old if old is not None else like).shape
        layers, heads, size = shape[0], shape[-3], shape[-1]
        per_row = layers * heads * slots * size
        if not self.used and old is not None:  # kept from earlier rows: cut anew, into as many rows as it has room for
            flat = torch.empty(0, dtype=self.dtype, device=self.device).set_(old.untyped_storage())
            if (fit := flat.numel() // per_row) >= rows:
                return flat[: fit * per_row].view(layers, fit, heads, slots, size)
        # Zeros, because slots that no row has filled are multiplied with weight 0, and 0 * NaN is NaN. What earlier rows
        # left in a kept buffer is finite.
        new = torch.zeros(layers, rows, heads, slots, size, dtype=self.dtype, device=self.device)
        if self.used:
            count = len(self)
            new[:, :count, :, : old.shape[3]] = old[:, :count]
        return new
