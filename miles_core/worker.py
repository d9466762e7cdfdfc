"""The worker process, `python -m miles_core.worker`: hosts one object and runs its methods for the driver.

Parent and child share a socket pair that nobody else can open. What to host arrives as JSON-compatible names and options,
never as a pickled object: the worker builds its own plugin host and refuses to serve when a plugin differs from the
driver's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from miles_core.channel import Channel, encode_error
from miles_core.errors import ConfigError, RunFailed, RuntimeMissing
from miles_core.reaping import kill_session_of

ENGINE_KINDS = ("engine", "tokenizer", "precision")
"""Whose plugins an engine's environment must have; it may lack those of the trainer, for example."""
CLOSE_LIMIT_S = 5.0
"""How long a hosted object may take to close when its worker is told to end."""


# --- Hosting ---------------------------------------------------------------------------------------------------------


class SerialThread:
    """Runs functions one at a time, in order, in one daemon thread: libraries with per-thread state (CUDA device, grad
    mode) see the same thread each time, and a stuck call cannot keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """A future of the running loop. Cancelling it drops the call if it has not started yet."""
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: function(*args, **kwargs)))
        return asyncio.wrap_future(future)

    def close(self) -> None:
        self._jobs.put(None)

    def stack(self) -> list[str]:
        """Where it stands, outermost call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return [line for text in traceback.format_stack(frame) for line in text.splitlines()] if frame else []

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                # SystemExit would end the event loop, and StopIteration cannot pass through a future
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if plain else RunFailed(f"a library raised {type(error).__name__}: {error}"))
            else:
                future.set_result(result)


class Hosted:
    """The object of a worker, or of the driver's own process, and how its methods run: coroutines side by side on the
    event loop, plain functions one at a time in one thread. `@get` reads attributes and `@place` says where it lives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = SerialThread(name)
        self._object: Any = None

    async def build(self, function: Callable[[], Any], *, in_thread: bool) -> None:
        """Builds the object where its methods will run: on the loop's thread for engines, else in the serial thread."""
        self._object = await self._thread.run(function) if in_thread else function()

    async def call(self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if method == "@get":
            return [getattr(self._object, name, None) for name in args]
        if method == "@place":
            return place()
        function = getattr(self._object, method, None)
        if not callable(function):
            raise RunFailed(f'{type(self._object).__name__} has no method "{method}"')
        if inspect.iscoroutinefunction(function):
            return await function(*args, **(kwargs or {}))
        return await self._thread.run(function, *args, **(kwargs or {}))

    def dump_stacks(self) -> None:
        """Nothing to do beforehand: `log_tail` reads the stack itself."""

    def log_tail(self, num_lines: int = 12) -> str:
        """Where its serial thread stands, as far as this process can see."""
        return "\n    ".join(["in the driver's process:", *self._thread.stack()[-num_lines:]])

    async def close(self) -> None:
        """Closes the object, if it has a `close`; queued behind a plain call that is still running."""
        if callable(getattr(self._object, "close", None)):
            await self.call("close")
        self._thread.close()


def place() -> dict[str, Any]:
    """Process and machine: two processes with the same "node" can share memory under /dev/shm."""
    node = socket.gethostname()
    with contextlib.suppress(OSError):
        node += "/" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        node += f"/{os.stat('/dev/shm').st_dev}"
    return {"pid": os.getpid(), "node": node, "host": socket.gethostname()}


# --- Building --------------------------------------------------------------------------------------------------------


def load_factory(reference: str) -> Callable[..., Any]:
    """The function behind "module:function" or "path/file.py:function"; raises ConfigError saying what is missing."""
    module_name, _, name = reference.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("miles_factory_" + Path(module_name).stem, module_name)
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    if not callable(getattr(module, name, None)):
        raise ConfigError(f'no function "{name}" in {module_name} (worker factory "{reference}")')
    return getattr(module, name)


def build_object(payload: Mapping[str, Any]) -> Any:
    """The object that `payload` describes; JSON-compatible keys:

    kind: "trainer", "engine", or any for a factory. run: `ResolvedRun.payload()`, or factory: "module:function" with
    args, called as function(BuildContext, **args). role, index, world_size, rendezvous, device, run_dir, model_path.
    Raises PluginError when a plugin here differs from the driver's.
    """
    if "factory" in payload:
        return _build_from_factory(payload)
    from miles_core.component import Environment
    from miles_core.config import ResolvedRun
    from miles_core.trainers import host_rank
    from miles_core.wiring import Wiring, run_checks

    kind = payload["kind"]
    run = ResolvedRun.from_payload(payload["run"], kinds=ENGINE_KINDS if kind == "engine" else None)
    paths = {"run_dir": Path(payload["run_dir"]), "model_path": _path(payload.get("model_path"))}
    run_checks(run, Environment(**paths), kinds=[kind])  # here, since this environment may not be the driver's
    place_in_role = {name: payload[name] for name in ("index", "world_size", "rendezvous", "device")}
    wiring = Wiring(run, role="policy" if kind == "trainer" else kind, **paths, **place_in_role)
    if kind == "trainer":
        return host_rank(wiring)
    replica = wiring.build(kind)
    replica.id = f"{payload['role']}-{payload['index']}"
    return replica


def _build_from_factory(payload: Mapping[str, Any]) -> Any:
    from miles_core.component import BuildContext
    from miles_core.interfaces import TrainerRank
    from miles_core.trainers import RankHost

    context = BuildContext(
        component=f"factory/{payload['role']}",
        run_dir=Path(payload["run_dir"]),
        seed=payload.get("seed", 0),
        run_config=None,
        model_path=_path(payload.get("model_path")),
        role=payload["role"],
        **{name: payload[name] for name in ("index", "world_size", "rendezvous", "device")},
    )
    built = load_factory(payload["factory"])(context, **payload.get("args", {}))
    return RankHost(built) if isinstance(built, TrainerRank) else built


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


# --- The process -----------------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Asks the kernel for a SIGTERM when the parent ends, on Linux; elsewhere the end of the channel must do. The kernel
    means the thread that started us, so the driver's event loop must live in a thread that lasts."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the request took effect
        os._exit(1)


async def serve(sock: socket.socket, parent: int) -> None:
    """Builds and serves until told to end, and then ends the process: still inside the event loop, whose own end would give
    SIGTERM its deadly default back while the kernel's may yet be on its way, and our children would live on."""
    channel = Channel(sock)
    payload = await channel.receive()
    hosted = Hosted(f"{payload['role']}-{payload['index']}")
    try:
        await hosted.build(lambda: build_object(payload), in_thread=payload["kind"] != "engine")
    except BaseException as error:
        traceback.print_exc()
        channel.send(("failed", 0, encode_error(_explain(error))))
        await channel.flush()
        end(orphaned=False)
    channel.send(("ready", 0, place()))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    requests = asyncio.create_task(_serve_requests(channel, hosted))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({requests, stopped}, return_when=asyncio.FIRST_COMPLETED)
    try:
        await asyncio.wait_for(hosted.close(), CLOSE_LIMIT_S)
    except Exception:
        traceback.print_exc()
    end(orphaned=requests.done() or os.getppid() != parent)


def end(*, orphaned: bool) -> NoReturn:
    """Ends this process and its children. `orphaned`: the driver is known to be gone; even if it only looks alive, because
    not all of its threads have died yet, nobody else may clean up after us."""
    sys.stdout.flush()
    sys.stderr.flush()
    if orphaned:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    kill_session_of(os.getpid())
    os._exit(0)  # a library's thread that will not end must not keep the process


async def _serve_requests(channel: Channel, hosted: Hosted) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    with contextlib.suppress(EOFError):
        while True:
            kind, number, *rest = await channel.receive()
            if kind == "call":
                running[number] = asyncio.create_task(_answer(channel, hosted, number, *rest))
                running[number].add_done_callback(lambda _, number=number: running.pop(number, None))
            elif number in running:
                running[number].cancel()


async def _answer(channel: Channel, hosted: Hosted, number: int, method: str, args: Any, kwargs: Any) -> None:
    try:
        channel.send(("result", number, await hosted.call(method, args, kwargs)))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # SystemExit from a library must not end the worker in the middle of other calls
        traceback.print_exc()
        channel.send(("error", number, encode_error(error)))


def _explain(error: BaseException) -> BaseException:
    """A missing module is the environment's fault, not a bug: say in which interpreter."""
    if isinstance(error, ModuleNotFoundError):
        return RuntimeMissing(
            f"{error} in {sys.executable}", "install it there, or choose another interpreter (python = PATH)"
        )
    return error


def main(argv: list[str]) -> None:
    fd, parent = (int(text) for text in argv)
    die_with_parent(parent)
    os.set_inheritable(fd, False)  # a child of ours that outlived us would hide our end from the driver
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    asyncio.run(serve(socket.socket(fileno=fd), parent))


if __name__ == "__main__":
    # under its importable name, so that classes of this module are the same for everyone in this process
    importlib.import_module("miles_core.worker").main(sys.argv[1:])
