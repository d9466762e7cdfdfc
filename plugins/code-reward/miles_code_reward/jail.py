"""Runs one program in a box and reports how it ended: `python -I -S jail.py SPEC_FD STATUS_FD`, standard library only.

Modes, tried by `sandbox.choose` in this order:

- "root": namespaces (mount, pid, net, ipc, uts) of a process with CAP_SYS_ADMIN; the program gets a user id of its own.
- "user": the same inside a user namespace, for a worker without privileges.
- "plain": no namespaces; limits and a session alone, and as root also a user id of its own.

With namespaces there are three processes: this one outside, one inside that is process 1 of the box (when it ends, the
kernel ends everything in the box), and the program. Nothing that the program could read here is secret: what it is
tested with never comes into this process, its arguments or its environment.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import resource
import signal
import sys
import time

BOX = "/box"
_CLONE = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000, "net": 0x40000000}
_CLONE_USER = 0x10000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MOUNT_SETATTR = 442
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FIRST_FREE_FD = 100

libc = ctypes.CDLL(None, use_errno=True)


def checked(name: str, *args: object) -> None:
    """Calls a function of the C library; raises OSError with its name."""
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    checked("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def die_with_parent() -> None:
    libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)


class Status:
    """Lines of JSON to the worker. The descriptor is never inherited by the program."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_inheritable(fd, False)

    def send(self, **row: object) -> None:
        os.write(self._fd, (json.dumps(row) + "\n").encode())


def main(spec_fd: int, status_fd: int) -> None:
    die_with_parent()
    status = Status(status_fd)
    with os.fdopen(spec_fd, encoding="utf-8") as file:
        spec = json.load(file)
    if spec["mode"] == "plain":
        in_the_open(spec, status)
        return
    try:
        go_in, go_out = os.pipe()
        unshare(spec["mode"])
        pid = os.fork()
        if pid == 0:
            os.close(go_out)
            die_with_parent()
            if os.read(go_in, 1):  # nothing: the process outside died before it could be followed
                first_process(spec, status)
            os._exit(1)
        os.write(go_out, b"x")
        os.waitpid(pid, 0)
    except OSError as error:
        status.send(refused=str(error))


def unshare(mode: str) -> None:
    flags = sum(_CLONE.values())
    if mode == "root":
        checked("unshare", flags)
        return
    uid, gid = os.getuid(), os.getgid()
    checked("unshare", flags | _CLONE_USER)
    # An id other than 0 inside: what it executes has no capabilities, in this user namespace either.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid or 65534} {uid} 1"),
        ("gid_map", f"{gid or 65534} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def first_process(spec: dict, status: Status) -> None:
    """Process 1 of the box. Whatever is still running when it ends is killed by the kernel."""
    try:
        furnish(spec)
        fill(BOX, spec)
        pid = start_program(BOX, spec, status)
    except BaseException as error:
        status.send(refused=f"{type(error).__name__}: {error}")
        return
    status.send(**wait_for(pid))


def in_the_open(spec: dict, status: Status) -> None:
    libc.prctl(36, 1, 0, 0, 0)  # orphans below become children of this process, and are killed with the rest
    libc.prctl(4, 0, 0, 0, 0)  # its memory cannot be read by others of the same user
    try:
        fill(spec["root"], spec)
        pid = start_program(spec["root"], spec, status)
    except BaseException as error:
        status.send(refused=f"{type(error).__name__}: {error}")
        return
    ended = wait_for(pid)
    kill_below()
    status.send(**ended)


# --- The box ---------------------------------------------------------------------------------------------------------


def furnish(spec: dict) -> None:
    """A file system of its own: what is readable, a few devices, and a folder of bounded size for the program."""
    root = spec["root"]
    mount("none", "/", None, _REC | _PRIVATE)
    mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=0755")
    for path in spec["readable"]:
        bind(path, root + path, read_only=True)
    os.makedirs(root + "/dev", exist_ok=True)
    for device in _DEVICES:
        bind(device, root + device, read_only=False)
    os.mkdir(root + BOX)
    owner = f",uid={spec['uid']},gid={spec['uid']}" if spec["uid"] is not None else ""
    mount("tmpfs", root + BOX, "tmpfs", _NOSUID | _NODEV, f"size={spec['disk_bytes']},nr_inodes=10000,mode=0700{owner}")
    if not os.path.lexists(root + "/tmp"):
        os.symlink(BOX, root + "/tmp")
    os.chdir(root)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None or libc.syscall(ctypes.c_long(number), b".", b".") != 0:
        raise OSError(ctypes.get_errno(), f"pivot_root failed on {platform.machine()}")
    checked("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def bind(source: str, target: str, *, read_only: bool) -> None:
    if os.path.lexists(target):
        return  # lies inside something that is bound already
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source) and os.path.dirname(source) == "/":  # /bin -> usr/bin
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        open(target, "w").close()
    mount(source, target, None, _BIND | _REC)
    if read_only:
        attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID | _NODEV, 0, 0, 0)
        path = os.fsencode(target)
        if libc.syscall(ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(attributes), 32) != 0:
            raise OSError(ctypes.get_errno(), "mount_setattr: this kernel cannot bind folders read-only")


def fill(folder: str, spec: dict) -> None:
    """Writes the program's files, as the program's user."""
    for name, text in spec["files"].items():
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        if spec["uid"] is not None:
            os.chown(path, spec["uid"], spec["uid"])
    if spec["uid"] is not None:
        os.chown(folder, spec["uid"], spec["uid"])


# --- The program -----------------------------------------------------------------------------------------------------


def start_program(folder: str, spec: dict, status: Status) -> int:
    pid = os.fork()
    if pid:
        status.send(started=pid)
        return pid
    try:
        os.setsid()
        os.chdir(folder)
        # First out of the way, then to 3, 4, ...: a number may be taken by another one of them.
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE_FD) for fd in spec["fds"]]
        for number, fd in enumerate(moved, 3):
            os.dup2(fd, number, inheritable=True)
        for fd in range(3 + len(moved), _FIRST_FREE_FD):
            if fd != status._fd:
                close(fd)
        os.closerange(max(_FIRST_FREE_FD, status._fd + 1), 1 << 16)
        set_limits(spec)
        if spec["uid"] is not None:
            os.setgroups([])
            os.setresgid(spec["uid"], spec["uid"], spec["uid"])
            os.setresuid(spec["uid"], spec["uid"], spec["uid"])
        die_with_parent()  # after the change of the user, which ends it
        checked("prctl", 38, 1, 0, 0, 0)  # no new privileges: set-user-id programs do not change the user
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as error:
        status.send(refused=f"cannot start {spec['argv'][0]}: {type(error).__name__}: {error}")
    os._exit(127)


def close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError as error:
        if error.errno != 9:  # EBADF: it was not open
            raise


def set_limits(spec: dict) -> None:
    processes = spec["processes"]
    if spec["mode"] == "plain" and spec["uid"] is None:
        processes += tasks_of(os.getuid())  # the kernel counts all of this user
    for name, soft, hard in (
        ("CORE", 0, 0),
        ("CPU", spec["cpu_s"], spec["cpu_s"] + 1),
        ("AS", spec["memory_bytes"], spec["memory_bytes"]),
        ("NPROC", processes, processes),
        ("FSIZE", spec["disk_bytes"], spec["disk_bytes"]),
        ("NOFILE", spec["open_files"], spec["open_files"]),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
    ):
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            resource.setrlimit(number, (soft, hard))


def tasks_of(uid: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it ended meanwhile
            continue
    return count


def wait_for(program: int) -> dict:
    """How the program ended. Orphans that end before it are reaped on the way."""
    while True:
        pid, code, usage = os.wait4(-1, 0)
        if pid == program:
            return {
                "exit": os.waitstatus_to_exitcode(code),
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "memory_kib": usage.ru_maxrss,
            }


def kill_below() -> None:
    """Without a pid namespace: kills whatever the program left behind, which this process has adopted."""
    for _ in range(1000):
        below = children()
        if not below:
            return
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue
        time.sleep(0.001)


def children() -> list[int]:
    """All living descendants and zombies."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
    found = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found - {os.getpid()})
        found |= more


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
