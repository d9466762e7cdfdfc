"""Trackers at arm's length (O1), and prompts that do not flood logs (O2)."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from miles_cli.view import ConsoleView, sparkline, visible
from miles_core.builtin.trackers import JsonlConfig, JsonlTracker
from miles_core.interfaces import Tracker
from miles_core.observers import MAX_FAILURES, MAX_WAITING, TrackerHost
from miles_core.testing.samples import make_group


class Recording(Tracker):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))


class RaisesAt(Recording):
    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def log(self, step, metrics):
        if step in self.steps:
            raise ConnectionError("no network")
        super().log(step, metrics)


def hosted(tracker: Tracker) -> tuple[TrackerHost, list[str]]:
    warnings: list[str] = []
    return TrackerHost("t", tracker, warnings.append), warnings


def test_O1_a_tracker_that_raises_once_is_named_once_and_goes_on() -> None:
    tracker = RaisesAt(3)
    host, warnings = hosted(tracker)
    for step in range(1, 6):
        host.log(step, {"x": 1.0})
    host.close()
    assert [step for step, _ in tracker.rows] == [1, 2, 4, 5]
    assert warnings == ['tracker "t" raised ConnectionError: no network; training goes on']


def test_O1_a_tracker_that_keeps_raising_is_switched_off() -> None:
    tracker = RaisesAt(*range(1, MAX_FAILURES + 1))
    host, warnings = hosted(tracker)
    for step in range(1, 20):
        host.log(step, {})
        host.flush()
    host.close()
    assert tracker.rows == [] and host.off
    assert len(warnings) == 2 and "is off for this run" in warnings[1]


def test_O1_a_tracker_that_blocks_costs_the_run_nothing() -> None:
    release = threading.Event()

    class Blocks(Recording):
        def log(self, step, metrics):
            release.wait(30)
            super().log(step, metrics)

    host, warnings = hosted(Blocks())
    began = time.perf_counter()
    for step in range(MAX_WAITING + 10):
        host.log(step, {})
    host.close(timeout_s=0.1)
    assert time.perf_counter() - began < 5  # against 60 s and more that the tracker would take
    assert host.dropped >= 9 and "is blocked" in warnings[0]
    release.set()


def test_O1_flush_waits_until_everything_is_written() -> None:
    tracker = Recording()
    host, _ = hosted(tracker)
    for step in range(50):
        host.log(step, {})
    host.flush()
    assert len(tracker.rows) == 50
    host.close()


@pytest.mark.parametrize("num_groups", [1, 64])
def test_O2_samples_on_disk_are_few_spread_and_bounded(tmp_path: Path, num_groups: int) -> None:
    groups = []
    for n in range(num_groups):
        group = make_group([1.0, 0.0], name=f"p{n}")
        group.prompt.messages, group.prompt.text = None, "x" * 1_000_000 + "data:image/png;base64," + "A" * 5000
        groups.append(group)
    tracker = JsonlTracker(JsonlConfig(samples_per_step=4, max_characters=500), tmp_path)
    tracker.samples(1, groups)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == min(4, num_groups)
    assert len({r["prompt_id"] for r in rows}) == len(rows)
    assert all(len(r["prompt"]) < 600 and "AAAA" not in r["prompt"] for r in rows)


def test_O2_console_lines_are_bounded_and_control_characters_escaped() -> None:
    assert visible("\x1b[31mred\x1b[0m\n" + "é😀" * 100, 40).startswith("\\x1b[31mred\\x1b[0m\\né😀")
    assert len(visible("x" * 1_000_000, 40)) == 40
    out = io.StringIO()
    view = ConsoleView(Console(file=out, width=100))
    view.info = {"steps": 1}
    group = make_group([1.0, 0.0])
    group.prompt.messages, group.prompt.text = None, "[bold]" + "y" * 1_000_000
    for sample in group.samples:
        sample.response = "\x1b]0;title\x07" + "z" * 1_000_000
    view.samples(1, [group])
    view.ended("done", {"steps": 1, "seconds": 1.0})
    assert "\x1b" not in out.getvalue() and "[bold]" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 110


def test_a_sparkline_shows_the_shape() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert len(sparkline(list(range(1000)), width=24)) == 24
