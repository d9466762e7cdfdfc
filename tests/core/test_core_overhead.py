"""The benchmark of the core's own cost: it runs, and it reads a run's metrics rightly."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "core_overhead.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("core_overhead", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_is_measured(benchmark):
    rows = benchmark.measure(num_samples=16, num_tokens=20, repeat=1)
    parts = {"filter length", "advantage grpo", "make_batches (token weights)", "rollout_metrics"}
    assert parts <= set(rows) and all(seconds > 0 for seconds in rows.values())


def test_the_share_of_a_run_leaves_the_first_step_out(benchmark, tmp_path):
    def row(step, prepare, report, train, clock, whole):
        return {"step": step, "time/prepare": prepare, "time/report": report, "time/train": train} | {
            "time/train_forward": clock,
            "time/rollout": whole - prepare - report - train,
            "step/seconds": whole,
        }

    # Steps 2 and 3: core .03 and .01 of 2 s each: .04 / 4 = 1%, at most .03 / 2; around the trainer's clock .02 and .04.
    rows = [row(1, 5, 5, 5, 0, 100), row(2, 0.02, 0.01, 1.02, 1.0, 2), row(3, 0.005, 0.005, 1.04, 1.0, 2)]
    lines = [*rows, {"step": 3, "eval/sums/reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = benchmark.read_run(tmp_path)
    assert found["steps"] == 2 and found["core_share"] == pytest.approx(0.01)
    assert found["largest_share"] == pytest.approx(0.015)
    assert found["core_and_around_share"] == pytest.approx((0.04 + 0.06) / 4)
