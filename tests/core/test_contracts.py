"""The contract suites on every component of the core, and on the fakes of the kinds of which it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_core import builtin
from miles_core.hookspecs import REGISTRATION
from miles_core.testing import contracts, suites
from miles_core.testing.contracts.base import kind_of
from miles_core.testing.suites import built_in


class TestToyData(suites.ToyData): ...


class TestToyTokenizer(suites.ToyTokenizer): ...


class TestToyEngine(suites.ToyEngine): ...


class TestToyTrainer(suites.ToyTrainer): ...


class TestSingleTurn(suites.SingleTurn): ...


class TestExactMatch(suites.ExactMatch): ...


class TestNonzeroStd(suites.NonzeroStd): ...


class TestGrpo(suites.Grpo): ...


class TestPolicyGradientOnToyArrays(suites.PolicyGradientOnToyArrays): ...


class TestDirect(suites.Direct): ...


class TestJsonlTracker(suites.JsonlTracker): ...


class TestSampler(suites.Sampler): ...


class TestCorrection(suites.Correction): ...


class TestMetric(suites.Metric): ...


class TestField(suites.Field): ...


class TestSource(suites.Source): ...


class TestModel(suites.Model): ...


class TestPrecision(suites.Precision): ...


class TestExtension(suites.Extension): ...


class TestInlineLauncher(suites.InlineLauncher): ...


class TestToyDataThatEnds(contracts.DataContract):
    component = built_in("data", "toy")
    options = {"num_prompts": 10, "epochs": 2}


class TestJsonlData(contracts.DataContract):
    component = built_in("data", "jsonl")

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        rows = [{"prompt": f"{i} + 1 =", "label": str(i + 1)} for i in range(6)]
        rows.append({"messages": [{"role": "user", "content": "hi"}], "label": "hi", "id": "chat"})
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.options = {"path": str(tmp_path / "data.jsonl")}


class TestToyReward(contracts.RewardContract):
    component = built_in("reward", "toy")


class TestExactMatchOfAPattern(contracts.RewardContract):
    component = built_in("reward", "exact-match")
    options = {"pattern": r"answer is (\S+)", "case_sensitive": False}
    label = ["Four", 4]
    right = "So the answer is four"


class TestAllVerdicts(contracts.FilterContract):
    component = built_in("filter", "all-verdicts")


class TestLengthFilter(contracts.FilterContract):
    component = built_in("filter", "length")
    options = {"max_tokens": 3}


class TestTruncation(contracts.FilterContract):
    component = built_in("filter", "truncation")


class TestStaleness(contracts.FilterContract):
    component = built_in("filter", "staleness")


class TestOverlong(contracts.RewardContract):
    component = built_in("reward", "overlong")
    options = {"cache_tokens": 2, "max_tokens": 4}
    right, wrong = "4", "4, and more"


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


class TestLocalLauncher(contracts.LauncherContract):
    component = built_in("launcher", "local")
    options = {"grace_s": 2.0}


def test_no_component_of_the_core_goes_without_its_suite():
    classes = [c for c in globals().values() if isinstance(c, type) and issubclass(c, contracts.ComponentContract)]
    tested = {(kind_of(c), c.component.name) for c in classes}
    offered = {(kind, c.name) for hook, kind in REGISTRATION.items() for c in builtin.collect(hook)}
    assert offered <= tested, f"without a suite: {sorted(offered - tested)}"
