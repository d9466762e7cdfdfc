"""GRPO on CPU cores: TRL's `GRPOTrainer` and Miles, on the same model, prompts, reward, optimizer settings and cores.

    python benchmarks/cpu_grpo.py --rounds 3 --steps 42 --json benchmarks/results/cpu_grpo.json
    python benchmarks/cpu_grpo.py --tune --steps 6        # every other TRL setting, against the chosen ones

What is trained is `recipes/quickstart.toml`. Miles runs it through its command line. TRL gets its numbers, its prompts
in the same order, and the recipe's own reward object; that TRL's prompt token ids equal Miles's is checked in every
step, and that Miles trained the same prompts, after every run. TRL and Miles take turns, each run in a fresh process;
round r has seed r on both sides. The first `--warmup` steps of a run do not count.

rollout: prompts to scored samples. train: the rest of the step - loss, gradient, optimizer, and with Miles the push of
the weights to its engine and the check after it, which TRL does not need because it samples from the model it trains.
step: from the end of one step to the end of the next. trained tokens: all tokens of the samples, prompts included, no
padding. CPU: processor seconds per sample, which other load on the machine disturbs less than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpu_clock import Step
from cpu_grpo_trl import CHOSEN, RECIPE, VARIANTS, Variant
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CLOCK = ROOT / "benchmarks" / "cpu_clock.py"
MILES_SETS = ("eval=[]", "checkpoint.save_model=false", 'metric=[{use="cpu-clock"}]')
"""No evaluation, as with TRL; and a plugin file that reads clock and memory at the end of a step."""

# --- Both sides ------------------------------------------------------------------------------------------------------


def run_child(command: Sequence[str], extra: dict[str, str], log: Path, cores: int) -> int:
    """Runs a fresh process to its end; returns its peak memory in bytes. Raises SystemExit with its last output."""
    defaults = {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    env = {**os.environ, **defaults, "HF_HUB_OFFLINE": "1", **extra}
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = "\n".join(log.read_text("utf-8").splitlines()[-15:])
        raise SystemExit(f"{' '.join(command[:4])} ... ended with exit code {child.returncode}:\n{tail}")
    return usage.ru_maxrss << 10


# --- Miles -----------------------------------------------------------------------------------------------------------


def run_miles(seed: int, steps: int, folder: Path, cores: int) -> dict[str, Any]:
    """`miles run` on the recipe. Raises SystemExit when it fails."""
    command = [sys.executable, "-c", "from miles_cli.main import main; main()", "run", str(RECIPE)]
    command += ["--out", str(folder), "--plugin-file", str(CLOCK)]
    for text in (f"seed={seed}", f"steps={steps}", *MILES_SETS):
        command += ["--set", text]
    peak = run_child(command, {}, folder / "miles.log", cores)
    (run_dir,) = folder.glob("quickstart-*")
    rows = [row for row in read_lines(run_dir / "metrics.jsonl") if "cpu-clock/cpu_s" in row]
    if len(rows) != steps:
        raise SystemExit(f"Miles logged {len(rows)} of {steps} steps")
    result: list[Step] = []
    for before, row in zip([None, *rows], rows, strict=False):
        # The clock of the log holds what a step's own seconds leave out: writing metrics and samples.
        whole = row["time"] - before["time"] if before else row["step/seconds"]
        cpu = row["cpu-clock/cpu_s"] - (before["cpu-clock/cpu_s"] if before else 0.0)
        result.append(
            Step(
                step=row["step"],
                step_s=whole,
                rollout_s=row["time/rollout"],
                cpu_s=cpu,
                samples=int(row["samples"]),
                completion_tokens=int(row["tokens/sampled"]),
                trained_tokens=int(row["train/tokens"]),
                reward=row["reward/mean"],
                peak_bytes=int(row["cpu-clock/peak_bytes"]),
            )
        )
    trained = [[name for name, _, _ in row["samples"]] for row in read_lines(run_dir / "trained.jsonl")]
    prompts = [list(dict.fromkeys(names)) for names in trained]
    names = ("time/train", "time/sync", "time/forward", "time/prepare", "packing/computed_tokens")
    phases = [{name: row.get(name, 0.0) for name in names} for row in rows]
    return {"steps": [asdict(s) for s in result], "prompts": prompts, "process_peak_bytes": peak, "phases": phases}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# --- TRL -------------------------------------------------------------------------------------------------------------


def run_trl(seed: int, steps: int, folder: Path, cores: int, variant: Variant = CHOSEN) -> dict[str, Any]:
    """`cpu_grpo_trl.py` in a process of its own. Raises SystemExit when it fails."""
    out = folder / "trl.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu_grpo_trl.py"), str(out)]
    command += ["--seed", str(seed), "--steps", str(steps), "--variant", variant.name]
    peak = run_child(command, variant.env, folder / "trl.log", cores)
    return {**json.loads(out.read_text("utf-8")), "process_peak_bytes": peak}


# --- Figures ---------------------------------------------------------------------------------------------------------

QUANTITIES = {
    "step, samples/s": lambda t: t["samples"] / t["step_s"],
    "step, trained tokens/s": lambda t: t["trained_tokens"] / t["step_s"],
    "rollout, samples/s": lambda t: t["samples"] / t["rollout_s"],
    "rollout, sampled tokens/s": lambda t: t["completion_tokens"] / t["rollout_s"],
    "train, samples/s": lambda t: t["samples"] / t["train_s"],
    "train, trained tokens/s": lambda t: t["trained_tokens"] / t["train_s"],
    "seconds per step": lambda t: t["step_s"] / t["count"],
    "CPU seconds per sample": lambda t: t["cpu_s"] / t["samples"],
    "sampled tokens per sample": lambda t: t["completion_tokens"] / t["samples"],
    "peak memory while training, GB": lambda t: t["peak_bytes"] / 1e9,
    "peak memory of the process, GB": lambda t: t["process_peak_bytes"] / 1e9,
    "mean reward, last 5 steps": lambda t: t["reward"],
}
"""Name -> its value from the totals of one run."""


def figures(result: dict[str, Any], warmup: int) -> dict[str, float]:
    """The quantities of one run over the steps after the warm-up."""
    rows = result["steps"][warmup:]
    names = ("step_s", "rollout_s", "cpu_s", "samples", "completion_tokens", "trained_tokens")
    totals = {name: sum(row[name] for row in rows) for name in names}
    totals |= {
        "train_s": totals["step_s"] - totals["rollout_s"],
        "count": len(rows),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "process_peak_bytes": result["process_peak_bytes"],
        "reward": statistics.fmean(row["reward"] for row in result["steps"][-5:]),
    }
    return {name: value(totals) for name, value in QUANTITIES.items()}


def seconds_to(reward: float, steps: Sequence[dict[str, Any]], span: int = 3) -> float | None:
    """Seconds of training until the mean reward of `span` steps in a row is at least `reward`, or None."""
    spent = 0.0
    for i, row in enumerate(steps):
        spent += row["step_s"]
        if i + 1 >= span and statistics.fmean(r["reward"] for r in steps[i + 1 - span : i + 1]) >= reward:
            return spent
    return None


def same_reward(rounds: Sequence[dict[str, Any]], reward: float) -> dict[str, Any]:
    """How long both took to the same reward, in the rounds in which both came there."""
    times = [[seconds_to(reward, pair[side]["steps"]) for side in ("TRL", "Miles")] for pair in rounds]
    both = [(trl, miles) for trl, miles in times if trl is not None and miles is not None]
    ratio = statistics.median(trl / miles for trl, miles in both) if both else None
    return {"reward": reward, "seconds": times, "ratio": ratio}


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """TRL, Miles, TRL, Miles, ..."""
    rounds = []
    for number in range(options.rounds):
        pair = {}
        for side, start in (("TRL", run_trl), ("Miles", run_miles)):
            with tempfile.TemporaryDirectory(prefix="cpu-grpo-") as folder:
                pair[side] = start(options.seed + number, options.steps, Path(folder), options.cores)
            pair[side]["figures"] = figures(pair[side], options.warmup)
            speed = pair[side]["figures"]["step, samples/s"]
            console.print(f"round {number + 1}/{options.rounds} {side}: {speed:.2f} samples/s")
        if pair["TRL"].pop("prompts") != pair["Miles"].pop("prompts"):
            raise SystemExit("TRL and Miles trained different prompts")
        rounds.append(pair)
    table = Table(title=f"{options.steps} steps, {options.cores} cores, median of {options.rounds} rounds")
    for column in ("", "TRL", "Miles", "Miles / TRL"):
        table.add_column(column, justify="left" if not column else "right")
    summary = {}
    for name in QUANTITIES:
        trl, miles = ([pair[side]["figures"][name] for pair in rounds] for side in ("TRL", "Miles"))
        ratios = [m / t for t, m in zip(trl, miles, strict=True) if t]
        ratio = statistics.median(ratios) if ratios else None
        summary[name] = {"trl": statistics.median(trl), "miles": statistics.median(miles), "ratio": ratio}
        shown = "-" if ratio is None else f"{ratio:.2f}"
        table.add_row(name, f"{summary[name]['trl']:.3f}", f"{summary[name]['miles']:.3f}", shown)
    console.print(table)
    reached = same_reward(rounds, options.reward)
    if reached["ratio"] is None:
        console.print(f"no round in which both came to a mean reward of {options.reward} over three steps")
    else:
        shown = "; ".join(f"TRL {trl:.0f} s, Miles {miles:.0f} s" for trl, miles in reached["seconds"] if trl and miles)
        console.print(
            f"to a mean reward of {options.reward} over three steps: {shown}; {reached['ratio']:.1f} times sooner"
        )
    others = "; ".join(v.name for v in VARIANTS[1:])
    console.print(f"Other settings of TRL, for --tune (benchmarks/README.md says which have been measured): {others}")
    return {"summary": summary, "same_reward": reached, "rounds": rounds}


def tune(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every variant of TRL's settings right after the chosen ones; what does not run is listed with its error."""
    table = Table(title=f"TRL settings, {options.steps} steps, {options.cores} cores", show_lines=False)
    for column in ("", "samples/s", "against the chosen", "CPU s per sample", "peak GB"):
        table.add_column(column, justify="left" if not column else "right")
    result: dict[str, Any] = {}
    for variant in [v for v in VARIANTS if options.only in v.name]:
        got = {}
        for one in (CHOSEN, variant):
            try:
                with tempfile.TemporaryDirectory(prefix="cpu-grpo-") as folder:
                    ran = run_trl(options.seed, options.steps, Path(folder), options.cores, one)
                got[one.name] = figures(ran, options.warmup)
            except SystemExit as error:
                got[one.name] = {"error": str(error).splitlines()[-1]}
        mine, base = got[variant.name], got[CHOSEN.name]
        result[variant.name] = got
        if "error" in mine:
            table.add_row(variant.name, "does not run", mine["error"][:60])
        else:
            speed, cpu = mine["step, samples/s"], mine["CPU seconds per sample"]
            ratio, peak = speed / base["step, samples/s"], mine["peak memory while training, GB"]
            table.add_row(variant.name, f"{speed:.2f}", f"{ratio:.2f}", f"{cpu:.3f}", f"{peak:.2f}")
        console.print(f"{variant.name}: done")
    console.print(table)
    return {"tuning": result}


def machine(cores: int) -> dict[str, Any]:
    from importlib.metadata import version

    cpu = ""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    packages = {name: version(name) for name in ("miles-core", "torch", "transformers", "trl")}
    return {"cpu": cpu, "cores": cores, "load_before": os.getloadavg()[0], **packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--steps", type=int, default=42, help="training steps of a run (default 42)")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run that do not count (default 2)")
    parser.add_argument("--cores", type=int, default=2, help="CPU cores of both sides (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (default 0)")
    parser.add_argument("--reward", type=float, default=0.4, help="time to this mean reward is compared (default 0.4)")
    parser.add_argument("--tune", action="store_true", help="measure the other TRL settings")
    parser.add_argument("--only", default="", help="with --tune: variants whose name contains this")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if not 0 <= options.warmup < options.steps:
        parser.error("--warmup must leave at least one of --steps")
    allowed = sorted(os.sched_getaffinity(0))
    if options.cores > len(allowed):
        parser.error(f"--cores {options.cores}, but this process may use {len(allowed)}")
    os.sched_setaffinity(0, allowed[: options.cores])  # inherited by both sides
    about = {"machine": machine(options.cores), "steps": options.steps, "warmup": options.warmup}
    console = Console()
    result = about | (tune if options.tune else compare)(options, console)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
