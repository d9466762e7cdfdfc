"""What a person sees of a run: a live table in a terminal, plain lines in a file or a CI log."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from miles_core.types import SampleGroup
from miles_core.view import RunView

BARS = "▁▂▃▄▅▆▇█"
ROWS = 8


def make_view(console: Console | None = None) -> ConsoleView:
    console = console or Console(file=sys.stdout, highlight=False, soft_wrap=False)
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else ConsoleView(console)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last `width` points (averaged when there are more values) as block characters, scaled to their own range."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in values)


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    if abs(value) < 1e-6:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def visible(text: str, limit: int = 60) -> str:
    """One line of at most `limit` characters, control characters (ANSI codes too) spelled out."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


COLUMNS: tuple[tuple[str, str], ...] = (
    ("reward", "reward/mean"),
    ("length", "response_length/mean"),
    ("loss", "train/loss"),
    ("gap", "gap/mean_abs"),
    ("rollout tok/s", "rollout/tokens_per_s"),
    ("train tok/s", "train/tokens_per_s"),
    ("s/step", "step/seconds"),
)


class ConsoleView(RunView):
    """Lines, for files and CI logs; also everything that is printed once in a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.info: Mapping[str, Any] = {}
        self.rewards: list[float] = []
        self.rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=ROWS)
        self.evaluations: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
        self.last_groups: Sequence[SampleGroup] = ()
        self.began = time.monotonic()
        self._last_phase = ""
        self._last_line = 0.0

    # What the loop tells

    def started(self, info: Mapping[str, Any]) -> None:
        self.info = info
        self.began = time.monotonic()
        self.line(info["plugins"])
        self.line(
            f"miles {info.get('version', '')} · {info['name']} · {info['steps']} steps of "
            f"{info['groups_per_step']} x {info['samples_per_group']} samples"
        )
        if info.get("resumed"):
            self.line(f"resuming after step {info['first_step']}")
        self.line(f"run folder: {info['run_dir']}")

    def phase(self, name: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        quiet = name in ("rollout", "train", "sync", "evaluate", "save")
        now = time.monotonic()
        if quiet or (name == self._last_phase and now - self._last_line < 2.0 and done != total):
            return
        self._last_phase, self._last_line = name, now
        self.line(f"{name}{amount(done, total, unit)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._remember(step, metrics)
        cells = [f"{title} {number(metrics.get(key))}" for title, key in COLUMNS if key in metrics]
        self.line(f"step {step}/{self.info.get('steps', '?')}  {'  '.join(cells)}  left {self.time_left(step)}")

    def evaluated(self, name: str, step: int, metrics: Mapping[str, float], groups: Sequence[SampleGroup]) -> None:
        self.evaluations.setdefault(name, []).append((step, metrics))
        self.line(
            f"{name} at step {step}: accuracy {metrics.get('accuracy', 0):.1%}  reward {number(metrics.get('reward'))}"
            f"  ({int(metrics.get('samples', 0))} samples, {duration(metrics.get('seconds', 0))})"
        )

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        self.last_groups = groups

    def note(self, text: str, level: str = "info") -> None:
        style = {"warning": "yellow", "error": "red"}.get(level, "")
        self.console.print(Text(f"{level}: {text}" if level != "info" else text, style=style), soft_wrap=True)

    def ended(self, reason: str, summary: Mapping[str, Any]) -> None:
        if self.last_groups:
            self.console.print(sample_table(self.last_groups))
        if self.evaluations:
            self.console.print(evaluation_table(self.evaluations))
        if summary.get("dropped"):
            dropped = sum(n for *_, n in summary["dropped"])
            self.line(f"groups dropped: {dropped} of {summary['started']}")
            self.console.print(drops_table(summary["dropped"]))
        seconds = summary.get("seconds", time.monotonic() - self.began)
        curve = sparkline(self.rewards)
        self.line(
            f"{reason}: {summary.get('steps', 0)} steps in {duration(seconds)}" + (f"  reward {curve}" if curve else "")
        )
        if reason == "already complete" and summary.get("run_dir"):
            self.line(f"run folder: {summary['run_dir']}")
        if summary.get("model_dir"):
            self.line(f"model: {summary['model_dir']}")
        if summary.get("hint"):
            self.line(str(summary["hint"]))

    # Shared

    def line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def time_left(self, step: int) -> str:
        seconds = [m["step/seconds"] for _, m in self.rows if "step/seconds" in m]
        if not seconds:
            return "?"
        return duration((self.info.get("steps", step) - step) * sum(seconds) / len(seconds))

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, metrics))
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])


class LiveView(ConsoleView):
    """A table of the last steps that is redrawn in place, with the phase under it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._phase = ("", 0, 0, "")
        self._phase_began = time.monotonic()
        self._live: Live | None = None

    def started(self, info: Mapping[str, Any]) -> None:
        super().started(info)
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, name: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        if name != self._phase[0]:
            self._phase_began = time.monotonic()
        self._phase = (name, done, total, unit)
        if self._live is None:
            super().phase(name, done, total, unit)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._remember(step, metrics)

    def ended(self, reason: str, summary: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.rows:
            self.console.print(self._table())
        super().ended(reason, summary)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._table()] if self.rows else []
        if self.rewards:
            parts.append(Text(f"reward {sparkline(self.rewards, 40)} {number(self.rewards[-1])}", style="green"))
        name, done, total, unit = self._phase
        left = f" · left {self.time_left(self.rows[-1][0])}" if self.rows else ""
        spent = duration(time.monotonic() - self._phase_began)
        parts.append(Text(f"{name}{amount(done, total, unit)} · {spent}{left}", style="cyan"))
        return Group(*parts)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        shown = [c for c in COLUMNS if any(c[1] in m for _, m in self.rows)]
        table.add_column("step", justify="right")
        for title, _ in shown:
            table.add_column(title, justify="right")
        for step, metrics in self.rows:
            table.add_row(f"{step}/{self.info.get('steps', '?')}", *(number(metrics.get(key)) for _, key in shown))
        return table


def amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        scaled = f"{done / 1e6:,.0f}" + (f" of {total / 1e6:,.0f}" if total else "")
        return f" {scaled} MB" if done or total else ""
    if total:
        return f" {done}/{total} {unit}".rstrip()
    return ""


def sample_table(groups: Sequence[SampleGroup], count: int = 5) -> Table:
    """A few samples of the last step, spread over its groups."""
    table = Table(title="samples of the last step", box=None, title_justify="left", header_style="bold", pad_edge=False)
    for title in ("prompt", "answer", "expected"):
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    table.add_column("reward", justify="right")
    for group in list(groups)[:: max(1, len(groups) // count)][:count]:
        sample = group.samples[0]
        table.add_row(
            escape(visible(last_words(group), 48)),
            escape(visible(sample.response, 32)),
            escape(visible(str(group.prompt.label), 20)),
            number(sample.reward),
        )
    return table


def last_words(group: SampleGroup) -> str:
    if group.prompt.messages:
        return str(group.prompt.messages[-1].get("content", ""))
    return group.prompt.text or ""


def drops_table(rows: Sequence[tuple[str, str, int]]) -> Table:
    """Why groups were dropped, over the whole run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("reason", "rewards", "groups"):
        table.add_column(title, justify="right" if title == "groups" else "left")
    for reason, rewards, n in rows:
        table.add_row(escape(visible(reason)), rewards, str(n))
    return table


def evaluation_table(evaluations: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]]) -> Table:
    """Before and after, one row per evaluation."""
    table = Table(title="evaluation", box=None, title_justify="left", header_style="bold", pad_edge=False)
    for title in ("name", "steps", "accuracy", "reward", "length"):
        table.add_column(title, justify="left" if title == "name" else "right")
    for name, rows in evaluations.items():
        ends = [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]
        cells = [
            [str(step) for step, _ in ends],
            [f"{m.get('accuracy', 0):.1%}" for _, m in ends],
            [number(m.get("reward")) for _, m in ends],
            [number(m.get("response_length")) for _, m in ends],
        ]
        table.add_row(name, *(" -> ".join(pair) for pair in cells))
    return table
