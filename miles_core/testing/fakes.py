"""Small correct components of the kinds of which the core has none, for the suites to be tried on and to be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.errors import ConfigError, RunFailed, RuntimeMissing, WorkerDied
from miles_core.fields import FieldSpec
from miles_core.interfaces import (
    Allocation,
    Launcher,
    ModelSource,
    ModelSpec,
    PrecisionRecipe,
    TrainExtension,
    WorkerGroup,
)
from miles_core.testing import toy_model
from miles_core.testing.workers import Worker
from miles_core.types import (
    CorrectionInputs,
    CorrectionOutput,
    Death,
    Prompt,
    RoleSpec,
    SampleGroup,
    StepReport,
    TrainBatch,
)


class HardestFirst:
    """A sampler: what is not yet solved, the prompts of the lowest mean reward first."""

    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        unsolved = [p for p in prompts if history.get(p.id, 0.0) < 1.0]
        return sorted(unsolved, key=lambda p: history.get(p.id, 0.0))


class TisConfig(ComponentConfig):
    """Options of the fake correction."""

    cap: float = 2.0
    """Largest importance weight."""
    mask_above: float = 1e4
    """Tokens with a larger ratio are masked."""


class TruncatedImportance:
    """A correction: min(exp(trainer - engine), cap), and a mask where the two are hopelessly apart."""

    def __init__(self, config: TisConfig) -> None:
        self.config = config

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        pairs = zip(inputs.columns["old_logprobs"], inputs.columns["rollout_logprobs"], strict=True)
        ratios = [np.exp(np.clip(old - rollout, -50.0, 50.0)) for old, rollout in pairs]
        masks = [m & (r <= self.config.mask_above) for m, r in zip(inputs.mask, ratios, strict=True)]
        return CorrectionOutput(mask=masks, multiplier=[np.minimum(r, self.config.cap).astype(np.float32) for r in ratios])


def lengths(groups: list[SampleGroup], batch: TrainBatch, reports: list[StepReport]) -> Mapping[str, float]:
    """A metric: mean number of response tokens."""
    counts = [s.num_response_tokens for group in groups for s in group.samples]
    return {"response": float(np.mean(counts))} if counts else {}


class FolderSource(ModelSource):
    """A source: `toy:SEED` is a toy model, written once below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        if not reference.isdigit():
            raise ConfigError(f'"toy:{reference}" names no toy model: write "toy:SEED"')
        folder = self.root / f"toy-{reference}"
        if not folder.is_dir():
            report("writing", 0, 1)
            scratch = self.root / f"scratch-{id(object())}-{np.random.default_rng().integers(2**40)}"
            toy_model.write_model(scratch, toy_model.initial_params(int(reference)))
            try:
                scratch.rename(folder)
            except OSError:  # another run was faster, and its folder is as good
                assert folder.is_dir()
            report("writing", 1, 1)
        return folder

    def offline(self) -> FolderSource:
        return _Unreachable(self.root)


class _Unreachable(FolderSource):
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        raise RuntimeMissing("there is no network", "give a local folder: model.path = /path/to/folder")


class SplitHeads(ModelSpec):
    """A model spec: the backend's fused `qkv` is three projections on the other side."""

    architectures = ("ToyPolicy",)
    parts = ("q_proj", "k_proj", "v_proj")

    def to_hf(self, name: str) -> tuple[str, ...]:
        return tuple(name.replace("qkv", part) for part in self.parts) if "qkv" in name else (name,)

    def from_hf(self, name: str) -> tuple[str, ...]:
        for part in self.parts:
            name = name.replace(part, "qkv")
        return (name,)


class AsIs(PrecisionRecipe):
    """A precision recipe that changes nothing."""


class Counting(TrainExtension):
    """A train extension that counts passes."""

    passes = 0

    def around_forward(self, microbatch: Any, context: Mapping[str, Any]) -> AbstractContextManager[None]:
        self.passes += 1
        return nullcontext()


EXPERTS = FieldSpec(name="routed-experts", dtype="int16", axes=("layer", "topk"), align="transition", missing="fill:-1")


# --- A launcher without processes ------------------------------------------------------------------------------------


class InlineLauncher(Launcher):
    """Workers are objects in this process. It has no GPU, and what `Worker` does by dying is only told."""

    async def allocate(self, specs: Sequence[RoleSpec], placement: Any = "auto") -> InlineAllocation:
        gpus = sum(spec.gpus * spec.num_workers for spec in specs)
        if gpus:
            raise RuntimeMissing(f"{gpus:g} GPUs were asked for, and here is none", "lower trainer.num_workers")
        return InlineAllocation(specs)


class InlineAllocation(Allocation):
    def __init__(self, specs: Sequence[RoleSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.groups: dict[str, InlineGroup] = {}
        self.restarts: dict[tuple[str, int], int] = {}

    async def launch(self, role: str, payload: Mapping[str, Any]) -> InlineGroup:
        made = [self.worker(role, i, payload) for i in range(self.specs[role].num_workers)]
        self.groups[role] = InlineGroup(role, made, payload)
        return self.groups[role]

    def worker(self, role: str, index: int, payload: Mapping[str, Any]) -> Worker:
        size = self.specs[role].num_workers
        place = {"role": role, "index": index, "world_size": size, "rendezvous": "file:///tmp/meet"}
        context = BuildContext(component="x/worker", run_dir=Path("."), seed=0, run_config=None, **place)
        return Worker(context, **payload.get("args", {}))

    async def replace(self, role: str, index: int) -> None:
        group, key = self.groups[role], (role, index)
        if self.restarts.get(key, 0) >= self.specs[role].restarts:
            raise RunFailed(f"{role} {index} has been started again often enough")
        self.restarts[key] = self.restarts.get(key, 0) + 1
        group.workers[index] = self.worker(role, index, group.payload)

    async def close(self) -> None:
        for group in self.groups.values():
            await group.close()


class InlineGroup(WorkerGroup):
    def __init__(self, role: str, workers: list[Worker], payload: Mapping[str, Any]) -> None:
        self.role, self.size, self.workers, self.payload = role, len(workers), workers, payload
        self.dead: list[Death] = []

    async def call(
        self,
        method: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        chosen = range(self.size) if ranks is None else ranks
        if not self.workers:
            raise RunFailed(f"the workers of {self.role} are closed")
        if method in ("die", "hang"):
            return await self.end(method, args[0], timeout_s)
        own = [()] * len(chosen) if per_rank is None else per_rank
        return [self.one(rank, method, (*args, *more)) for rank, more in zip(chosen, own, strict=True)]

    def one(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self.workers[rank], method)(*args)
        except Exception as error:
            raise RunFailed(f"{self.role} {rank}: {error}") from error

    async def end(self, method: str, rank: int, timeout_s: float | None) -> list[Any]:
        if method == "hang":
            await asyncio.sleep(timeout_s or 3600)
            raise RunFailed(f"{self.role} {rank} did not answer within {timeout_s:g} s")
        self.dead.append(Death(role=self.role, index=rank, exit_code=9))
        raise WorkerDied(f"{self.role} {rank} died with exit code 9")

    async def deaths(self) -> AsyncIterator[Death]:
        for death in self.dead:
            yield death

    async def close(self) -> None:
        self.workers = []


# --- Components ------------------------------------------------------------------------------------------------------


def fake(name: str, build: Any, **fields: Any) -> Component[Any]:
    """A component with a summary; `build` is called without arguments unless it is given as `builder`."""
    make = fields.pop("builder", None) or (lambda config, context: build())
    return Component(name=name, summary=f"the fake {name}", build=make, **fields)


COMPONENTS = SimpleNamespace(
    sampler=fake("hardest-first", HardestFirst),
    correction=fake(
        "tis",
        None,
        builder=lambda config, context: TruncatedImportance(config),
        config=TisConfig,
        needs=lambda config: frozenset({"old_logprobs"}),
        traits={"denominator": "keep"},
    ),
    metric=fake("lengths", lambda: lengths),
    source=fake("folder", None, builder=lambda config, context: FolderSource(context.run_dir)),
    model=fake("split-heads", SplitHeads, traits={"architectures": ("ToyPolicy",)}),
    precision=fake("as-is", AsIs),
    extension=fake("counting", Counting),
    launcher=fake("inline", InlineLauncher),
)
