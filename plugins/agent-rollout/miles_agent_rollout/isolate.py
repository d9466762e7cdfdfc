"""User code in a process of its own, which can be killed: isolated tools, and agents that are functions.

Parent and child speak JSON lines over pipes, never pickles: what a model's arguments make a tool do must not reach this
process. The child adopts its orphans, and is killed with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.reaping import TOKEN_VARIABLE, kill_tree
from miles_core.reward_pool import clean_environment

LINE_LIMIT = 64 << 20
"""Bytes of one answer of a child."""
TAIL_BYTES = 2000


def as_text(value: Any) -> str:
    """A tool's result as the model reads it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def child_environment(more: Mapping[str, str], declared: frozenset[str] = frozenset()) -> dict[str, str]:
    """This process's environment without what looks like a secret, unless it is declared; modules are found where they
    are found here, and no proxy stands between a child and this machine."""
    env = clean_environment(declared)
    local = "127.0.0.1,localhost"
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = f"{env[name]},{local}" if env.get(name) else local
    return env | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)} | more


class Process:
    """A child in a session of its own; its output goes to `log`."""

    def __init__(
        self, command: list[str], env: Mapping[str, str], log: Path, *, pipes: bool = False, folder: Path | None = None
    ) -> None:
        self._token, self._log = secrets.token_hex(8), log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._start = file.tell()
            self.process = subprocess.Popen(
                command,
                env={**env, TOKEN_VARIABLE: self._token},
                cwd=folder,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else file,
                stderr=file,
                start_new_session=True,
            )

    async def wait(self) -> int:
        while self.process.poll() is None:
            await asyncio.sleep(0.02)
        return int(self.process.returncode)

    async def kill(self) -> None:
        """Ends it with everything that it started; it may have ended before. Runs to its end even when cancelled."""
        await asyncio.shield(asyncio.to_thread(kill_tree, self.process, self._token))

    def tail(self) -> str:
        """The end of what it wrote."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""


class Child:
    """A process that carries out calls, one after the other."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "miles_agent_rollout.child", str(os.getpid())]
        self.handle = Process(command, env, log, pipes=True)
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def call(self, request: Mapping[str, Any], timeout_s: float | None) -> tuple[str, Any]:
        """("ok", result), ("error", text), or ("timeout", ""). After an end that is not "ok" and not an exception of
        the called function, the child is gone; `alive` tells."""
        assert self.handle.process.stdin is not None
        if self._reader is None:
            loop = asyncio.get_running_loop()
            self._reader = asyncio.StreamReader(limit=LINE_LIMIT)
            protocol = asyncio.StreamReaderProtocol(self._reader)
            self._transport, _ = await loop.connect_read_pipe(lambda: protocol, self.handle.process.stdout)
        line = json.dumps(request, default=str).encode() + b"\n"
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(self._write, line)
                answer = await self._reader.readline()
            if answer:
                row = json.loads(answer)
                return ("ok", row["ok"]) if "ok" in row else ("error", row["error"])
            code = await self.handle.wait()
            problem = f"it died with exit code {code}; {self.handle.tail()[-400:]}"
        except TimeoutError:
            await self.close()
            return "timeout", ""
        except asyncio.CancelledError:
            await self.close()
            raise
        except (OSError, ValueError) as error:
            problem = f"it cannot be understood: {error}"
        await self.close()
        return "error", problem

    @property
    def alive(self) -> bool:
        return self.handle.process.poll() is None

    def _write(self, line: bytes) -> None:
        self.handle.process.stdin.write(line)  # type: ignore[union-attr]
        self.handle.process.stdin.flush()  # type: ignore[union-attr]

    async def close(self) -> None:
        await self.handle.kill()
        if self._transport is not None:
            self._transport.close()
        elif self.handle.process.stdout is not None:
            self.handle.process.stdout.close()
        with contextlib.suppress(OSError):
            self.handle.process.stdin.close()  # type: ignore[union-attr]


class Workers:
    """At most `size` children that are started when they are needed, and again when they have been killed."""

    def __init__(self, size: int, log: Path) -> None:
        self.size, self.log = size, log
        self.kills = 0
        self._idle: list[Child] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(size)
        self._keeper: asyncio.Task[None] | None = None

    async def call(self, request: Mapping[str, Any], timeout_s: float) -> tuple[str, str]:
        """(kind, text) of a call; waiting for a free worker and starting it are not part of its time."""
        self._enter_loop()
        async with self._room:
            child = self._idle.pop() if self._idle else None
            if child is None or not child.alive:
                child = Child(child_environment({}), self.log)
                await child.call({"ready": True}, 120.0)
            kind, value = await child.call(request, timeout_s)
            if child.alive:
                self._idle.append(child)
            else:
                self.kills += 1
            return kind, value if isinstance(value, str) else as_text(value)

    def _enter_loop(self) -> None:
        """Children live as long as the event loop that uses them: a task of it kills them when it is cancelled."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._idle, self._room = loop, [], asyncio.Semaphore(self.size)
            self._keeper = asyncio.ensure_future(self._keep(self._idle))

    async def _keep(self, idle: list[Child]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for child in idle:
                await child.close()
