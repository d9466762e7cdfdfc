"""Every hook. The docstring is the contract: where it runs, when it is called, what it returns, since when.

Registration hooks take no arguments and return an iterable of components; they are called once per process, each
implementation by itself, so that every component and every error is attributed to a plugin and its distribution.
Lifecycle hooks run on the driver. `miles_configure` may veto; the others observe, and none of them can stop a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from miles_core.component import Component
    from miles_core.fields import FieldSpec

PROJECT = "miles"
HOOK_API = 1
"""Version of this file. The core supports HOOK_API and HOOK_API - 1."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

REGISTRATION: dict[str, str] = {
    "miles_data_sources": "data",
    "miles_samplers": "sampler",
    "miles_tokenizers": "tokenizer",
    "miles_engines": "engine",
    "miles_rollouts": "rollout",
    "miles_rewards": "reward",
    "miles_filters": "filter",
    "miles_advantages": "advantage",
    "miles_corrections": "correction",
    "miles_losses": "loss",
    "miles_trainers": "trainer",
    "miles_model_specs": "model",
    "miles_model_sources": "source",
    "miles_precision_recipes": "precision",
    "miles_weight_transports": "transport",
    "miles_train_extensions": "extension",
    "miles_launchers": "launcher",
    "miles_metrics": "metric",
    "miles_trackers": "tracker",
    "miles_sample_fields": "field",
}
"""Registration hook -> kind of the components that it returns."""


@hookspec
def miles_data_sources() -> Iterable[Component[Any]]:
    """Sources of prompts.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `DataSource`. Since: 0.1.
    """


@hookspec
def miles_samplers() -> Iterable[Component[Any]]:
    """Curricula: which prompts come next. Provisional.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `Sampler`. Since: 0.1.
    """


@hookspec
def miles_tokenizers() -> Iterable[Component[Any]]:
    """The only place where text becomes tokens.

    Runs in: driver and workers. Called: once per process. Returns: components that build a `Tokenizer`. Since: 0.1.
    """


@hookspec
def miles_engines() -> Iterable[Component[Any]]:
    """Inference engines.

    Runs in: driver, or the worker that hosts a replica. Called: once per process. Returns: components that build an
    `EngineReplica`. Since: 0.1.
    """


@hookspec
def miles_rollouts() -> Iterable[Component[Any]]:
    """Ways to make a group of samples from a prompt.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `Rollout`. Since: 0.1.
    """


@hookspec
def miles_rewards() -> Iterable[Component[Any]]:
    """Verdicts on samples.

    Runs in: driver and reward workers. Called: once per process. Returns: components that build a `Reward` or a
    `GroupReward`. Since: 0.1.
    """


@hookspec
def miles_filters() -> Iterable[Component[Any]]:
    """Which groups are trained.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `Filter`. Since: 0.1.
    """


@hookspec
def miles_advantages() -> Iterable[Component[Any]]:
    """Per-token advantages from rewards; several are chained in the order of the config. One that gives `returns` provides
    "column/returns"; the trait `baseline = "group"` says that it compares the answers to one prompt with each other.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build an `Advantage`. Since: 0.1.
    """


@hookspec
def miles_corrections() -> Iterable[Component[Any]]:
    """Masks and multipliers against the mismatch between engine and trainer. The trait `denominator` says whether a
    masked token leaves the denominator ("shrink") or stays in it ("keep").

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `Correction`. Since: 0.1.
    """


@hookspec
def miles_losses() -> Iterable[Component[Any]]:
    """Per-token losses. The trait `scope` names the token weights that apply ("policy", "value", "pair"); the trait
    `zero_advantage = "no-gradient"` promises that a token without advantage has no gradient, so that it may be left out;
    `ratio = "sequence"` says that it weighs whole sequences by their probability, which top-p and top-k sampling rule out.

    Runs in: every trainer rank. Called: once per process. Returns: components that build a `Loss`. Since: 0.1.
    """


@hookspec
def miles_trainers() -> Iterable[Component[Any]]:
    """Trainers.

    Runs in: driver (metadata) and every trainer rank. Called: once per process. Returns: components that build a
    `TrainerRank`; `parts["group"]` may replace the driver's `TrainerGroup`. Since: 0.1.
    """


@hookspec
def miles_model_specs() -> Iterable[Component[Any]]:
    """Architectures for a training backend. Provisional.

    Runs in: every trainer rank. Called: once per process. Returns: components that build a `ModelSpec`. Since: 0.1.
    """


@hookspec
def miles_model_sources() -> Iterable[Component[Any]]:
    """Places where models come from. `[model] path = "<name>:<reference>"` selects one.

    Runs in: driver. Called: once, before anything else is built. Returns: components that build a `ModelSource`.
    Since: 0.1.
    """


@hookspec
def miles_precision_recipes() -> Iterable[Component[Any]]:
    """One name for the number format of both sides. Provisional.

    Runs in: driver and trainer ranks. Called: once per process. Returns: components that build a `PrecisionRecipe`.
    Since: 0.1.
    """


@hookspec
def miles_weight_transports() -> Iterable[Component[Any]]:
    """How new weights reach engines.

    Runs in: driver; `parts["sender"]` in every trainer rank. Called: once per process. Returns: components that build a
    `WeightTransport`. Since: 0.1.
    """


@hookspec
def miles_train_extensions() -> Iterable[Component[Any]]:
    """Wrappers around a trainer's passes. Provisional.

    Runs in: every trainer rank. Called: once per process. Returns: components that build a `TrainExtension`.
    Since: 0.1.
    """


@hookspec
def miles_launchers() -> Iterable[Component[Any]]:
    """How worker processes come to be.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `Launcher`. Since: 0.1.
    """


@hookspec
def miles_metrics() -> Iterable[Component[Any]]:
    """Numbers of a finished step, logged under the component's own name.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `MetricFunction`. Since: 0.1.
    """


@hookspec
def miles_trackers() -> Iterable[Component[Any]]:
    """Where metrics and samples go.

    Runs in: driver. Called: once, when the run is wired. Returns: components that build a `Tracker`. Since: 0.1.
    """


@hookspec
def miles_sample_fields() -> Iterable[FieldSpec]:
    """Side channels of samples.

    Runs in: driver and workers. Called: once per process. Returns: `FieldSpec`s, not components. Since: 0.1.
    """


@hookspec
def miles_configure(config: Any) -> None:
    """May veto a run: whatever it raises stops the run, with the plugin's name in front.

    Runs in: driver. Called: once, with the resolved `RunConfig`, before anything is built. Returns: nothing. Since: 0.1.
    """


@hookspec
def miles_run_start(config: Any, run_dir: Any) -> None:
    """Runs in: driver. Called: once, after trainer and engines have started. Returns: nothing. Since: 0.1."""


@hookspec
def miles_before_rollout(step: int, version: int) -> None:
    """Runs in: driver. Called: before a step waits for its groups. Returns: nothing. Since: 0.1."""


@hookspec
def miles_batch_ready(step: int, batch: Any) -> None:
    """Runs in: driver. Called: when advantages, masks and weights of a step are fixed. `batch` is the step's
    `miles_core.batch.RolloutBatch`; it must not be changed. Returns: nothing. Since: 0.1."""


@hookspec
def miles_before_step(step: int, batch: Any) -> None:
    """Runs in: driver. Called: before each optimizer step, with its minibatch. Returns: nothing. Since: 0.1."""


@hookspec
def miles_weights_synced(version: int, report: Any) -> None:
    """Runs in: driver. Called: after a push, with its `SyncReport`. Returns: nothing. Since: 0.1."""


@hookspec
def miles_step_end(step: int, metrics: Any) -> None:
    """Runs in: driver. Called: after each step, with all its metrics. Returns: nothing. Since: 0.1."""


@hookspec
def miles_run_end(reason: str) -> None:
    """Runs in: driver. Called: once; reason is "done", "failed" or "interrupted". Returns: nothing. Since: 0.1."""
