"""An event loop whose clock jumps: time-outs and long generations cost no real time and always end in one order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Where a real loop would sleep until its next timer, the clock is put forward to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled and every coroutine waits")
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and jumps from timer to timer. Threads and sockets are not waited for."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual clock. A deadlock raises RuntimeError instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
