"""What components must do: an ABC where there is a lifecycle, a Protocol where a function would do.

New methods always get a default body, so that an older plugin keeps working.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from miles_core.types import (
    AdvantageInputs,
    AdvantageOutput,
    Bucket,
    CorrectionInputs,
    CorrectionOutput,
    Death,
    GenerateRequest,
    Generation,
    LossInputs,
    LossOutput,
    Prompt,
    PromptTokens,
    RankInfo,
    RoleSpec,
    RolloutContext,
    Sample,
    SampleGroup,
    Score,
    SendPlan,
    StepReport,
    SyncReport,
    TrainBatch,
    Verdict,
    WeightMessage,
)

if TYPE_CHECKING:
    from miles_core.engines import EnginePool
    from miles_core.trainers import TrainerGroup

# --- Data and tokens -------------------------------------------------------------------------------------------------


class DataSource(ABC):
    """A stream of prompts. The same seed gives the same ids in the same order, also after `restore`."""

    @abstractmethod
    def next(self, n: int) -> list[Prompt]:
        """The next prompts, at most `n`. An empty list means that the source is exhausted: a training source starts
        its next epoch by itself unless it was given a number of epochs. Sets `Prompt.draw`."""

    @property
    def num_prompts(self) -> int | None:
        """Prompts in one epoch, or None when they are made on the fly."""
        return None

    def state(self) -> dict[str, Any]:
        """JSON-compatible cursor; the next prompt after `restore` is the one that would have come next."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Sampler(Protocol):
    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        """Orders, drops or repeats what it was offered, now or before. `history`: mean rewards by id, of earlier steps."""


class Tokenizer(ABC):
    """The only place that turns text into tokens."""

    @abstractmethod
    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), images: Sequence[Any] = ()
    ) -> PromptTokens:
        """Chat messages as a prompt that ends where the assistant starts to speak; if the last message is an assistant
        message, the prompt ends inside it, after its text. Exactly one BOS where the model has one.

        Raises ConfigError naming the model and the option when there is no chat template.
        """

    @abstractmethod
    def encode(self, text: str) -> PromptTokens:
        """A plain prompt, without a template; exactly one BOS where the model has one."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str: ...

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn (EOS and end-of-turn)."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def template_hash(self) -> str:
        """SHA-256 of the chat template in force, or of the empty string."""


# --- Engines and rollouts --------------------------------------------------------------------------------------------


class EngineReplica(ABC):
    """One copy of the model that samples tokens; one server, or one in-process object.

    All methods are coroutines of the loop's event loop, or of the worker that hosts the replica. A replica knows
    nothing of its siblings: routing, requeueing and re-syncing are the pool's. `generate` calls overlap freely.
    """

    id: str = "engine-0"
    incarnation: str = ""
    """New at every start: a message for another incarnation is refused."""
    capabilities: frozenset[str] = frozenset()
    """What it can do: "weights/ipc", "weights/path", "weights/broadcast", "fields/<name>", "score", "sleep", ..."""

    @abstractmethod
    async def start(self) -> None:
        """Loads the model (version 0) and sets `incarnation`. Raises RuntimeMissing or EngineFailed with the reason."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples until a stop, `max_new_tokens` or the context. An aborted request returns what it has with
        finish="aborted". Raises EngineFailed when the engine itself is broken, so that the pool requeues."""

    @abstractmethod
    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Ends these requests (all when None); returns once they have been acknowledged."""

    @abstractmethod
    async def pause(self, mode: str = "abort") -> None:
        """Stops sampling. "abort": running requests return partial output. "retract": they are put back and go on
        after `resume`, their cache recomputed. "in_place": they keep their cache and go on under the new weights."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        """Carries out one weight message, in the order begin, data..., flush, commit. Returns {"sha": ...} for data,
        {"version": n, "state_hash": ...} for commit. Raises WeightSyncFailed; the replica is then dirty."""

    @abstractmethod
    async def health(self) -> dict[str, Any]:
        """{"version": int, "running": int, "waiting": int, ...}; raises EngineFailed when it cannot serve."""

    @abstractmethod
    async def close(self) -> None:
        """Ends it and frees its memory; safe to call twice."""

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        """Log-probabilities of given tokens at temperature 1: "logprobs" float32[T] each (index 0 is 0), and with
        `topk` also "topk_ids" int32[T, K] and "topk_logprobs" float32[T, K]."""
        raise NotImplementedError(f"{type(self).__name__} cannot score")

    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        """Releases device memory by tag ("weights", "cache", "graphs")."""

    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None: ...

    async def layout(self, rank: int = 0) -> list[tuple[str, int, tuple[int, ...], str]]:
        """(parameter, address, shape, dtype) of rank's own sharded parameters, for one-sided transports."""
        raise NotImplementedError(f"{type(self).__name__} does not expose its parameters")

    def topology(self) -> RoleSpec:
        """What one replica needs of a launcher."""
        return RoleSpec(name="engine", component="")


class Rollout(Protocol):
    """How a group of samples is made: single turn, tools, agents. A failed sample is data (`status`, `reason`), not an
    exception; `run_group` raises only when no sample can be had from any engine."""

    async def run_group(self, context: RolloutContext) -> SampleGroup: ...


# --- Judging ---------------------------------------------------------------------------------------------------------


class Reward(Protocol):
    """Either `score` (isolated and timed per sample) or `score_group` (timed per group, sees all siblings)."""

    def score(self, sample: Sample) -> float | Score | None | Awaitable[float | Score | None]: ...


class GroupReward(Protocol):
    def score_group(self, group: SampleGroup) -> Sequence[float | Score | None]:
        """One verdict per sample, in order; any other number is an error that names this function."""


class Filter(Protocol):
    def check(self, group: SampleGroup) -> Verdict:
        """Pure: the same group always gets the same verdict."""


class Advantage(Protocol):
    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutput: ...


class Correction(Protocol):
    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput: ...


class Loss(Protocol):
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Runs inside trainer ranks, once per microbatch."""


class MetricFunction(Protocol):
    """Numbers of a finished step, logged under the component's own name."""

    def __call__(self, groups: list[SampleGroup], batch: TrainBatch, reports: list[StepReport]) -> Mapping[str, float]: ...


# --- Training --------------------------------------------------------------------------------------------------------


class TrainerRank(ABC):
    """One rank of a trainer. The driver talks to all ranks at once through `miles_core.trainers.TrainerGroup`; every
    method is called on every rank, with the shard of its data-parallel rank.

    Roles: "policy" is trained; "reference", "critic", "teacher" exist when the run's config has `[roles.<name>]`.
    """

    @abstractmethod
    def start(self) -> RankInfo:
        """Joins the process group, loads the models, and says where this rank stands."""

    @abstractmethod
    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        """Per-sample float32[T] for each of `outputs` ("logprobs", "entropy", "values"), without gradients, at the
        temperature of each sample; 0 where index 0 or nothing is defined. An empty batch is allowed."""

    @abstractmethod
    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        """Exactly one optimizer step, or none: with nothing trainable on any rank, no optimizer, scheduler or moment
        moves and `skipped` says so. The loss is sum(weight * per_token) over all ranks and nothing else; a rank whose
        shard is empty takes part in every collective. Raises RunFailed when the loss or its gradient is not finite.

        What the ranks report becomes one report: `loss`, `tokens`, `trainable`, `metrics` and `auxiliary` are this rank's
        own partial sums over its shard (already reduced inside a data-parallel rank), and the driver adds those of the
        output ranks; `grad_norm`, `lr` and `skipped` are of the whole step and must agree on all of them; of `seconds`
        and `peak_bytes` the largest counts; `columns` have one array per sample of the shard."""

    @abstractmethod
    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        """The policy's weights, "hf_full" under Hugging Face names. Collective: every rank iterates to the end, with the
        same number of buckets; ranks that publish nothing yield buckets without tensors. Unless a transport says that it
        can take several, one rank publishes all of them: a broadcast has one source."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Everything needed to continue exactly - weights, optimizer, scheduler, RNG - into an existing empty folder,
        each rank its own files. Never a pickle."""

    @abstractmethod
    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """The reverse of `save`. A missing or unexpected key is an error that lists every one of them."""

    @abstractmethod
    def close(self) -> None: ...

    def save_model(self, folder: Path) -> None:
        """The policy as a Hugging Face folder (safetensors, config, without the tokenizer)."""
        raise NotImplementedError(f"{type(self).__name__} cannot write a Hugging Face folder")

    def sleep(self, tags: Sequence[str] = ("optimizer", "weights")) -> None:
        """Moves state off the device to make room for a colocated engine."""

    def wake(self, tags: Sequence[str] = ("optimizer", "weights")) -> None: ...

    def state_hash(self) -> str:
        """SHA-256 over the policy's weights in name order, or "" where that is too expensive. Called on every rank; the
        answer of the first output rank counts."""
        return ""


class WeightSender(ABC):
    """The transport's end in every trainer rank (`Component.parts["sender"]`)."""

    @abstractmethod
    def send(self, plan: SendPlan, buckets: Iterator[Bucket]) -> Iterator[WeightMessage | None]:
        """A generator that the driver pulls one step at a time on all ranks at once, which bounds memory to a bucket.
        Each yield offers a message for the engines (None from ranks that publish nothing, as often as the others yield);
        the next pull may reuse the bucket's memory or, for a collective, performs the transfer that was announced.

        A transfer ends by itself before `plan.timeout_s`: a rank cannot be interrupted, and a late one blocks the next
        attempt. One that fails raises and leaves the rest of the export to `send_close`, on all ranks."""

    def close(self) -> None: ...


class WeightTransport(ABC):
    """Plan, barrier, time-outs and verdict, on the driver; tensors never come here."""

    @abstractmethod
    async def connect(self, trainer: TrainerGroup, pool: EnginePool) -> None:
        """Once, after both have started. Raises ConfigError when an engine lacks the channel."""

    @abstractmethod
    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        """Sends `version` to these paused engines: begin, data, flush, commit to each. One that fails does not stop the
        others; where a collective breaks, all have failed and the second attempt forms a new group. Raises only for the
        trainer's failures; the pool pauses before, judges the report, and resumes after."""

    async def close(self) -> None: ...


class TrainExtension(ABC):
    """Wraps the passes of a trainer: routing replay, fake quantization, probes."""

    def setup(self, trainer: TrainerRank) -> None: ...

    def around_forward(self, microbatch: Any, context: Mapping[str, Any]) -> AbstractContextManager[None]:
        return nullcontext()

    def around_backward(self, microbatch: Any, context: Mapping[str, Any]) -> AbstractContextManager[None]:
        return nullcontext()


# --- Models ----------------------------------------------------------------------------------------------------------


class ModelSource(ABC):
    """Turns `[model] path = "<name>:<rest>"` into a local Hugging Face folder."""

    @abstractmethod
    def fetch(self, reference: str, revision: str | None, report: Any) -> Path:
        """Idempotent and safe when two runs fetch at once. `report(phase: str, done_bytes: int, total_bytes: int)` shows
        progress. Raises RuntimeMissing that names the folder alternative when there is no network."""


class ModelSpec(ABC):
    """An architecture for a backend: which models it serves, parts to build it with, names both ways."""

    architectures: tuple[str, ...] = ()

    @abstractmethod
    def to_hf(self, name: str) -> tuple[str, ...]: ...

    @abstractmethod
    def from_hf(self, name: str) -> tuple[str, ...]: ...


class PrecisionRecipe(ABC):
    def trainer_options(self, backend: str) -> Mapping[str, Any]:
        return {}

    def engine_options(self, engine: str) -> Mapping[str, Any]:
        return {}

    def export(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """Many to many, on Hugging Face names."""
        return buckets


# --- Processes -------------------------------------------------------------------------------------------------------


class WorkerGroup(ABC):
    """The workers of one role. `call` runs a method of the hosted object on each of them."""

    role: str
    size: int

    @abstractmethod
    async def call(
        self,
        method: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Results in rank order. `per_rank[i]` are further positional arguments for the i-th of `ranks` (or of all)
        alone. The first exception of a worker is raised with its rank's name and remote traceback; a dead worker raises
        WorkerDied, also when another one complained first. The methods "@get" (attribute names) and "@place" ask the
        host of the object; see `miles_core.worker.Hosted`."""

    @abstractmethod
    def deaths(self) -> AsyncIterator[Death]: ...

    @abstractmethod
    async def close(self) -> None: ...


class Allocation(ABC):
    @abstractmethod
    async def launch(self, role: str, payload: Mapping[str, Any]) -> WorkerGroup:
        """Starts the workers of a role, each hosting what `miles_core.worker.build_object` makes of `payload`, to which
        role, index, world_size and rendezvous are added. Raises what building raised, or WorkerDied."""

    @abstractmethod
    async def replace(self, role: str, index: int) -> None:
        """Starts worker `index` of `role` again, in its place or on a spare. Raises RunFailed after `restarts` times."""

    @abstractmethod
    async def close(self) -> None: ...


class Launcher(ABC):
    @abstractmethod
    async def allocate(self, specs: Sequence[RoleSpec], placement: Any = "auto") -> Allocation:
        """Room for all roles at once, or RuntimeMissing that says what was asked, what each node has and which option
        to change - within seconds, before any model loads."""


# --- Observers -------------------------------------------------------------------------------------------------------


class Tracker(ABC):
    """Receives numbers and samples. Whatever it raises or how long it blocks, training goes on."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None: ...

    def close(self) -> None: ...
