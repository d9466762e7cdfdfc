"""Rewards on finished groups: under a time limit that holds, in workers that can be killed, combined into one number.

A reward runs in a worker process, unless it is built in and declares the trait `inline`: those are a few string
operations, and scoring them in the driver saves the trip. Rewards that declare secrets share no process with others.
Rewards keep no state between calls: which worker scores a sample is not fixed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.component import Component, merge_metric, metric_value
from miles_core.discovery import BUILTIN
from miles_core.errors import ConfigError, RunFailed
from miles_core.judging import Judge, judge_group, judge_sample
from miles_core.reward_pool import JudgeInfo, RewardPool, Task
from miles_core.reward_wire import Outcome, encode_group
from miles_core.settings import RewardsTable, RewardTable
from miles_core.types import Metric, Sample, SampleGroup, Score
from miles_core.votes import FAILED, last_segments, sample_id

if TYPE_CHECKING:
    from miles_core.config import ResolvedRun
    from miles_core.wiring import Wiring

log = logging.getLogger("miles.scoring")

STARTUP_TIMEOUT_S = 300.0
"""Limit for importing and building all rewards of a worker; it is not part of any sample's time."""
MAX_TIMEOUT_LINES = 5
"""Time-outs of a run that are logged one by one, each with its sample."""
_COUNTED = {"error": "errors", "timeout": "timeouts", "none": "no-verdict"}


@dataclass(slots=True, kw_only=True)
class RewardEntry:
    """One selected reward. `row` is what a worker needs to find it; `judge` is set when it is scored inline."""

    name: str
    table: RewardTable
    secrets: tuple[str, ...] = ()
    row: dict[str, Any] = field(default_factory=dict)
    judge: Judge | None = None
    pool: RewardPool | None = None

    @property
    def info(self) -> JudgeInfo:
        if self.judge is not None:
            return JudgeInfo(function=self.judge.function, grouped=self.judge.grouped, asynchronous=False)
        assert self.pool is not None, "the scorer has not been started"
        return self.pool.rewards[self.name]


class Scorer:
    """Fills `sample.scores` and `sample.reward` of whole groups.

    A trajectory is judged once, on its last segment, and all its segments get the verdict. Samples that failed before
    (error, timeout, aborted) are not judged. `counters`: samples, errors, timeouts, no-verdict, retried, skipped.
    """

    def __init__(
        self,
        entries: Sequence[RewardEntry],
        rewards: RewardsTable,
        setup: Mapping[str, Any],
        *,
        log_dir: Path | None = None,
    ) -> None:
        """`setup` tells workers how to find the rewards: a run's payload, or modules and files (see `from_components`)."""
        twice = [name for name, count in Counter(e.name for e in entries).items() if count > 1]
        if twice:
            raise ConfigError(
                f'two rewards are named "{twice[0]}"', 'give one of them a name of its own: [[reward]] name = "..."'
            )
        self.entries, self.rewards, self.setup = list(entries), rewards, dict(setup)
        self.log_dir = log_dir
        self.counters: Counter[str] = Counter()
        self.first_traceback = ""
        self._logged: set[tuple[str, str]] = set()
        self._reported: Counter[str] = Counter()
        self._seconds = 0.0
        self._pools: list[RewardPool] = []

    @classmethod
    def from_run(cls, run: ResolvedRun, wiring: Wiring, run_dir: Path) -> Scorer:
        """The scorer of a run; inline rewards are built here, the others in the workers from the run's payload."""
        entries = []
        for position, selection in enumerate(run.all("reward")):
            component, table = selection.component, selection.table
            name = table.name or component.name
            entry = RewardEntry(name=name, table=table, secrets=component.secrets, row={"name": name, "position": position})
            if selection.plugin.name == BUILTIN and is_inline(component, selection.options):
                context = wiring.context(selection)
                entry.judge = Judge.of(name, component.build(selection.options, context), context)
            entries.append(entry)
        model_path = str(wiring.model_path) if wiring.model_path else ""
        setup = {"payload": run.payload(), "run_dir": str(run_dir), "model_path": model_path}
        return cls(entries, run.config.rewards, setup, log_dir=run_dir / "logs")

    @classmethod
    def from_components(
        cls,
        rewards: Iterable[tuple[str, Component[Any], Any, RewardTable]],
        *,
        modules: Sequence[str] = (),
        files: Sequence[Path] = (),
        table: RewardsTable | None = None,
        run_dir: Path | None = None,
        log_dir: Path | None = None,
    ) -> Scorer:
        """A scorer without a run, for tests of a reward: (name, component, options, table) rows. The workers find the
        components by name in what `miles_rewards()` of the given modules and plugin files returns."""
        entries = [
            RewardEntry(
                name=name,
                table=reward_table,
                secrets=component.secrets,
                row={"name": name, "component": component.name, "options": options.model_dump_json()},
            )
            for name, component, options, reward_table in rewards
        ]
        setup = {"payload": None, "modules": list(modules), "files": [str(f) for f in files], "seed": 0}
        return cls(entries, table or RewardsTable(), setup | {"run_dir": str(run_dir or Path.cwd())}, log_dir=log_dir)

    # --- Life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts `rewards.workers` processes per set of secrets and waits until their rewards are built. Raises what a
        reward's `build` raised, or RunFailed naming the reward, and leaves no process behind then."""
        for secrets in sorted({e.secrets for e in self.entries if e.judge is None}):
            members = [e for e in self.entries if e.judge is None and e.secrets == secrets]
            pool = RewardPool(
                {**self.setup, "rewards": [e.row for e in members]},
                num_workers=self.rewards.workers,
                declared=frozenset(secrets),
                startup_timeout_s=STARTUP_TIMEOUT_S,
                log_dir=self.log_dir,
                warn=log.error,
            )
            self._pools.append(pool)
            for entry in members:
                entry.pool = pool
        try:
            await asyncio.gather(*(asyncio.wrap_future(f) for pool in self._pools for f in pool.start()))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kills the workers and all that they started; safe to call twice."""
        pools, self._pools = self._pools, []
        await asyncio.gather(*(asyncio.to_thread(pool.close) for pool in pools))

    def worker_pids(self) -> list[int]:
        """Living reward workers."""
        return [pid for pool in self._pools for pid in pool.pids()]

    # --- Scoring -----------------------------------------------------------------------------------------------------

    async def score_group(self, group: SampleGroup) -> None:
        """Judges `group` and its baseline with every reward, in place.

        A sample that a reward raised on, timed out on or had no verdict for has `reward` None, and the others keep
        theirs. Raises ContractError when a group reward returns a wrong number of scores, RunFailed when workers cannot
        be had any more.
        """
        last = {key: s for key, s in last_segments(group.samples).items() if s.status not in FAILED}
        baseline = [group.baseline] if group.baseline is not None and group.baseline.status not in FAILED else []
        judged = [*last.values(), *baseline]
        self.counters["samples"] += len(judged)
        self.counters["skipped"] += len({s.trajectory_id for s in group.samples}) - len(last)
        body = encode_group(group, judged) if judged and any(e.judge is None for e in self.entries) else b""
        columns = await asyncio.gather(*(self._score(entry, group, judged, len(last), body) for entry in self.entries))
        for entry, outcomes in zip(self.entries, columns, strict=True):
            for sample, outcome in zip(judged, outcomes, strict=True):
                sample.scores[entry.name] = self._verdict(entry, sample, outcome)
        for sample in judged:
            sample.reward = self.combined(sample.scores)
        for sample in group.samples:
            verdict = last.get(sample.trajectory_id)
            if verdict is None:
                sample.reward = None
            elif verdict is not sample:
                sample.scores, sample.reward = dict(verdict.scores), verdict.reward

    def combined(self, scores: Mapping[str, Score]) -> float | None:
        """One number from all scores, by the `[rewards] combine` rule."""
        return combine([(scores[e.name].value, e.table.weight) for e in self.entries], self.rewards.combine)

    async def _score(
        self, entry: RewardEntry, group: SampleGroup, judged: list[Sample], num_last: int, body: bytes
    ) -> list[Outcome]:
        """Outcomes in the order of `judged`. A group reward sees the siblings together and the baseline by itself."""
        if not judged:
            return []
        grouped = entry.info.grouped
        pieces = [list(range(num_last)), list(range(num_last, len(judged)))] if grouped else [list(range(len(judged)))]
        pieces = [piece for piece in pieces if piece]
        if entry.judge is not None:
            return [o for piece in pieces for o in _score_inline(entry.judge, group, [judged[i] for i in piece])]
        assert entry.pool is not None
        limit_s = entry.table.timeout_s
        tasks = [Task(reward=entry.name, body=body, indices=piece, limit_s=limit_s) for piece in pieces]
        outcomes = await asyncio.gather(*(asyncio.wrap_future(entry.pool.submit(task)) for task in tasks))
        self.counters["retried"] += sum(len(task.retried) for task in tasks)
        return [outcome for part in outcomes for outcome in part]

    def _verdict(self, entry: RewardEntry, sample: Sample, outcome: Outcome) -> Score:
        self._seconds += outcome.seconds
        if outcome.kind in _COUNTED:
            self.counters[_COUNTED[outcome.kind]] += 1
        if outcome.kind in ("error", "timeout"):
            self._log(entry, sample, outcome)
        if outcome.kind == "timeout" and entry.table.on_timeout == "zero":
            outcome.value = 0.0
        return outcome.score()

    def _log(self, entry: RewardEntry, sample: Sample, outcome: Outcome) -> None:
        """The first failure of a sort in full, with its sample; the counters tell how many there were."""
        head = f'reward "{entry.name}" ({entry.info.function}) on sample {sample_id(sample)}: {outcome.reason}'
        text = head if outcome.traceback.strip() in head else f"{head}\n{outcome.traceback}".rstrip()
        self.first_traceback = self.first_traceback or text
        new = (entry.name, outcome.reason) not in self._logged
        self._logged.add((entry.name, outcome.reason))
        if outcome.kind == "timeout" and self.counters["timeouts"] <= MAX_TIMEOUT_LINES:
            last = self.counters["timeouts"] == MAX_TIMEOUT_LINES
            log.warning("%s; its worker is killed and replaced%s", head, "; further ones are only counted" * last)
        elif new:
            log.error("%s", text)
        else:
            log.debug("%s", head)

    def check_step(self, groups: Sequence[SampleGroup]) -> None:
        """Raises RunFailed with the first traceback when every sample that was judged failed (raised or timed out): such
        a reward is broken, and a run must not go on as if all answers were unknown. None verdicts do not count."""
        judged = [s for group in groups for s in last_segments(group.samples).values() if s.status not in FAILED]
        if judged and all(any(_is_failure(score) for score in s.scores.values()) for s in judged):
            raise RunFailed(
                f"scoring failed for all {len(judged)} samples of this step; the first failure:",
                *(self.first_traceback or "(none was recorded)").splitlines(),
            )

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call: counts under `scoring/`, and what rewards reported under `reward/<name>/`."""
        counts = self.counters - self._reported
        self._reported = Counter(self.counters)
        found = {
            f"scoring/{key.replace('-', '_')}": float(counts[key]) for key in ("samples", "retried", *_COUNTED.values())
        }
        found["scoring/seconds_per_sample"] = self._seconds / counts["samples"] if counts["samples"] else 0.0
        self._seconds = 0.0
        merged: dict[str, Metric] = {}
        for key, metric in self._component_metrics():
            merged[key] = merge_metric(merged.get(key), metric)
        return found | {key: value for key, metric in merged.items() if (value := metric_value(metric)) is not None}

    def _component_metrics(self) -> Iterable[tuple[str, Metric]]:
        for pool in self._pools:
            while not pool.metrics.empty():
                yield from pool.metrics.get().items()
        for entry in self.entries:
            if entry.judge is not None and entry.judge.context is not None:
                yield from entry.judge.context.metrics.items()
                entry.judge.context.metrics.clear()


def combine(scores: Sequence[tuple[float | None, float]], rule: str) -> float | None:
    """One number from (value, weight) pairs, or None when a score that counts has no verdict.

    A score of weight 0 is logged and does not count. "sum": of weight * value. "product": of weight * value. "gate": when
    the first score that counts is not positive, it alone (times its weight) is the reward, and the others need no
    verdict; otherwise the sum. Without any score the reward is 0: such a run learns from a teacher.
    """
    counting = [(value, weight) for value, weight in scores if weight != 0]
    if rule == "gate" and counting:
        value, weight = counting[0]
        if value is not None and value <= 0:
            return weight * value
    total = 1.0 if rule == "product" and counting else 0.0
    for value, weight in counting:
        if value is None:
            return None
        total = total * weight * value if rule == "product" else total + weight * value
    return total


def is_inline(component: Component[Any], options: Any) -> bool:
    """Whether a built-in reward may run in the driver's process; the trait may depend on the options."""
    trait = component.traits.get("inline", False)
    return bool(trait(options) if callable(trait) else trait)


def _score_inline(judge: Judge, group: SampleGroup, samples: list[Sample]) -> list[Outcome]:
    if not judge.grouped:
        return [judge_sample(judge, sample) for sample in samples]
    view = SampleGroup(id=group.id, prompt=group.prompt, samples=samples, num_samples=group.num_samples)
    return judge_group(judge, view)


def _is_failure(score: Score) -> bool:
    return score.value is None and score.reason.startswith(("error: ", "timeout after "))
