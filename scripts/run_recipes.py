"""Runs recipes one after the other, checks that each reaches its target, and draws their curves.

    python scripts/run_recipes.py                          # all recipes with a target, on what the machine has
    python scripts/run_recipes.py ppo grpo --device cuda --set seed=1
    python scripts/run_recipes.py --draw                   # nothing is run: the newest run of each recipe in --out

A recipe states its target as the tag "target_reward=<number>": the mean reward over the last five steps that had one. What
is compared and drawn is each run's own metrics.jsonl. Writes the picture (--picture, docs/recipes.svg) and the table
beside it (.md).
Exit code 1 when a run failed or missed its target.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from miles_core.config import load
from miles_core.errors import EXIT_USAGE

ROOT = Path(__file__).resolve().parents[1]
TAG = "target_reward="
LAST = 5
"""Steps at the end whose mean reward is compared with the target."""
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 44, 150, 16, 40
"""Of the picture and its margins, in pixels; the legend stands on the right."""


@dataclass(slots=True)
class Curve:
    """One recipe and its run. A step whose groups were all dropped has no reward and no point in the curve."""

    name: str
    target: float
    steps: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    @property
    def reached(self) -> float | None:
        last = self.rewards[-LAST:]
        return sum(last) / len(last) if last else None

    @property
    def passed(self) -> bool:
        return self.complete and self.reached is not None and self.reached >= self.target


def target_of(recipe: Path, sets: Sequence[str] = ()) -> float | None:
    """The number in the recipe's tag, or None without one."""
    tags = [tag for tag in load(recipe, sets=sets).config.tags if tag.startswith(TAG)]
    return float(tags[0].removeprefix(TAG)) if tags else None


def recipes(names: Sequence[str]) -> list[Path]:
    """Files of the names given, or every recipe with a target."""
    if names:
        files = [Path(n) if n.endswith(".toml") else ROOT / "recipes" / f"{n}.toml" for n in names]
        if missing := [str(f) for f in files if not f.is_file()]:
            sys.exit(f"error: no recipe {', '.join(missing)}")
        return files
    return [f for f in sorted((ROOT / "recipes").glob("*.toml")) if target_of(f) is not None]


def run_dir_of(recipe: Path, out: Path) -> Path | None:
    """The newest run folder of a recipe; a name may be the beginning of another."""
    name = load(recipe).config.name
    found = [p for p in out.glob(f"{name}-*") if p.name.removeprefix(f"{name}-")[:8].isdigit()]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def read_curve(recipe: Path, out: Path, sets: Sequence[str]) -> Curve:
    """What the newest run of a recipe logged."""
    target = target_of(recipe, sets)
    if target is None:
        sys.exit(f'error: {recipe} has no tag "{TAG}<number>"')
    config = load(recipe, sets=sets).config
    curve, folder = Curve(config.name, target), run_dir_of(recipe, out)
    file = folder / "metrics.jsonl" if folder else None
    for line in file.read_text("utf-8").splitlines() if file and file.is_file() else ():
        row = json.loads(line)
        if "step/seconds" not in row:  # evaluations have rows of their own
            continue
        curve.seconds += row["step/seconds"]
        curve.complete = row["step"] == config.steps
        if "reward/mean" in row:
            curve.steps.append(row["step"])
            curve.rewards.append(row["reward/mean"])
    return curve


def run(recipe: Path, out: Path, sets: Sequence[str], device: str) -> int:
    places = [f"trainer.fsdp.device={device}", f"engine.torch.device={device}"] if device != "auto" else []
    options = [word for value in (*places, *sets) for word in ("--set", value)]
    return subprocess.call([sys.executable, "-m", "miles_cli.main", "run", str(recipe), "--out", str(out), *options])


def table(curves: Sequence[Curve]) -> str:
    """Markdown: one row per recipe."""
    rows = ["| recipe | target | mean of the last five steps | steps | seconds |", "|---|---|---|---|---|"]
    for curve in curves:
        reached = "-" if curve.reached is None else f"{curve.reached:.3f}"
        verdict = reached if curve.passed else f"{reached} (missed)" if curve.complete else f"{reached} (did not finish)"
        rows.append(f"| {curve.name} | {curve.target:.2f} | {verdict} | {len(curve.steps)} | {curve.seconds:.0f} |")
    return "\n".join(rows)


def picture(curves: Sequence[Curve]) -> str:
    """SVG: mean reward by step."""
    last = max((curve.steps[-1] for curve in curves if curve.steps), default=1)
    low = min(0.0, *(r for curve in curves for r in curve.rewards), 0.0)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (reward - low) / (1 - low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in sorted({round(last * i / 4) for i in range(5)}):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">training step</text>')
    parts.append(
        f'<text x="12" y="{HEIGHT / 2}" transform="rotate(-90 12 {HEIGHT / 2})" text-anchor="middle">mean reward</text>'
    )
    for i, curve in enumerate(curves):
        color, place = COLORS[i % len(COLORS)], TOP + 12 + 18 * i
        points = " ".join(f"{x(s):.1f},{y(r):.1f}" for s, r in zip(curve.steps, curve.rewards, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {place - 4}h18" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 36}" y="{place}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(curves: Sequence[Curve], file: Path, note: str = "") -> None:
    """The picture and, beside it, the page that shows it."""
    file.write_text(picture(curves), "utf-8")
    page = (
        "# Recipes\n\n*Written by `scripts/run_recipes.py` from the runs' own `metrics.jsonl`.*\n\n"
        f"Mean reward of each step on the task of the quickstart. {note}".rstrip()
        + f"\n\n![curves]({file.name})\n\n{table(curves)}\n"
    )
    file.with_suffix(".md").write_text(page, "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes by name or file; all with a target by default")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="where run folders are made")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="handed to each run")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "recipes.svg")
    parser.add_argument("--note", default="", help="a sentence for the page: on what machine, with what settings")
    parser.add_argument("--draw", action="store_true", help="run nothing, read the newest runs")
    chosen = parser.parse_args(arguments)
    files = recipes(chosen.names)
    failed, refused = [], set()
    for recipe in () if chosen.draw else files:
        print(f"--- {recipe.stem}", flush=True)
        if code := run(recipe, chosen.out, chosen.sets, chosen.device):
            failed.append(f"{recipe.stem}: the run ended with exit code {code}")
            refused |= {recipe} if code == EXIT_USAGE else set()  # there is no run to read
    curves = [read_curve(recipe, chosen.out, chosen.sets) for recipe in files if recipe not in refused]
    write(curves, chosen.picture, chosen.note)
    print(table(curves))
    for curve in curves:
        if curve.complete and not curve.passed:
            failed.append(f"{curve.name}: {curve.reached:.3f} is below its target {curve.target:.2f}")
        elif not curve.complete:
            failed.append(f"{curve.name}: no complete run in {chosen.out}")
    for problem in failed:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
