"""The worker's side of the box: starts `jail.py`, feeds it, bounds what comes back, ends it with all that it started."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import RuntimeMissing
from miles_core.reaping import TOKEN_VARIABLE, kill_tree

Mode = Literal["root", "user", "plain"]
JAIL = Path(__file__).with_name("jail.py")
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
"""What every box shows of the file system, read-only: programs and libraries, and no file of a user."""
PREFIX = "miles-code-"
_FIRST_UID, _UIDS = 61184, 2048
"""User ids that systemd also gives to services without an account; one worker uses two of them."""
_SETUP_S = 10.0
_KEPT_STDERR = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use. Memory and CPU time hold for each of its processes, the rest for all of them together."""

    memory_bytes: int = 512 << 20
    processes: int = 8
    disk_bytes: int = 64 << 20
    open_files: int = 64
    output_bytes: int = 1 << 20
    cpu_s: int = 10


@dataclass(slots=True, kw_only=True)
class Ended:
    """How a program ended. `exit`: its exit code, or minus a signal's number; None when it was killed by us, for the
    reason `why`: "timeout" or "output"."""

    exit: int | None = None
    why: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """One line for people, or "" when it ended well."""
        if self.why:
            return {"timeout": "took too long", "output": "wrote too much"}[self.why]
        if self.exit == 0:
            return ""
        if self.exit is not None and self.exit < 0:
            name = signal.Signals(-self.exit).name if -self.exit in set(signal.Signals) else str(-self.exit)
            return f"ended by {name}"
        last = self.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"exit code {self.exit}" + (f": {last[:200]}" if last else "")


class Refused(RuntimeError):
    """The box could not be made: a fault of the environment, never of the program."""


@dataclass(slots=True)
class Run:
    """A box with a program in it. Always `close` it."""

    process: subprocess.Popen[bytes]
    folder: str
    token: str
    status_fd: int
    limits: Limits
    started: float
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)
    report: dict[str, Any] = field(default_factory=dict)

    def pipes(self) -> dict[int, bytearray]:
        outputs = [(self.process.stdout, self.output), (self.process.stderr, self.errors)]
        return {self.status_fd: self.status} | {pipe.fileno(): kept for pipe, kept in outputs if pipe is not None}

    def read_status(self) -> None:
        """Takes complete lines of the jail. Raises Refused when it could not make the box or start the program."""
        while (end := self.status.find(b"\n")) >= 0:
            row = json.loads(self.status[:end])
            del self.status[: end + 1]
            if "refused" in row:
                raise Refused(row["refused"])
            self.report |= row

    def close(self) -> None:
        """Kills what is left, and removes the folder. Links in it are removed and never followed."""
        if not self._ended():
            kill_tree(self.process, self.token)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self.status_fd)
        remove(self.folder)

    def _ended(self) -> bool:
        """Whether the jail has ended by itself, and so has killed all that was in it."""
        if "exit" not in self.report:
            return False
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return self.process.returncode == 0


class Sandbox:
    """Makes boxes of one mode. `packages`: programs may import what is installed beside Python."""

    def __init__(
        self,
        mode: Mode,
        *,
        python: str = sys.executable,
        packages: bool = False,
        readable: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        self.mode, self.limits = mode, limits or Limits()
        self.python = [python, "-I", "-B", *([] if packages else ["-S"])]
        self.readable = visible([*SYSTEM, *python_folders(python), *readable])
        self.drops_user = os.geteuid() == 0

    def start(
        self,
        argv: Sequence[str],
        files: Mapping[str, str],
        *,
        stdin: bytes = b"",
        fds: Sequence[int] = (),
        capture: bool = True,
        slot: int = 0,
        limits: Limits | None = None,
    ) -> Run:
        """Starts `argv` (the first an absolute path) in a folder with `files`. `fds` become 3, 4, ... of the program.
        `slot` 0 or 1: two programs that run at once have different users where the worker may choose one."""
        limits = limits or self.limits
        uid = _FIRST_UID + 2 * (os.getpid() % _UIDS) + slot if self.drops_user else None
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{_here()}-{os.getpid()}-")
        spec = {
            "mode": self.mode,
            "root": folder,
            "readable": self.readable,
            "uid": uid,
            "argv": list(argv),
            "files": dict(files),
            "fds": list(fds),
            "env": environment("." if self.mode == "plain" else "/box"),
            "disk_bytes": limits.disk_bytes,
            "memory_bytes": limits.memory_bytes,
            "processes": limits.processes,
            "open_files": limits.open_files,
            "cpu_s": limits.cpu_s,
        }
        status_in, status_out = os.pipe()
        token = secrets.token_hex(8)
        try:
            with temporary(json.dumps(spec).encode()) as described, temporary(stdin) as given:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(JAIL), str(described.fileno()), str(status_out)],
                    stdin=given,
                    stdout=subprocess.PIPE if capture else subprocess.DEVNULL,
                    stderr=subprocess.PIPE if capture else subprocess.DEVNULL,
                    pass_fds=[described.fileno(), status_out, *fds],
                    env={TOKEN_VARIABLE: token},
                    start_new_session=True,
                    cwd="/",
                )
        except BaseException:
            os.close(status_in)
            remove(folder)
            raise
        finally:
            os.close(status_out)
        return Run(process, folder, token, status_in, limits, time.monotonic())

    def run(self, argv: Sequence[str], files: Mapping[str, str], *, stdin: bytes = b"", limit_s: float) -> Ended:
        """Runs a program to its end, or for `limit_s` seconds. Raises Refused."""
        run = self.start(argv, files, stdin=stdin)
        try:
            return drive([run], run, deadline=time.monotonic() + limit_s)
        finally:
            run.close()


def drive(
    runs: Sequence[Run], last: Run, *, deadline: float, on_output: Callable[[bytearray], float | None] | None = None
) -> Ended:
    """Reads what `runs` write until `last` has ended, the deadline (monotonic) has passed, or one wrote too much.
    `on_output(bytes so far)` is called when `last` wrote something, and may give a new deadline. Raises Refused."""
    why = ""
    with selectors.DefaultSelector() as selector:
        for run in runs:
            for fd in run.pipes():
                selector.register(fd, selectors.EVENT_READ, run)
        while not why and "exit" not in last.report:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                why = "timeout"
            for key, _ in ready:
                why = why or _take(key.fd, key.data, selector)
                if key.data is last and on_output is not None:
                    deadline = on_output(last.output) or deadline
        if not why:
            _drain(last, selector)
            why = "output" if len(last.output) > last.limits.output_bytes else ""
    if on_output is not None:
        on_output(last.output)
    code = None if why else last.report["exit"]
    seconds = time.monotonic() - last.started
    return Ended(exit=code, why=why, stdout=bytes(last.output), stderr=bytes(last.errors), seconds=seconds)


def _take(fd: int, run: Run, selector: selectors.BaseSelector) -> str:
    """Reads once; "output" when that was too much. Raises Refused when the jail is gone without a word."""
    kept = run.pipes()[fd]
    data = os.read(fd, 1 << 16)
    if not data:
        selector.unregister(fd)
        if fd == run.status_fd and "exit" not in run.report:
            if "started" not in run.report:
                raise Refused("the process that makes the box ended without a word")
            run.report["exit"] = -int(signal.SIGKILL)  # it was killed from inside: the program's own doing
        return ""
    kept += data
    if kept is run.status:
        run.read_status()
    if kept is run.errors:
        del kept[:-_KEPT_STDERR]
    return "output" if kept is run.output and len(kept) > run.limits.output_bytes else ""


def _drain(run: Run, selector: selectors.BaseSelector) -> None:
    """What a program that has ended left in its pipes; every writer is dead by now."""
    for fd, key in list(selector.get_map().items()):
        if key.data is run and fd != run.status_fd:
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while len(run.output) <= run.limits.output_bytes and fd in selector.get_map():
                    _take(fd, run, selector)


def choose(require: bool, **options: Any) -> Sandbox:
    """The best sandbox that works here. Raises RuntimeMissing when none does, or with `require` none that isolates."""
    sweep()
    modes: tuple[Mode, ...] = ("root", "plain") if os.geteuid() == 0 else ("user", "plain")
    said = []
    for mode in modes[:1] if require else modes:
        sandbox = Sandbox(mode, **options)
        try:
            ended = sandbox.run([*sandbox.python, "-c", "print(6 * 7)"], {}, limit_s=_SETUP_S)
        except Refused as error:
            said.append(f"{mode}: {error}")
            continue
        if ended.exit == 0 and ended.stdout == b"42\n":
            return sandbox
        said.append(f"{mode}: Python did not run in it: {ended.reason}")
    raise RuntimeMissing(
        "the reward code cannot run programs here" + (' with isolation = "require"' if require else ""),
        *said,
        f"programs run as a user without rights, who must be able to execute {options.get('python', sys.executable)}: "
        'where that is not so, name another one, as in [reward.code] python = "/usr/bin/python3"',
    )


def environment(home: str) -> dict[str, str]:
    """All that a program finds in its environment; nothing of the worker's."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def python_folders(python: str) -> list[str]:
    """Where an interpreter and its libraries lie, also when it is a virtual environment's."""
    if python == sys.executable:
        return [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(python))]
    code = (
        "import os, sys; print(sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), sep='\\n')"
    )
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=_SETUP_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeMissing(f'[reward.code] python = "{python}" does not run: {error}') from error
    return done.stdout.split("\n")[:3]


def visible(paths: Sequence[str]) -> list[str]:
    """Existing ones, parents before children, with where links lead."""
    wanted = {os.path.abspath(path) for path in paths if path and path != "/"}
    wanted |= {os.path.realpath(path) for path in wanted}
    return sorted((path for path in wanted if os.path.exists(path)), key=lambda path: (path.count("/"), path))


def temporary(data: bytes) -> Any:
    """An open, nameless file with this content, at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.flush()
    file.seek(0)
    return file


def sweep() -> None:
    """Removes folders of workers that were killed in the middle of a program; whoever takes their place calls this."""
    start = f"{PREFIX}{_here()}-"
    for name in os.listdir(tempfile.gettempdir()):
        pid = name.removeprefix(start).partition("-")[0]
        path = os.path.join(tempfile.gettempdir(), name)
        if name.startswith(start) and pid.isdigit() and not os.path.exists(f"/proc/{pid}") and not os.path.islink(path):
            remove(path)


def _here() -> str:
    """Where a process id means a process: this machine, and the same pid namespace."""
    return hashlib.sha256(f"{platform.node()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]


def remove(folder: str) -> None:
    """Removes a folder, also where a program took its own rights away. Links are unlinked, not followed."""

    def again(function: Callable[[str], Any], path: str, _: Any) -> None:
        with suppress(OSError):
            for place in (os.path.dirname(path), path):
                if not stat.S_ISLNK(os.lstat(place).st_mode):
                    os.chmod(place, 0o700)
            function(path) if function in (os.unlink, os.rmdir) else shutil.rmtree(path)

    for _ in range(2):
        if os.path.lexists(folder):
            shutil.rmtree(folder, onerror=again)
