"""Trackers at arm's length: whatever one raises, and however long it blocks, training goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.interfaces import Tracker
from miles_core.types import SampleGroup

log = logging.getLogger("miles.trackers")

MAX_FAILURES = 3
MAX_WAITING = 256


class TrackerHost:
    """Runs one tracker in a thread of its own, behind a bounded queue.

    A tracker that raises is reported once and, after MAX_FAILURES in a row, left off; a full queue (a tracker that
    blocks) drops rows and says so once. The delay that a tracker can cause the run is a queue operation.
    """

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self.name = name
        self.tracker = tracker
        self.off = False
        self.dropped = 0
        self._warn = warn
        self._warned: set[str] = set()
        self._failures = 0
        self._jobs: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put("log", (step, dict(metrics)))

    def samples(self, step: int, groups: Sequence[SampleGroup]) -> None:
        self._put("samples", (step, list(groups)))

    def flush(self, timeout_s: float = 5.0) -> None:
        """Waits until everything handed over so far is written, at most `timeout_s`; called before a checkpoint."""
        done = threading.Event()
        if not self.off and self._put("flush", (done,)):
            done.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Gives the tracker `timeout_s` to write what is waiting, then leaves it behind."""
        try:
            self._jobs.put(("close", ()), timeout=timeout_s)
            self._jobs.put(None, timeout=timeout_s)
        except queue.Full:
            self._warn_once("slow", f'tracker "{self.name}" is blocked; its last rows are lost')
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn_once(
                "slow", f'tracker "{self.name}" did not finish within {timeout_s:g} s; its last rows may be lost'
            )

    def _put(self, method: str, arguments: tuple[Any, ...]) -> bool:
        if self.off:
            return False
        try:
            self._jobs.put_nowait((method, arguments))
            return True
        except queue.Full:
            self.dropped += 1
            self._warn_once("full", f'tracker "{self.name}" is blocked: rows are dropped until it goes on')
            return False

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            method, arguments = job
            if method == "flush":
                arguments[0].set()
                continue
            if self.off and method != "close":
                continue
            try:
                getattr(self.tracker, method)(*arguments)
                self._failures = 0
            except Exception as error:
                log.debug("tracker %s failed", self.name, exc_info=True)
                self._failures += 1
                self._warn_once("raised", f'tracker "{self.name}" raised {type(error).__name__}: {error}; training goes on')
                if self._failures >= MAX_FAILURES:
                    self.off = True
                    self._warn_once(
                        "off", f'tracker "{self.name}" failed {MAX_FAILURES} times in a row and is off for this run'
                    )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)
