"""docs/algorithms.md against the registry: names, options and defaults, columns, and the metrics that are really logged."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from miles_core.testing.contracts import AdvantageContract, CorrectionContract, LossContract

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import algorithms_page as page  # noqa: E402

WRITTEN = tomllib.loads(page.SOURCE.read_text("utf-8"))
REQUIRED = {"opsm": {"delta": 0.1}, "length": {}}
"""Options without a default."""
LOGGED = [(kind, name) for kind in ("advantage", "loss", "correction") for name in sorted(WRITTEN[kind])]


def test_the_page_and_the_registry_agree():
    assert page.findings() == []
    assert page.PAGE.read_text("utf-8") == page.page(), "run python scripts/algorithms_page.py"


def test_a_missing_entry_and_a_surplus_one_are_found(tmp_path, monkeypatch):
    text = page.SOURCE.read_text("utf-8").replace("[loss.sft]", "[loss.sftx]")
    changed = tmp_path / "algorithms.toml"
    changed.write_text(text, "utf-8")
    monkeypatch.setattr(page, "SOURCE", changed)
    found = page.findings()
    assert 'loss "sft" has no entry in docs/algorithms.toml' in found
    assert 'docs/algorithms.toml: no loss is named "sftx"' in found


@pytest.mark.parametrize(("kind", "name"), LOGGED)
def test_every_metric_is_in_the_table(kind, name, tmp_path):
    """What a component logs on the inputs of its contract suite, without those named after a reward."""
    _, component = page.registered()[kind][name]
    if kind == "loss":
        pytest.importorskip("torch")
    emitted = {m for m in metrics_of(kind, component, tmp_path) if "/" not in m}
    assert emitted <= set(WRITTEN[kind][name]["metrics"]), f"{kind} {name}"


def metrics_of(kind, component, folder):
    suites = {"advantage": AdvantageContract, "loss": LossContract, "correction": CorrectionContract}
    suite = type("Suite", (suites[kind],), {"component": component, "options": REQUIRED.get(component.name, {})})()
    if kind == "advantage":
        suite.follows = component.name in ("whiten",)
        return suite.compute(folder, suite.inputs(suite.samples([0, 1, 1]))).metrics
    if kind == "loss":
        return suite.result(folder, suite.microbatch()).output.metrics
    return suite.compute(folder, suite.inputs()).metrics
