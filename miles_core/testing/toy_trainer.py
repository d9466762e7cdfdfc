"""The toy trainer: one rank, Adam, elementwise losses, exact gradients. N: trainable tokens of a microbatch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.component import BuildContext, merge_metric
from miles_core.errors import ConfigError, RunFailed
from miles_core.interfaces import TrainerRank
from miles_core.testing import toy_model as model
from miles_core.testing.toy import ToyTrainerConfig
from miles_core.testing.toy_arrays import ToyArray
from miles_core.types import Bucket, LossInputs, Metric, RankInfo, StepReport, TensorSpec, TrainBatch

BETA1, BETA2, ADAM_EPS = 0.9, 0.95, 1e-8


class ToyTrainer(TrainerRank):
    """Parameters and Adam's moments are arrays by name. The role "reference" is the policy as it was at the start."""

    def __init__(self, config: ToyTrainerConfig, context: BuildContext) -> None:
        if context.world_size > 1:
            raise ConfigError(f"trainer toy has one rank, not {context.world_size}", "set trainer.num_workers = 1")
        roles = getattr(context.run_config, "roles", {})
        if unknown := set(roles) - {"reference"}:
            raise ConfigError(f"trainer toy has no role {sorted(unknown)[0]}; it has policy and reference")
        self.config, self.context = config, context
        self.losses: list[tuple[str, Any, float]] = []
        self.params: model.Params = {}
        self.reference: model.Params = {}
        self.moments: dict[str, np.ndarray] = {}
        self.num_steps = 0

    def start(self) -> RankInfo:
        self.params = model.load_params(self.context.seed, self.context.model_path)
        self.reference = {name: value.copy() for name, value in self.params.items()}
        self.moments = {f"{m}.{name}": np.zeros(shape) for m in ("m", "v") for name, shape in model.SHAPES.items()}
        built = self.context.select("loss") if self.context.select is not None else []
        tables = getattr(self.context.run_config, "loss", ())
        weights = [table.weight for table in tables] if tables else [1.0] * len(built)
        self.losses = [(name, loss, weight) for (name, loss), weight in zip(built, weights, strict=True)]
        return RankInfo(rank=0, world_size=1, description="numpy")

    # --- Passes ---

    def forward(self, batch: TrainBatch, role: str, outputs: frozenset[str]) -> dict[str, list[np.ndarray]]:
        if unknown := outputs - {"logprobs", "entropy"}:
            raise ConfigError(f"trainer toy computes logprobs and entropy, not {sorted(unknown)}")
        if role not in ("policy", "reference"):
            raise ConfigError(f"trainer toy has no role {role}; it has policy and reference")
        params = self.params if role == "policy" else self.reference
        rows: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
        for sample in batch.samples:
            positions = np.arange(1, sample.num_tokens)
            logp = _tempered(model.logits(params, model.windows(sample.tokens, positions)), sample.temperature)
            values = {
                "logprobs": logp[np.arange(len(positions)), sample.tokens[1:]],
                "entropy": -(np.exp(logp) * logp).sum(axis=-1),
            }
            for name in outputs:
                rows[name].append(np.concatenate([[0.0], values[name]]).astype(np.float32))
        return rows

    def step(self, batch: TrainBatch, role: str = "policy") -> StepReport:
        if role != "policy":
            raise ConfigError(f"trainer toy trains the policy, not {role}")
        began = time.perf_counter()
        report = StepReport(step=batch.step, loss=0.0, grad_norm=0.0, lr=self.config.lr, trainable=batch.num_trainable)
        report.tokens = sum(s.num_tokens for s in batch.samples)
        if not batch.num_trainable:
            report.skipped = "nothing-trainable"
            return report
        report.loss, grads, report.metrics, logprobs = self.loss_and_gradients(batch)
        report.grad_norm = float(np.sqrt(sum(float((g * g).sum()) for g in grads.values())))
        if not np.isfinite([report.loss, report.grad_norm]).all():
            raise RunFailed(f"step {batch.step}: the loss is {report.loss} and its gradient norm {report.grad_norm}")
        self._adam(grads, min(1.0, self.config.max_grad_norm / max(report.grad_norm, 1e-12)))
        report.columns["logprobs"] = logprobs
        report.seconds["step"] = time.perf_counter() - began
        return report

    def loss_and_gradients(self, batch: TrainBatch) -> tuple[float, model.Params, dict[str, Metric], list[np.ndarray]]:
        """(loss, gradient by parameter, metrics, log-probabilities float32[T] per sample) of `batch`, summed over its
        microbatches."""
        grads: model.Params = {name: np.zeros(shape) for name, shape in model.SHAPES.items()}
        logprobs = [np.zeros(s.num_tokens, dtype=np.float32) for s in batch.samples]
        metrics: dict[str, Metric] = {}
        loss = 0.0
        rows, places = _trainable(batch)
        size = self.config.microbatch_tokens or max(len(rows), 1)
        for start in range(0, len(rows), size):
            part = _Microbatch(batch, self.params, rows[start : start + size], places[start : start + size])
            value, slope = self._losses(part, metrics)
            loss += value
            for name, grad in part.gradients(slope).items():
                grads[name] += grad
            for row, place, logprob in zip(part.rows, part.places, part.logprobs, strict=True):
                logprobs[row][place] = logprob
        return loss, grads, metrics, logprobs

    def _losses(self, part: _Microbatch, metrics: dict[str, Metric]) -> tuple[float, np.ndarray]:
        """The weighted sum of all losses on a microbatch and its derivative [N] by the log-probabilities."""
        total, slope = 0.0, np.zeros(len(part.rows))
        for name, loss, factor in self.losses:
            output = loss(part.inputs())
            per_token = output.per_token
            if not isinstance(per_token, ToyArray):
                raise ConfigError(
                    f"loss {name} returned a {type(per_token).__name__}, and the toy trainer needs its own arrays"
                )
            weight = factor * part.column(output.scope, part.batch.token_weights)
            if output.scope == "policy":
                weight = weight * part.multiplier
            total += float((weight * per_token.value).sum())
            slope += weight * per_token.slope
            for key, (amount, count, reduce) in output.metrics.items():
                full = f"loss/{name}/{key}"
                metrics[full] = merge_metric(metrics.get(full), (float(amount), float(count), reduce))
        return total, slope

    def _adam(self, grads: model.Params, scale: float) -> None:
        """Adam, arXiv:1412.6980, with bias correction."""
        self.num_steps += 1
        for name, grad in grads.items():
            m, v = self.moments[f"m.{name}"], self.moments[f"v.{name}"]
            m += (1 - BETA1) * (grad * scale - m)
            v += (1 - BETA2) * ((grad * scale) ** 2 - v)
            m_hat, v_hat = m / (1 - BETA1**self.num_steps), v / (1 - BETA2**self.num_steps)
            self.params[name] -= (self.config.lr * m_hat / (np.sqrt(v_hat) + ADAM_EPS)).astype(np.float32)

    # --- Weights and files ---

    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        if layout != "hf_full":
            raise ConfigError(f'trainer toy exports the layout "hf_full", not "{layout}"')
        pending: list[tuple[str, np.ndarray]] = []
        index = 0
        for name in sorted(self.params):
            value = self.params[name]
            if pending and sum(v.nbytes for _, v in pending) + value.nbytes > bucket_bytes:
                yield _bucket(index, pending)
                pending, index = [], index + 1
            pending.append((name, value))
        yield _bucket(index, pending)

    def save(self, folder: Path) -> None:
        model.write_tensors(folder / "policy.safetensors", self.params)
        model.write_tensors(folder / "reference.safetensors", self.reference)
        model.write_tensors(folder / "optimizer.safetensors", self.moments)
        (folder / "trainer.json").write_text(json.dumps({"num_steps": self.num_steps}), "utf-8")

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        files = {"policy": model.SHAPES}
        if not weights_only:
            moments = {f"{m}.{name}": shape for m in ("m", "v") for name, shape in model.SHAPES.items()}
            files |= {"reference": model.SHAPES, "optimizer": moments}
        tensors = {}
        for file, shapes in files.items():
            tensors[file] = model.read_tensors(folder / f"{file}.safetensors")
            model.check_names(str(folder / f"{file}.safetensors"), tensors[file], shapes)
        num_steps = 0 if weights_only else _read_steps(folder / "trainer.json")
        self.params = tensors["policy"]
        if not weights_only:
            self.reference, self.moments, self.num_steps = tensors["reference"], tensors["optimizer"], num_steps

    def save_model(self, folder: Path) -> None:
        model.write_model(folder, self.params)

    def state_hash(self) -> str:
        return model.state_hash(self.params)

    def close(self) -> None:
        self.params, self.reference, self.moments = {}, {}, {}


class _Microbatch:
    """N trainable tokens: token n is `places[n]` of sample `rows[n]`."""

    def __init__(self, batch: TrainBatch, params: model.Params, rows: np.ndarray, places: np.ndarray) -> None:
        self.batch, self.params, self.rows, self.places = batch, params, rows, places
        samples = batch.samples
        self.tokens = np.array([samples[r].tokens[t] for r, t in zip(rows, places, strict=True)], dtype=np.int64)
        self.temperature = np.array([samples[r].temperature for r in rows])
        self.context = np.concatenate([model.windows(samples[r].tokens, places[rows == r]) for r in np.unique(rows)])
        self.hidden = model.hidden(params, self.context)
        self.logp = _tempered(model.logits(params, self.context, self.hidden), self.temperature)
        self.logprobs = self.logp[np.arange(len(rows)), self.tokens]
        has_multiplier = "multiplier" in batch.columns
        self.multiplier = self.column("multiplier", batch.columns) if has_multiplier else np.ones(len(rows))

    def column(self, name: str, columns: dict[str, list[np.ndarray]]) -> np.ndarray:
        if name not in columns:
            raise ConfigError(f'the batch has no column or scope "{name}"; it has {sorted(columns)}')
        return np.array([columns[name][r][t] for r, t in zip(self.rows, self.places, strict=True)], dtype=np.float64)

    def get(self, name: str) -> ToyArray:
        if name == "logprobs":
            return ToyArray(self.logprobs, np.ones(len(self.rows)))
        if name == "old_logprobs" and self.batch.old_is_current:
            return ToyArray(self.logprobs)
        return ToyArray(self.column(name, self.batch.columns))

    def inputs(self) -> LossInputs:
        return LossInputs(
            tokens=self.tokens,
            mask=ToyArray(np.ones(len(self.rows), dtype=bool)),
            seq_ids=self.rows,
            advantages=ToyArray(self.column("advantages", self.batch.columns)),
            multiplier=ToyArray(self.multiplier),
            seq=_NoSequences(),
            get=self.get,
        )

    def gradients(self, slope: np.ndarray) -> model.Params:
        """d logp[token] / d logits = (onehot(token) - softmax) / temperature."""
        dlogits = -np.exp(self.logp)
        dlogits[np.arange(len(self.rows)), self.tokens] += 1.0
        dlogits *= (slope / self.temperature)[:, None]
        return model.gradients(self.params, self.context, self.hidden, dlogits)


class _NoSequences:
    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"the toy trainer differentiates elementwise losses only, and this loss uses seq.{name}",
            "train it with another trainer, for example fsdp",
        )


def _read_steps(path: Path) -> int:
    try:
        return int(json.loads(path.read_text("utf-8"))["num_steps"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the trainer's state in {path}: {error}") from error


def _tempered(logits: np.ndarray, temperature: Any) -> np.ndarray:
    return model.log_softmax(logits / np.reshape(temperature, (-1, 1)))


def _trainable(batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """Sample index and place of every trainable token, in order."""
    places = [np.flatnonzero(mask) for mask in batch.mask]
    rows = [np.full(len(p), i, dtype=np.int64) for i, p in enumerate(places)]
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *rows]), np.concatenate([empty, *places])


def _bucket(index: int, tensors: list[tuple[str, np.ndarray]]) -> Bucket:
    data = np.concatenate([np.ascontiguousarray(value).reshape(-1).view(np.uint8) for _, value in tensors])
    specs, offset = [], 0
    for name, value in tensors:
        specs.append(TensorSpec(name=name, dtype="float32", shape=value.shape, offset=offset))
        offset += value.nbytes
    sha = hashlib.sha256(data.tobytes()).hexdigest()
    return Bucket(index=index, tensors=tuple(specs), data=data, sha=sha, nbytes=data.nbytes)
