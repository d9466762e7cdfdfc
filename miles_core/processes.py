"""One worker process as its parent sees it: start, calls, an end that is explained, and no zombie or orphan after it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.channel import Channel, decode_error
from miles_core.errors import RunFailed, WorkerDied
from miles_core.types import Death

POLL_S = 0.05
"""How often a worker's exit status is looked at; the end of its channel is noticed at once."""
EXIT_LIMIT_S = 10.0
"""How long a worker may live on after it closed its channel."""
SETTLE_S = 1.0
"""After one rank failed, how long the others may take to fail too: the first to complain is often not the cause."""
TAIL_LINES = 12
STACK_LINES = 40

_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


class CallTimeout(RunFailed):
    """Workers that are alive but did not answer in time."""


class WorkerProcess:
    """A child that runs `miles_core.worker`. `death` is set once it has ended without being told to."""

    def __init__(
        self, role: str, index: int, *, python: str, env: Mapping[str, str], payload: Mapping[str, Any], log: Path
    ):
        self.role, self.index, self.log = role, index, log
        self.name = f"{role} {index}"
        self.place: dict[str, Any] = {}
        self.death: Death | None = None
        self.on_death: Callable[[Death], None] | None = None
        self._python, self._env, self._payload = python, env, payload
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._lost = ""
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Returns when the hosted object has been built. Raises what building it raised, WorkerDied, or CallTimeout."""
        ready = asyncio.get_running_loop().create_future()
        self._pending[0] = ("start-up", ready)
        self._spawn()
        try:
            (self.place,) = await gather_calls([ready], [self], "start-up", timeout_s)
        except BaseException:
            await self.stop(0.0)
            raise

    def submit(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> asyncio.Future[Any]:
        """A future with the result, or with the worker's exception, or with WorkerDied; cancelling it cancels a
        coroutine in the worker, and only forgets a plain call."""
        future = asyncio.get_running_loop().create_future()
        if self.death is not None or self._closing:
            future.set_exception(self._died(method))
            return future
        number = next(self._numbers)
        try:
            self._channel.send(("call", number, method, args, dict(kwargs)))
        except Exception as error:
            future.set_exception(RunFailed(f'the arguments of "{method}" cannot travel to {self.name}: {error}'))
            return future
        self._pending[number] = (method, future)
        future.add_done_callback(lambda done: self._forget(number, done.cancelled()))
        return future

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; to its whole process group, and it is reaped."""
        self._closing = True
        if self._process is None:
            return
        if grace_s > 0 and self._process.returncode is None:
            self._signal(signal.SIGTERM, whole_group=False)
            until = time.monotonic() + grace_s
            while not self._exited() and time.monotonic() < until:
                await asyncio.sleep(0.01)
        self._reap()
        for task in self._tasks:
            task.cancel()
        self._channel.close()
        self._fail_pending()

    def dump_stacks(self) -> None:
        """Makes the worker write where each of its threads stands to its log; works while it is stuck."""
        if self._process is not None and self.death is None:
            self._signal(signal.SIGUSR1, whole_group=False)

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines that this worker wrote, indented, under the path of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - 4000))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n    ".join([f"log: {self.log}", *lines[-num_lines:]])

    def _spawn(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._oom_kills = _count_oom_kills()
        ours, theirs = socket.socketpair()
        command = [self._python, "-P", "-m", "miles_core.worker", str(theirs.fileno()), str(os.getpid())]
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._env, "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = Channel(ours)
        self._channel.send(dict(self._payload))
        reader = asyncio.create_task(self._read())
        self._tasks = [reader, asyncio.create_task(self._watch(reader))]

    async def _read(self) -> None:
        try:
            while True:
                kind, number, value = await self._channel.receive()
                method, future = self._pending.pop(number, ("", None))
                if future is None or future.done():
                    continue
                if kind in ("error", "failed"):
                    future.set_exception(decode_error(value, self.name, method))
                else:
                    future.set_result(value)
        except EOFError:
            pass
        except Exception as error:
            # nothing after this frame can be understood, so the worker is lost
            self._lost = f"the driver cannot read its answer: {type(error).__name__}: {error}"

    async def _watch(self, reader: asyncio.Task[None]) -> None:
        """Looks for the end by the exit status: a child of the worker might keep the channel open."""
        while not self._exited() and not reader.done():
            await asyncio.wait({reader}, timeout=POLL_S)
        await asyncio.wait({reader}, timeout=POLL_S)  # an answer that it gave before it ended still counts
        until = time.monotonic() + EXIT_LIMIT_S
        while not self._exited() and not self._lost and time.monotonic() < until:
            await asyncio.sleep(POLL_S / 10)
        self._reap()
        if not self._closing:
            self.death = self._explain(self._process.returncode)
            self._fail_pending()
            if self.on_death is not None:
                self.on_death(self.death)

    def _exited(self) -> bool:
        """Whether it ended, without reaping it: as long as it is a zombie, its group's id cannot be anyone else's."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _reap(self) -> None:
        if self._process.returncode is None:
            self._signal(signal.SIGKILL, whole_group=True)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver; the kernel ends it later
                self._process.wait(EXIT_LIMIT_S)

    def _signal(self, number: signal.Signals, *, whole_group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if whole_group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def _forget(self, number: int, cancelled: bool) -> None:
        self._pending.pop(number, None)
        if cancelled and self.death is None and not self._closing:
            self._channel.send(("cancel", number))

    def _fail_pending(self) -> None:
        for method, future in list(self._pending.values()):
            if not future.done():
                future.set_exception(self._died(method))
        self._pending.clear()

    def _died(self, method: str) -> WorkerDied:
        if self.death is None:
            return WorkerDied(f'{self.name} was closed; "{method}" cannot run')
        how = f"killed by {self.death.signal}" if self.death.signal else f"exit code {self.death.exit_code}"
        return WorkerDied(f'{self.name} died during "{method}": {how}: {self.death.cause}', self.log_tail())

    def _explain(self, code: int | None) -> Death:
        code = -signal.SIGKILL if code is None else code
        name = signal.Signals(-code).name if code < 0 else ""
        if self._lost:
            cause = self._lost
        elif name == "SIGKILL" and _count_oom_kills() > self._oom_kills:
            cause = "the kernel ended it because memory ran out"
        else:
            cause = _CAUSES.get(name, "its log may say why")
        return Death(
            role=self.role,
            index=self.index,
            exit_code=None if name else code,
            signal=name,
            cause=cause,
            log=str(self.log),
        )


_CAUSES = {
    "SIGKILL": "perhaps memory ran out (see dmesg), or someone killed it",
    "SIGTERM": "someone asked it to end",
    "SIGSEGV": "a crash in native code; the stack is in its log",
    "SIGABRT": "native code gave up; the reason is in its log",
    "SIGBUS": "memory behind a mapped file is gone; perhaps /dev/shm or the disk is full",
}


def _count_oom_kills() -> int:
    """How often the kernel has killed in this control group for want of memory; 0 where it does not say."""
    try:
        return int(dict(line.split() for line in _OOM_EVENTS.read_text().splitlines())["oom_kill"])
    except (OSError, KeyError, ValueError):
        return 0


async def gather_calls(
    futures: Sequence[asyncio.Future[Any]], workers: Sequence[Any], method: str, timeout_s: float | None
) -> list[Any]:
    """Results in order. If any fails, the others get SETTLE_S to fail too, and then the most telling error is raised:
    a death before an exception, since an exception is often an echo of it. Whatever still runs is cancelled.

    Raises CallTimeout that names every worker without an answer.
    """
    failed: list[asyncio.Future[Any]] = []
    for future in futures:
        future.add_done_callback(lambda f: failed.append(f) if not f.cancelled() and f.exception() else None)
    try:
        _, pending = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if any(f.done() and (f.cancelled() or f.exception()) for f in futures) and pending:
            await asyncio.wait(pending, timeout=SETTLE_S)
        await asyncio.sleep(0)  # lets the callbacks above run
        if failed:
            raise next((f for f in failed if isinstance(f.exception(), WorkerDied)), failed[0]).exception()
        silent = [worker for worker, future in zip(workers, futures, strict=True) if not future.done()]
        if silent:
            raise await _explain_silence(silent, method, timeout_s)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _explain_silence(workers: Sequence[Any], method: str, timeout_s: float | None) -> CallTimeout:
    for worker in workers:
        worker.dump_stacks()
    await asyncio.sleep(0.2)
    names = ", ".join(worker.name for worker in workers)
    return CallTimeout(
        f'no answer to "{method}" within {timeout_s:g} s from {names}', *(w.log_tail(STACK_LINES) for w in workers)
    )
