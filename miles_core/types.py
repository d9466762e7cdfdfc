"""The data that components hand to each other.

Shape letters: T tokens of one sample (prompt and response), R sampled tokens, N tokens packed in one microbatch,
K entries of a top-k. Index `t` of a per-token array speaks of `tokens[t]` given `tokens[:t]`, so that no array is
shifted and no response-length arithmetic is needed anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from miles_core.engines import EnginePool
    from miles_core.fields import FieldSpec
    from miles_core.interfaces import Tokenizer

Status = Literal["running", "stop", "length", "truncated", "aborted", "error", "timeout"]
"""How a sample ended. `stop`: the model ended it. `length`: `max_new_tokens` or the context was reached.
`truncated`: a multi-turn trajectory cut at the context. `aborted`, `error`, `timeout`: not to be trained."""

Reduce = Literal["mean", "sum", "max", "min"]
Metric = tuple[float, float, Reduce]
"""(sum, count, reduce): merged over ranks and microbatches before the division, so that averages are exact.
For `max` and `min` the first number is the extremum and the count only says that there was one."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One task. `draw` is the n-th time that any prompt was taken, over all epochs; (id, draw) is unique in a run."""

    id: str
    draw: int = 0
    messages: list[dict[str, Any]] | None = None
    """Chat messages. If the last one is an assistant message, its text opens the answer that the model continues."""
    text: str | None = None
    """A plain prompt, encoded without a chat template. Exactly one of `messages` and `text` is set."""
    label: Any = None
    task: str | None = None
    tools: tuple[Any, ...] = ()
    images: tuple[Any, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class VersionSpan:
    """Tokens [start, stop) were sampled under weight version `version`."""

    start: int
    stop: int
    version: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Score:
    """A verdict. `value is None` means no verdict: the sample gets no gradient and does not count in its group.
    A value is never NaN or infinite; the scorer turns those into errors that are counted."""

    value: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trained segment of one trajectory. All arrays have the full length T.

    `logprobs` are nats at the sampling temperature, before top-k and top-p, and 0 where a token was not sampled.
    `loss_mask` is True where a token was sampled by the policy and may be trained; `loss_mask[0]` is False.
    """

    group_id: str
    trajectory_id: str
    index: int
    segment: int = 0
    tokens: np.ndarray
    prompt_len: int
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...] = ()
    status: Status = "stop"
    temperature: float = 1.0
    prompt: Prompt | None = None
    response: str = ""
    """Decoded text of the response, for rewards and people only; never encoded again."""
    reward: float | None = None
    scores: dict[str, Score] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why status is error, timeout, aborted or truncated."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens after the prompt, sampled or not."""
        return len(self.tokens) - self.prompt_len

    @property
    def oldest_version(self) -> int | None:
        return min((s.version for s in self.versions), default=None)


@dataclass(slots=True, kw_only=True)
class SampleGroup:
    """All samples of one prompt draw. `id` is "{prompt.id}@{prompt.draw}"."""

    id: str
    prompt: Prompt
    samples: list[Sample]
    num_samples: int
    born_version: int = 0
    baseline: Sample | None = None
    """A greedy sample that some advantages compare with; never trained."""
    order: int = 0
    """Place in the order in which groups were started; batches are formed in this order."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Verdict:
    keep: bool
    reason: str = ""
    """A kebab-case counter key, for example "zero-std"."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingParams:
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches top-k off."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    id: str
    token_ids: np.ndarray
    """int32[P], the context; the engine never sees text."""
    params: SamplingParams
    seed: int
    """Comes from (run seed, prompt id, draw, sample index, turn): siblings differ, a rerun gives the same."""
    images: tuple[Any, ...] = ()
    fields: frozenset[str] = frozenset()
    """Names of side channels that the engine is asked to return in `Generation.extras`."""
    session: str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """What an engine sampled: `token_ids` int32[R] includes the stop token; `logprobs` float32[R] in nats."""

    id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish: Status
    versions: tuple[VersionSpan, ...]
    incarnation: str = ""
    cached_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class PromptTokens:
    """A rendered prompt: int32[P] ids, and the text that they stand for (for logs)."""

    token_ids: np.ndarray
    text: str


@dataclass(slots=True, kw_only=True)
class RolloutContext:
    """Everything that a rollout needs for one group. `sampling` already holds the run's stop token ids."""

    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    pool: EnginePool
    tokenizer: Tokenizer
    seed: int
    max_context: int
    evaluation: bool = False
    partial: SampleGroup | None = None
    cancelled: asyncio.Event | None = None
    order: int = 0
    fields: frozenset[str] = frozenset()
    """Names of the side channels that the run reads."""
    field_specs: Mapping[str, FieldSpec] = field(default_factory=dict)
    """Declarations of side channels by name; those of `fields` are checked as samples are made."""
    baseline: bool = False
    """True when an advantage asked for a greedy baseline sample per group."""


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """One optimizer step as the driver sees it; per-sample lists are aligned with `samples`.

    `token_weights[scope][i]` float32[T]: the trainer sums `weight * per_token_loss` over everything and does no
    division of its own. `mask[i]` bool[T] is `loss_mask` after corrections. `shared` holds tuples of sample indices
    that must share a microbatch (pairs); samples of a group stand next to each other, which lets a trainer compute
    their prompt once.
    """

    samples: list[Sample]
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    token_weights: dict[str, list[np.ndarray]] = field(default_factory=dict)
    mask: list[np.ndarray] = field(default_factory=list)
    shared: list[tuple[int, ...]] = field(default_factory=list)
    step: int = 0
    minibatch: int = 0
    epoch: int = 0
    version: int = 0
    old_is_current: bool = False
    """True when this is the first optimizer step after the samples were taken and `old_logprobs` is to be recomputed:
    the loss then finds `old_logprobs` equal to its own detached `logprobs`, which saves a forward pass exactly."""

    @property
    def num_trainable(self) -> int:
        return int(sum(int(m.sum()) for m in self.mask))

    def select(self, indices: list[int]) -> TrainBatch:
        """The sub-batch of `indices`, weights unchanged; `shared` tuples must lie inside or outside it whole."""
        new = {old: i for i, old in enumerate(indices)}
        assert all(len({i in new for i in group}) == 1 for group in self.shared), "a shared tuple was split"

        def pick(rows: list[Any]) -> list[Any]:
            return [rows[i] for i in indices]

        return TrainBatch(
            samples=pick(self.samples),
            columns={k: pick(v) for k, v in self.columns.items()},
            token_weights={k: pick(v) for k, v in self.token_weights.items()},
            mask=pick(self.mask) if self.mask else [],
            shared=[tuple(new[i] for i in group) for group in self.shared if group[0] in new],
            step=self.step,
            minibatch=self.minibatch,
            epoch=self.epoch,
            version=self.version,
            old_is_current=self.old_is_current,
        )


@dataclass(slots=True, kw_only=True)
class AdvantageInputs:
    """What an advantage sees of one rollout batch. `groups[g]` holds the indices of group g in `samples`.

    `rewards[i]` is None where there is no verdict. `advantages` and `returns` are what the previous advantage of a
    chain produced, or None for the first. `columns` hold what `needs` named, for example "old_values".
    """

    samples: list[Sample]
    groups: list[tuple[int, ...]]
    rewards: list[float | None]
    mask: list[np.ndarray]
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    baselines: list[float | None] = field(default_factory=list)
    """Reward of the greedy baseline of each group, where one was asked for."""
    advantages: list[np.ndarray] | None = None
    returns: list[np.ndarray] | None = None


@dataclass(slots=True, kw_only=True)
class AdvantageOutput:
    """float32[T] per sample, 0 outside the mask. `returns` only where a value loss needs them."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class CorrectionInputs:
    """A minibatch before its weights are fixed. Columns hold `rollout_logprobs` and what `needs` named."""

    samples: list[Sample]
    mask: list[np.ndarray]
    advantages: list[np.ndarray]
    columns: dict[str, list[np.ndarray]]
    version: int
    """The weight version about to be trained; a token sampled under v has lag `version - v`."""


@dataclass(slots=True, kw_only=True)
class CorrectionOutput:
    """A new mask (never True where the old one was False) and a multiplier float32[T] of the per-token loss."""

    mask: list[np.ndarray]
    multiplier: list[np.ndarray] | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LossInputs:
    """One microbatch inside a trainer rank. Arrays are 1-D over its N tokens, of the trainer's own array library.

    `get(name)` returns fp32 [N] (or [N, K]) for a name that the loss's `needs` listed: "logprobs" (differentiable),
    "entropy", "logsumexp", "topk:K", "values", "reverse_kl:teacher" and "forward_kl:teacher" (with ":K" over a top-k), any
    column of the batch ("old_logprobs", "rollout_logprobs", "reference_logprobs", "returns", "pair_ids", "pair_sign", ...)
    or a field. `seq` reduces over sequences and is differentiable, also when a
    sequence is spread over context-parallel ranks.
    """

    tokens: Any
    mask: Any
    seq_ids: Any
    """int [N]: index of the sample that a token belongs to, inside this microbatch."""
    advantages: Any
    multiplier: Any
    """Of the corrections, for reading: the trainer applies it, together with the token weights of scope "policy"."""
    seq: Any
    """`seq.sum(x)`, `seq.mean(x)` -> [S] over the masked tokens of each sequence; `seq.broadcast(y)` -> [N]."""
    get: Any


@dataclass(slots=True, kw_only=True)
class LossOutput:
    """`per_token` fp32 [N], unweighted: the trainer multiplies with the token weights of `scope` and sums."""

    per_token: Any
    metrics: dict[str, tuple[Any, Any, Reduce]] = field(default_factory=dict)
    scope: str = "policy"


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did. `loss` is the exact weighted sum over all ranks. `skipped` says why no step ran.

    `columns["logprobs"]` float32[T] per sample, in the order of the batch, are the policy's log-probabilities before
    the step: the driver measures the gap to the engine with them at no cost.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: str | None = None
    tokens: int = 0
    trainable: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict)
    auxiliary: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorSpec:
    """A tensor inside a bucket: `dtype` is a torch-style name ("float32", "bfloat16"), `offset` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Some tensors as one flat run of bytes. `data` is a uint8 array on the rank's device, opaque to the core.
    `sha` is the hex SHA-256 of the bytes, or "" where the sender does not hash."""

    index: int
    tensors: tuple[TensorSpec, ...]
    data: Any
    sha: str = ""
    nbytes: int = 0


@dataclass(slots=True, kw_only=True)
class WeightMessage:
    """The vocabulary that engines understand; an engine declares the kinds it supports as `weights/<channel>`.

    begin: an update to `version` starts. path: load from a folder. ipc: `body` names a handle, a shared-memory
    segment or a device IPC handle with the bucket's bytes. join: enter a process group. broadcast: receive a bucket in
    it. expose: register buffers for one-sided writes. flush: drop every cached prefix. commit: verify and switch to
    `version`. abort: give the update up; the engine is dirty.
    """

    kind: Literal["begin", "path", "ipc", "join", "broadcast", "expose", "flush", "commit", "abort"]
    version: int
    incarnation: str = ""
    bucket: int = 0
    tensors: tuple[TensorSpec, ...] = ()
    sha: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0


@dataclass(slots=True, kw_only=True)
class EngineSync:
    """How one engine came out of a push."""

    engine: str
    ok: bool
    seconds: float = 0.0
    error: str = ""
    phase: str = ""
    state_hash: str = ""


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """One push of one version to all engines."""

    version: int
    num_bytes: int
    seconds: float
    num_buckets: int
    engines: list[EngineSync] = field(default_factory=list)
    hashes: tuple[str, ...] = ()
    """SHA-256 of each bucket as it was sent."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SendPlan:
    """What every trainer rank is told before it exports and sends."""

    version: int
    layout: str = "hf_full"
    bucket_bytes: int = 128 << 20
    transport: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    """The driver's limit for each pull; a collective of the sender must give up before it."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RankInfo:
    """Where a trainer rank stands. Ranks with the same `dp_rank` get the same shard of data; of those, the one with
    `output=True` returns results."""

    rank: int
    world_size: int
    dp_rank: int = 0
    dp_size: int = 1
    output: bool = True
    description: str = ""


@dataclass(slots=True, kw_only=True)
class RoleSpec:
    """What a launcher must provide for one role: `num_workers` processes that host `component`."""

    name: str
    component: str
    num_workers: int = 1
    gpus: float = 0.0
    cpus: float = 1.0
    memory_bytes: int = 0
    nodes: int = 1
    python: str | None = None
    colocate: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class Death:
    """A worker that ended: `signal` or `exit_code`, a probable cause, and where its log is."""

    role: str
    index: int
    exit_code: int | None = None
    signal: str = ""
    cause: str = ""
    log: str = ""
