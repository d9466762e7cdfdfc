"""Programs that attack: they harm neither worker nor machine nor the next program, in each mode that works here."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.errors import RuntimeMissing

sys.path.insert(0, str(Path(__file__).parent))
from boxes import SMALL, alive, box

from miles_code_reward import sandbox as sandbox_module
from miles_code_reward.sandbox import Ended, Sandbox, choose, drive, remove, sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made of Linux namespaces and limits")


@pytest.fixture(scope="module", params=["root" if os.geteuid() == 0 else "user", "plain"])
def sandbox(request):
    found = box(request.param)
    if found is None:
        pytest.skip(f'mode "{request.param}" does not work for this user here')
    return found


def run(sandbox: Sandbox, program: str, limit_s: float = 5.0, stdin: bytes = b"") -> Ended:
    return sandbox.run([*sandbox.python, "program.py"], {"program.py": program}, stdin=stdin, limit_s=limit_s)


def test_a_good_program_runs(sandbox):
    ended = run(sandbox, "print(int(input()) + 1)", stdin=b"41\n")
    assert (ended.exit, ended.why, ended.stdout, ended.reason) == (0, "", b"42\n", "")


def test_a_failure_says_how(sandbox):
    assert run(sandbox, "1 / 0").reason == "exit code 1: ZeroDivisionError: division by zero"
    assert run(sandbox, "import os; os.kill(os.getpid(), 11)").reason == "ended by SIGSEGV"


# --- Using things up -------------------------------------------------------------------------------------------------


def test_a_fork_bomb_is_bounded_and_gone(sandbox):
    mark = f"bomb{secrets.token_hex(4)}"
    program = f"""
import os, subprocess, sys, time
started = 0
for _ in range(50):
    try:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)  # {mark}"])
        started += 1
    except OSError:
        break
print(started)
"""
    ended = run(sandbox, program)
    # 4 tasks at once, of which one is the program (a worker without rights shares its count with its other processes)
    assert 0 < int(ended.stdout) <= SMALL.processes, ended
    assert alive(mark) == []


def test_an_endless_fork_bomb_ends_with_its_time(sandbox):
    start = time.monotonic()
    ended = run(sandbox, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limit_s=0.5)
    assert ended.why == "timeout" and time.monotonic() - start < 5


def test_a_memory_bomb_fails_alone(sandbox):
    assert "MemoryError" in run(sandbox, "x = bytearray(1 << 30)").reason  # 1 GiB of 256 MiB


def test_endless_output_is_cut(sandbox):
    ended = run(sandbox, "while True: print('x' * 1000)")
    assert ended.why == "output" and len(ended.stdout) < SMALL.output_bytes + (1 << 17)


def test_endless_errors_are_cut_and_no_reason_to_stop(sandbox):
    ended = run(sandbox, "import sys\nfor _ in range(1000): sys.stderr.write('x' * 1000)\nprint(1)")
    assert ended.stdout == b"1\n" and len(ended.stderr) <= 4096


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)",
        "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(1000)",
    ],
    ids=["busy", "catches all", "ignores signals", "closes its pipes"],
)
def test_an_endless_program_is_killed(sandbox, program):
    start = time.monotonic()
    assert run(sandbox, program, limit_s=0.4).why == "timeout"
    assert time.monotonic() - start < 4


def test_a_full_disk_is_the_programs_own(sandbox):
    ended = run(sandbox, "open('big', 'wb').write(b'x' * (8 << 20))")  # 8 of 4 MiB
    assert ended.exit != 0 and ("No space left" in ended.reason or "too large" in ended.reason or "SIGXFSZ" in ended.reason)


def test_all_files_together_are_bounded(sandbox):
    if sandbox.mode == "plain":
        pytest.skip("without namespaces the limit is one of each file")
    ended = run(sandbox, "for i in range(8): open(f'part{i}', 'wb').write(b'x' * (1 << 20))")  # 8 times 1 of 4 MiB
    assert "No space left" in ended.reason


def test_open_files_are_bounded(sandbox):
    assert "Too many open files" in run(sandbox, "keep = [open('/dev/null') for _ in range(100)]").reason


# --- Looking and reaching out ----------------------------------------------------------------------------------------


def test_no_secret_is_in_the_environment(sandbox, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    monkeypatch.setenv("HARMLESS", "sesame")
    ended = run(sandbox, "import os; print(sorted(os.environ))")
    names = "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']"
    assert ended.stdout.decode().strip() == names


def test_the_environment_and_memory_of_other_processes_cannot_be_read(sandbox, monkeypatch):
    program = f"""
import glob, os
found = []
for pid in {{os.getppid(), {os.getpid()}, 1}}:
    for name in ("environ", "mem", "fd/0", "cwd/x"):
        try:
            with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                found.append((pid, name, file.read(1)))
        except OSError:
            pass
print(found)
"""
    assert run(sandbox, program).stdout == b"[]\n"


def test_files_outside_cannot_be_written(sandbox, tmp_path):
    tmp_path.chmod(0o755)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    program = f"""
import os, sys
wrote = []
for path in ({str(mine)!r}, {str(tmp_path / "new")!r}, os.path.join(os.path.dirname(os.__file__), "new.py"), "/usr/new",
             "/new", {str(Path(sandbox_module.__file__))!r}):
    try:
        with open(path, "a") as file:
            file.write("x")
        wrote.append(path)
    except OSError:
        pass
print(wrote)
"""
    ended = run(sandbox, program)
    assert ended.stdout == b"[]\n" and mine.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_files_of_users_are_not_there(sandbox, tmp_path):
    if sandbox.mode == "plain":
        pytest.skip("without namespaces a program sees what every user may read")
    tmp_path.chmod(0o755)
    (tmp_path / "answers.json").write_text("42")
    paths = [str(tmp_path / "answers.json"), "/etc/passwd", "/home", "/proc"]
    program = f"import os; print([p for p in {paths} if os.path.exists(p)], sorted(os.listdir('/tmp')))"
    homes = {Path(sys.prefix), Path(sys.base_prefix)}  # an interpreter under /tmp, as in CI, is there to be run
    interpreters = {home.relative_to("/tmp").parts[0] for home in homes if home.is_relative_to("/tmp")}
    seen = run(sandbox, program).stdout.decode()
    assert seen in {f"[] {sorted([*interpreters, *own])}\n" for own in ([], ["program.py"])}


def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')")
    assert (ended.stdout == b"connected\n") == (sandbox.mode == "plain")


def test_it_cannot_kill_what_judges_it(sandbox):
    program = f"""
import os, signal
for pid in ({os.getpid()}, os.getppid(), -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("still here")
"""
    ended = run(sandbox, program)
    assert ended.why == "" and (ended.stdout == b"still here\n" or ended.exit in (-9, 137))


@pytest.mark.parametrize(("pipes", "inherited"), [(0, "[0, 1, 2]"), (1, "[0, 1, 2, 3, 4]")])
def test_nothing_is_inherited_but_what_was_given(sandbox, pipes, inherited):
    program = """
import os
found = []
for fd in range(256):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
print(found)
"""
    given = [fd for _ in range(pipes) for fd in os.pipe()]
    made = sandbox.start([*sandbox.python, "program.py"], {"program.py": program}, fds=given)
    try:
        assert drive([made], made, deadline=time.monotonic() + 5).stdout.decode() == f"{inherited}\n"
    finally:
        made.close()
        for fd in given:
            os.close(fd)


def test_rights_cannot_be_had_again(sandbox):
    program = "import os\ntry:\n    os.setuid(0); print('root')\nexcept OSError: print(os.getuid() != 0)"
    assert run(sandbox, program).stdout == b"True\n"


# --- Leaving things behind -------------------------------------------------------------------------------------------


def test_a_daemon_is_killed(sandbox):
    mark = f"daemon{secrets.token_hex(4)}"
    program = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, ["python", "-S", "-c", "import time; time.sleep(1000)  # {mark}"], {{}})
    os._exit(0)
time.sleep(0.3)
print("left it behind")
"""
    ended = run(sandbox, program)
    assert ended.stdout == b"left it behind\n"
    assert alive(mark) == []


def test_a_program_dies_with_a_worker_that_was_killed(sandbox):
    mark = f"orphan{secrets.token_hex(4)}"
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from miles_code_reward.sandbox import Sandbox
sandbox = Sandbox({sandbox.mode!r}, python={sandbox.python[0]!r})
program = "import os, sys; os.execv(sys.executable, ['p', '-S', '-c', 'import time; time.sleep(1000)  # {mark}'])"
sandbox.run([*sandbox.python, "-c", program], {{}}, limit_s=60)
"""
    worker = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert until(lambda: alive(mark) and not any("os.execv" in line for line in alive(mark)))
    finally:
        worker.kill()
        worker.wait()
    assert until(lambda: not alive(mark))
    assert any(f"-{worker.pid}-" in name for name in boxes_left())
    sweep()  # as whoever takes its place does
    assert not any(f"-{worker.pid}-" in name for name in boxes_left())


def test_folders_of_living_workers_and_of_others_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox_module.tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = sandbox_module._here()
    kept = {
        f"miles-code-{here}-{os.getpid()}-a",
        f"miles-code-elsewhere-{gone.pid}-b",
        f"{here}-{gone.pid}",
        "miles-code-x",
    }
    for name in (*kept, f"miles-code-{here}-{gone.pid}-c"):
        (tmp_path / name).mkdir()
    (tmp_path / f"miles-code-{here}-{gone.pid}-link").symlink_to(tmp_path / "miles-code-x")
    sweep()
    assert {path.name for path in tmp_path.iterdir()} == {*kept, f"miles-code-{here}-{gone.pid}-link"}


def until(true, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(true())


def test_the_folder_is_removed_and_links_in_it_are_not_followed(sandbox, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    before = boxes_left()
    program = f"""
import os
os.symlink({str(outside)!r}, "link")
os.symlink({str(outside / "kept")!r}, "file")
os.makedirs("a/b")
os.chmod("a/b", 0); os.chmod("a", 0); os.chmod(".", 0)
"""
    run(sandbox, program)
    assert (outside / "kept").read_text() == "kept"
    assert boxes_left() == before


def test_removing_takes_rights_back_and_follows_no_link(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    (folder / "closed" / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (folder / "closed" / "link").symlink_to(outside)
    (folder / "closed").chmod(0)
    remove(str(folder))
    assert not folder.exists() and (outside / "kept").exists()
    assert stat.S_IMODE(outside.stat().st_mode) != 0


def boxes_left() -> set[str]:
    import tempfile

    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(sandbox_module.PREFIX)}


# --- The environment -------------------------------------------------------------------------------------------------


def test_a_python_that_does_not_run_is_refused_before_the_run():
    with pytest.raises(RuntimeMissing, match='python = "/nowhere/python" does not run'):
        choose(False, python="/nowhere/python")


def test_where_isolation_is_required_there_is_no_other_mode(monkeypatch):
    monkeypatch.setattr(sandbox_module.Sandbox, "run", lambda self, *args, **kwargs: Ended(exit=int(self.mode != "plain")))
    with pytest.raises(RuntimeMissing, match='cannot run programs here with isolation = "require"'):
        choose(True)


WITHOUT_RIGHTS = """
import os, sys
sys.path.insert(0, {tests!r})
import boxes, pathlib, tempfile, test_box
test_box.test_removing_takes_rights_back_and_follows_no_link(pathlib.Path(tempfile.mkdtemp()))
for mode in ("user", "plain"):
    sandbox = boxes.box(mode)
    if sandbox is None:
        print(mode, "does not work")
        continue
    for test in (test_box.test_a_good_program_runs, test_box.test_an_endless_fork_bomb_ends_with_its_time,
                 test_box.test_there_is_no_network, test_box.test_a_daemon_is_killed):
        test(sandbox)
    test_box.test_an_endless_program_is_killed(sandbox, "while True: pass")
    print(mode, "works")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests themselves run without rights")
def test_a_worker_without_rights_has_the_same_box(tmp_path):
    """The mode "user", of a process that is not root."""
    paths = [p for p in sys.path if p] + [str(Path(sandbox_module.__file__).parents[1])]
    import miles_core

    paths.append(str(Path(miles_core.__file__).parents[1]))
    environment = {"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    program = WITHOUT_RIGHTS.format(tests=str(Path(__file__).parent))
    who = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "env": environment}
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        try:
            done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, **who)
        except OSError:
            continue
        if "No module named" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        assert "plain works" in done.stdout and ("user works" in done.stdout or "user does not work" in done.stdout)
        return
    pytest.skip("no Python of this version that another user may run")
