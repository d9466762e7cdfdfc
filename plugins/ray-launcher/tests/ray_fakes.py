"""What the tests host in actors; loaded by path there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import numpy as np


class Plain:
    def __init__(self, context: Any) -> None:
        self.context = context
        self.cancelled = 0

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def doubled(self, array: np.ndarray) -> np.ndarray:
        array *= 2  # in place: what arrives must be writable
        return array

    def child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def say(self, text: str) -> None:
        print(text)

    def unpicklable(self) -> Any:
        return lambda: None

    async def wait(self) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def count_cancelled(self) -> int:
        return self.cancelled


def plain(context: Any) -> Plain:
    return Plain(context)
