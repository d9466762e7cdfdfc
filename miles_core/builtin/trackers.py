"""The tracker that every run has: metrics and some samples as JSON lines in the run folder."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.interfaces import Tracker
from miles_core.types import SampleGroup

_DATA_URL = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=]{64,}")


class JsonlConfig(ComponentConfig):
    samples_per_step: int = Field(default=4, ge=0)
    """Samples written per step, spread over the groups."""
    max_characters: int = Field(default=2000, gt=0)
    """Longest prompt or response text written; the middle is cut out."""


class JsonlTracker(Tracker):
    """`metrics.jsonl` has one line a step, `samples.jsonl` a few samples of each, `trained.jsonl` what was trained.

    After a resume, lines of steps that are about to run again are moved to `*.discarded.jsonl`, so that the files tell
    the surviving history and nothing is lost.
    """

    def __init__(self, config: JsonlConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir

    def rewind(self, step: int) -> None:
        """Forgets steps after `step`: called once on resume, before anything is logged."""
        for name in ("metrics", "samples", "trained"):
            _rewind_file(self.run_dir / f"{name}.jsonl", step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
        self._append("metrics.jsonl", {"step": step, "time": round(time.time(), 3), **finite})

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        self._append(
            "trained.jsonl",
            {
                "step": step,
                "samples": [[g.prompt.id, g.prompt.draw, s.index] for g in groups for s in g.samples],
            },
        )
        chosen = groups[:: max(1, len(groups) // max(self.config.samples_per_step, 1))][: self.config.samples_per_step]
        for group in filter(lambda group: group.samples, chosen):
            sample = group.samples[step % len(group.samples)]
            self._append("samples.jsonl", {"step": step, **self._describe(group, sample)})

    def _describe(self, group: SampleGroup, sample: Any) -> dict[str, Any]:
        prompt = group.prompt.text
        if prompt is None:
            prompt = json.dumps(group.prompt.messages, ensure_ascii=False)
        limit = self.config.max_characters
        return {
            "prompt_id": group.prompt.id,
            "draw": group.prompt.draw,
            "index": sample.index,
            "prompt": shorten(prompt, limit),
            "label": shorten(str(group.prompt.label), limit),
            "response": shorten(sample.response, limit),
            "reward": sample.reward if sample.reward is None or math.isfinite(sample.reward) else None,
            "status": sample.status,
            "num_tokens": sample.num_response_tokens,
        }

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        # A lone surrogate, which UTF-8 cannot hold, is then written as the JSON escape that it came from.
        with open(self.run_dir / name, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def shorten(text: str, limit: int) -> str:
    """`text` with embedded files and everything beyond `limit` characters taken out of the middle."""
    text = _DATA_URL.sub(lambda m: f"<{len(m.group())} characters of base64>", text)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... <{len(text) - 2 * half} characters> ... {text[-half:]}"


def _rewind_file(path: Path, step: int) -> None:
    if not path.is_file():
        return
    kept, gone = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row_step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            row_step = step + 1  # a torn last line of a killed run
        (kept if row_step <= step else gone).append(line)
    if not gone:
        return
    with open(path.with_suffix(".discarded.jsonl"), "ab") as file:
        file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in gone)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def _build(config: JsonlConfig, context: BuildContext) -> JsonlTracker:
    return JsonlTracker(config, context.run_dir)


COMPONENTS = {
    "miles_trackers": [
        Component(
            name="jsonl",
            summary="Metrics and samples as JSON lines in the run folder.",
            config=JsonlConfig,
            build=_build,
        )
    ]
}
