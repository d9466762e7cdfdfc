"""A `TrainerRank` on Megatron-Core with tensor and pipeline parallelism: a policy and, if asked for, a critic.

Every rank gets the whole batch (one data-parallel rank). The last pipeline stage computes losses; of it, the first
tensor-parallel rank returns results and publishes weights. All methods but `close` are collective.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import cpu_shim
import numpy as np
import torch
import torch.distributed as dist
from gloo_transport import GlooSender

from miles_core.component import BuildContext, merge_metric
from miles_core.errors import ConfigError, RunFailed
from miles_core.fields import FieldSpec
from miles_core.interfaces import TrainerRank
from miles_core.trainers import RankHost
from miles_core.types import Bucket, RankInfo, StepReport, TensorSpec, TrainBatch
from miles_core.worker import load_factory

COLLECTIVE_LIMIT_S = 240.0
"""A rank waits this long for the others; longer than a sender waits for engines, or a slow engine kills the trainer."""


class MegatronRank(TrainerRank):
    def __init__(
        self,
        context: BuildContext,
        *,
        tp: int,
        pp: int,
        losses: Sequence[str],
        fields: Sequence[Mapping[str, Any]] = (),
        critic: str = "",
        lr: float = 1e-3,
        max_grad_norm: float = 1.0,
        max_tokens: int = 64,
    ) -> None:
        self.context, self.tp, self.pp = context, tp, pp
        self.rank, self.max_tokens = context.index, max_tokens
        self.paths = {"policy": Path(context.model_path), **({"critic": Path(critic)} if critic else {})}
        self.fields = {**context.fields, **{spec["name"]: FieldSpec(**spec) for spec in fields}}
        components = [load_factory(reference) for reference in losses]
        self.losses = [(c.name, c.traits["scope"], c.build(c.config(), context)) for c in components]
        self.optimizer_options = {"lr": lr, "max_grad_norm": max_grad_norm}
        self.roles: dict[str, Any] = {}

    # --- Life ---

    def start(self) -> RankInfo:
        torch.set_num_threads(1)
        cpu_shim.install()
        from megatron.core import parallel_state as mpu
        from megatron.core import tensor_parallel
        from megatron_model import load_role

        limit = datetime.timedelta(seconds=COLLECTIVE_LIMIT_S)
        dist.init_process_group(
            "gloo", init_method=self.context.rendezvous, rank=self.rank, world_size=self.context.world_size, timeout=limit
        )
        mpu.initialize_model_parallel(self.tp, self.pp)
        tensor_parallel.model_parallel_cuda_manual_seed(self.context.seed + 1)
        self.mpu = mpu
        self.tp_rank, self.stage = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
        self.last = mpu.is_pipeline_last_stage()
        self.publishes = self.last and self.tp_rank == 0
        for name, folder in self.paths.items():
            self.roles[name] = load_role(name, folder, **self.optimizer_options)
        return RankInfo(
            rank=self.rank,
            world_size=self.context.world_size,
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
            output=self.publishes,
            description=f"megatron-core, tensor rank {self.tp_rank} of {self.tp}, stage {self.stage} of {self.pp}",
        )

    def close(self) -> None:
        self.roles.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- Passes ---

    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        holder = self._role(role)
        possible = {"values"} if role == "critic" else {"logprobs"}
        if outputs - possible:
            raise ConfigError(f"the spike's {role} cannot give {sorted(outputs - possible)}; it gives {sorted(possible)}")
        rows = {name: [np.zeros(s.num_tokens, np.float32) for s in batch.samples] for name in outputs}

        def collect(micro: Any, computed: dict[str, torch.Tensor]) -> torch.Tensor:
            for name in outputs:
                for i, values in zip(micro.indices, micro.split(computed[name]), strict=True):
                    rows[name][i] = values
            return next(iter(computed.values())).sum()

        if batch.samples:
            self._run(holder, batch, collect, forward_only=True)
        return rows if self.last else {}

    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        holder, began = self._role(role), time.perf_counter()
        report = StepReport(step=batch.step, loss=0.0, grad_norm=0.0, lr=self.optimizer_options["lr"])
        report.tokens, report.trainable = sum(s.num_tokens for s in batch.samples), batch.num_trainable
        if not batch.num_trainable:  # every rank has the whole batch, so all of them see the same
            report.skipped = "nothing-trainable"
            return report
        if role == "policy":
            report.columns["logprobs"] = [np.zeros(s.num_tokens, np.float32) for s in batch.samples]
        holder.model.zero_grad_buffer()
        holder.optimizer.zero_grad()
        self._run(holder, batch, lambda micro, computed: self._losses(holder, batch, micro, computed, report))
        self._refuse_nonfinite(report, holder, batch)
        _, report.grad_norm, _ = holder.optimizer.step()
        report.seconds["step"] = time.perf_counter() - began
        return report

    def _losses(
        self, holder: Any, batch: TrainBatch, micro: Any, computed: dict[str, torch.Tensor], report: StepReport
    ) -> torch.Tensor:
        """The weighted sum of this role's losses on a microbatch; adds to `report` what is known beside it."""
        from packing import loss_inputs, sum_loss

        x = loss_inputs(batch, micro, computed, self.fields)
        total = 0.0 * next(iter(computed.values())).sum()
        scopes = ("value",) if holder.name == "critic" else ("policy", "pair")
        for name, scope, loss in self.losses:
            if scope not in scopes:
                continue
            out = loss(x)
            total = total + sum_loss(out, x, micro.flat(batch.token_weights[out.scope]))
            for key, (amount, count, reduce) in out.metrics.items():
                full = f"loss/{name}/{key}"
                report.metrics[full] = merge_metric(report.metrics.get(full), (float(amount), float(count), reduce))
        report.loss += total.item()
        if holder.name == "policy":
            for i, values in zip(micro.indices, micro.split(computed["logprobs"]), strict=True):
                report.columns["logprobs"][i] = values
        return total

    def _run(self, holder: Any, batch: TrainBatch, finish: Any, *, forward_only: bool = False) -> None:
        """Megatron's pipeline schedule over the microbatches; `finish(micro, outputs)` runs on the last stage and gives
        what is differentiated."""
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from packing import microbatches

        parts = microbatches(batch, self.max_tokens)

        def forward_step(stream: Iterator[Any], model: Any, *_: Any) -> Any:
            micro = next(stream)
            bounds = torch.tensor(micro.bounds, dtype=torch.int32)
            longest = max(b - a for a, b in pairwise(micro.bounds))
            packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
            out = model(micro.tokens[None], micro.positions[None], None, packed_seq_params=packed)

            def loss(out: torch.Tensor) -> Any:
                total = finish(micro, self._outputs(holder.name, batch, micro, out[0]))
                return total, torch.tensor(1, dtype=torch.int), {}

            return out, loss

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=[holder.model],
            num_microbatches=len(parts),
            seq_length=len(parts[0].tokens),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _outputs(self, role: str, batch: TrainBatch, micro: Any, out: torch.Tensor) -> dict[str, torch.Tensor]:
        """[M] from the last stage's [N, vocabulary / tp] logits, or [N, 1] values. The model at a token speaks of the
        next one, a column of the token itself; "values" are those of the state in which it was chosen."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if role == "critic":
            return {"values": micro.shift(out[:, 0].float())}
        heat = torch.ones(len(micro.tokens))
        heat[: micro.num_tokens] = micro.flat(
            [np.full(s.num_tokens, s.temperature or 1.0, np.float32) for s in batch.samples]
        )
        target = micro.tokens.roll(-1)
        nll = vocab_parallel_cross_entropy((out.float() / heat[:, None])[:, None], target[:, None])
        return {"logprobs": micro.shift(-nll[:, 0])}

    def _refuse_nonfinite(self, report: StepReport, holder: Any, batch: TrainBatch) -> None:
        """Raises on every rank before any weight moves; only the last stage knows the loss, so it is shared."""
        holder.optimizer.prepare_grads()
        norm = float(holder.optimizer.get_grad_norm())
        bad = torch.tensor([0.0 if math.isfinite(report.loss) and math.isfinite(norm) else 1.0])
        dist.all_reduce(bad)
        if bad.item():
            raise RunFailed(
                f"step {batch.step}: the loss is {report.loss} and its gradient norm {norm}; nothing was changed"
            )

    def _role(self, name: str) -> Any:
        if name not in self.roles:
            raise ConfigError(f"the spike's trainer holds {sorted(self.roles)}, not {name}")
        return self.roles[name]

    # --- Weights ---

    @torch.no_grad()
    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        if layout != "hf_full":
            raise ConfigError(f'the spike exports "hf_full", not "{layout}"')
        role = self.roles["policy"]
        index, size, pending = 0, 0, []
        for weight in role.plan:  # the same cuts on all ranks, since sizes come from the plan
            if size and size + weight.nbytes > bucket_bytes:
                yield self._bucket(index, pending)
                index, size, pending = index + 1, 0, []
            pending += self._gather(role, weight)
            size += weight.nbytes
        yield self._bucket(index, pending)

    def _gather(self, role: Any, weight: Any) -> list[tuple[str, torch.Tensor]]:
        """The full Hugging Face tensors of one parameter on the publishing rank, nothing elsewhere: joined over TP on the
        stage that owns it, then carried to the last stage along the pipeline of the first tensor ranks."""
        import hf_names

        tensors = [torch.empty(shape) for _, shape in weight.hf]
        if weight.stage == self.stage:
            own = role.named[weight.name].detach().contiguous()
            shards = [own]
            if weight.kind != "copy":
                shards = [torch.empty_like(own) for _ in range(self.tp)]
                dist.all_gather(shards, own, group=self.mpu.get_tensor_model_parallel_group())
            tensors = [t.contiguous() for t in hf_names.join(weight, shards)]
        if weight.stage != self.pp - 1 and self.tp_rank == 0:
            group = self.mpu.get_pipeline_model_parallel_group()
            for tensor in tensors:
                dist.broadcast(tensor, group_src=weight.stage, group=group)
        return [(name, t) for (name, _), t in zip(weight.hf, tensors, strict=True)] if self.publishes else []

    def _bucket(self, index: int, pending: list[tuple[str, torch.Tensor]]) -> Bucket:
        if not pending:
            return Bucket(index=index, tensors=(), data=None)
        data = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in pending])
        specs, offset = [], 0
        for name, tensor in pending:
            specs.append(TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape), offset=offset))
            offset += tensor.nbytes
        sha = hashlib.sha256(data.numpy()).hexdigest()
        return Bucket(index=index, tensors=tuple(specs), data=data, sha=sha, nbytes=data.nbytes)

    def state_hash(self) -> str:
        hashes = [bucket.sha for bucket in self.export("hf_full", 1 << 40)]
        return hashes[0]

    def save_model(self, folder: Path) -> None:
        from safetensors.torch import save_file

        for bucket in self.export("hf_full", 1 << 40):
            if self.publishes:
                tensors = {
                    t.name: bucket.data[t.offset : t.offset + 4 * math.prod(t.shape)].view(torch.float32).view(t.shape)
                    for t in bucket.tensors
                }
                save_file(tensors, folder / "model.safetensors", {"format": "pt"})
                (folder / "config.json").write_text(json.dumps(self.roles["policy"].hf_config, indent=2), "utf-8")

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._state(), folder / f"rank-{self.rank}.safetensors", self._counters())

    @torch.no_grad()
    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        from safetensors import safe_open

        with safe_open(folder / f"rank-{self.rank}.safetensors", "pt") as file:
            own = self._state()
            if wrong := sorted(own.keys() ^ set(file.keys())):
                raise RunFailed(f"{folder} does not fit trainer rank {self.rank}: {wrong}")
            for name, tensor in own.items():
                if not weights_only or ".weights." in name:
                    tensor.copy_(file.get_tensor(name))
            counters = file.metadata() or {}
        for name, role in self.roles.items():
            for group in role.optimizer.optimizer.param_groups if not weights_only else ():
                group["step"] = int(counters[name])

    def _state(self) -> dict[str, torch.Tensor]:
        """Weights and moments of this rank by name; moments exist from here on."""
        state = {}
        for role in self.roles.values():
            adam = role.optimizer.optimizer
            for name, parameter in role.named.items():
                state[f"{role.name}.weights.{name}"] = parameter.detach()
                for moment in ("exp_avg", "exp_avg_sq"):
                    known = adam.state[parameter].setdefault(moment, torch.zeros_like(parameter))
                    state[f"{role.name}.{moment}.{name}"] = known
        return state

    def _counters(self) -> dict[str, str]:
        return {name: str(role.optimizer.optimizer.param_groups[0].get("step", 0)) for name, role in self.roles.items()}


def build(context: BuildContext, **options: Any) -> RankHost:
    """Worker factory: a rank with the sender of the gloo transport beside it."""
    return RankHost(MegatronRank(context, **options), lambda plan: GlooSender())
