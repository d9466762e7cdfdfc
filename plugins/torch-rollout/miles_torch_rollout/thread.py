"""The engine's own thread: everything that touches the model happens here, one thing after another."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

GATHER_S, GATHER_LIMIT_S = 0.001, 0.02
"""After idling, the first step waits until no request has come for the first time, and at most for the second: the
samples of a group arrive together, and their prompt is then computed once."""


class StepThread(threading.Thread):
    """Calls `step` while `ready()` is true, and commands between steps. With nothing to do it blocks; it never polls.

    `crashed(error)` is called in this thread when a step raises; commands get their own exceptions back.
    """

    def __init__(
        self, name: str, step: Callable[[], None], ready: Callable[[], bool], crashed: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._step, self._ready, self._crashed = step, ready, crashed
        self._changed = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._arrivals = 0
        self._stopping = False

    def call(self, command: Callable[[], Any]) -> Future[Any]:
        """Runs `command` between two steps; its future is cancelled when the thread has ended."""
        future: Future[Any] = Future()
        with self._changed:
            if self._stopping:
                future.cancel()
            else:
                self._commands.append((command, future))
                self._changed.notify()
        return future

    def arrived(self) -> None:
        """Something that `ready` depends on has changed."""
        with self._changed:
            self._arrivals += 1
            self._changed.notify()

    def stop(self) -> None:
        """Ends after the current step; pending commands are cancelled."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    @torch.inference_mode()
    def run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._crashed(error)
        finally:
            self.stop()
            for _, future in self._commands:
                future.cancel()

    def _turn(self) -> bool:
        with self._changed:
            idle = not self._has_work()
            self._changed.wait_for(self._has_work)
            if self._stopping:
                return False
            command, future = self._commands.popleft() if self._commands else (None, None)
        if future is not None:
            _carry_out(command, future)
            return True
        if idle:
            self._gather()
        self._step()
        return True

    def _has_work(self) -> bool:
        return self._stopping or bool(self._commands) or self._ready()

    def _gather(self) -> None:
        seen, end = -1, time.monotonic() + GATHER_LIMIT_S
        while seen != self._arrivals and time.monotonic() < end:
            seen = self._arrivals
            time.sleep(GATHER_S)


def _carry_out(command: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command())
    except BaseException as error:
        future.set_exception(error)
