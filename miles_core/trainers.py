"""The trainer as the driver sees it: one `TrainerGroup` over any number of ranks, and the host of each rank.

The driver cuts a batch into one shard per data-parallel rank, sends each rank what it needs and no more, and puts the
per-sample results back into the order of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.component import merge_metric
from miles_core.errors import ContractError
from miles_core.interfaces import TrainerRank, WeightSender, WorkerGroup
from miles_core.types import RankInfo, Sample, SendPlan, StepReport, TrainBatch, WeightMessage

UNEVEN = 1.15
"""Groups stay whole unless the fullest shard would then have this many times the tokens of an even one: a group that is
cut costs its prompt a second time, an uneven shard costs the waiting of all other ranks."""


# --- Shards ----------------------------------------------------------------------------------------------------------


def shard_indices(batch: TrainBatch, num_shards: int) -> list[list[int]]:
    """Sample indices of each shard, ascending; deterministic; shards may be empty.

    Balances the sum of tokens. `shared` tuples are never split. Groups are kept whole when that is even enough, because
    a trainer computes their prompt once; else the batch is cut in its own order, which splits at most num_shards - 1.
    """
    units = _units(batch)
    cost = [sum(batch.samples[i].num_tokens for i in unit) for unit in units]
    if not units or num_shards == 1:
        return [sorted(i for unit in units for i in unit)] + [[] for _ in range(num_shards - 1)]
    shards, fullest = _by_group(batch, units, cost, num_shards)
    if fullest > UNEVEN * sum(cost) / num_shards:
        shards = _in_order(cost, num_shards)
    return [sorted(i for u in shard for i in units[u]) for shard in shards]


def _units(batch: TrainBatch) -> list[list[int]]:
    """Smallest pieces that may be moved: samples joined by `shared`, in the order of their first sample."""
    head = list(range(len(batch.samples)))

    def find(i: int) -> int:
        while head[i] != i:
            i = head[i]
        return i

    for group in batch.shared:
        for i in group[1:]:
            low, high = sorted((find(group[0]), find(i)))
            head[high] = low
    members: dict[int, list[int]] = {}
    for i in head:
        members.setdefault(find(i), [])
    for i in range(len(head)):
        members[find(i)].append(i)
    return [members[root] for root in sorted(members)]


def _by_group(batch: TrainBatch, units: list[list[int]], cost: list[int], num_shards: int) -> tuple[list[list[int]], int]:
    """Whole groups, largest first, each to the emptiest shard; and the tokens of the fullest shard."""
    groups: dict[str, list[int]] = {}
    for u, unit in enumerate(units):
        groups.setdefault(batch.samples[unit[0]].group_id, []).append(u)
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for group in sorted(groups.values(), key=lambda group: (-sum(cost[u] for u in group), group[0])):
        target = load.index(min(load))
        shards[target] += group
        load[target] += sum(cost[u] for u in group)
    return shards, max(load)


def _in_order(cost: list[int], num_shards: int) -> list[list[int]]:
    """Consecutive units; each goes to the shard in whose even share of the tokens its middle lies."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    total, before = max(sum(cost), 1), 0
    for u, tokens in enumerate(cost):
        shards[min(num_shards - 1, int((before + tokens / 2) * num_shards / total))].append(u)
        before += tokens
    return shards


def slim(sample: Sample) -> Sample:
    """What a rank needs of a sample: arrays and numbers, without prompt, text, scores and metadata. Images and other
    inputs of the model travel as fields in `extras`."""
    return replace(sample, prompt=None, response="", scores={}, metadata={})


# --- Driver ----------------------------------------------------------------------------------------------------------


class TrainerGroup:
    """All ranks of a trainer at once. Every method runs on every rank; a rank that fails or hangs is named."""

    def __init__(self, workers: WorkerGroup, *, timeout_s: float = 3600.0) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.ranks: list[RankInfo] = []
        self.dp_size = 1
        self._outputs: list[int] = []

    async def start(self) -> list[RankInfo]:
        """Starts every rank. Raises ContractError when what they say of themselves does not fit together."""
        self.ranks = await self.workers.call("start", timeout_s=self.timeout_s)
        self._outputs = check_ranks(self.ranks, self.workers.size)
        self.dp_size = self.ranks[0].dp_size
        return self.ranks

    async def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        """float32[T] per sample for each of `outputs`, in the order of `batch`."""
        outputs = frozenset(outputs)
        if not batch.samples or not outputs:
            return {name: [] for name in outputs}
        shards, results = await self._run("forward", batch, role, outputs)
        for dp_rank, result in enumerate(results):
            if missing := outputs - result.keys():
                raise ContractError(f"trainer rank {self._outputs[dp_rank]} left out {sorted(missing)} in forward")
        return {name: self._gather(batch, shards, [r[name] for r in results], name) for name in outputs}

    async def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        """One optimizer step on all ranks, or none, as one report; see `TrainerRank.step` for what is summed."""
        shards, reports = await self._run("step", batch, role)
        report = merge_reports(reports)
        for name in reports[0].columns:
            report.columns[name] = self._gather(batch, shards, [r.columns.get(name, []) for r in reports], name)
        return report

    async def send_open(self, plan: SendPlan, timeout_s: float | None = None) -> None:
        """Begins an export on all ranks; then pull `send_next` until it returns None, and always `send_close`."""
        await self.workers.call("send_open", plan, timeout_s=timeout_s or self.timeout_s)

    async def send_next(self, timeout_s: float | None = None) -> list[WeightMessage | None] | None:
        """The next message of each rank, pulled on all ranks at once; None after the last one."""
        answers = await self.workers.call("send_next", timeout_s=timeout_s or self.timeout_s)
        ended = [answer is END for answer in map(_as_end, answers)]
        if any(ended) and not all(ended):
            raise ContractError(
                f"export ended on trainer ranks {[r for r, e in enumerate(ended) if e]} and not on the others"
            )
        return None if ended[0] else answers

    async def send_close(self, timeout_s: float | None = None) -> None:
        """Ends a send: an export that was left half-way is drained on all ranks, since it is collective."""
        await self.workers.call("send_close", timeout_s=timeout_s or self.timeout_s)

    async def save(self, folder: Path) -> None:
        await self.workers.call("save", folder, timeout_s=self.timeout_s)

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        await self.workers.call("load", folder, weights_only=weights_only, timeout_s=self.timeout_s)

    async def save_model(self, folder: Path) -> None:
        await self.workers.call("save_model", folder, timeout_s=self.timeout_s)

    async def sleep(self, tags: Sequence[str] = ("optimizer", "weights")) -> None:
        await self.workers.call("sleep", tuple(tags), timeout_s=self.timeout_s)

    async def wake(self, tags: Sequence[str] = ("optimizer", "weights")) -> None:
        await self.workers.call("wake", tuple(tags), timeout_s=self.timeout_s)

    async def state_hash(self) -> str:
        """The hash that the first output rank gives. Every rank is asked, since computing it may be collective."""
        return (await self.workers.call("state_hash", timeout_s=self.timeout_s))[self._outputs[0]]

    async def close(self) -> None:
        """Closes the ranks and their workers; also after a failure, when the ranks can no longer be asked."""
        await self.workers.close()

    async def _run(self, method: str, batch: TrainBatch, *args: Any) -> tuple[list[list[int]], list[Any]]:
        """Shards, and the results of the output rank of each data-parallel rank in that order."""
        assert self.ranks, "start() comes first"
        shards = shard_indices(batch, self.dp_size)
        thin = replace(batch, samples=[slim(s) for s in batch.samples])
        parts = [thin.select(indices) for indices in shards]
        per_rank = [(parts[info.dp_rank], *args) for info in self.ranks]
        results = await self.workers.call(method, per_rank=per_rank, timeout_s=self.timeout_s)
        return shards, [results[rank] for rank in self._outputs]

    def _gather(self, batch: TrainBatch, shards: list[list[int]], parts: list[list[Any]], name: str) -> list[np.ndarray]:
        rows: list[Any] = [None] * len(batch.samples)
        for dp_rank, (indices, part) in enumerate(zip(shards, parts, strict=True)):
            who = f"trainer rank {self._outputs[dp_rank]}"
            if len(part) != len(indices):
                raise ContractError(f'{who} returned {len(part)} rows of "{name}" for {len(indices)} samples')
            for i, row in zip(indices, part, strict=True):
                rows[i] = np.asarray(row, np.float32)
                if rows[i].shape != (want := (batch.samples[i].num_tokens,)):
                    raise ContractError(f'{who} returned "{name}" of shape {rows[i].shape} for a sample of shape {want}')
        return rows


def check_ranks(ranks: Sequence[RankInfo], num_workers: int) -> list[int]:
    """The output rank of each data-parallel rank. Raises ContractError unless the ranks agree on world and data-parallel
    size, are numbered as they were started, and each data-parallel rank has exactly one output rank."""

    def wrong(problem: str) -> ContractError:
        return ContractError(f"trainer ranks do not fit together: {problem}", *map(str, ranks))

    if any(info.rank != i or info.world_size != num_workers for i, info in enumerate(ranks)):
        raise wrong(f"{num_workers} were started as ranks 0 to {num_workers - 1}")
    if len({info.dp_size for info in ranks}) != 1:
        raise wrong("they name different data-parallel sizes")
    outputs: dict[int, int] = {}
    for info in ranks:
        if info.output and outputs.setdefault(info.dp_rank, info.rank) != info.rank:
            raise wrong(f"data-parallel rank {info.dp_rank} has two output ranks")
    if sorted(outputs) != list(range(ranks[0].dp_size)):
        raise wrong(f"output ranks cover the data-parallel ranks {sorted(outputs)} of {ranks[0].dp_size}")
    return [outputs[dp_rank] for dp_rank in range(ranks[0].dp_size)]


def merge_reports(reports: Sequence[StepReport]) -> StepReport:
    """One report from those of the output ranks, without columns: partial sums (loss, tokens, trainable, auxiliary) are
    added, seconds and memory are the worst. Raises ContractError when what all ranks must share differs."""
    first = reports[0]
    for other in reports[1:]:
        for name in ("step", "skipped", "lr", "grad_norm"):
            a, b = getattr(first, name), getattr(other, name)
            same = isclose(a, b, rel_tol=1e-4, abs_tol=1e-12) if isinstance(a, float) and isinstance(b, float) else a == b
            if not same:
                raise ContractError(f'trainer ranks report different "{name}" of step {first.step}: {a!r} and {b!r}')
    merged = replace(first, seconds={}, metrics={}, auxiliary={}, columns={})
    merged.loss = sum(r.loss for r in reports)
    merged.tokens = sum(r.tokens for r in reports)
    merged.trainable = sum(r.trainable for r in reports)
    merged.peak_bytes = max(r.peak_bytes for r in reports)
    for report in reports:
        for name, value in report.seconds.items():
            merged.seconds[name] = max(merged.seconds.get(name, 0.0), value)
        for name, value in report.metrics.items():
            merged.metrics[name] = merge_metric(merged.metrics.get(name), value)
        for name, value in report.auxiliary.items():
            merged.auxiliary[name] = merged.auxiliary.get(name, 0.0) + value
    return merged


# --- Rank ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """What `RankHost.send_next` returns after the last message; equal in every process."""


END = End()


def _as_end(answer: Any) -> Any:
    return END if isinstance(answer, End) else answer


class RankHost:
    """A `TrainerRank` with the transport's sender beside it, as a worker hosts it. Methods of the rank pass through."""

    def __init__(self, rank: TrainerRank, make_sender: Callable[[SendPlan], WeightSender] | None = None) -> None:
        self._rank = rank
        self._make_sender = make_sender or _direct_sender
        self._sender: WeightSender | None = None
        self._buckets: Iterator[Any] | None = None
        self._stream: Iterator[WeightMessage | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def send_open(self, plan: SendPlan) -> None:
        self.send_close()
        if self._sender is None:
            self._sender = self._make_sender(plan)
        self._buckets = iter(self._rank.export(plan.layout, plan.bucket_bytes))
        self._stream = self._sender.send(plan, self._buckets)

    def send_next(self) -> WeightMessage | None | End:
        assert self._stream is not None, "send_open() comes first"
        return next(self._stream, END)

    def send_close(self) -> None:
        """Lets the sender free what it holds, then takes the rest of the export, which other ranks take part in."""
        stream, buckets, self._stream, self._buckets = self._stream, self._buckets, None, None
        if stream is not None and hasattr(stream, "close"):
            stream.close()
        for _ in buckets or ():
            pass

    def close(self) -> None:
        """Frees what a send in progress holds, without draining: other ranks may be gone."""
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        if self._sender is not None:
            self._sender.close()
        self._rank.close()


def _direct_sender(plan: SendPlan) -> WeightSender:
    from miles_core.transport import DirectSender

    return DirectSender()


def host_rank(wiring: Any) -> RankHost:
    """The run's trainer rank in this process, with the sender of the run's transport."""

    def make_sender(plan: SendPlan) -> WeightSender:
        sender = wiring.build_part("transport", "sender")
        if sender is None:
            raise ContractError(f'the transport "{plan.transport}" has no part "sender" for trainer ranks')
        return sender

    return RankHost(wiring.build("trainer"), make_sender)
