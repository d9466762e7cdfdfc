"""The suites of the toy components and of the fakes: examples to read, and what each broken fake is a variant of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core import builtin
from miles_core.hookspecs import REGISTRATION
from miles_core.testing import contracts, fakes, toy_model


def built_in(kind: str, name: str) -> Any:
    """A component of the core."""
    hook = next(hook for hook, of in REGISTRATION.items() if of == kind)
    return next(c for c in builtin.collect(hook) if c.name == name)


class ToyData(contracts.DataContract):
    component = built_in("data", "toy")
    options = {"num_prompts": 10}


class ToyTokenizer(contracts.TokenizerContract):
    component = built_in("tokenizer", "toy")
    bos_id = toy_model.BOS


class ToyEngine(contracts.EngineContract):
    component = built_in("engine", "toy")
    prompt = (toy_model.BOS, toy_model.USER, 20, toy_model.ASSISTANT)
    vocab_size = toy_model.VOCAB_SIZE

    def weights(self, variant: int) -> Any:
        return toy_model.initial_params(variant)


class ToyTrainer(contracts.TrainerContract):
    component = built_in("trainer", "toy")
    vocab_size = toy_model.VOCAB_SIZE
    microbatch_options = {"microbatch_tokens": 4}


class SingleTurn(contracts.RolloutContract):
    component = built_in("rollout", "single-turn")


class ExactMatch(contracts.RewardContract):
    component = built_in("reward", "exact-match")


class NonzeroStd(contracts.FilterContract):
    component = built_in("filter", "nonzero-std")


class Grpo(contracts.AdvantageContract):
    component = built_in("advantage", "grpo")


class PolicyGradientOnToyArrays(contracts.LossContract):
    component = built_in("loss", "policy-gradient")
    arrays = "toy"


class Direct(contracts.TransportContract):
    component = built_in("transport", "direct")
    options = {"hash_handles": True}


class JsonlTracker(contracts.TrackerContract):
    component = built_in("tracker", "jsonl")


class Sampler(contracts.SamplerContract):
    component = fakes.COMPONENTS.sampler


class Correction(contracts.CorrectionContract):
    component = fakes.COMPONENTS.correction


class Metric(contracts.MetricContract):
    component = fakes.COMPONENTS.metric


class Field(contracts.FieldContract):
    spec = fakes.EXPERTS


class Source(contracts.SourceContract):
    component = fakes.COMPONENTS.source
    reference = "3"

    def unreachable(self, folder: Path) -> Any:
        return fakes.FolderSource(folder).offline(), "3"


class Model(contracts.ModelContract):
    component = fakes.COMPONENTS.model
    names = ("layers.0.qkv.weight", "layers.0.norm.weight", "embed")


class Precision(contracts.PrecisionContract):
    component = fakes.COMPONENTS.precision


class Extension(contracts.ExtensionContract):
    component = fakes.COMPONENTS.extension


class InlineLauncher(contracts.LauncherContract):
    component = fakes.COMPONENTS.launcher
