"""One Ray actor as its driver sees it: start, calls, an end that is explained, and nothing left after it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from miles_core.channel import decode_error
from miles_core.errors import MilesError, RunFailed, WorkerDied
from miles_core.processes import EXIT_LIMIT_S, POLL_S, TAIL_LINES, CallTimeout
from miles_core.types import Death
from miles_core.worker import place as place_of_this_process
from miles_ray_launcher.actor import Host

MAX_CONCURRENT_CALLS = 10_000
"""Calls that one actor runs side by side; Ray's own default of 1000 is less than an engine may have waiting."""


class RayWorker:
    """An actor that hosts one worker of a role. `death` is set once it has ended without being told to.

    `options` are those of the actor; `room` raises when its bundle has lost its place in the cluster.
    """

    def __init__(
        self,
        role: str,
        index: int,
        *,
        options: Mapping[str, Any],
        payload: Mapping[str, Any],
        env: Mapping[str, str | None],
        log: Path,
        room: Callable[[], Coroutine[Any, Any, None]],
        patience_s: float,
    ) -> None:
        self.role, self.index, self.log = role, index, log
        self.name = f"{role} {index}"
        self.payload, self.env = dict(payload), dict(env)
        self.place: dict[str, Any] = {}
        self.death: Death | None = None
        self.on_death: Callable[[Death], None] | None = None
        self._options, self._room, self._patience_s = options, room, patience_s
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._actor: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False

    # --- Life --------------------------------------------------------------------------------------------------------

    async def start(self, timeout_s: float) -> None:
        """Creates the actor and builds what it hosts, at the place that its siblings have agreed on."""
        until = time.monotonic() + timeout_s
        await self.appear(timeout_s)
        await self.build(until - time.monotonic())

    async def appear(self, timeout_s: float) -> None:
        """Creates the actor and waits until it is there. Raises RuntimeMissing when there is no room for it any more or it
        cannot work where it is, WorkerDied, or CallTimeout."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._actor = ray.remote(Host).options(**self._options).remote()
        here = _future(self._actor.appear.remote(str(self.payload["run_dir"]), str(self.log)))
        until = time.monotonic() + timeout_s
        while not (await asyncio.wait({here}, timeout=min(self._patience_s, max(0.0, until - time.monotonic()))))[0]:
            if time.monotonic() >= until:
                await self.stop(0.0)
                raise CallTimeout(f"{self.name} did not start within {timeout_s:g} s", self.log_tail())
            await self._room()
        try:
            self.place = here.result()
        except RayTaskError as error:
            await self.stop(0.0)
            cause = error.cause if isinstance(error.cause, MilesError) else RunFailed(f"{self.name}: {error}")
            raise cause from None
        except RayError as error:
            raise WorkerDied(f"{self.name} died while it started: {_first_line(error)}", self.log_tail()) from None
        self._watcher = asyncio.create_task(self._watch())

    async def meeting_point(self, *, same_node: bool) -> str:
        return await _future(self._actor.meet.remote(same_node=same_node))

    async def build(self, timeout_s: float) -> None:
        """Builds the hosted object. Raises what building raised, WorkerDied, or CallTimeout; the actor is then ended."""
        future = self._expect("start-up", lambda number: self._actor.build.remote(pickle.dumps((self.payload, self.env))))
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout_s)
            if not done:
                self.dump_stacks()
                await asyncio.sleep(0.2)
                raise CallTimeout(f'no answer to "start-up" within {timeout_s:g} s from {self.name}', self.log_tail())
            future.result()
        except BaseException:
            future.cancel()
            await self.stop(0.0)
            raise

    async def stop(self, grace_s: float) -> None:
        """Lets the actor close what it hosts within `grace_s`, then ends it; returns when its process is gone."""
        self._closing = True
        if self._actor is None:
            return
        if grace_s > 0 and self.death is None and self.place:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_future(self._actor.close.remote()), grace_s)
        with contextlib.suppress(RayError, ValueError):  # gone already
            ray.kill(self._actor, no_restart=True)
        if self._watcher is not None:
            await asyncio.wait({self._watcher}, timeout=EXIT_LIMIT_S)
            self._watcher.cancel()
        await self._wait_until_gone()
        self._actor = None
        self._fail_pending()

    async def _wait_until_gone(self) -> None:
        """On this machine, until the process and what watched over it are no more."""
        if self.place.get("node") != place_of_this_process()["node"]:
            return
        until = time.monotonic() + EXIT_LIMIT_S
        while time.monotonic() < until and any(
            _alive(self.place[name]) for name in ("pid", "guardian") if self.place[name]
        ):
            await asyncio.sleep(POLL_S / 5)

    async def _watch(self) -> None:
        """Notes the end of the actor, also when nobody calls it."""
        while True:
            try:
                await _future(self._actor.watch.remote())
            except ActorUnavailableError:
                await asyncio.sleep(POLL_S)  # Ray has not made up its mind yet
            except RayError as error:
                self._note_end(error)
                return

    # --- Calls -------------------------------------------------------------------------------------------------------

    def submit(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> asyncio.Future[Any]:
        """A future with the result, or with the worker's exception, or with WorkerDied; cancelling it cancels a coroutine
        in the actor, and only forgets a plain call."""
        future = asyncio.get_running_loop().create_future()
        if self.death is not None or self._closing:
            future.set_exception(self._died(method))
            return future
        try:
            data = pickle.dumps((method, args, dict(kwargs)), protocol=5)
        except Exception as error:
            future.set_exception(RunFailed(f'the arguments of "{method}" cannot travel to {self.name}: {error}'))
            return future
        return self._expect(method, lambda number: self._actor.call.remote(number, data))

    def dump_stacks(self) -> None:
        """Makes the actor write where each of its threads stands to its log; works while it is stuck on this machine, and
        elsewhere while its event loop is not."""
        if self._actor is None or self.death is not None:
            return
        if self.place.get("node") == place_of_this_process()["node"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.place["pid"], signal.SIGUSR1)
        else:
            self._actor.dump_stacks.remote()

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines that this actor wrote, indented, under the path of its log."""
        return "\n    ".join([f"log: {self.log}", *self._tail()[-num_lines:]])

    def _expect(self, method: str, send: Callable[[int], Any]) -> asyncio.Future[Any]:
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        raw = _future(send(number))
        self._pending[number] = (method, future)
        raw.add_done_callback(lambda done: self._answered(number, done))
        future.add_done_callback(lambda done: self._forget(number, done.cancelled()))
        return future

    def _answered(self, number: int, raw: asyncio.Future[Any]) -> None:
        method, future = self._pending.pop(number, ("", None))
        error = None if raw.cancelled() else raw.exception()
        if isinstance(error, ActorDiedError):
            self._note_end(error)
        if future is None or future.done():
            return
        if isinstance(error, RayActorError) and (self.death is not None or self._closing):
            future.set_exception(self._died(method))
        elif error is not None or raw.cancelled():
            future.set_exception(RunFailed(f'"{method}" of {self.name} failed in Ray: {_first_line(error)}'))
        else:
            self._resolve(future, method, *raw.result())

    def _resolve(self, future: asyncio.Future[Any], method: str, kind: str, value: Any) -> None:
        if kind == "error":
            future.set_exception(decode_error(value, self.name, method))
        elif kind == "cancelled":
            future.cancel()
        else:
            try:
                future.set_result(None if value is None else pickle.loads(value))
            except Exception as error:
                future.set_exception(RunFailed(f'the answer of {self.name} to "{method}" cannot be read: {error}'))

    def _forget(self, number: int, cancelled: bool) -> None:
        waiting = self._pending.pop(number, None)
        if cancelled and waiting and self.death is None and not self._closing:
            self._actor.cancel.remote(number)

    # --- Ends --------------------------------------------------------------------------------------------------------

    def _note_end(self, error: RayError) -> None:
        if self.death is not None or self._closing:
            return
        self.death = self._explain(str(error))
        self._fail_pending()
        if self.on_death is not None:
            self.on_death(self.death)

    def _fail_pending(self) -> None:
        for method, future in list(self._pending.values()):
            if not future.done():
                future.set_exception(self._died(method))
        self._pending.clear()

    def _died(self, method: str) -> WorkerDied:
        if self.death is None:
            return WorkerDied(f'{self.name} was closed; "{method}" cannot run')
        how = f"killed by {self.death.signal}: " if self.death.signal else ""
        return WorkerDied(f'{self.name} died during "{method}": {how}{self.death.cause}', self.log_tail())

    def _explain(self, text: str) -> Death:
        """Ray does not know an actor's exit status; it tells apart its own hands, the node, and all else."""
        crash = next((_CRASHES[m[1]] for line in self._tail() if (m := _FATAL.match(line)) and m[1] in _CRASHES), "")
        where = f"process {self.place.get('pid')} on node {self.place.get('host')}"
        if "ray.kill" in text or "ray kill" in text:
            cause = f"{where}: someone ended it through Ray"
        elif "running low on memory" in text:
            cause = f"{where}: Ray ended it because memory ran out on its node"
        elif _NODE_LOST.search(text):
            cause = f"{where}: its node is gone"
        elif crash:
            cause = f"{where}: a crash in native code; the stack is in its log"
        else:
            cause = (
                f"{where} ended unexpectedly: killed, perhaps for want of memory (see dmesg there), or by its own "
                "doing; its log may say more"
            )
        return Death(role=self.role, index=self.index, signal=crash, cause=cause, log=str(self.log))

    def _tail(self) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - 4000))
                return file.read().decode(errors="replace").splitlines()
        except (OSError, AttributeError):
            return []


_NODE_LOST = re.compile(r"node (?:\S+ )?(?:has |was )?(?:died|dead|terminated|removed)|the actor's node", re.IGNORECASE)
_FATAL = re.compile(r"Fatal Python error: (.+)")
_CRASHES = {"Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Illegal instruction": "SIGILL"}


def _future(reference: Any) -> asyncio.Future[Any]:
    """Of the running loop, for a result that Ray has promised."""
    return asyncio.wrap_future(reference.future())


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that is dead and that nobody has reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # gone in between, or a system without /proc
    except OSError:
        return True
