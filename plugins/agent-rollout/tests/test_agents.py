"""Agents: functions in threads and processes, programs; what they give back, and every way in which they fail."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import pytest
from agent_demo_agents import ask, post
from agent_words import END, HE, HELLO, HERE, LLO, agent_group, ids, run_group, sampled

from miles_agent_rollout.agents import make_agent, result_row
from miles_core.errors import ConfigError
from miles_core.testing.engines import StubEngine
from miles_core.types import Prompt

USER = {"role": "user", "content": "hi"}
DEMO = f"{HERE}/agent_demo_agents.py"


def once(task, notes):
    return ask(task, [USER])


# --- What an agent gives back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reward", "response", "more"),
    [
        (None, None, "hello", {}),
        (0.25, 0.25, "hello", {}),
        (True, 1.0, "hello", {}),
        ("42", None, "42", {}),
        ({"reward": 2, "response": "x", "metadata": {"steps": 3}}, 2.0, "x", {"steps": 3}),
    ],
)
def test_what_an_agent_returns_reaches_the_rewards(value, reward, response, more):
    def agent(task, notes):
        once(task, notes)
        return value

    (sample,), *_ = agent_group(agent, [HE, LLO, END])
    assert (sample.status, sample.response, sample.metadata["agent_reward"]) == ("stop", response, reward)
    assert sample.metadata["agent"] == more


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "not a finite number"),
        ({"reward": "1"}, "not a finite number"),
        ({"score": 1}, "known are reward, response, metadata"),
        ([1], "returned a list"),
        ({"response": 3}, "not text"),
        ({"metadata": 3}, "not a mapping"),
        ({"metadata": {"x": object()}}, "not JSON"),
    ],
)
def test_R2_what_cannot_be_a_result_is_an_error(value, message):
    with pytest.raises(ValueError, match=message):
        result_row(value)

    def agent(task, notes):
        once(task, notes)
        return value

    (sample,), *_ = agent_group(agent)
    assert sample.status == "error" and message in sample.reason and not sample.loss_mask.any()


# --- Failures --------------------------------------------------------------------------------------------------------


def test_an_agent_that_crashes_is_an_error_and_its_siblings_are_whole():
    def agent(task, notes):
        once(task, notes)
        if task.index == 1:
            raise KeyError("lost")

    samples, *_ = agent_group(agent, num_samples=3)
    assert [s.status for s in samples] == ["stop", "error", "stop"]
    assert samples[1].reason == "the agent failed: KeyError: 'lost'"
    assert [bool(s.loss_mask.any()) for s in samples] == [True, False, True]


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("x"), KeyboardInterrupt()])
def test_an_agent_may_raise_anything(error):
    def agent(task, notes):
        raise error

    (sample,), *_ = agent_group(agent)
    assert sample.status == "error" and type(error).__name__ in sample.reason


def test_an_agent_that_never_asks_is_an_error():
    (sample,), engine, _ = agent_group(lambda task, notes: 1.0)
    assert sample.status == "error" and "it made no request" in sample.reason
    assert not engine.requests and sample.num_tokens == sample.prompt_len > 0


def test_an_agent_whose_every_request_was_refused_is_an_error():
    (sample,), *_ = agent_group(lambda task, notes: post(task, {"messages": []})[0] and None)
    assert sample.status == "error" and sample.metadata["refused"] == 1


def test_a_session_that_is_never_closed_is_reaped_and_counted():
    """The agent hangs after one answer: at its limit the session is closed, the request after that is refused, and the
    trajectory is a time-out. The thread goes on, since threads cannot be killed."""

    def agent(task, notes):
        once(task, notes)
        time.sleep(3)
        notes["late"] = post(task, {"messages": [USER]})

    began = time.monotonic()
    (sample,), _, notes = agent_group(agent, options={"timeout_s": 0.3})
    assert time.monotonic() - began < 2.5
    assert sample.status == "timeout" and "within 0.3 s" in sample.reason and not sample.loss_mask.any()
    assert sample.metadata["reaped"] and notes["gateway"].counts["reaped"] == 1


def test_a_request_that_outlives_its_session_is_ended():
    engine = StubEngine(answer=lambda weight, request: [HE] * 100, token_s=0.1)
    (sample,), _, notes = agent_group(lambda task, notes: notes.update(a=post(task, {"messages": [USER]})), engine=engine,
                                      options={"timeout_s": 0.3})  # fmt: skip
    assert sample.status == "timeout"
    until = time.monotonic() + 10
    while "a" not in notes and time.monotonic() < until:
        time.sleep(0.01)
    assert notes["a"][0] == 403 and "its time is over" in notes["a"][1]["error"]["message"]


def test_agents_run_at_most_so_many_at_a_time():
    running = []

    def agent(task, notes):
        running.append(1)
        notes["most"] = max(notes.get("most", 0), len(running))
        time.sleep(0.05)
        once(task, notes)
        running.pop()

    _, _, notes = agent_group(agent, num_samples=5, options={"max_running": 2})
    assert notes["most"] == 2


# --- Coroutines, processes, programs ---------------------------------------------------------------------------------


def one(options, *, prompt=None, answers=(), **fields):
    group, engine, _ = run_group("agent", options, answers, prompt=prompt, **fields)
    return group.samples[0], engine


def test_coroutines_run_on_a_loop_of_their_own(tmp_path):
    sample, _ = one({"agent": f"{DEMO}:patient"}, answers=[[HE, LLO, END]])
    assert sample.response == "hello!" and sampled(sample) == [HE, LLO, END]


def test_a_function_in_a_process_speaks_by_its_environment(tmp_path, monkeypatch):
    """It sees no secret of this process but the one that was named; what the gateway gives it is its own key."""
    for name in ("MILES_TEST_SECRET_TOKEN", "MILES_TEST_PLAIN", "MILES_TEST_API_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "the-users-own")
    options = {"agent": f"{DEMO}:environment", "mode": "process", "env": ("MILES_TEST_API_KEY",)}
    sample, engine = one(options, answers=[[HELLO, END]], run_dir=tmp_path)
    assert sample.metadata["agent_reward"] == 0.5, sample.reason
    assert sample.metadata["agent"]["pid"] != os.getpid()
    seen = {"MILES_TEST_SECRET_TOKEN": None, "MILES_TEST_PLAIN": "x", "MILES_TEST_API_KEY": "x"}
    assert sample.metadata["agent"]["env"] == seen
    assert sampled(sample) == [HELLO, END] and len(engine.requests) == 1


def test_R5_a_process_that_hangs_is_killed_with_its_children(tmp_path):
    prompt = Prompt(id="p", messages=[USER], metadata={"pid_file": str(tmp_path / "pid")})
    options = {"agent": f"{DEMO}:with_child", "mode": "process", "timeout_s": 4.0}
    sample, _ = one(options, prompt=prompt, run_dir=tmp_path)
    assert sample.status == "timeout"
    assert (pid := pid_in(tmp_path)) and not Path(f"/proc/{pid}").exists()


def test_X1_a_process_that_dies_says_how(tmp_path):
    prompt = Prompt(id="p", messages=[USER])
    sample, _ = one({"agent": f"{DEMO}:dies", "mode": "process"}, prompt=prompt, run_dir=tmp_path)
    assert sample.status == "error" and "exit code 9" in sample.reason and "my last words" in sample.reason
    assert not sample.loss_mask.any()


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(open(os.environ["MILES_TASK"]))
body = {"model": sys.argv[2], "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
text = answer["choices"][0]["message"]["content"]
json.dump({"reward": float(text == task["label"]), "response": text}, open(os.environ["MILES_RESULT"], "w"))
open("left-behind", "w").write(os.getcwd())
print(os.getcwd())
"""


def test_a_program_gets_its_task_and_writes_its_result():
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "a {model} 'b'"}], label="hello")
    sample, engine = one({"command": (sys.executable, "-c", PROGRAM, "{prompt}", "{model}")}, prompt=prompt)
    assert (sample.metadata["agent_reward"], sample.response) == (1.0, "hello"), sample.reason
    text = "<user>a {model} 'b'<end><assistant>"  # the prompt is filled in once, and goes through no shell
    assert engine.requests[0].token_ids.tolist() == ids(text)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('so long'); sys.exit(4)", "ended with code 4: so long"),
        ("import os; open(os.environ['MILES_RESULT'], 'w').write('{')", "MILES_RESULT cannot be used"),
        ("", "it made no request"),
    ],
)
def test_a_program_that_fails_says_how(code, reason):
    sample, _ = one({"command": (sys.executable, "-c", code)})
    assert sample.status == "error" and reason in sample.reason


@pytest.mark.parametrize(
    ("function", "command", "message"),
    [
        ("", (), 'set one of "agent" and "command"'),
        ("a:b", ("ls",), 'set one of "agent" and "command"'),
        ("nowhere:agent", (), 'the agent "nowhere:agent" does not import'),
        ("", ("no-such-program-here",), 'there is no program "no-such-program-here"'),
        ("", ("ls", os.path.relpath(__file__)), "each agent works in a folder of its own"),
    ],
)
def test_an_agent_that_cannot_be_had_is_refused_at_the_start(function, command, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make_agent(function, command, "thread", tmp_path, ())


def test_a_cancelled_group_kills_its_processes(tmp_path):
    prompt = Prompt(id="p", messages=[USER], metadata={"pid_file": str(tmp_path / "pid")})
    options = {"agent": f"{DEMO}:with_child", "mode": "process"}
    sample, _ = one(options, prompt=prompt, run_dir=tmp_path, cancel_when=lambda: pid_in(tmp_path))
    assert sample.status == "aborted"
    assert not Path(f"/proc/{pid_in(tmp_path)}").exists()


def pid_in(folder: Path) -> int:
    """The id that `with_child` wrote; 0 as long as it has not."""
    file = folder / "pid"
    return int(file.read_text() or 0) if file.exists() else 0
