"""What several test modules need."""

from __future__ import annotations

import time
from pathlib import Path

GPUS = 4
"""Pretended GPUs of the session's cluster."""


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether a process has ended, or ends soon."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # not every init in a container reaps
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
