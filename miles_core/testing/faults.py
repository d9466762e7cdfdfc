"""Deaths on demand: MILES_FAULT="checkpoint:3" kills this process at the third fault point of that name."""

from __future__ import annotations

import os
import signal
from collections import Counter

_hits: Counter[str] = Counter()


def hit(name: str) -> None:
    target, _, count = os.environ.get("MILES_FAULT", "").partition(":")
    _hits[name] += 1
    if name == target and _hits[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
