"""One rank of the trainer `megatron`."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles_core import BuildContext
from miles_core.errors import ConfigError, RunFailed
from miles_core.interfaces import TrainerRank
from miles_core.types import Bucket, RankInfo, StepReport, TrainBatch
from miles_fsdp_trainer.microbatch import Microbatch, masks_of, microbatches
from miles_fsdp_trainer.objective import Tally, Term, check_outputs, loss_inputs, total_loss
from miles_megatron_trainer import OUTPUTS, MegatronConfig, arguments, names, optimizer_steps
from miles_megatron_trainer.cpu import megatron_device

LANGUAGE = frozenset(OUTPUTS)


@dataclass(slots=True)
class Role:
    """A model of which this rank holds a part; `optimizer` is None for the reference."""

    name: str
    folder: Path
    args: Any
    hf: dict[str, Any]
    plan: list[names.Weight]
    model: Any
    parameters: dict[str, torch.nn.Parameter]
    optimizer: Any = None


class MegatronRank(TrainerRank):
    """See `TrainerRank`. Every public method but `close` is collective. The last pipeline stage computes losses; of each
    data-parallel rank its first tensor and context rank returns results. Rank 0 publishes weights."""

    def __init__(self, config: MegatronConfig, context: BuildContext):
        self.config, self.context = config, context
        self.rank, self.world_size = context.index, context.world_size
        self.device = torch.device("cpu")
        self.roles: dict[str, Role] = {}
        self.terms: list[Term] = []
        self._joined = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> RankInfo:
        self.device = self._pick_device()
        run = self.context.run_config
        if self.context.model_path is None:
            raise ConfigError("trainer megatron: the run has no model folder", "set [model] path")
        with megatron_device(), arguments.quiet():
            from megatron.core import parallel_state as mpu

            from miles_megatron_trainer import runtime

            self.mpu = mpu
            policy = self._resolve(self.context.model_path, "model.path")
            runtime.join(self.context, policy[0], self.device)
            self._joined = True
            self.roles["policy"] = self._load("policy", self.context.model_path, "model.path", *policy)
            if "reference" in run.roles:
                own = run.roles["reference"].path
                path = Path(own).expanduser() if own else self.context.model_path
                where = "roles.reference.path" if own else "model.path"
                self.roles["reference"] = self._load("reference", path, where, *self._resolve(path, where))
        select = self.context.select or (lambda kind: ())
        pairs = list(select("loss"))
        labels = [name for name, _ in pairs]
        self.terms = [
            Term(f"{name}-{i}" if labels.count(name) > 1 else name, function, table.weight)
            for i, ((name, function), table) in enumerate(zip(pairs, run.loss, strict=True))
        ]
        args = self.roles["policy"].args
        self.last = mpu.is_pipeline_last_stage()
        tensor, stage = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
        return RankInfo(
            rank=self.rank,
            world_size=self.world_size,
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
            output=self.last and tensor == 0 and mpu.get_context_parallel_rank() == 0,
            description=f"{self.device}, tensor rank {tensor} of {args.tensor_model_parallel_size}, "
            f"stage {stage} of {args.pipeline_model_parallel_size}, "
            f"context rank {mpu.get_context_parallel_rank()} of {args.context_parallel_size}",
        )

    def _pick_device(self) -> torch.device:
        wanted = self.config.device if self.config.device != "auto" else self.context.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(wanted)
        if device.type == "cuda":
            if device.index is None:
                device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        elif torch.cuda.is_available():
            raise ConfigError(
                'trainer megatron: device = "cpu" on a machine with a GPU',
                "Megatron takes the GPU where there is one; hide it with CUDA_VISIBLE_DEVICES=",
            )
        return device

    def _resolve(self, path: Path, where: str) -> tuple[Any, dict[str, Any]]:
        hf, steps = names.read_config(path, where), optimizer_steps(self.context.run_config)
        args = arguments.resolve(
            self.config.args, hf, world_size=self.world_size, total_steps=steps, where="trainer.megatron"
        )
        return args, hf

    def _load(self, name: str, path: Path, where: str, args: Any, hf: dict[str, Any]) -> Role:
        from miles_megatron_trainer import model as models
        from miles_megatron_trainer import optim, weights

        plan = names.plan(hf, args.pipeline_model_parallel_size, args.padded_vocab_size)
        source = weights.hf_source(path, plan, where, tied=bool(hf.get("tie_word_embeddings")))
        model = models.build(args, hf, self.device, trainable=name == "policy")
        role = Role(name, path, args, hf, plan, model, dict(models.unwrap(model).named_parameters()))
        if name == "policy":
            role.optimizer = optim.Optimizer(args, model)
        self._fill(role, source)
        return role

    def _own(self, role: Role) -> list[names.Weight]:
        """The parameters of this stage, with the last stage's copy of a tied embedding."""
        copy = names.tied_copy(role.plan, role.args.pipeline_model_parallel_size)
        stage = self.mpu.get_pipeline_model_parallel_rank()
        return [weight for weight in [*role.plan, *([copy] if copy else [])] if weight.stage == stage]

    @torch.no_grad()
    def _fill(self, role: Role, source: Any) -> None:
        own = self._own(role)
        if wrong := sorted(role.parameters.keys() ^ {weight.name for weight in own}):
            raise ConfigError(f"trainer megatron: parameters without a mapping: {', '.join(wrong)}")
        for weight in own:
            parameter, value = role.parameters[weight.name], source.part(weight)
            role.optimizer.set_weights(parameter, value) if role.optimizer else parameter.copy_(value)

    def close(self) -> None:
        self.roles.clear()
        if self._joined:
            from miles_megatron_trainer import runtime

            self._joined = False
            with megatron_device():
                runtime.leave()

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        holder = self._role(role)
        if outputs - LANGUAGE:
            raise ConfigError(
                f"trainer megatron: role {role} cannot give {', '.join(sorted(outputs - LANGUAGE))}",
                f"it gives {', '.join(sorted(LANGUAGE))}",
            )
        result = {name: [np.zeros(s.num_tokens, np.float32) for s in batch.samples] for name in outputs}

        def collect(micro: Microbatch, computed: dict[str, torch.Tensor]) -> torch.Tensor:
            for name in outputs if micro.indices else ():
                for i, values in zip(micro.indices, micro.split(micro.scatter(computed[name])), strict=True):
                    result[name][i] = values
            return computed["logprobs"].sum()

        with megatron_device(), torch.no_grad():
            rounds, stream = self._microbatches(batch, masks_of(batch))
            self._run(holder, rounds, stream, outputs, collect, forward_only=True)
        return result if self.last else {}

    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        holder = self._role(role)
        if holder.optimizer is None:
            raise ConfigError(f"trainer megatron: role {role} is frozen and cannot be trained")
        masks = masks_of(batch)
        report = StepReport(step=batch.step, loss=0.0, grad_norm=0.0, lr=holder.optimizer.lr)
        report.tokens, report.trainable = sum(s.num_tokens for s in batch.samples), sum(int(m.sum()) for m in masks)
        report.columns["logprobs"] = [np.zeros(s.num_tokens, np.float32) for s in batch.samples]
        with megatron_device():
            if self._reduce(report.trainable, dist.ReduceOp.SUM) == 0:
                report.skipped = "nothing trainable"
                return report
            self._train(holder, batch, masks, report)
        return report

    def _train(self, holder: Role, batch: TrainBatch, masks: Sequence[np.ndarray], report: StepReport) -> None:
        began, tally = self._now(), Tally()
        needs = self.context.loss_needs if self.context.loss_needs is not None else self.context.needs
        want = frozenset(name for name in needs if name in LANGUAGE) | {"logprobs"}

        def finish(micro: Microbatch, computed: dict[str, torch.Tensor]) -> torch.Tensor:
            total = 0.0 * computed["logprobs"].sum()
            if not micro.indices:
                return total
            check_outputs("policy", batch, micro, computed, tally)
            x = loss_inputs(batch, micro, masks, computed, self.context.fields)
            own = total_loss(self.terms, frozenset({"policy", "pair"}), batch, micro, x, tally)
            if own is None:
                raise ConfigError("trainer megatron: no loss trains role policy", "add a [[loss]] for it")
            tally.add("packing/computed_tokens", (micro.num_computed, 1.0, "sum"))
            for i, values in zip(micro.indices, micro.split(x.get("logprobs")), strict=True):
                report.columns["logprobs"][i] = values
            return total + own if own.requires_grad else total

        holder.optimizer.zero_grad()
        rounds, stream = self._microbatches(batch, masks)
        self._run(holder, rounds, stream, want, finish)
        report.seconds["forward_backward"] = self._now() - began
        self._raise_together(tally.failures)
        began = self._now()
        report.grad_norm = holder.optimizer.grad_norm()
        self._raise_together([] if np.isfinite(report.grad_norm) else [self._bad_gradient(holder, batch)])
        holder.optimizer.step()
        report.seconds["optimizer"] = self._now() - began
        report.loss, report.metrics = tally.loss, tally.metrics
        report.peak_bytes = self._peak_bytes()

    def _microbatches(self, batch: TrainBatch, masks: Sequence[np.ndarray]) -> tuple[int, Iterator[Microbatch]]:
        """How many microbatches every rank runs, and this rank's own followed by one-token ones."""
        budget = self.config.max_tokens or (16384 if self.device.type == "cuda" else 1024)
        own, stream = microbatches(
            batch, masks, device=self.device, max_tokens=budget, packing=True, share=self.config.shared_prefix
        )
        return max(1, self._reduce(own, dist.ReduceOp.MAX)), stream

    def _run(
        self,
        holder: Role,
        rounds: int,
        stream: Iterator[Microbatch],
        want: frozenset[str],
        finish: Callable[[Microbatch, dict[str, torch.Tensor]], torch.Tensor],
        *,
        forward_only: bool = False,
    ) -> None:
        """Megatron's pipeline schedule; `finish` runs on the last stage and gives what is differentiated."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from miles_megatron_trainer import model as models

        def forward_step(data: Iterator[Microbatch], model: Any, *_: Any) -> Any:
            micro = next(data)
            out = models.hidden_states(model, micro.inputs)

            def loss(hidden: torch.Tensor) -> Any:
                vocab = holder.hf["vocab_size"]
                computed = models.head_outputs(model, hidden, micro.inputs, want, self.config.logit_rows, vocab)
                return finish(micro, computed), torch.tensor(1, dtype=torch.int), {}

            return out, loss

        try:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=stream,
                model=[holder.model],
                num_microbatches=rounds,
                seq_length=1,  # unused: stages tell each other the length of each microbatch
                micro_batch_size=1,
                forward_only=forward_only,
            )
        finally:
            models.forget_plans()

    def _role(self, name: str) -> Role:
        if name not in self.roles:
            raise ConfigError(f"trainer megatron: no role {name} here", f"it holds {', '.join(self.roles)}")
        return self.roles[name]

    # --- failures -----------------------------------------------------------------------------------------------------

    def _raise_together(self, failures: Sequence[str]) -> None:
        """Raises RunFailed on every rank when any has something to report, so that none waits for another."""
        everywhere: list[Any] = [None] * self.world_size
        dist.all_gather_object(everywhere, list(failures))
        if lines := list(dict.fromkeys(line for rank in everywhere for line in rank)):
            self.roles["policy"].optimizer.zero_grad()
            raise RunFailed(f"step refused, no weight was changed: {lines[0]}", *lines[1:8])

    def _bad_gradient(self, holder: Role, batch: TrainBatch) -> str:
        bad = [n for n, p in holder.parameters.items() if not bool(torch.isfinite(p.main_grad).all())]
        terms = ", ".join(f'"{term.name}"' for term in self.terms)
        ids = [s.trajectory_id for s in batch.samples]
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        return f"the gradient of loss {terms} is not finite in {', '.join(bad[:3]) or 'another rank'}; samples {shown}"

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return self._role("policy").args.params_dtype

    def _gathered(self, weight: names.Weight) -> list[tuple[str, torch.Tensor]]:
        from miles_megatron_trainer import weights

        policy = self._role("policy")
        with megatron_device(), torch.no_grad():
            return weights.whole(weight, lambda w: policy.parameters[w.name], self._dtype, self.device)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in self._role("policy").plan:
            yield from self._gathered(weight)

    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        if layout != "hf_full":
            raise ConfigError(f'trainer megatron exports "hf_full", not "{layout}"')
        from miles_megatron_trainer import weights

        yield from weights.buckets(self._role("policy").plan, self._gathered, bucket_bytes, self._dtype.itemsize)

    def state_hash(self) -> str:
        from miles_fsdp_trainer.weights import hash_tensors

        found: list[Any] = [hash_tensors(self._tensors())]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def save_model(self, folder: Path) -> None:
        from miles_megatron_trainer import weights

        weights.write_hf_folder(folder, self._role("policy").folder, self._tensors(), self._dtype, self.rank == 0)
        dist.barrier()

    def save(self, folder: Path) -> None:
        from miles_megatron_trainer import checkpoint

        with megatron_device(), torch.no_grad():
            checkpoint.save(folder, self._role("policy"), self.device)
            dist.barrier()

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Raises RunFailed that lists every missing or unexpected key. The layout of ranks may have changed."""
        from miles_megatron_trainer import checkpoint

        policy = self._role("policy")
        with megatron_device(), torch.no_grad():
            checkpoint.load(folder, policy, self._own(policy), weights_only=weights_only)

    def sleep(self, tags: Sequence[str] = ("optimizer", "weights")) -> None:
        if self.device.type == "cuda":
            raise ConfigError(
                "trainer megatron cannot make room for a colocated engine yet", "give the engine GPUs of its own"
            )

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _reduce(self, number: int, op: Any) -> int:
        tensor = torch.tensor([number], dtype=torch.long, device=self.device)
        dist.all_reduce(tensor, op=op)
        return int(tensor.item())

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
