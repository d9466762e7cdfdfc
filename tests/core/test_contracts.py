"""The contract suites on the components of the core, and on the fakes of the kinds of which it has none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from miles_core import builtin
from miles_core.hookspecs import REGISTRATION
from miles_core.testing import contracts, toy_model
from miles_core.testing.fakes import COMPONENTS, EXPERTS, FolderSource


def built_in(kind: str, name: str) -> Any:
    hook = next(hook for hook, of in REGISTRATION.items() if of == kind)
    return next(c for c in builtin.collect(hook) if c.name == name)


class TestToyData(contracts.DataContract):
    component = built_in("data", "toy")
    options = {"num_prompts": 10}


class TestToyDataThatEnds(contracts.DataContract):
    component = built_in("data", "toy")
    options = {"num_prompts": 10, "epochs": 2}


class TestJsonlData(contracts.DataContract):
    component = built_in("data", "jsonl")

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        rows: Iterable[dict[str, Any]] = [{"prompt": f"{i} + 1 =", "label": str(i + 1)} for i in range(6)]
        rows = [*rows, {"messages": [{"role": "user", "content": "hi"}], "label": "hi", "id": "chat"}]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.options = {"path": str(tmp_path / "data.jsonl")}


class TestToyTokenizer(contracts.TokenizerContract):
    component = built_in("tokenizer", "toy")
    bos_id = toy_model.BOS


class TestToyEngine(contracts.EngineContract):
    component = built_in("engine", "toy")
    prompt = (toy_model.BOS, toy_model.USER, 20, toy_model.ASSISTANT)
    vocab_size = toy_model.VOCAB_SIZE

    def weights(self, variant: int) -> Any:
        return toy_model.initial_params(variant)


class TestToyTrainer(contracts.TrainerContract):
    component = built_in("trainer", "toy")
    vocab_size = toy_model.VOCAB_SIZE
    microbatch_options = {"microbatch_tokens": 4}


class TestSingleTurn(contracts.RolloutContract):
    component = built_in("rollout", "single-turn")


class TestToyReward(contracts.RewardContract):
    component = built_in("reward", "toy")


class TestExactMatch(contracts.RewardContract):
    component = built_in("reward", "exact-match")


class TestExactMatchOfAPattern(contracts.RewardContract):
    component = built_in("reward", "exact-match")
    options = {"pattern": r"answer is (\S+)", "case_sensitive": False}
    label = ["Four", 4]
    right = "So the answer is four"


class TestNonzeroStd(contracts.FilterContract):
    component = built_in("filter", "nonzero-std")


class TestAllVerdicts(contracts.FilterContract):
    component = built_in("filter", "all-verdicts")


class TestGrpo(contracts.AdvantageContract):
    component = built_in("advantage", "grpo")


class TestDrGrpo(contracts.AdvantageContract):
    component = built_in("advantage", "grpo")
    options = {"std": False}


class TestRloo(contracts.AdvantageContract):
    component = built_in("advantage", "rloo")


class TestGae(contracts.AdvantageContract):
    component = built_in("advantage", "gae")
    relative = False


class TestPolicyGradient(contracts.LossContract):
    component = built_in("loss", "policy-gradient")


class TestPolicyGradientWithoutTorch(TestPolicyGradient):
    arrays = "toy"


class TestDirect(contracts.TransportContract):
    component = built_in("transport", "direct")
    options = {"hash_handles": True}


class TestLocalLauncher(contracts.LauncherContract):
    component = built_in("launcher", "local")
    options = {"grace_s": 2.0}


class TestJsonlTracker(contracts.TrackerContract):
    component = built_in("tracker", "jsonl")


# --- Fakes -----------------------------------------------------------------------------------------------------------


class TestSampler(contracts.SamplerContract):
    component = COMPONENTS.sampler


class TestCorrection(contracts.CorrectionContract):
    component = COMPONENTS.correction


class TestMetric(contracts.MetricContract):
    component = COMPONENTS.metric


class TestField(contracts.FieldContract):
    spec = EXPERTS


class TestSource(contracts.SourceContract):
    component = COMPONENTS.source
    reference = "3"

    def unreachable(self, folder: Path) -> Any:
        return FolderSource(folder).offline(), "3"


class TestModel(contracts.ModelContract):
    component = COMPONENTS.model
    names = ("layers.0.qkv.weight", "layers.0.norm.weight", "embed")


class TestPrecision(contracts.PrecisionContract):
    component = COMPONENTS.precision


class TestExtension(contracts.ExtensionContract):
    component = COMPONENTS.extension


class TestInlineLauncher(contracts.LauncherContract):
    component = COMPONENTS.launcher
