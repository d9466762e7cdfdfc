"""Reward worker processes: one thread of the driver per process, which times every sample and kills what does not return.

Threads, not tasks: a limit must hold too while the driver's event loop is busy with a training step.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import miles_core.errors as errors
from miles_core.errors import ContractError, RunFailed
from miles_core.judging import timed_out
from miles_core.reaping import TOKEN_VARIABLE, kill_tree
from miles_core.reward_wire import Outcome, send_frame
from miles_core.types import Metric

_GRACE_S = 0.25  # an asynchronous reward is cancelled at its limit; the process is killed when that did not help
_STALL_S = 60.0  # between two samples nothing of the reward runs
_POLL_S = 0.25
_MAX_DEATHS = 5

_SECRET_NAME = re.compile(
    r"secret|token(?!iz)|passw|passphrase|credential|bearer|cookie|auth|private|webhook|dsn|_pat$|api_?key|(^|_)key(s|_id)?$|"
    r"database_url|conn(ection)?_?str",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/\s:@]+:[^/\s@]+@")


def clean_environment(declared: frozenset[str], source: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a reward worker: without whatever looks like a secret by its name, or by a password in a URL,
    except what the worker's rewards declared."""
    return {
        name: value
        for name, value in source.items()
        if name in declared or not (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    }


@dataclass(slots=True, kw_only=True)
class JudgeInfo:
    function: str
    grouped: bool
    asynchronous: bool


@dataclass(slots=True, kw_only=True)
class Task:
    """One reward on some samples of an encoded group. `done` holds an outcome for each of `indices`, in their order."""

    reward: str
    body: bytes
    indices: list[int]
    limit_s: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    done: Future[list[Outcome]] = field(default_factory=Future)
    deaths: dict[int, int] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, index: int, outcome: Outcome) -> None:
        with self.lock:  # pieces of one task may end in several threads at once
            self.outcomes.setdefault(index, outcome)
            if len(self.outcomes) == len(self.indices) and not self.done.done():
                self.done.set_result([self.outcomes[i] for i in self.indices])

    def fail(self, error: Exception) -> None:
        with self.lock:
            if not self.done.done():
                self.done.set_exception(error)


@dataclass(slots=True, kw_only=True)
class Job:
    """A part of a task, small enough to be one message: what was left of a killed worker's job comes back in pieces."""

    task: Task
    indices: list[int]


class WorkerGone(Exception):
    """The process ended, or said nothing for too long between two samples."""


class WorkerProcess:
    """The parent's end of one `miles_core.reward_worker`."""

    def __init__(self, setup: dict[str, Any], env: Mapping[str, str], log: Path | None) -> None:
        self.token = secrets.token_hex(8)
        self.rewards: dict[str, JudgeInfo] = {}
        self._buffer = b""
        self._lines: list[bytes] = []
        ours, theirs = socket.socketpair()
        with theirs, _open_log(log) as stderr:
            command = [sys.executable, "-m", "miles_core.reward_worker", str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,  # what a reward prints goes to the log, never into the protocol
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env, TOKEN_VARIABLE: self.token},
                start_new_session=True,
            )
        self._sock = ours
        self._setup = setup

    def wait_ready(self, limit_s: float) -> None:
        """Sends the setup and waits until every reward is built. Raises the MilesError that a reward's `build` raised, or
        RunFailed naming the reward that was being built."""
        end = time.monotonic() + limit_s
        building = "(imports)"
        try:
            send_frame(self._sock, self._setup)
            while True:
                match self.receive(end):
                    case ["building", name]:
                        building = name
                    case ["ready", rows]:
                        self.rewards = {n: JudgeInfo(function=f, grouped=g, asynchronous=a) for n, f, g, a in rows}
                        return
                    case ["failed", kind, message, traceback]:
                        raise _build_error(building, kind, message, traceback)
                    case None:
                        raise RunFailed(f'reward "{building}" was still being imported or built after {limit_s:g} s')
        except (WorkerGone, OSError) as error:
            raise RunFailed(
                f'the reward worker ended while reward "{building}" was being built: {self.obituary()}'
            ) from error

    def send(self, job: dict[str, Any], body: bytes) -> None:
        send_frame(self._sock, job, body)

    def receive(self, deadline: float) -> list[Any] | None:
        """The next line, or None at `deadline` (monotonic). What has arrived always wins over the clock, so that a driver
        that was itself held up kills nobody. Raises WorkerGone."""
        while not self._lines:
            wait = max(0.0, min(deadline - time.monotonic(), _POLL_S))
            ready, _, _ = select.select([self._sock], [], [], wait)
            if ready:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise WorkerGone
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                self._lines.extend(lines)
            elif self.process.poll() is not None:  # a grandchild may hold the other end of the socket open
                raise WorkerGone
            elif time.monotonic() >= deadline:
                return None
        return json.loads(self._lines.pop(0))

    def obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            return "it stopped answering"
        if code < 0:
            cause = " (out of memory, or killed from outside)" if code == -9 else ""
            return f"killed by signal {-code}{cause}"
        return f"exit code {code}"

    def kill(self) -> None:
        """Ends it and everything that it started, and reaps them. Safe to call twice and from any thread."""
        kill_tree(self.process, self.token)

    def close(self) -> None:
        """For the thread that reads from it, and only there: a closed descriptor's number may be given out again."""
        self.kill()
        self._sock.close()


class RewardPool:
    """`num_workers` processes that build the same rewards and share one queue of jobs."""

    def __init__(
        self,
        setup: dict[str, Any],
        *,
        num_workers: int,
        declared: frozenset[str],
        startup_timeout_s: float,
        log_dir: Path | None,
        warn: Callable[[str], None],
    ) -> None:
        self._setup, self._env, self._log_dir = setup, clean_environment(declared), log_dir
        self._startup_timeout_s, self._warn = startup_timeout_s, warn
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._workers: list[WorkerProcess | None] = [None] * num_workers
        self._started: list[Future[None]] = [Future() for _ in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"miles-reward-{i}", daemon=True)
            for i in range(num_workers)
        ]
        self._closing = False
        self._broken: Exception | None = None
        self._deaths = 0
        self.rewards: dict[str, JudgeInfo] = {}
        self.metrics: queue.SimpleQueue[dict[str, Metric]] = queue.SimpleQueue()

    def start(self) -> list[Future[None]]:
        """Starts all workers at once; each future ends when its worker has built its rewards, or raises."""
        for thread in self._threads:
            thread.start()
        return self._started

    def submit(self, task: Task) -> Future[list[Outcome]]:
        if self._broken is not None:
            task.fail(self._broken)
        else:
            self._jobs.put(Job(task=task, indices=task.indices))
        return task.done

    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers if w is not None and w.process.poll() is None]

    def close(self) -> None:
        """Kills the workers, whatever they do, and waits for their threads. Open tasks end with an error."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for worker in list(self._workers):
            if worker is not None:
                worker.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._drain(RunFailed("the reward workers were closed"))

    # --- One thread per worker ---------------------------------------------------------------------------------------

    def _serve(self, index: int) -> None:
        try:
            worker = self._spawn(index)
            self.rewards = worker.rewards
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                self._started[index].set_exception(error)
            return
        with contextlib.suppress(InvalidStateError):  # a run that is stopped meanwhile has cancelled it
            self._started[index].set_result(None)
        while (job := self._jobs.get()) is not None:
            if job.task.done.done():  # cancelled, or failed in another worker
                continue
            try:
                alive = self._run(worker, job)
            except Exception as error:  # a fault of ours must not leave the loop waiting for ever
                job.task.fail(error)
                alive = False
            if self._closing:
                break
            if not alive:
                worker.close()
                try:
                    worker = self._spawn(index)
                except Exception as error:
                    self._give_up(error)
                    break
        worker.close()

    def _spawn(self, index: int) -> WorkerProcess:
        log = self._log_dir / f"reward-worker-{index}.log" if self._log_dir is not None else None
        worker = WorkerProcess({**self._setup, "index": index}, self._env, log)
        self._workers[index] = worker
        try:
            worker.wait_ready(self._startup_timeout_s)
        except BaseException:
            worker.close()
            raise
        return worker

    def _run(self, worker: WorkerProcess, job: Job) -> bool:
        """Scores one job; False when the worker must be replaced. Every index of the job is settled or queued again."""
        task, info = job.task, worker.rewards[job.task.reward]
        limit_s = task.limit_s + (_GRACE_S if info.asynchronous else 0.0)
        running: dict[int, float] = {}
        try:
            worker.send({"reward": task.reward, "indices": job.indices, "limit_s": task.limit_s}, task.body)
            while True:
                deadline = min(running.values()) + limit_s if running else time.monotonic() + _STALL_S
                match worker.receive(deadline):
                    case ["s", index, since]:
                        running[index] = since
                    case ["d", index, row]:
                        running.pop(index, None)
                        task.settle(index, Outcome.from_json(row))
                    case ["g", rows]:
                        running.clear()
                        for index, row in zip(job.indices, rows, strict=True):
                            task.settle(index, Outcome.from_json(row))
                    case ["x", message]:
                        running.clear()
                        task.fail(ContractError(message))
                    case ["e", metrics]:
                        self._deaths = 0
                        if metrics:
                            self.metrics.put({key: tuple(metric) for key, metric in metrics.items()})
                        return True
                    case None:
                        return self._after("timeout", worker, job, running)
        except (WorkerGone, OSError):
            return self._after("death", worker, job, running)

    def _after(
        self, what: Literal["timeout", "death"], worker: WorkerProcess, job: Job, running: Mapping[int, float]
    ) -> bool:
        """A worker was overdue or died. The sample that it was on is timed out, or tried once more after a death; samples
        that only waited behind it go back to the queue one by one, so that idle workers share them."""
        task, grouped = job.task, worker.rewards[job.task.reward].grouped
        if self._closing:
            task.fail(RunFailed("the reward workers were closed"))
            return False
        if not running:
            self._deaths += 1
            if self._deaths >= _MAX_DEATHS:
                error = RunFailed(f"{self._deaths} reward workers in a row ended between samples: {worker.obituary()}")
                task.fail(error)
                self._give_up(error)
                return False
        open_ = [i for i in job.indices if i not in task.outcomes]
        suspects = sorted(running) if running and not grouped else open_
        if what == "timeout" and running and (grouped or len(suspects) == 1):
            for index in suspects:
                task.settle(index, timed_out(task.limit_s))
        again = [i for i in open_ if i not in task.outcomes and (i not in suspects or self._may_retry(task, i, worker))]
        task.retried.update(again)
        for indices in [again] if grouped and again else [[i] for i in again]:
            self._jobs.put(Job(task=task, indices=indices))
        return False

    def _may_retry(self, task: Task, index: int, worker: WorkerProcess) -> bool:
        """True for the first death under a sample; after the second one the sample is an error."""
        task.deaths[index] = task.deaths.get(index, 0) + 1
        if task.deaths[index] == 1:
            return True
        text = f"the reward worker died twice on this sample: {worker.obituary()}"
        task.settle(index, Outcome(kind="error", reason=f"error: {text}", traceback=text + "\n"))
        return False

    def _give_up(self, error: Exception) -> None:
        """No worker can be had any more: whatever waits now or later ends with `error`."""
        self._broken = error
        self._warn(f"reward workers cannot be replaced: {error}")
        self._drain(error)

    def _drain(self, error: Exception) -> None:
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.task.fail(error)


def _build_error(name: str, kind: str, message: str, traceback: str) -> Exception:
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.MilesError):
        return known(message)
    return errors.PluginError(f'reward "{name}" could not be built: {kind}: {message}', traceback)


def _open_log(path: Path | None) -> Any:
    """Where a worker's stdout and stderr go: appended to its log, or our stderr."""
    if path is None:
        return os.fdopen(os.dup(2), "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
