"""What runs inside a Ray actor: the object that a payload describes, in an environment and with a log of its own."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from miles_core.channel import encode_error
from miles_core.errors import RuntimeMissing
from miles_core.reaping import kill_session_of
from miles_core.worker import CLOSE_LIMIT_S, Hosted, build_object, place
from miles_ray_launcher import guardian


class Host:
    """One worker of a role. All methods are coroutines of the actor's event loop; arguments and results are pickles of our
    own, because arrays that come out of Ray's object store are read-only."""

    def __init__(self) -> None:
        self._hosted: Hosted | None = None
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: set[int] = set()
        self._guardian = 0
        self._folder = ""

    async def appear(self, run_dir: str, log: str) -> dict[str, Any]:
        """Takes its log in use and says where it is. Raises RuntimeMissing when the run folder is not to be seen here."""
        with contextlib.suppress(PermissionError):  # it leads a group already, which Ray then cleans up itself
            os.setsid()
        if not Path(run_dir).is_dir():
            raise RuntimeMissing(
                f"there is no run folder {run_dir} on node {socket.gethostname()}",
                "put it on a file system that every node of the cluster sees (--out DIR)",
            )
        _write_to(Path(log))
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if os.getsid(0) == os.getpid():
            self._guard()
        return {**place(), "ip": _address(), "guardian": self._guardian}

    async def meet(self, *, same_node: bool) -> str:
        """Where the ranks of this role can meet; asked of the first one."""
        if same_node and self._folder:  # a local file: no port to lose to someone else
            return f"file://{self._folder}/rendezvous"
        with socket.socket() as sock:
            sock.bind(("", 0))
            return f"tcp://{_address()}:{sock.getsockname()[1]}"

    async def build(self, data: bytes) -> tuple[str, Any]:
        """Builds the object. ("ready", None), or ("error", what was raised)."""
        payload, env = pickle.loads(data)
        for name, value in env.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        name = f"{payload['role']}-{payload['index']}"
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or "none"
        print(f"{name}: process {os.getpid()} on node {socket.gethostname()} ({_address()}), GPUs: {devices}", flush=True)
        self._hosted = Hosted(name)
        try:
            await self._hosted.build(lambda: build_object(payload), in_thread=payload["kind"] != "engine")
        except BaseException as error:
            traceback.print_exc()
            return "error", encode_error(_explain(error))
        return "ready", None

    async def call(self, number: int, data: bytes) -> tuple[str, Any]:
        """("result", pickle), ("error", what was raised) or ("cancelled", None)."""
        if number in self._cancelled:  # Ray starts the calls of one caller in any order
            self._cancelled.discard(number)
            return "cancelled", None
        task = self._running[number] = asyncio.ensure_future(self._call(data))
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled", None
        finally:
            self._running.pop(number, None)

    async def cancel(self, number: int) -> None:
        """Cancels a coroutine; a plain call that has started runs to its end."""
        task = self._running.get(number)
        if task is not None:
            task.cancel()
        else:
            self._cancelled.add(number)

    async def watch(self) -> None:
        """Never returns; Ray ends it with an error when the actor is gone."""
        await asyncio.Event().wait()

    async def dump_stacks(self) -> None:
        faulthandler.dump_traceback(all_threads=True)

    async def close(self) -> None:
        """Closes the object and ends whatever it started; Ray then ends this process."""
        if self._hosted is not None:
            try:
                await asyncio.wait_for(self._hosted.close(), CLOSE_LIMIT_S)
            except Exception:
                traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getsid(0) == os.getpid():
            kill_session_of(os.getpid())

    async def _call(self, data: bytes) -> tuple[str, Any]:
        method, args, kwargs = pickle.loads(data)
        try:
            return "result", pickle.dumps(await self._hosted.call(method, args, kwargs), protocol=5)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit from a library must not end the worker in the middle of other calls
            traceback.print_exc()
            return "error", encode_error(error)

    def _guard(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="miles-")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guardian = int(process.stdout.readline())
        process.wait()
        self._lifeline = process.stdin  # closed by the end of this process, however it comes


def _write_to(log: Path) -> None:
    """Sends what this process and its children print to `log`; Ray's own messages go there too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _explain(error: BaseException) -> BaseException:
    if isinstance(error, ModuleNotFoundError):
        return RuntimeMissing(
            f"{error} in {sys.executable} on node {socket.gethostname()}",
            "install it there: every node needs the driver's plugins",
        )
    return error


def visible_devices() -> str:
    """Run as a Ray task that holds all GPUs of a bundle: their names, as CUDA_VISIBLE_DEVICES has them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
