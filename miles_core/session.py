"""Everything that one run holds open: model, trainer, engines, scorer, buffer, trackers - started in an order in which
cheap mistakes show before expensive starts, and closed in the reverse."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core import __version__
from miles_core.batch import needs_old_forward
from miles_core.buffer import GroupBuffer
from miles_core.component import Environment
from miles_core.config import ResolvedRun
from miles_core.drops import verdict_of
from miles_core.engines import PUSH_MODES, EnginePool
from miles_core.errors import ConfigError, MilesError
from miles_core.evaluate import EVAL_SEED
from miles_core.interfaces import Allocation, DataSource, EngineReplica
from miles_core.launch import RemoteEngine, launch_engines, launch_trainer, role_specs
from miles_core.observers import TrackerHost
from miles_core.probes import Probes
from miles_core.prompts import PromptFeed
from miles_core.roles import FORWARD_COLUMNS, divergence
from miles_core.scoring import Scorer
from miles_core.settings import EvalTable, SamplingTable, TrainTable
from miles_core.types import (
    Prompt,
    RolloutContext,
    SampleGroup,
    SamplingParams,
    StepReport,
    SyncReport,
    TrainBatch,
    Verdict,
)
from miles_core.view import RunView
from miles_core.wiring import Wiring, run_checks


class Session:
    """The open pieces of one run. `open` raises before anything expensive starts wherever that is possible."""

    def __init__(self, run: ResolvedRun, run_dir: Path, view: RunView) -> None:
        self.run, self.run_dir, self.view, self.host = run, run_dir, view, run.host
        self.config = run.config
        self.trackers: list[TrackerHost] = []
        self.allocation: Allocation | None = None
        self.trainer: Any = None
        self.pool: Any = None
        self.scorer: Any = None
        self.buffer: Any = None
        self.transport: Any = None

    # --- Opening and closing -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Model, checks, data, tokenizer, scorer; then launcher, trainer and engines together, and the transport."""
        self.wiring = Wiring(self.run, run_dir=self.run_dir)
        self.host.configure(self.config)
        self.trackers = [
            TrackerHost(name, tracker, lambda text: self.view.note(text, "warning"))
            for name, tracker in self._build_trackers()
        ]
        self.model_path = await asyncio.to_thread(self._fetch_model)
        self.wiring.model_path = self.model_path
        for role, table in self.config.roles.items():
            if table.path:
                self._folder(table.path, f"roles.{role}.path")
        run_checks(self.run, Environment(run_dir=self.run_dir, model_path=self.model_path))
        self._build_driver_parts()
        await self.scorer.start()
        self.view.phase("start trainer and engines")
        launcher = self.wiring.build("launcher")
        specs = role_specs(self.run)
        self.allocation = await launcher.allocate(specs, self.config.launcher.placement)
        place = {"run_dir": self.run_dir, "model_path": self.model_path, "allocation": self.allocation}
        self.trainer = await launch_trainer(self.run, **place)
        engines = await launch_engines(self.run, **place)
        self.pool = EnginePool(
            engines,
            timeout_s=self.config.engine.timeout_s,
            max_attempts=self.config.engine.max_attempts,
            sync_timeout_s=self.config.transport.timeout_s,
            partial=self.partial,
            replace=self._replace_engine,
            on_event=self._engine_event,
        )
        if len(specs) == 2:
            await asyncio.gather(self.trainer.start(), self.pool.start())
        else:  # loading a model changes process-wide defaults (torch's dtype): in one process, one after the other
            await self.trainer.start()
            await self.pool.start()
        if isinstance(engines[0], RemoteEngine):
            self._watcher = asyncio.create_task(self._watch(engines[0]))
        self.transport = self.wiring.build("transport")
        await self.transport.connect(self.trainer, self.pool)
        self.probes = Probes(self.trainer, self.feed, self.config.transport.tolerance)
        self._build_buffer()

    async def close(self, reason: str) -> None:
        """Ends everything that was opened; what fails here is a note, not an error."""
        self.host.observe("miles_run_end", reason=reason)
        for what, piece in (
            ("buffer", self.buffer),
            ("transport", self.transport),
            ("engines", self.pool),
            ("trainer", self.trainer),
            ("scorer", self.scorer),
            ("launcher", self.allocation),
        ):
            if piece is None:
                continue
            try:
                await piece.close()
            except Exception as error:
                self.view.note(f"closing the {what}: {type(error).__name__}: {error}", "warning")
        for tracker in self.trackers:
            tracker.close()

    def _build_trackers(self) -> list[tuple[str, Any]]:
        """A tracker that cannot be built is left off; metrics still go to the others."""
        built = []
        for selection in self.run.all("tracker"):
            try:
                built.append((selection.name, self.wiring.build_selection(selection)))
            except MilesError as error:
                self.view.note(f'tracker "{selection.name}" is off for this run: {error}', "warning")
        return built

    def _fetch_model(self) -> Path | None:
        path = self.config.model.path
        if not path:
            return None
        if self.run.all("source"):
            self.view.phase("fetch model")
            _, _, reference = path.partition(":")
            source = self.wiring.build("source")
            return source.fetch(reference, self.config.model.revision, self._report_fetch)
        return self._folder(path, "model.path")

    def _folder(self, path: str, where: str) -> Path:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            sources = ", ".join(f'"{e.name}:..."' for e in self.host.registry.all("source")) or "none installed"
            raise ConfigError(
                f"there is no model folder {path} ({where})",
                f"name a Hugging Face folder, or a model source: {sources}",
            )
        return folder.resolve()

    def _report_fetch(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.view.phase(f"model: {phase}", done, total, "bytes")

    def _build_driver_parts(self) -> None:
        self.view.phase("read data")
        wiring, config = self.wiring, self.config
        self.tokenizer = wiring.tokenizer
        self.rollout = wiring.build("rollout")
        self.filters = wiring.build_all("filter")
        self.advantages = wiring.build_all("advantage")
        self.corrections = [
            (name, built, selection.component.traits.get("denominator", "shrink"))
            for selection, (name, built) in zip(self.run.all("correction"), wiring.build_all("correction"), strict=True)
        ]
        self.custom = wiring.build_all("metric")
        self.loss_needs = self._needs("loss")
        self.driver_needs = self._needs("advantage") | self._needs("correction")
        self.scopes = sorted({s.component.traits.get("scope", "policy") for s in self.run.all("loss")})
        self.skips_dead = config.train.skip_zero_advantage and all(
            s.component.traits.get("zero_advantage") == "no-gradient" for s in self.run.all("loss")
        )
        self.partial = config.rollout.partial or config.rollout.on_stale == "continue"
        self.fields = [spec for name, spec in self.host.fields.items() if name in self.loss_needs | self.driver_needs]
        self.max_context = config.model.max_context or self._model_context()
        self.sampling = self._sampling(config.rollout.sampling)
        self.feed = self._feed(wiring.build("data"), self._only("sampler"))
        self.feed.check(config.rollout.groups_per_step)
        self.scorer = Scorer.from_run(self.run, wiring, self.run_dir)

    def _needs(self, kind: str) -> frozenset[str]:
        return frozenset().union(*(s.component.needed(s.options) for s in self.run.all(kind)))

    def _model_context(self) -> int:
        """The model's own limit from its config.json; without one, nothing is known and nothing is cut."""
        path = self.model_path / "config.json" if self.model_path else None
        if path is None or not path.is_file():
            return 1 << 30
        return int(json.loads(path.read_text("utf-8")).get("max_position_embeddings") or 1 << 30)

    def _only(self, kind: str) -> Any:
        """The component of a kind that a run may do without."""
        return self.wiring.build(kind) if self.run.all(kind) else None

    def _feed(self, data: DataSource, sampler: Any = None) -> PromptFeed:
        refuse = self.config.data.long_prompts == "error"
        return PromptFeed(data, self.tokenizer, self.max_context, refuse_long=refuse, sampler=sampler, note=self.view.note)

    def _sampling(self, table: SamplingTable) -> SamplingParams:
        stop_ids = dict.fromkeys((*table.stop_token_ids, *self.tokenizer.stop_token_ids))
        return SamplingParams(**table.model_dump(exclude={"stop_token_ids"}), stop_token_ids=tuple(stop_ids))

    def _build_buffer(self) -> None:
        rollout = self.config.rollout
        self.buffer = GroupBuffer(
            take_prompts=self.feed.take,
            run=self._run_prompt,
            verdict=self._verdict,
            groups_per_step=rollout.groups_per_step,
            max_lag=rollout.max_lag,
            on_stale=rollout.on_stale,
            update_every=rollout.update_every,
            max_rounds=rollout.max_rounds,
            on_exhausted=rollout.on_exhausted,
            on_group=lambda group, verdict: self.feed.remember(group),
            note=self.view.note,
        )

    # --- Groups ------------------------------------------------------------------------------------------------------

    async def _run_prompt(self, prompt: Prompt, order: int, partial: SampleGroup | None) -> SampleGroup:
        """Rollout and reward of one training prompt."""
        table = self.config.rollout
        return await self._make_group(
            self._context(prompt, order, table.samples_per_group, self.sampling, self.config.seed, partial=partial)
        )

    async def evaluate_prompt(self, prompt: Prompt, order: int, table: EvalTable) -> SampleGroup:
        seed = table.seed if table.seed is not None else self.config.seed + EVAL_SEED
        sampling = self._sampling(table.sampling)
        return await self._make_group(self._context(prompt, order, table.num_samples, sampling, seed, evaluation=True))

    async def _make_group(self, context: RolloutContext) -> SampleGroup:
        group = await self.rollout.run_group(context)
        await self.scorer.score_group(group)
        return group

    def _context(
        self, prompt: Prompt, order: int, num_samples: int, sampling: SamplingParams, seed: int, **more: Any
    ) -> RolloutContext:
        return RolloutContext(
            prompt=prompt,
            order=order,
            num_samples=num_samples,
            sampling=sampling,
            seed=seed,
            pool=self.pool,
            tokenizer=self.tokenizer,
            max_context=self.max_context,
            fields=frozenset(spec.name for spec in self.fields),
            field_specs={spec.name: spec for spec in self.fields},
            baseline="baseline" in self.driver_needs,
            **more,
        )

    def evaluation_prompts(self, table: EvalTable) -> list[Prompt]:
        """The same prompts at every evaluation: a fresh source with a seed of its own."""
        selection = self.run.data_for(table)
        context = self.wiring.context(selection)
        context.seed = table.seed if table.seed is not None else self.config.seed + EVAL_SEED
        data = selection.component.build(selection.options, context)
        prompts = self._feed(data).take(table.num_prompts)
        for prompt in prompts:
            prompt.id = f"{table.name}/{prompt.id}"
        return prompts

    def _verdict(self, group: SampleGroup) -> Verdict:
        return verdict_of(self.filters, group)

    # --- Weights -----------------------------------------------------------------------------------------------------

    async def push(self, version: int) -> SyncReport:
        """Sends the trainer's weights to every engine as `version`, verified as the transport table says."""
        mode = "retract" if self.partial else PUSH_MODES[self.config.rollout.on_stale]
        probes = await self.probes.measure() if self.config.transport.verify else None
        return await self.pool.sync(self.transport, version, probes, mode=mode)

    async def _replace_engine(self, old: EngineReplica) -> EngineReplica | None:
        """A dead replica in a process of its own is started again; one inside this process cannot be."""
        return await old.restart() if hasattr(old, "restart") else None

    async def _watch(self, engine: RemoteEngine) -> None:
        """Tells the pool of workers that end while nobody calls them; ends with the allocation."""
        async for death in engine.deaths():
            if any(member.id == f"{death.role}-{death.index}" for member in self.pool.members()):
                how = f"{death.signal or 'ended'}: {death.cause}; log: {death.log}"
                self.pool.report_death(f"{death.role}-{death.index}", how)

    def _engine_event(self, kind: str, engine: str, reason: str) -> None:
        if kind in ("dead", "replaced", "dirty"):
            self.view.note(f"{engine} is {kind}: {reason}", "warning")

    def forward_roles(self, train: TrainTable) -> dict[str, dict[str, str]]:
        """Of each forward pass that a step takes before it trains: role -> {column: output}. A shared critic's values come
        from the policy's pass; divergences that an advantage or correction reads are computed in it too."""
        wanted = (self.loss_needs | self.driver_needs) & FORWARD_COLUMNS.keys()
        if not needs_old_forward(train, loss_needs=self.loss_needs, driver_needs=self.driver_needs):
            wanted -= {"old_logprobs"}
        passes: dict[str, dict[str, str]] = {}
        critic = self.config.roles.get("critic")
        for column in sorted(wanted):
            role, output = FORWARD_COLUMNS[column]
            passes.setdefault("policy" if role == "critic" and critic and critic.shared else role, {})[column] = output
        for name in sorted(self.driver_needs):
            if divergence(name):
                passes.setdefault("policy", {})[name] = name
        return passes

    async def save_model(self, folder: Path) -> None:
        """The policy as a Hugging Face folder with its tokenizer, complete or absent."""
        work = folder.with_name(f"tmp-{folder.name}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        await self.trainer.save_model(work)
        for path in self.model_path.iterdir() if self.model_path else ():
            if is_tokenizer_file(path) and not (work / path.name).exists():
                shutil.copy2(path, work / path.name)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)

    # --- Reporting ---------------------------------------------------------------------------------------------------

    def announce(self, first_step: int) -> None:
        """The first lines of a run, before anything is opened."""
        config = self.config
        self.view.started(
            {
                "version": __version__,
                "name": config.name,
                "run_dir": str(self.run_dir),
                "steps": config.steps,
                "first_step": first_step,
                "groups_per_step": config.rollout.groups_per_step,
                "samples_per_group": config.rollout.samples_per_group,
                "plugins": self.host.describe(),
                "resumed": first_step > 0,
            }
        )

    def finish(self, reason: str, result: Any, seconds: float) -> None:
        summary: dict[str, Any] = {"run_dir": str(self.run_dir), "seconds": seconds}
        if self.buffer is not None:
            summary |= {"dropped": self.buffer.drops.rows(), "started": self.buffer.counts["started"]}
        if result is not None:
            summary |= {"steps": result.step, "model_dir": str(result.model_dir or "")}
        self.view.ended(reason, summary)

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[SampleGroup]) -> None:
        metrics = {**metrics, "data/dropped_long": float(self.feed.dropped)}
        self.view.step(step, metrics)
        self.view.samples(step, groups)
        for tracker in self.trackers:
            tracker.log(step, metrics)
            tracker.samples(step, groups)
        self.host.observe("miles_step_end", step=step, metrics=metrics)

    def log_evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, {f"eval/{name}/{key}": value for key, value in metrics.items()})

    def custom_metrics(
        self, groups: list[SampleGroup], batches: list[TrainBatch], reports: list[StepReport]
    ) -> dict[str, float]:
        """What `metric` components say of the step; one that raises is a note, never the end of a run."""
        found: dict[str, float] = {}
        for name, function in self.custom:
            try:
                for batch in batches[:1]:
                    found |= {f"{name}/{k}": float(v) for k, v in function(groups, batch, reports).items()}
            except Exception as error:
                self.view.note(f'metric "{name}" raised {type(error).__name__}: {error}', "warning")
        return found

    def flush_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.flush()

    def rewind_trackers(self, step: int) -> None:
        for tracker in self.trackers:
            if hasattr(tracker.tracker, "rewind"):
                tracker.tracker.rewind(step)

    # --- State -------------------------------------------------------------------------------------------------------

    def _stateful(self) -> dict[str, Any]:
        """Components that keep state, by "<kind>/<name>"."""
        named = [("filter", self.filters), ("advantage", self.advantages), ("metric", self.custom)]
        pairs = [(f"{kind}/{name}", built) for kind, rows in named for name, built in rows]
        pairs += [(f"rollout/{self.run.one('rollout').name}", self.rollout)]
        pairs += [(f"sampler/{s.name}", self.feed.sampler) for s in self.run.all("sampler")]
        pairs += [(f"correction/{name}", built) for name, built, _ in self.corrections]
        return {key: built for key, built in pairs if hasattr(built, "state") and hasattr(built, "restore")}

    def state(self) -> dict[str, Any]:
        return {
            "source": self.run.one("data").name,
            "data": self.feed.state(),
            "buffer": self.buffer.state(),
            "components": {key: built.state() for key, built in self._stateful().items()},
            "saved_at": time.time(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state`. Raises ConfigError when a component's state is missing: nothing starts afresh."""
        missing = sorted(self._stateful().keys() - state["components"].keys())
        if missing:
            raise ConfigError(f"the checkpoint has no state of {', '.join(missing)}; it was written by another run")
        if state["source"] != (source := self.run.one("data").name):
            raise ConfigError(
                f'the checkpoint is of a run on data "{state["source"]}", and this one reads "{source}" (data.use)',
                "its cursor means nothing there: go on with the data of the checkpoint, or start a new run",
            )
        self.feed.restore(state["data"])
        self.buffer.restore(state["buffer"])
        for key, built in self._stateful().items():
            built.restore(state["components"][key])


def is_tokenizer_file(path: Path) -> bool:
    """Whether a file of a model folder belongs beside new weights: tokenizer, template and generation config do, the
    old weights' index does not."""
    return path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and ".index." not in path.name
