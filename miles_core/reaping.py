"""Ending a worker together with everything that it started.

A worker leads a session of its own and carries a token in its environment. On Linux it also adopts its orphans
(`become_subreaper`), so that a grandchild that daemonised itself is still found below it. Elsewhere only the process
group is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TOKEN_VARIABLE = "MILES_WORKER_TOKEN"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_LINUX = sys.platform == "linux"
_killing = threading.Lock()


def become_subreaper() -> None:
    """Called in a worker: orphans below it become its children instead of init's."""
    if _LINUX:
        _set_subreaper(1)


def die_with_parent(parent: int) -> None:
    """Called in a worker: SIGKILL arrives when the thread that started it ends, however hard the driver died."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def kill_session_of(leader: int) -> None:
    """Kills everything in the session of `leader` but the leader itself, on Linux; called by a worker before it ends."""
    for pid in _process_table() if _LINUX else ():
        with suppress(OSError, IndexError, ValueError):
            if pid != leader and _stat(pid)[2] == leader:
                os.kill(pid, signal.SIGKILL)


def kill_tree(process: subprocess.Popen[bytes], token: str) -> None:
    """Kills `process`, its session and all its descendants, and reaps them; returns when none is left."""
    with _killing, _adopting_orphans():
        # Stopped first: a process that cannot run cannot fork while its descendants are being listed.
        running = process.poll() is None
        if running:
            _signal_group(process.pid, signal.SIGSTOP)
        seen: set[int] = set()
        for _ in range(1000):
            alive = _descendants(process.pid, token)
            if not alive:
                break
            seen |= alive
            for pid in alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        if running:
            _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        _reap(seen)


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _descendants(root: int, token: str) -> set[int]:
    """Living processes below `root`, in its session, or with its token; without `root` itself and without zombies."""
    if not _LINUX:
        return set()
    table: dict[int, tuple[str, int, int]] = {}
    for pid in _process_table():
        with suppress(OSError, IndexError, ValueError):
            table[pid] = _stat(pid)
    found = {root}
    while True:  # parents do not always have smaller ids than their children
        below = {pid for pid, (_, parent, _) in table.items() if parent in found} - found
        if not below:
            break
        found |= below
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found |= {pid for pid, (_, _, session) in table.items() if session == root or _marked(pid, mark)}
    return {pid for pid in found - {root} if pid in table and table[pid][0] not in "ZX"}


def _process_table() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, int, int]:
    """(state, parent, session); the command name in parentheses may itself hold blanks and parentheses."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
    return state.decode(), int(parent), int(session)


def _marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def _set_subreaper(value: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """What a dying worker leaves behind comes to us for a moment, to be reaped: not every init in a container does."""
    if not _LINUX:
        yield
        return
    before = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _set_subreaper(1)
    try:
        yield
    finally:
        _set_subreaper(before.value)


def _reap(pids: set[int], patience_s: float = 5.0) -> None:
    end = time.monotonic() + patience_s
    while pids and time.monotonic() < end:
        for pid in list(pids):
            try:
                done, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # reaped by someone else, or never ours
                done = pid
            if done:
                pids.discard(pid)
        if pids:
            time.sleep(0.002)
