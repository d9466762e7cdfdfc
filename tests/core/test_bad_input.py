"""What a user may do wrong, through the `miles` command: one readable error, the right exit code, and nothing loaded."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs

from miles_cli.main import main
from miles_core.errors import ConfigError
from miles_core.reward_pool import RewardPool

TOY = """
name = "toy"
steps = 1
tokenizer.use = "toy"
data.use = "toy"
engine.use = "toy"
trainer.use = "toy"
rollout.groups_per_step = 2
rollout.samples_per_group = 2
rollout.sampling.max_new_tokens = 2
[[reward]]
use = "toy"
[[loss]]
use = "policy-gradient"
"""
LOADED = "start trainer and engines"
"""What a run says when it begins to load models."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILES_PLUGINS", "")
    monkeypatch.delenv("MILES_TRACEBACK", raising=False)
    (tmp_path / "run.toml").write_text(TOY)


def miles(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `miles run ...`."""
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments])
    for name in [n for n in sys.modules if n.startswith("miles_plugin_file_")]:
        del sys.modules[name]
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def write_rows(*prompts: str) -> None:
    Path("d.jsonl").write_text("\n".join(json.dumps({"prompt": p, "label": "3"}) for p in prompts))


JSONL = ("--set", "data.use=jsonl", "--set", "data.jsonl.path=d.jsonl")
LONG = "3,4=" * 10
"""41 tokens of the toy with its BOS; `3,4=` has 5."""

NO_FOLDER = "error: run.toml: name (line 2): must be the name of a folder"
CONFIGS = {
    "empty": ("", 'error: run.toml has 6 problems:'),
    "a number of 5000 digits": ("steps = " + "9" * 5000, "error: run.toml: cannot be read: Exceeds the limit"),
    "5000 brackets": ("a = " + "[" * 5000, "error: run.toml: cannot be read: maximum recursion depth"),
    "a name with a slash": (TOY.replace('"toy"', '"../evil"', 1), NO_FOLDER),
    "a name of two lines": (TOY.replace('"toy"', '"a\\nb"', 1), NO_FOLDER),
    "no name": (TOY.replace('"toy"', '""', 1), NO_FOLDER),
    "a long name": (TOY.replace('"toy"', f'"{"x" * 101}"', 1), NO_FOLDER),
    "a table for a value": (TOY.replace("steps = 1", "steps.x = 1"), "error: run.toml: steps"),
    "binary": ("\udcff\udcfe", "error: run.toml is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_cannot_be_read_is_one_error(kind, capsys):
    text, message = CONFIGS[kind]
    Path("run.toml").write_text(text, "utf-8", "surrogateescape")
    code, _, error = miles(capsys, "run.toml")
    assert code == 2 and error.startswith(message) and "Traceback" not in error
    assert not Path("runs").exists()


@pytest.mark.parametrize("value", ["steps=" + "9" * 5000, "steps=" + "[" * 5000])
def test_a_value_of_set_that_cannot_be_read_is_one_short_error(value, capsys):
    code, _, error = miles(capsys, "run.toml", "--set", value)
    assert code == 2 and error.startswith("error: --set steps=") and "cannot be read" in error and len(error) < 400


# --- Prompts and the tokenizer ---------------------------------------------------------------------------------------


def test_D5_a_refused_long_prompt_is_found_before_anything_loads(capsys):
    """Also where it is not the first: under long_prompts = "error" all prompts of an epoch are looked at."""
    write_rows(*["3,4="] * 8, LONG, *["3,4="] * 8)
    more = ("--set", "model.max_context=16", "--set", "data.long_prompts=error")
    code, out, error = miles(capsys, "run.toml", *JSONL, *more)
    assert code == 2 and error.startswith('error: prompt "row-9" has 41 tokens, and the context holds 16')
    assert LOADED not in out


def test_D5_long_prompts_at_the_end_of_an_epoch_and_the_start_of_the_next_are_not_all_prompts(capsys):
    """Two rows, one of them long: over 40 epochs the long one is often drawn twice in a row."""
    write_rows(LONG, "3,4=")
    more = ("--set", "model.max_context=16", "--set", "steps=20")
    code, out, _ = miles(capsys, "run.toml", *JSONL, *more)
    assert code == 0 and "done: 20 steps" in out
    write_rows(LONG, LONG + "1,2=")
    code, out, error = miles(capsys, "run.toml", *JSONL, *more)
    assert code == 2 and error.startswith("error: all of the last 3 prompts fill the context of 16 tokens")
    assert LOADED not in out


# --- Rewards ---------------------------------------------------------------------------------------------------------

REWARD = "import math, time\nimport miles_core\n@miles_core.reward('mine')\ndef mine(sample):\n    "
MINE = ("--plugin-file", "mine.py", "--set", "reward[0].use=mine")


def test_R2_a_score_that_advantages_cannot_hold_is_an_error_like_nan(capsys):
    """float32 ends at 3.4e38: beyond it, group statistics would be infinite."""
    for value, said in (("1e39", "returned 1e+39 as a score, which advantages cannot hold"), ("math.nan", "returned nan")):
        Path("mine.py").write_text(REWARD + f"return {value}\n")
        code, _, error = miles(capsys, "run.toml", *MINE)
        assert code == 1 and said in error and "Traceback" not in error
        assert error.count(said) == 1  # the message stands where a traceback would, and is not said again
    Path("mine.py").write_text(REWARD + "return 3e38 * (1 - 2 * (sample.index % 2))\n")
    assert miles(capsys, "run.toml", *MINE)[0] == 0


def test_a_run_without_a_reward_says_so(capsys):
    Path("run.toml").write_text(TOY.replace('[[reward]]\nuse = "toy"\n', ""))
    code, out, _ = miles(capsys, "run.toml", "--dry-run")
    assert code == 0 and "there is no [[reward]]: every answer gets the reward 0" in " ".join(out.split())


def test_R4_a_worker_that_dies_is_told_once(capsys):
    Path("mine.py").write_text(REWARD + "__import__('os')._exit(3)\n")
    code, _, error = miles(capsys, "run.toml", *MINE)
    assert code == 1 and error.count("the reward worker died twice on this sample: exit code 3") == 1


def test_R4_an_endless_message_is_cut(capsys):
    Path("mine.py").write_text(REWARD + "raise ValueError('boom ' * 10_000)\n")
    code, _, error = miles(capsys, "run.toml", *MINE)
    assert code == 1 and "ValueError: boom boom" in error and len(error) < 3000


# --- Run folders -----------------------------------------------------------------------------------------------------


def finished_run(capsys) -> Path:
    assert miles(capsys, "run.toml", "--set", "checkpoint.every=1")[0] == 0
    (folder,) = Path("runs").iterdir()
    return folder


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"plugins": 3, "tables": {}}'])
def test_a_damaged_run_file_is_one_error(capsys, content):
    folder = finished_run(capsys)
    (folder / "run.json").write_text(content)
    code, out, error = miles(capsys, "run.toml", "--resume", str(folder))
    assert code == 2 and error.startswith(f"error: {folder}/run.json is damaged: ") and LOADED not in out


def test_C1_a_manifest_of_another_form_is_passed_over(capsys):
    folder = finished_run(capsys)
    for content in ("[]", '{"files": 3}', "null"):
        for manifest in folder.glob("checkpoints/*/manifest.json"):
            manifest.write_text(content)
        code, out, _ = miles(capsys, "run.toml", "--set", "checkpoint.every=1", "--resume", str(folder))
        assert code == 0 and "passing over step-000001: its manifest cannot be read" in out
        assert "has no complete checkpoint; the run starts from the beginning" in out


def test_a_cursor_of_another_data_source_is_refused(capsys):
    folder = finished_run(capsys)
    write_rows("3,4=")
    more = ("--set", "checkpoint.every=1", "--set", "steps=2", "--accept-changes", "--resume", str(folder))
    code, _, error = miles(capsys, "run.toml", *JSONL, *more)
    assert code == 2 and 'the checkpoint is of a run on data "toy", and this one reads "jsonl"' in error


def test_a_folder_that_cannot_be_written_or_is_full_is_an_error_of_the_environment(capsys, monkeypatch):
    Path("file").write_text("x")
    for out in ("file", "file/below", "/proc/runs"):
        code, _, error = miles(capsys, "run.toml", "--out", out)
        assert code == 3 and error.startswith(f"error: cannot create a run folder under {out}: ")
        assert "choose another place with --out DIR" in error
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    code, out, error = miles(capsys, "run.toml")
    assert code == 3 and "has 1 MB free, and a run needs at least 67 MB" in error and LOADED not in out


def test_two_runs_in_one_folder_are_refused(capsys):
    folder = finished_run(capsys)
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    code, out, error = miles(capsys, "run.toml", "--resume", str(folder), "--accept-changes", "--set", "steps=2")
    os.close(other)
    assert code == 2 and error.startswith(f"error: another process is running in {folder}") and LOADED not in out
    code, out, _ = miles(capsys, "run.toml", "--resume", str(folder), "--accept-changes", "--set", "steps=2")
    assert code == 0 and "done: 2 steps" in out  # the lock went with its holder


def test_a_run_holds_its_folder_while_it_runs(tmp_path):
    """From outside, in the middle of a run."""
    plugin = tmp_path / "look.py"
    plugin.write_text(
        "import fcntl, os\nfrom miles_core import hookimpl\n"
        "@hookimpl\ndef miles_run_start(config, run_dir):\n"
        "    try:\n        fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError:\n        print('it is held')\n"
    )
    command = runs.command(tmp_path / "run.toml", tmp_path / "runs", "--plugin-file", str(plugin))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=runs.environment(MILES_PLUGINS=""))
    assert done.returncode == 0 and "it is held" in done.stdout


# --- Stopping --------------------------------------------------------------------------------------------------------


def test_workers_that_become_ready_after_a_run_was_stopped_raise_nothing_in_their_thread(tmp_path, monkeypatch):
    """Their futures are cancelled by then; an exception in the thread would be printed over the error."""
    raised = []
    monkeypatch.setattr("threading.excepthook", lambda args: raised.append(args.exc_value))
    for fails in (False, True):
        pool = RewardPool({}, num_workers=1, declared=frozenset(), startup_timeout_s=5, log_dir=None, warn=print)

        def spawn(index, pool=pool, fails=fails):
            pool._started[index].cancel()
            if fails:
                raise ConfigError("it was killed")
            return type("Worker", (), {"rewards": {}, "close": lambda self: None, "kill": lambda self: None})()

        monkeypatch.setattr(pool, "_spawn", spawn)
        pool.start()
        pool.close()
    assert raised == []


# --- One message, said once --------------------------------------------------------------------------------------------


def test_an_element_that_is_refused_is_not_missed_as_well(capsys):
    """The only [[loss]] has a wrong weight: pydantic leaves it out and then misses one."""
    code, _, error = miles(capsys, "run.toml", "--set", "loss[0].weight=nan")
    assert code == 2 and "loss[0].weight" in error and "element" not in error and "problems" not in error


def test_the_place_of_a_refusal_is_said_once(capsys):
    more = ("--set", "advantage[0].use=grpo", "--set", "advantage[1].use=grpo")
    Path("run.toml").write_text(TOY + '[[advantage]]\nuse = "grpo"\n[[advantage]]\nuse = "grpo"\n')
    code, _, error = miles(capsys, "run.toml", *more)
    assert code == 2 and error.count("advantage[1].use") == 1 and 'advantage "grpo" (built in)' in error
