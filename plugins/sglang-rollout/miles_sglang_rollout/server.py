"""One SGLang server process: started in a process group of its own, watched, and ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.reaping import TOKEN_VARIABLE, kill_tree

TAIL_BYTES = 1 << 16
MILESTONES = (
    (r"Load weight begin", "loading weights"),
    (r"Load weight end", "weights loaded"),
    (r"KV [Cc]ache is allocated", "cache allocated"),
    (r"Capture .*cuda graph begin", "capturing graphs"),
    (r"Capture .*cuda graph end", "graphs captured"),
    (r"Uvicorn running|fired up and ready", "listening"),
)
"""What a server says while it starts, and how we put it."""
CAUSES = (
    (
        r"CUDA out of memory|OutOfMemoryError|[Nn]ot enough memory",
        "not enough GPU memory (server_args.mem_fraction_static)",
    ),
    (r"address already in use|is not available", "its port was taken"),
    (r"does not appear to have a file named|No such file or directory|not a valid model identifier", "a file is missing"),
)


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a free port until the server has bound it: it does not listen, and both allow the address to be
    used again, so that the server's own bind works and nobody is given the port as a free one."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


class Server:
    """`start` returns at once; `dead` says whether it has ended, and `reason` why."""

    def __init__(self, name: str, folder: Path, log: logging.Logger) -> None:
        self.name, self.log = name, log
        self.log_file = folder / "logs" / f"{name}-server.log"
        self.args_file = folder / "logs" / f"{name}-server.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._holder: socket.socket | None = None
        self._token = ""
        self._seen, self._said = 0, 0
        self._started = time.monotonic()

    def port(self) -> int:
        """A free port, held until `bound`."""
        self.bound()
        self._holder = hold_port()
        return self._holder.getsockname()[1]

    def bound(self) -> None:
        """The server listens: its port needs no holder any more."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.close()

    def start(self, python: str, args: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.args_file.parent.mkdir(parents=True, exist_ok=True)
        self.args_file.write_text(json.dumps(args, indent=1), encoding="utf-8")
        self._token = os.urandom(16).hex()
        self._started = time.monotonic()
        with self.log_file.open("ab") as log:
            self._seen = log.tell()
            self._process = subprocess.Popen(
                [python, "-m", "miles_sglang_server", str(self.args_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, TOKEN_VARIABLE: self._token},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """0 before it starts."""
        return self._process.pid if self._process is not None else 0

    @property
    def dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def progress(self) -> None:
        """Logs what the server has reached since the last call."""
        text = self._read(self._seen)
        for pattern, words in MILESTONES[self._said :]:
            if re.search(pattern, text):
                self._said = MILESTONES.index((pattern, words)) + 1
                self.log.info("%s: %s after %.0f s", self.name, words, time.monotonic() - self._started)

    def reason(self) -> list[str]:
        """How it ended, the probable cause, the last error in its log, and where the log is."""
        if self._process is None:
            return ["it was not started"]
        code = self._process.poll()
        lines = []
        if code is None:
            lines.append("it is still running")
        elif code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                lines.append(f"it was ended by {name}")
        else:
            lines.append(f"it ended with exit code {code}")
        text = self._read(self._seen)
        lines += [f"cause: {words}" for pattern, words in CAUSES if re.search(pattern, text)][:1]
        errors = last_errors(text)
        if code == -signal.SIGKILL and not errors:
            lines[0] += "; the system does this when memory runs out (see dmesg)"
        lines += [f"it said: {line}" for line in errors]
        return [*lines, f"its log: {self.log_file}"]

    async def close(self) -> None:
        """Kills it with everything that it started: SIGTERM is known to hang."""
        self.bound()
        if self._process is not None:
            await asyncio.to_thread(kill_tree, self._process, self._token)

    def _read(self, start: int) -> str:
        """The log since `start`, at most its last part."""
        try:
            with self.log_file.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(start, size - TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def last_errors(text: str, count: int = 2) -> list[str]:
    """The last lines that name an exception or begin like our own start-up errors, without repetitions."""
    pattern = re.compile(r"^(?:\[.*?\] )?((?:[A-Za-z_.]*(?:Error|Exception|Interrupt|Exit)\b:.*)|server_args: .*)$")
    found = [match[1].strip() for line in text.splitlines() if (match := pattern.match(line.strip()))]
    return list(dict.fromkeys(found))[-count:]
