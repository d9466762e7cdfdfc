"""Clock and memory at the end of each step: a plugin file for Miles, and the same numbers for TRL."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.functional import metric


@dataclass(slots=True)
class Step:
    """One training step of either side."""

    step: int
    step_s: float
    rollout_s: float
    cpu_s: float
    samples: int
    completion_tokens: int
    trained_tokens: int
    reward: float
    peak_bytes: int


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@metric("cpu-clock")
def cpu_clock(groups: Any, batch: Any, reports: Any) -> dict[str, float]:
    """Processor seconds and peak memory of the driver's process so far; the quickstart has no other process."""
    return {"cpu_s": time.process_time(), "peak_bytes": float(peak_bytes())}
