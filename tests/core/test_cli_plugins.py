"""The command line: `miles plugins`, commands of plugins, exit codes, and the options of `miles run`."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import pytest
import typer
from dists import Dists

from miles_cli import commands, main, plugins
from miles_core.errors import ConfigError, Interrupted, RunFailed, RuntimeMissing


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    """No command of an installed plugin, and no choice of the caller's environment."""
    monkeypatch.setattr(commands, "installed_commands", lambda: ())
    monkeypatch.delenv("MILES_PLUGINS", raising=False)
    monkeypatch.delenv("MILES_TRACEBACK", raising=False)


def miles(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(argv)
    return caught.value.code or 0


# --- plugins list, info, check ---------------------------------------------------------------------------------------


def test_G1_list_shows_every_state_and_imports_nothing(dists: Dists, capsys):
    dists.add("good", "raise RuntimeError('imported')")
    dists.add("old", requires=("miles-core>=99",))
    dists.add("fast", requires=('gone>=1; extra == "runtime"',))
    dists.add("twice", dist="one-twice")
    dists.add("twice", dist="two-twice")
    assert plugins.list_command(dists.all) == 0
    table, _, reasons = capsys.readouterr().out.partition("\n\n")
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["plugin", "state"],
        ["fast", "needs-runtime"],
        ["good", "ok"],
        ["old", "incompatible"],
        ["twice", "broken"],
        ["twice", "broken"],
    ]
    assert "needs gone>=1 (not installed): pip install 'miles-fast[runtime]'" in reasons
    assert 'plugin "old" (miles-old 1.0) is incompatible: wants miles-core>=99' in reasons
    assert "one-twice 1.0 and two-twice 1.0; uninstall one of them" in reasons


def test_list_in_a_pipe_is_one_unwrapped_line_per_plugin(dists: Dists, capsys):
    name = "a-plugin-with-quite-a-long-name-" + "x" * 60
    dists.add(name, dist="d")
    plugins.list_command(dists.all)
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2 and lines[1].startswith(name) and lines[1].endswith(f"the {name} plugin") and "\x1b" not in lines[1]
    )


def test_list_shows_what_the_environment_leaves_out(dists: Dists, capsys, monkeypatch):
    monkeypatch.setenv("MILES_PLUGINS", "a")
    dists.add("a")
    dists.add("b")
    plugins.list_command(dists.all)
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["a", "ok"], ["b", "off"]]
    assert 'plugin "b" (miles-b 1.0) is off: left out by MILES_PLUGINS' in out


def test_info_shows_components_and_options_of_that_plugin_alone(dists: Dists, capsys):
    dists.add(
        "acme",
        """
        import miles_core

        @miles_core.reward("acme")
        def acme(sample, *, bonus: float = 1.5):
            '''What acme likes.

            bonus: for every match
            '''
        """,
    )
    dists.add("other", "raise RuntimeError('imported')")
    assert plugins.info_command("Acme", dists.all) == 0
    out = capsys.readouterr().out
    assert "acme: the acme plugin\n  distribution miles-acme 1.0, module miles_acme\n" in out
    assert "\nreward/acme  What acme likes.\n  bonus: float = 1.5  for every match\n" in out
    assert "miles_other" not in sys.modules


def test_info_of_a_broken_plugin_shows_its_metadata_and_then_the_error(dists: Dists, capsys):
    dists.add("bad", "raise RuntimeError('no licence')")
    with pytest.raises(ConfigError.__mro__[1], match="no licence"):
        plugins.info_command("bad", dists.all)
    assert "distribution miles-bad 1.0" in capsys.readouterr().out


CHECKED = {
    "good": (None, "ok", ""),
    "raises": ("raise RuntimeError('no licence')", "broken", "importing miles_raises raised RuntimeError: no licence"),
    "exits": ("import os; os._exit(0)", "broken", "importing miles_exits ended the process with exit code 0"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "broken", "ended the process with SIGSEGV"),
    "hangs": ("while True:\n    pass", "hangs", "was still running after 3 s, and was killed"),
    "stubborn": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "hangs",
        "was still running after 3 s, and was killed",
    ),
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "from miles_core import hookimpl\n@hookimpl\ndef miles_rewards(): return []",
        "ok",
        "",
    ),
    "prints": (
        "print('noise' * 100000)\nfrom miles_core import hookimpl\n@hookimpl\ndef miles_rewards(): return []",
        "ok",
        "",
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_G1_check_imports_in_a_child_that_is_killed(dists: Dists, name: str, capsys):
    source, state, reason = CHECKED[name]
    dists.add(name, source)
    start = time.monotonic()
    code = plugins.check_command([], 3.0 if state == "hangs" else 60.0, dists.all)
    assert time.monotonic() - start < 20
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:2] == [name, state] and reason in line
    assert code == (0 if state == "ok" else 1)
    assert f"miles_{name}" not in sys.modules


def test_G1_check_kills_what_the_plugin_started_too(dists: Dists, tmp_path: Path):
    pid_file = tmp_path / "pid"
    source = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    dists.add("spawns", source + f"open({str(pid_file)!r}, 'w').write(str(child.pid))\nwhile True: pass")
    for timeout_s in (2.0, 10.0, 50.0):  # long enough to get that far, on a busy machine too
        assert plugins.check_command([], timeout_s, dists.all) == 1
        if pid_file.is_file():
            break
    deadline = time.monotonic() + 10  # a kill takes effect a moment after it was sent
    while alive(pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid_file.read_text())


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # Z: dead, not yet reaped
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_check_of_one_plugin_leaves_the_others_alone(dists: Dists, capsys):
    dists.add("good")
    dists.add("bad", "raise RuntimeError")
    assert plugins.check_command(["good"], 20.0, dists.all) == 0
    assert "bad" not in capsys.readouterr().out


def test_check_counts_incompatible_and_doubled_plugins_as_failures(dists: Dists, capsys):
    dists.add("old", requires=("miles-core>=99",))
    assert plugins.check_command([], 20.0, dists.all) == 1
    assert "incompatible" in capsys.readouterr().out


# --- Commands of plugins ---------------------------------------------------------------------------------------------

COMMAND = """
    import typer
    app = typer.Typer()

    @app.command()
    def main(word: str):
        print("hello", word)
"""


def install_commands(monkeypatch, made: Dists) -> None:
    real = commands.discover_commands
    commands_of = commands.cache(lambda: _grouped(real(made.all)))
    monkeypatch.setattr(commands, "installed_commands", commands_of)


def _grouped(found: list) -> tuple:
    names = sorted({c.name for c in found})
    return tuple(commands.PluginCommand(n, tuple(c for c in found if c.name == n)) for n in names)


def test_commands_of_plugins_are_listed_from_metadata_and_imported_when_invoked(dists: Dists, monkeypatch, capsys):
    dists.add("dash", COMMAND, group="miles.commands", value="miles_dash:app")
    install_commands(monkeypatch, dists)
    assert miles("--help") == 0
    assert "dash         From miles-dash 1.0." in capsys.readouterr().out and "miles_dash" not in sys.modules
    assert miles("dash", "world") == 0
    assert capsys.readouterr().out == "hello world\n"


def test_G1_a_broken_command_of_a_plugin_bricks_nothing_else(dists: Dists, monkeypatch, capsys):
    dists.add("dash", "raise SystemExit(0)", group="miles.commands", value="miles_dash:app")
    install_commands(monkeypatch, dists)
    assert miles("--help") == 0 and miles("plugins", "--help") == 0
    capsys.readouterr()
    assert miles("dash") == 2
    assert capsys.readouterr().err == 'error: the command "dash" of miles-dash 1.0 does not load: SystemExit(0)\n'


def test_G2_two_commands_of_one_name_are_refused_and_never_replace_a_built_in(dists: Dists, monkeypatch, capsys):
    for dist in ("a-dist", "b-dist"):
        dists.add("dash", COMMAND, dist=dist, group="miles.commands", value=f"{dist.replace('-', '_')}:app")
    dists.add("run", COMMAND, dist="c-dist", group="miles.commands", value="c_dist:app")
    install_commands(monkeypatch, dists)
    assert miles("dash", "x") == 2
    assert 'two distributions offer a command "dash": a-dist 1.0 and b-dist 1.0' in capsys.readouterr().err
    assert miles("run", "--help") == 0
    assert "CONFIG" in capsys.readouterr().out and "c_dist" not in sys.modules
    plugins.print_hidden_commands()
    assert 'the command "run" of c-dist 1.0 cannot be reached' in capsys.readouterr().out


# --- Errors and exit codes -------------------------------------------------------------------------------------------


def fake_run(monkeypatch, body) -> None:
    module = types.ModuleType("miles_cli.run")
    module.run_command = body
    module.help_command = body
    monkeypatch.setitem(sys.modules, "miles_cli.run", module)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("no such key", "nearest: x"), 2, "error: no such key\n  nearest: x\n"),
        (RunFailed("it died"), 1, "error: it died\n"),
        (RuntimeMissing("no GPU"), 3, "error: no GPU\n"),
        (Interrupted("saved"), 130, "error: saved\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyError("x"), 1, "error: unexpected KeyError: 'x'\n  see where with --traceback or MILES_TRACEBACK=1\n"),
    ],
)
def test_each_error_is_one_message_and_an_exit_code(monkeypatch, capsys, error: BaseException, code: int, text: str):
    def body(*args, **kwargs):
        raise error

    fake_run(monkeypatch, body)
    assert miles("run", "x.toml") == code
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (text, "")


@pytest.mark.parametrize("how", ["--traceback", "--strict", "environment"])
def test_a_traceback_is_shown_when_asked_for(monkeypatch, capsys, how: str):
    def body(*args, **kwargs):
        raise RunFailed("it died")

    fake_run(monkeypatch, body)
    if how == "environment":
        monkeypatch.setenv("MILES_TRACEBACK", "1")
    assert miles("run", "x.toml", *([how] if how.startswith("--") else [])) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and err.endswith("error: it died\n")


@pytest.mark.parametrize("argv", [["frob"], ["run"], ["run", "x.toml", "--nope"], ["plugins", "info"], ["show-config"]])
def test_bad_usage_is_exit_code_2_without_traceback(capsys, argv: list[str]):
    assert miles(*argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and err


# --- The run command -------------------------------------------------------------------------------------------------


def test_the_options_of_run_are_fixed():
    """A snapshot: component options belong in the config and never here. Change it only together with the docs."""
    command = typer.main.get_command(main.app).commands["run"]
    assert [sorted(p.opts) for p in command.params] == [
        ["config"],
        ["--plugins"],
        ["-p"],
        ["--set"],
        ["--plugin-file"],
        ["--out"],
        ["--resume"],
        ["--accept-changes"],
        ["--dry-run"],
        ["--strict"],
        ["--traceback"],
    ]


def record(monkeypatch) -> list:
    seen: list = []

    def body(config, **kwargs):
        seen.append((config, kwargs))
        return 0

    fake_run(monkeypatch, body)
    return seen


def test_run_hands_everything_to_its_body(monkeypatch):
    seen = record(monkeypatch)
    argv = [
        "run",
        "c.toml",
        "--plugins",
        "a,b",
        "-p",
        "c",
        "-p",
        "no:d",
        "--set",
        "x=1",
        "--set",
        "y=2",
        "--plugin-file",
        "f.py",
        "--out",
        "o",
        "--dry-run",
        "--strict",
    ]
    assert miles(*argv, "--accept-changes") == 0
    assert seen == [
        (
            Path("c.toml"),
            {
                "plugins": ("a", "b"),
                "adjust": ("c", "no:d"),
                "sets": ("x=1", "y=2"),
                "files": (Path("f.py"),),
                "out": Path("o"),
                "resume": None,
                "dry_run": True,
                "strict": True,
                "accept_changes": True,
            },
        )
    ]


@pytest.mark.parametrize(
    ("argv", "resume"),
    [
        (["c.toml"], None),
        (["c.toml", "--resume"], "latest"),
        (["--resume", "c.toml"], "latest"),
        (["c.toml", "--resume", "--dry-run"], "latest"),
        (["c.toml", "--resume", "runs/one"], "runs/one"),
        (["--resume=runs/one", "c.toml"], "runs/one"),
    ],
)
def test_resume_with_and_without_a_run(monkeypatch, argv: list[str], resume: str | None):
    seen = record(monkeypatch)
    assert miles("run", *argv) == 0
    assert (seen[0][0], seen[0][1]["resume"]) == (Path("c.toml"), resume)


@pytest.mark.parametrize(("argv", "expected"), [([], None), (["--plugins", ""], ()), (["--plugins", "a, b"], ("a", "b"))])
def test_no_plugins_and_an_empty_list_of_plugins_differ(monkeypatch, argv: list[str], expected: tuple | None):
    seen = record(monkeypatch)
    miles("run", "c.toml", *argv)
    assert seen[0][1]["plugins"] == expected


def test_help_with_a_config_adds_the_components_options(monkeypatch, capsys):
    seen = record(monkeypatch)
    assert miles("run", "--help") == 0 and seen == []
    assert miles("run", "--set", "engine.use=toy", "c.toml", "--help", "-p", "x") == 0
    assert seen == [(Path("c.toml"), {"plugins": None, "adjust": ("x",), "sets": ("engine.use=toy",), "files": ()})]
    assert capsys.readouterr().out.count("--plugin-file F.PY") == 2


def test_the_exit_code_of_the_body_is_the_exit_code(monkeypatch):
    fake_run(monkeypatch, lambda config, **kwargs: 1)
    assert miles("run", "c.toml") == 1


def test_version(capsys):
    from miles_core import __version__

    assert miles("--version") == 0
    assert capsys.readouterr().out == f"miles {__version__}\n"
