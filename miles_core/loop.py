"""One run: open the session, evaluate, train step by step, save. A step reads top to bottom in `Loop.train_step`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles_core import batch as batching
from miles_core import checkpoint
from miles_core.component import merge_metric, metric_value
from miles_core.errors import DataError, Interrupted
from miles_core.evaluate import evaluate
from miles_core.session import Session
from miles_core.stats import value_metrics
from miles_core.types import Metric, SampleGroup, StepReport, TrainBatch

MODEL_FOLDER = "model"
"""Where in the run folder the final policy is written."""


@dataclass(slots=True)
class RunResult:
    """How a run ended: the last step, where things are, and every evaluation as (name, step, metrics)."""

    step: int
    run_dir: Path
    model_dir: Path | None = None
    evaluations: list[tuple[str, int, Mapping[str, float]]] = field(default_factory=list)
    already_complete: bool = False


class Loop:
    """Training, given an open session. `step` counts finished training steps, `version` the weights of the engines."""

    def __init__(self, session: Session, stop: asyncio.Event) -> None:
        self.session = session
        self.stop = stop
        self.config = session.run.config
        self.step = 0
        self.version = 0
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.rollout_seconds = 0.0
        self.log_seconds = 0.0
        """What the last step took to hand its numbers to trackers and view; counted with the next step's."""
        self.ended = False
        self.evaluations: list[tuple[str, int, Mapping[str, float]]] = []

    async def run(self) -> RunResult:
        """Trains to `config.steps`. Raises Interrupted after a complete save when `stop` was set."""
        if self.step >= self.config.steps:  # what was killed after its last checkpoint still owes the model
            return self.result(model_dir=await self._save_model(), already_complete=True)
        if self.step == 0:
            await self.evaluate_due(first=True)
        while self.step < self.config.steps:
            groups = await self._or_stop(self._next_groups())
            if not groups and self.session.buffer.data_ended:
                break
            await self.train_step(groups)
            await self.evaluate_due()
            await self.save_due()
        await self._end_early()
        return self.result(model_dir=await self._save_model())

    async def _next_groups(self) -> list[SampleGroup]:
        """The groups of the next step. Meanwhile engines that fell out of rotation are brought back, if the trainer still
        holds the weights of the last push."""
        session = self.session
        session.host.observe("miles_before_rollout", step=self.step + 1, version=self.version)
        session.feed.settle()
        began = time.perf_counter()
        pushed = self.step % self.config.rollout.update_every == 0
        async with session.pool.repairing() if pushed else nullcontext():
            groups = await session.buffer.next_batch()
        self.rollout_seconds = time.perf_counter() - began
        return groups

    async def _end_early(self) -> None:
        """A data source with a fixed number of epochs may end before `steps`: said, evaluated and saved like the end.

        Raises DataError when not a single step could be trained."""
        if self.step >= self.config.steps:
            return
        if self.step == 0:
            raise DataError(
                f"the data ended before one step was full (rollout.groups_per_step = {self.config.rollout.groups_per_step})"
            )
        self.session.view.note(f"the data ended after step {self.step} of {self.config.steps}", "warning")
        self.ended = True
        await self.evaluate_due()
        await self.save_due()

    async def train_step(self, groups: list[SampleGroup]) -> None:
        """One training step on complete, scored groups: columns, advantages, weights, optimizer steps, push."""
        session, step = self.session, self.step + 1
        clock = Clock()
        session.scorer.check_step(groups)
        batch = batching.prepare(
            groups,
            train_truncated=self.config.train.train_truncated,
            version=self.version,
            max_lag=self.config.rollout.max_lag,
            old_logprobs=self.config.train.old_logprobs,
            fields=session.fields,
        )
        clock.lap("prepare")
        await self._forward_columns(batch, step)
        clock.lap("forward")
        batching.apply_advantages(batch, session.advantages)
        batches = batching.make_batches(
            batch,
            self.config.train,
            constant_length=self.config.rollout.sampling.max_new_tokens,
            corrections=session.corrections,
            needs=session.loss_needs,
            scopes=session.scopes,
            seed=self.config.seed,
            step=step,
            version=self.version,
        )
        if session.skips_dead:
            batches = [batching.live_part(minibatch) for minibatch in batches]
        session.host.observe("miles_batch_ready", step=step, batch=batch)
        clock.lap("prepare")
        reports = [await self._optimize(step, minibatch) for minibatch in batches]
        self.skipped_steps += not batches  # all groups were dropped, which `rollout.on_exhausted = "train"` allows
        clock.lap("train")
        self.step = step
        if step % self.config.rollout.update_every == 0 or step == self.config.steps:
            await self._push()
        clock.lap("sync")
        self._report(groups, batch, batches, reports, clock)

    async def _forward_columns(self, batch: batching.RolloutBatch, step: int) -> None:
        """Forward passes for the union of what advantages, corrections and losses read, once per step."""
        session = self.session
        wanted = session.forward_roles(self.config.train)
        if not wanted or not any(m.any() for m in batch.mask):
            return
        whole = TrainBatch(samples=batch.samples, mask=batch.mask, step=step, version=self.version)
        for role, columns in wanted.items():
            session.view.phase(f"forward {role}")
            rows = await session.trainer.forward(whole, role, frozenset(columns.values()))
            for column, output in columns.items():
                batch.put(column, rows[output], f"trainer forward of {role}")

    async def _optimize(self, step: int, minibatch: TrainBatch) -> StepReport:
        if reason := batching.skip_reason(minibatch):
            self.skipped_steps += 1
            self.session.view.note(f"step {step}: nothing to train, the optimizer step is skipped", "warning")
            return StepReport(step=step, loss=0.0, grad_norm=0.0, lr=0.0, skipped=reason)
        self.session.view.phase("train")
        self.session.host.observe("miles_before_step", step=step, batch=minibatch)
        critic = self.config.roles.get("critic")
        alone = critic is not None and step <= critic.warmup_steps
        report = StepReport(step=step, loss=0.0, grad_norm=0.0, lr=0.0, skipped="critic-warmup")
        if not alone:
            report = await self.session.trainer.step(minibatch)
            self.optimizer_steps += report.skipped is None
        if critic is not None and (alone or not critic.shared):
            add_critic(report, await self.session.trainer.step(minibatch, "critic"))
        return report

    async def _push(self) -> None:
        """Sends the next version to every engine. Order matters: stale groups first, then the push, then the buffer."""
        session = self.session
        session.view.phase("sync")
        await session.buffer.before_push(self.version + 1)
        report = await session.push(self.version + 1)
        self.version += 1
        session.buffer.advance(self.version)
        session.host.observe("miles_weights_synced", version=self.version, report=report)
        for engine in report.engines:
            if not engine.ok:
                session.view.note(f"engine {engine.engine} is out of rotation ({engine.phase}: {engine.error})", "warning")

    def _report(
        self,
        groups: list[SampleGroup],
        batch: batching.RolloutBatch,
        batches: Sequence[TrainBatch],
        reports: Sequence[StepReport],
        clock: Clock,
    ) -> None:
        session = self.session
        metrics = batching.rollout_metrics(groups)
        metrics |= session.buffer.metrics() | session.scorer.metrics()
        metrics |= _train_metrics(batches, reports) | value_metrics(batch.columns, batch.mask)
        metrics |= {name: value for name, m in batch.metrics.items() if (value := metric_value(m)) is not None}
        metrics |= session.custom_metrics(groups, batches, list(reports))
        clock.lap("report", self.log_seconds)
        metrics |= clock.metrics(self.rollout_seconds)
        metrics["step/samples_per_s"] = len(batch.samples) / max(metrics["step/seconds"], 1e-9)
        metrics["run/version"] = float(self.version)
        metrics["run/optimizer_steps"] = float(self.optimizer_steps)
        metrics["run/skipped_steps"] = float(self.skipped_steps)
        if metrics.get("time/rollout"):
            metrics["rollout/tokens_per_s"] = metrics.get("tokens/sampled", 0.0) / metrics["time/rollout"]
        if metrics.get("time/train"):
            metrics["train/tokens_per_s"] = metrics.get("train/tokens", 0.0) / metrics["time/train"]
        began = time.perf_counter()
        session.log(self.step, metrics, groups)
        self.log_seconds = time.perf_counter() - began

    async def evaluate_due(self, first: bool = False) -> None:
        last = self.ended or self.step == self.config.steps
        for table in self.config.eval:
            if first or last or (table.every and self.step % table.every == 0):
                metrics, groups = await self._or_stop(evaluate(self.session, table))
                self.evaluations.append((table.name, self.step, metrics))
                self.session.view.evaluated(table.name, self.step, metrics, groups)
                self.session.log_evaluation(self.step, table.name, metrics)

    async def save_due(self) -> None:
        every = self.config.checkpoint.every
        if (every and self.step % every == 0) or self.ended or self.step == self.config.steps:
            await self.save()
        if self.stop.is_set() and self.step < self.config.steps:
            await self._save_and_stop()

    async def save(self) -> Path:
        self.session.view.phase("save")
        self.session.flush_trackers()
        return await checkpoint.save(
            self.session.run_dir, self.step, self.state(), self.session.trainer.save, self.config.checkpoint.keep
        )

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            **self.session.state(),
        }

    async def restore(self, folder: Path) -> None:
        """Continues from a checkpoint: the trainer's and the driver's state, then the weights to every engine."""
        state = checkpoint.read_state(folder)
        await self.session.trainer.load(folder / "trainer")
        self.step, self.version = state["step"], state["version"]
        self.optimizer_steps, self.skipped_steps = state["optimizer_steps"], state["skipped_steps"]
        self.session.restore(state)
        await self.session.push(self.version)

    async def _or_stop(self, work: Any) -> Any:
        """The result of `work`, unless the run is asked to stop meanwhile: then a save and Interrupted."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._save_and_stop()
        finally:
            stop.cancel()

    async def _save_and_stop(self) -> None:
        if checkpoint.find(self.session.run_dir).step != self.step or self.step == 0:
            await self.save()
        raise Interrupted(
            f"stopped on request after step {self.step} of {self.config.steps}; everything is saved",
            f"go on with: miles run {self.session.run_dir / 'config.toml'} --resume {self.session.run_dir}",
        )

    async def _save_model(self) -> Path | None:
        if not self.config.checkpoint.save_model:
            return None
        folder = self.session.run_dir / MODEL_FOLDER
        self.session.view.phase("save")
        await self.session.save_model(folder)
        return folder

    def result(self, model_dir: Path | None = None, already_complete: bool = False) -> RunResult:
        return RunResult(
            step=self.step,
            run_dir=self.session.run_dir,
            model_dir=model_dir,
            evaluations=self.evaluations,
            already_complete=already_complete,
        )


class Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str, more: float = 0.0) -> None:
        """Adds the time since the last lap, and `more`, to a phase."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last + more
        self._last = now

    def metrics(self, rollout_seconds: float) -> dict[str, float]:
        """`time/<phase>`; "rollout" is how long the step waited for its groups."""
        rows = {f"time/{name}": value for name, value in self.seconds.items()} | {"time/rollout": rollout_seconds}
        rows["step/seconds"] = sum(rows.values())
        return rows


def add_critic(report: StepReport, critic: StepReport) -> None:
    """Adds the numbers of the critic's own step to those of the policy's: "critic/..." and the time it took."""
    report.metrics |= {n if n.startswith("critic/") else f"critic/{n}": metric for n, metric in critic.metrics.items()}
    if critic.skipped is None:
        for name in ("grad_norm", "lr"):
            report.metrics[f"critic/{name}"] = (getattr(critic, name), 1.0, "mean")
        report.metrics["critic/loss"] = (critic.loss, 1.0, "mean")
    for name, value in critic.seconds.items():
        report.seconds[name] = report.seconds.get(name, 0.0) + value
    report.peak_bytes = max(report.peak_bytes, critic.peak_bytes)


def _over_steps(reports: Sequence[StepReport]) -> dict[str, float]:
    """The metrics of several optimizer steps as one: means over everything counted, extrema, and of sums the mean per
    step."""
    merged: dict[str, Metric] = {}
    steps: dict[str, int] = {}
    for report in reports:
        for name, metric in report.metrics.items():
            merged[name] = merge_metric(merged.get(name), metric)
            steps[name] = steps.get(name, 0) + 1
    values = {name: metric_value(m) for name, m in merged.items()}
    return {n: v / (steps[n] if merged[n][2] == "sum" else 1) for n, v in values.items() if v is not None}


def _train_metrics(batches: Sequence[TrainBatch], reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the optimizer steps of one training step, and the gap between engine and trainer before the first."""
    rows = _over_steps(reports)
    for report in reports:
        for name, value in report.seconds.items():
            rows[f"time/train_{name}"] = rows.get(f"time/train_{name}", 0.0) + value
    done = [r for r in reports if r.skipped is None]
    if not done:
        return rows
    rows |= {
        "train/loss": float(np.mean([r.loss for r in done])),
        "train/grad_norm": float(np.mean([r.grad_norm for r in done])),
        "train/lr": done[-1].lr,
        "train/tokens": float(sum(r.tokens for r in done)),
        "train/trainable_tokens": float(sum(r.trainable for r in done)),
        "train/peak_gbytes": max(r.peak_bytes for r in done) / 1e9,
    }
    for report in done:
        rows |= {f"auxiliary/{name}": value for name, value in report.auxiliary.items()}
    first = reports[0]
    if first.skipped is None and "logprobs" in first.columns:
        samples = batches[0].samples
        sampled = [m & (not s.metadata.get("recorded")) for m, s in zip(batches[0].mask, samples, strict=True)]
        gap = batching.logprob_gap([s.logprobs for s in samples], first.columns["logprobs"], sampled)
        rows |= {f"gap/{name}": value for name, value in gap.items()}
    return rows
