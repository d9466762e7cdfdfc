"""One rank of the trainer `fsdp`."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles_core import BuildContext
from miles_core.errors import ConfigError, ContractError, RunFailed, RuntimeMissing
from miles_core.interfaces import TrainerRank
from miles_core.roles import divergence
from miles_core.types import Bucket, RankInfo, StepReport, TrainBatch
from miles_fsdp_trainer import FsdpConfig, checkpoint, weights
from miles_fsdp_trainer.divergence import HeadInputs
from miles_fsdp_trainer.microbatch import Microbatch, ModelInputs, masks_of, microbatches
from miles_fsdp_trainer.objective import Tally, Term, check_outputs, loss_inputs, total_loss
from miles_fsdp_trainer.optim import Optimizer, grad_norm
from miles_fsdp_trainer.roles import FROZEN, Role, check_vocabularies, load_roles
from miles_fsdp_trainer.selfcheck import check_packing

LANGUAGE = frozenset({"logprobs", "entropy", "logsumexp"})


class FsdpRank(TrainerRank):
    """See `TrainerRank`. All ranks are data parallel; every public method but `close` is collective."""

    def __init__(self, config: FsdpConfig, context: BuildContext):
        self.config, self.context = config, context
        self.rank, self.world_size = context.index, context.world_size
        self.device = torch.device("cpu")
        self.roles: dict[str, Role] = {}
        self.terms: list[Term] = []
        self.extensions: list[Any] = []
        self.steps = 0
        self._joined = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> RankInfo:
        self.device = self._pick_device()
        if self.world_size > 1 and not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, init_method=self.context.rendezvous, rank=self.rank, world_size=self.world_size
            )
            self._joined = True
        run = self.context.run_config
        self.roles = load_roles(self.config, self.context, self.device, self.world_size)
        for role in self.roles.values():
            if role.name == "policy" or run.roles[role.name].path:
                check_packing(role.model, self.config, self.device, role.name)
        compared = {spec.role for name in self.context.needs if (spec := divergence(name))}
        tokenizer = self.context.tokenizer if compared else None
        check_vocabularies(self.roles, compared, tokenizer.vocab_size if tokenizer is not None else None)
        select = self.context.select or (lambda kind: ())
        pairs = list(select("loss"))
        names = [name for name, _ in pairs]
        self.terms = [
            Term(f"{name}-{i}" if names.count(name) > 1 else name, function, table.weight)
            for i, ((name, function), table) in enumerate(zip(pairs, run.loss, strict=True))
        ]
        self.extensions = [extension for _, extension in select("extension")]
        for extension in self.extensions:
            extension.setup(self)
        place = f"{self.device}, {self.config.dtype}" + (", FSDP2" if self.world_size > 1 else "")
        return RankInfo(
            rank=self.rank, world_size=self.world_size, dp_rank=self.rank, dp_size=self.world_size, description=place
        )

    def _pick_device(self) -> torch.device:
        wanted = self.config.device if self.config.device != "auto" else self.context.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(wanted)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeMissing(f'trainer fsdp: device = "{wanted}", but torch sees no GPU here')
            if device.index is None:
                device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        return device

    def close(self) -> None:
        self.roles.clear()
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        """Besides the usual outputs, the policy gives divergences from the frozen roles, and a shared critic's "values"."""
        model = self._role(role).model
        others = {spec.role for name in outputs if (spec := divergence(name))}
        possible = self._possible(role, outputs, others)
        if outputs - possible:
            raise ConfigError(
                f"trainer fsdp: role {role} cannot give {', '.join(sorted(outputs - possible))}",
                f"it gives {', '.join(sorted(possible))}",
            )
        result = {name: [np.zeros(s.num_tokens, np.float32) for s in batch.samples] for name in outputs}
        masks = masks_of(batch)
        own, stream = self._microbatches(batch, masks)
        with torch.no_grad():
            for _ in range(self._reduce([own], "max")[0]):
                micro = next(stream)
                out = model(micro.inputs, outputs, others=self._heads(others, micro.inputs))
                for name in outputs if micro.indices else ():
                    for i, values in zip(micro.indices, micro.split(micro.scatter(out[name])), strict=True):
                        result[name][i] = values
        return result

    def _possible(self, role: str, outputs: frozenset[str], others: set[str]) -> frozenset[str]:
        if role == "critic":
            return frozenset({"values"})
        if role != "policy":
            return LANGUAGE
        known = {name for name in outputs if (spec := divergence(name)) and spec.role in self.roles.keys() & set(FROZEN)}
        return LANGUAGE | known | ({"values"} if self._critic_is_shared else set())

    @property
    def _critic_is_shared(self) -> bool:
        return "critic" in self.roles and self.roles["critic"].shared

    def _heads(self, roles: set[str], inputs: ModelInputs) -> dict[str, HeadInputs]:
        """The frozen models' passes over the same tokens, up to their heads."""
        with torch.no_grad():
            return {name: self._role(name).model(inputs, frozenset({"head"}))["head"] for name in sorted(roles)}

    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        """A shared critic is trained in the policy's step; a step of its own trains its value head alone."""
        holder = self._role(role)
        if holder.optimizer is None:
            raise ConfigError(f"trainer fsdp: role {role} is frozen and cannot be trained")
        optimizers = [holder.optimizer]
        if role == "policy" and self._critic_is_shared:
            optimizers.append(self.roles["critic"].optimizer)
        seconds = dict.fromkeys(("pack", "forward", "backward", "optimizer"), 0.0)
        masks = masks_of(batch)
        own, stream = self._timed(seconds, "pack", self._microbatches, batch, masks)
        trainable, tokens = sum(int(m.sum()) for m in masks), sum(s.num_tokens for s in batch.samples)
        rounds, anywhere = self._reduce([own], "max")[0], self._reduce([trainable], "sum")[0]
        report = StepReport(
            step=batch.step, loss=0.0, grad_norm=0.0, lr=holder.optimizer.lr, tokens=tokens, trainable=trainable
        )
        if role == "policy":
            report.columns["logprobs"] = [np.zeros(s.num_tokens, np.float32) for s in batch.samples]
        report.seconds = seconds
        if anywhere == 0:
            report.skipped = "nothing trainable"
            return report
        tally = Tally()
        for _ in range(rounds):
            micro = self._timed(seconds, "pack", next, stream)
            self._accumulate(holder, batch, micro, masks, tally, report)
        self._raise_together(tally.failures)
        norm = self._timed(seconds, "optimizer", grad_norm, optimizers)
        if not np.isfinite(norm):
            self._refuse_gradient(optimizers, batch)
        for optimizer in optimizers:
            self._timed(seconds, "optimizer", optimizer.step, norm)
        self.steps += role == "policy"
        report.loss, report.grad_norm, report.metrics = tally.loss, norm, tally.metrics
        report.peak_bytes = self._peak_bytes()
        return report

    def _accumulate(
        self, holder: Role, batch: TrainBatch, micro: Microbatch, masks: Sequence[Any], tally: Tally, report: StepReport
    ) -> None:
        """Forward and backward of one microbatch; gradients add up in the parameters."""
        context = {"role": holder.name, "pp_rank": 0, "model_chunk": 0, "recompute": self.config.activation_checkpointing}
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.around_forward(micro, context))
            began = self._now()
            outputs = self._outputs(holder, micro.inputs)
            loss = sum(0.0 * outputs[name].sum() for name in ("logprobs", "values") if name in outputs)
            if micro.indices:
                check_outputs(holder.name, batch, micro, outputs, tally)
                x = loss_inputs(batch, micro, masks, outputs, self.context.fields)
                own = total_loss(self.terms, self._scopes(holder), batch, micro, x, tally)
                if own is None:
                    raise ConfigError(f"trainer fsdp: no loss trains role {holder.name}", "add a [[loss]] for it")
                if not own.requires_grad and bool(x.mask.any()):
                    names = ", ".join(term.name for term in self.terms)
                    raise ContractError(f"no loss ({names}) has a gradient for the {holder.name}; was it detached?")
                loss = loss + own if own.requires_grad else loss
                tally.add("packing/computed_tokens", (micro.num_computed, 1.0, "sum"))
                if holder.name == "policy":
                    for i, values in zip(micro.indices, micro.split(x.get("logprobs")), strict=True):
                        report.columns["logprobs"][i] = values
        report.seconds["forward"] += self._now() - began
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.around_backward(micro, context))
            self._timed(report.seconds, "backward", loss.backward)

    def _outputs(self, holder: Role, inputs: ModelInputs) -> Mapping[str, torch.Tensor]:
        if holder.name == "critic":
            return holder.model(inputs, frozenset({"values"}), trunk_gradient=not holder.shared)
        needs = self.context.needs if self.context.loss_needs is None else self.context.loss_needs
        want = {name for name in needs if name == "entropy" or name.startswith("topk:") or divergence(name)}
        others = {spec.role for name in want if (spec := divergence(name))}
        want |= {"logprobs"} | ({"values"} if self._critic_is_shared else set())
        return holder.model(inputs, frozenset(want), others=self._heads(others, inputs))

    def _scopes(self, holder: Role) -> frozenset[str]:
        """Scopes of the losses that train a role."""
        if holder.name == "critic":
            return frozenset({"value"})
        return frozenset({"policy", "pair"} | ({"value"} if self._critic_is_shared else set()))

    def _microbatches(self, batch: TrainBatch, masks: Sequence[Any]) -> tuple[int, Iterator[Microbatch]]:
        budget = self.config.max_tokens or (16384 if self.device.type == "cuda" else 1024)
        return microbatches(
            batch,
            masks,
            device=self.device,
            max_tokens=budget,
            packing=self.config.packing,
            share=self.config.shared_prefix,
        )

    def _role(self, name: str) -> Role:
        if name not in self.roles:
            raise ConfigError(
                f"trainer fsdp: no role {name} here",
                f"it holds {', '.join(self.roles)}",
                f"add [roles.{name}] to the config",
            )
        return self.roles[name]

    # --- failures -----------------------------------------------------------------------------------------------------

    def _raise_together(self, failures: Sequence[str]) -> None:
        """Raises RunFailed on every rank when any has something to report, so that none waits for another."""
        everywhere: list[Any] = [list(failures)]
        if self.world_size > 1:
            everywhere = [None] * self.world_size
            dist.all_gather_object(everywhere, list(failures))
        lines = [line for rank in everywhere for line in rank]
        if lines:
            for role in self.roles.values():
                if role.optimizer:
                    role.optimizer.zero_grad()
            raise RunFailed(f"step refused, no weight was changed: {lines[0]}", *lines[1:8])

    def _refuse_gradient(self, optimizers: Sequence[Optimizer], batch: TrainBatch) -> None:
        named = {n: p for optimizer in optimizers for n, p in optimizer.named.items()}
        bad = [n for n, p in named.items() if p.grad is not None and not _finite(p.grad)]
        terms = ", ".join(f'"{term.name}"' for term in self.terms)
        ids = [s.trajectory_id for s in batch.samples]
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        self._raise_together(
            [f"the gradient of loss {terms} is not finite in {', '.join(bad[:3]) or 'another rank'}; samples {shown}"]
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def _export_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32

    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        if layout != "hf_full":
            raise ConfigError(f'trainer fsdp exports "hf_full", not "{layout}"')
        with torch.no_grad():
            yield from weights.buckets(self._lm, bucket_bytes, self._export_dtype, publish=self.rank == 0)

    @property
    def _lm(self) -> Any:
        return self._role("policy").model.lm

    def state_hash(self) -> str:
        return weights.hash_tensors(weights.hf_tensors(self._lm, self._export_dtype))

    def save_model(self, folder: Path) -> None:
        weights.write_hf_folder(self._lm, folder, self._export_dtype, publish=self.rank == 0)

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.roles, self.steps, publish=self.rank == 0)
        self._barrier()

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Raises RunFailed that lists every missing or unexpected key. The number of ranks may have changed."""
        steps = checkpoint.load(folder, self.roles, weights_only=weights_only)
        self.steps = self.steps if steps is None else steps

    def sleep(self, tags: Sequence[str] = ("optimizer", "weights")) -> None:
        self._move(tags, torch.device("cpu"))

    def wake(self, tags: Sequence[str] = ("optimizer", "weights")) -> None:
        self._move(tags, self.device)

    def _move(self, tags: Sequence[str], device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        for role in self.roles.values():
            if "optimizer" in tags and role.optimizer:
                role.optimizer.move(device)
            if "weights" in tags:
                role.model.to(device)
        torch.cuda.empty_cache()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _reduce(self, numbers: list[int], how: str) -> list[int]:
        if self.world_size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.long, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        return tensor.tolist()

    def _barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, seconds: dict[str, float], phase: str, function: Callable[..., Any], *args: Any) -> Any:
        began = self._now()
        result = function(*args)
        seconds[phase] += self._now() - began
        return result

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _finite(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
