"""What the core itself costs: filters, advantages, corrections and token weights on a large batch, and its share of a run.

    python benchmarks/core_overhead.py [--samples N] [--tokens T] [--json FILE]
    python benchmarks/core_overhead.py --run RUN_FOLDER [--json FILE]

The first form makes N samples of T sampled tokens in groups of 8, with log-probabilities that differ between engine and
trainer, and sends them through everything that runs on the driver between a rollout and an optimizer step. Each row is the
best of `--repeat` passes. Components of plugins that are not installed are left out.

The second form reads a run's metrics.jsonl. Core time of a step is `time/prepare` (checks, advantages, corrections, token
weights) and `time/report` (metrics, trackers, console). What `time/train` holds beside the trainer's own clock (pack,
forward, backward, optimizer) is shown too: calls, results and their checks. The first step is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from miles_core import __version__
from miles_core.batch import RolloutBatch, apply_advantages, live_part, make_batches, prepare
from miles_core.discovery import discover
from miles_core.plugins import PluginHost
from miles_core.settings import TrainTable
from miles_core.stats import rollout_metrics
from miles_core.testing.samples import make_sample
from miles_core.types import CorrectionInputs, Prompt, SampleGroup, Score, TrainBatch, VersionSpan

GROUP, PROMPT = 8, 64
PLUGINS = ("mismatch-corrections", "policy-advantages")
FILTERS: dict[str, dict[str, Any]] = {
    "nonzero-std": {},
    "all-verdicts": {},
    "length": {"max_tokens": 100_000},
    "truncation": {},
    "staleness": {},
}
ADVANTAGES = ("grpo", "rloo", "gae", "dr-grpo", "opo", "reinforce-pp", "reinforce-pp-baseline")
CORRECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("tis", {}),
    ("tis", {"level": "sequence"}),
    ("tis", {"level": "geometric"}),
    ("mis", {"level": "token"}),
    ("mis", {}),
    ("icepop", {}),
    ("rejection", {}),
    ("opsm", {"delta": 0.001}),
]


def make_groups(num_samples: int, num_tokens: int) -> list[SampleGroup]:
    """Groups of 8 with rewards of 0 and 1; one sample in eight was cut, and each was sampled under two versions."""
    rng = np.random.default_rng(0)
    total = PROMPT + num_tokens
    mask, old = np.arange(total) >= PROMPT, total - num_tokens // 100
    groups = []
    for g in range(num_samples // GROUP):
        prompt = Prompt(id=f"p{g}", draw=g, text="?")
        samples = []
        for i in range(GROUP):
            sample = make_sample(num_tokens, prompt_len=PROMPT, group=f"p{g}@{g}", index=i, prompt=prompt)
            sample.tokens = rng.integers(0, 50_000, total, dtype=np.int32)
            sample.logprobs = np.where(mask, -rng.random(total, dtype=np.float32), np.float32(0))
            sample.versions = (
                VersionSpan(start=PROMPT, stop=old, version=0),
                VersionSpan(start=old, stop=total, version=1),
            )
            sample.status = "length" if i == 0 else "stop"
            sample.reward = float(rng.random() < 0.5)
            sample.scores = {"math": Score(value=sample.reward)}
            samples.append(sample)
        groups.append(SampleGroup(id=f"p{g}@{g}", prompt=prompt, samples=samples, num_samples=GROUP))
    return groups


def add_columns(batch: RolloutBatch) -> None:
    """The trainer's log-probabilities are the engine's plus noise of 0.02 nats."""
    rng = np.random.default_rng(1)
    rollout = batch.columns["rollout_logprobs"]
    noisy = [row + rng.standard_normal(len(row), dtype=np.float32) * np.float32(0.02) for row in rollout]
    batch.put("old_logprobs", noisy, "benchmark")
    batch.put("old_values", [np.full(len(row), 0.5, np.float32) for row in rollout], "benchmark")


def best(function: Callable[[], Any], repeat: int) -> float:
    """Seconds of the fastest of `repeat` calls."""
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure(num_samples: int, num_tokens: int, repeat: int) -> dict[str, float]:
    """Row -> seconds."""
    host = PluginHost.create(plugins=[p for p in PLUGINS if p in {info.name for info in discover()}])
    found = {(kind, e.name): e.component for kind in ("filter", "advantage", "correction") for e in host.registry.all(kind)}

    def build(kind: str, name: str, options: dict[str, Any]) -> Any:
        component = found[kind, name]
        return component.build(component.config(**options), None)

    groups = make_groups(num_samples, num_tokens)
    rows = {}
    for name, options in FILTERS.items():
        check = build("filter", name, options).check
        rows[f"filter {name}"] = best(lambda check=check: [check(g) for g in groups], repeat)
    rows["prepare (checks, masks, columns)"] = best(lambda: prepare(groups, version=1, max_lag=1), repeat)
    batch = prepare(groups, version=1, max_lag=1)
    add_columns(batch)
    for name in (n for n in ADVANTAGES if ("advantage", n) in found):
        made = build("advantage", name, {})
        rows[f"advantage {name}"] = best(lambda made=made, name=name: apply_advantages(batch, [(name, made)]), repeat)
    apply_advantages(batch, [("grpo", build("advantage", "grpo", {}))])
    inputs = CorrectionInputs(
        samples=batch.samples, mask=batch.mask, advantages=batch.columns["advantages"], columns=batch.columns, version=1
    )
    for name, options in (c for c in CORRECTIONS if ("correction", c[0]) in found):
        made = build("correction", name, options)
        level = f" {options['level']}" if "level" in options else ""
        rows[f"correction {name}{level}"] = best(lambda made=made: made(inputs), repeat)
    table = TrainTable()
    rows["make_batches (token weights)"] = best(lambda: make_batches(batch, table), repeat)
    if ("correction", "tis") in found:
        chain = [(n, build("correction", n, {}), rule) for n, rule in (("tis", "keep"), ("rejection", "shrink"))]
        rows["make_batches with tis and rejection"] = best(lambda: make_batches(batch, table, corrections=chain), repeat)
    rows["make_batches, 4 minibatches"] = best(lambda: make_batches(batch, TrainTable(minibatches=4)), repeat)
    (whole,) = make_batches(batch, table)
    rows["live_part (samples without advantage)"] = best(lambda: live_part(whole), repeat)
    rows["shards for 8 ranks"] = best(lambda: _shards(whole), repeat)
    rows["rollout_metrics"] = best(lambda: rollout_metrics(groups), repeat)
    return rows


def _shards(batch: TrainBatch) -> list[TrainBatch]:
    return [batch.select(list(range(rank, len(batch.samples), 8))) for rank in range(8)]


# --- A run -----------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> dict[str, Any]:
    """Mean seconds of each phase per step, and the share of the core, over all steps but the first."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "step/seconds" in row][1:]
    if not steps:
        raise SystemExit(f"{folder} has no second step to measure")
    names = sorted({n for row in steps for n in row if n.startswith("time/") and not n.startswith("time/train_")})
    phases = {n.removeprefix("time/"): float(np.mean([row.get(n, 0.0) for row in steps])) for n in names}
    whole = float(np.mean([row["step/seconds"] for row in steps]))
    core = phases.get("prepare", 0.0) + phases.get("report", 0.0)
    shares = [(r.get("time/prepare", 0.0) + r.get("time/report", 0.0)) / r["step/seconds"] for r in steps]
    clocks = [sum(v for n, v in row.items() if n.startswith("time/train_")) for row in steps]
    around = phases.get("train", 0.0) - float(np.mean(clocks))
    return {
        "steps": len(steps),
        "step_s": whole,
        "phases_s": phases,
        "core_s": core,
        "core_share": core / whole,
        "largest_share": max(shares),
        "around_the_trainers_clock_s": around,
        "core_and_around_share": (core + around) / whole,
    }


# --- Output ----------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    if "rows" in result:
        size = result["samples"]
        table = Table(title=f"{size:,} samples of {result['tokens']:,} tokens", box=None, title_justify="left")
        for title in ("part", "seconds", "us/sample", "ns/token"):
            table.add_column(title, justify="left" if title == "part" else "right")
        for name, seconds in result["rows"].items():
            per_sample = seconds / size * 1e6
            table.add_row(name, f"{seconds:.3f}", f"{per_sample:.1f}", f"{per_sample * 1e3 / result['tokens']:.1f}")
        console.print(table)
    if "run" in result:
        run = result["run"]
        phases = "  ".join(f"{name} {seconds:.4f}" for name, seconds in run["phases_s"].items())
        console.print(f"{run['steps']} steps of {run['step_s']:.3f} s: {phases}", soft_wrap=True)
        most = run["largest_share"]
        console.print(f"core (prepare + report): {run['core_share']:.2%} of a step, at most {most:.2%}")
        console.print(f"with what stands around the trainer's own clock: {run['core_and_around_share']:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--run", type=Path, help="run folder whose metrics.jsonl is read instead")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "core_overhead.json")
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text("utf-8")) if arguments.json.is_file() else {}
    if arguments.run:
        measured: dict[str, Any] = {"run": read_run(arguments.run)}
    else:
        rows = measure(arguments.samples, arguments.tokens, arguments.repeat)
        machine = {"cores": os.cpu_count(), "load_after": os.getloadavg()[0], "python": platform.python_version()}
        machine |= {"numpy": np.__version__, "miles-core": __version__}
        measured = {"machine": machine, "samples": arguments.samples, "tokens": arguments.tokens, "rows": rows}
    show(measured, Console())
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result | measured, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
