"""The gateway: what is refused and how, limits, engines that fail, clients that go away."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
import pytest
from agent_demo_agents import ask, post
from agent_words import (
    AGAIN,
    END,
    HE,
    HELLO,
    LLO,
    PROMPT,
    USER,
    WordTokenizer,
    agent_group,
    run_group,
    sampled,
    scripted,
    twice,
    user,
)

from miles_agent_rollout import AgentConfig
from miles_agent_rollout.agent_rollout import AgentRollout
from miles_agent_rollout.agents import ThreadAgent
from miles_core.errors import ContractError, RunFailed
from miles_core.testing.engines import Script, StubEngine
from miles_core.types import Prompt

# --- Errors ----------------------------------------------------------------------------------------------------------

BAD = [
    (b"{not json", 400, "invalid_json", "not JSON"),
    (b"[" * 200_000, 400, "invalid_json", "not JSON"),
    (b"[]", 400, "invalid_json", "must be a JSON object"),
    ({}, 400, "invalid_value", "at least one message"),
    ({"messages": []}, 400, "invalid_value", "at least one message"),
    ({"messages": ["hi"]}, 400, "invalid_value", "needs a role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_value", "needs a role"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_value", "text or a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400, "unsupported_value", "a part of type image_url",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "invalid_value", "needs a function"),
    ({"messages": [USER], "max_tokens": 0}, 400, "invalid_value", "at least 1"),
    ({"messages": [USER], "max_tokens": "9"}, 400, "invalid_value", "at least 1"),
    ({"messages": [USER], "stop": [3]}, 400, "invalid_value", "stop must be"),
    ({"messages": [USER], "tools": "add"}, 400, "invalid_value", "tools must be"),
    (b"x" * 300_000, 413, "body_too_large", "larger than 262144 bytes"),
]  # fmt: skip


def test_bad_requests_are_answered_and_do_no_harm():
    def agent(task, notes):
        notes["answers"] = [post(task, body) for body, *_ in BAD]
        return ask(task, [USER])["content"]

    (sample,), engine, notes = agent_group(agent, options={"max_body_bytes": 1 << 18})
    for (_, status, code, text), (got, body) in zip(BAD, notes["answers"], strict=True):
        assert (got, body["error"]["code"]) == (status, code), body
        assert text in body["error"]["message"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert sample.status == "stop" and len(engine.requests) == 1


def test_keys_and_paths():
    def agent(task, notes):
        body = {"messages": [USER]}
        notes["wrong"] = post(task, body, key="nobody")
        notes["none"] = post(task, body, key=" ")
        notes["path"] = post(task, body, path="/embeddings")
        notes["method"] = post(task, body, path="/models")
        ask(task, [USER])

    _, engine, notes = agent_group(agent)
    assert [notes[k][0] for k in ("wrong", "none", "path", "method")] == [401, 401, 404, 405]
    assert notes["wrong"][1]["error"]["code"] == "invalid_api_key"
    assert "there is /v1/chat/completions" in notes["path"][1]["error"]["message"]
    assert len(engine.requests) == 1 and notes["gateway"].counts["unauthorized"] == 2
    assert notes["gateway"].base_url.startswith("http://127.0.0.1:")


def test_one_sample_cannot_speak_for_another():
    """Each has a key of its own; what was asked under it is in its own trajectory."""

    def agent(task, notes):
        notes.setdefault("keys", []).append(task.api_key)
        ask(task, [{"role": "user", "content": str(task.index)}])

    samples, _, notes = agent_group(agent, num_samples=3)
    assert len(set(notes["keys"])) == 3
    for sample in samples:
        assert WordTokenizer().decode(sample.tokens).startswith(str(sample.index))


def test_a_session_that_is_over_answers_no_more():
    def agent(task, notes):
        notes.setdefault("tasks", []).append(task)
        ask(task, [USER])
        if task.index == 1:
            while notes["tasks"][0].index == 1 or post(notes["tasks"][0], {"messages": [USER]})[0] == 200:
                time.sleep(0.01)
            notes["late"] = post(notes["tasks"][0], {"messages": [USER]})

    samples, *_, notes = agent_group(agent, num_samples=2, options={"max_running": 1})
    assert notes["late"][0] == 403 and notes["late"][1]["error"]["code"] == "session_closed"
    assert "its agent has ended" in notes["late"][1]["error"]["message"]
    assert [len(s.metadata["turns"]) for s in samples] == [1, 1]


def test_D5_a_context_that_is_full_at_turn_3_truncates():
    """Two answers fit. The third request is refused as OpenAI does, the agent falls over it, and two turns are trained."""

    def agent(task, notes):
        messages = [USER]
        for _ in range(3):
            messages.append(ask(task, messages))
            messages.append(AGAIN)

    first = [HE, LLO, END]
    full = len(PROMPT) + 2 * (len(first) + len(user("try again")))
    (sample,), engine, _ = agent_group(agent, first, first, first, max_context=full)
    assert (sample.status, sampled(sample)) == ("truncated", first * 2)
    assert f"{full} tokens in a context of {full}" in sample.reason
    assert all(r.params.max_new_tokens >= 1 for r in engine.requests) and len(engine.requests) == 2


def test_requests_and_tokens_are_bounded():
    def agent(task, notes):
        notes["statuses"] = [post(task, {"messages": [USER]}) for _ in range(4)]

    samples, engine, notes = agent_group(agent, options={"max_turns": 2})
    assert [s for s, _ in notes["statuses"]] == [200, 200, 403, 403]
    assert notes["statuses"][2][1]["error"]["code"] == "max_turns"
    assert samples[-1].status == "truncated" and len(engine.requests) == 2
    samples, engine, notes = agent_group(agent, *[[HE] * 3] * 4, options={"max_tokens": 5})
    assert [r.params.max_new_tokens for r in engine.requests] == [5, 2]
    assert notes["statuses"][2][1]["error"]["code"] == "context_length_exceeded"


def test_an_engine_that_fails_once_may_be_asked_again():
    engine = StubEngine(answer=scripted([HE, END], [HELLO, END]), script=Script())
    engine.script.fail["generate"] = 1

    def agent(task, notes):
        notes["first"] = post(task, {"messages": [USER]})
        ask(task, [USER])

    (sample,), _, notes = agent_group(agent, engine=engine, max_attempts=1)
    assert notes["first"][0] == 502 and notes["first"][1]["error"]["type"] == "server_error"
    assert sample.status == "stop" and len(sample.metadata["turns"]) == 1


def test_no_engine_left_fails_the_group():
    """The agent is told so, whatever it makes of it."""

    def agent(task, notes):
        notes["answer"] = post(task, {"messages": [USER]})
        return 1.0

    notes = {}
    built = AgentRollout(AgentConfig(agent="x"), ThreadAgent(lambda task: agent(task, notes)), logging.getLogger("test"))
    with pytest.raises(RunFailed):
        run_group("agent", {}, engine=StubEngine(script=Script(dies_after=0)), built=built)
    assert notes["answer"][0] == 503 and notes["answer"][1]["error"]["code"] == "no_engine"


def test_an_agent_that_goes_on_asking_does_not_hold_up_the_end():
    """All engines down, and an agent that would try for ever: the group fails within seconds, not at its time limit."""
    stop = []

    def agent(task, notes):
        while not stop:
            post(task, {"messages": [USER]})
            time.sleep(0.02)

    began = time.monotonic()
    with pytest.raises(RunFailed):
        agent_group(agent, engine=StubEngine(script=Script(dies_after=0)))
    stop.append(1)
    assert time.monotonic() - began < 20


def test_an_engine_that_breaks_its_contract_fails_the_group():
    """A log-probability that is not finite: nobody can train that, whatever the agent makes of the error."""
    engine = StubEngine(answer=scripted([HE, END]))
    real = engine.generate

    async def broken(request):
        return replace(await real(request), logprobs=np.full(2, np.nan, np.float32))

    engine.generate = broken
    with pytest.raises(ContractError, match="not finite"):
        agent_group(lambda task, notes: post(task, {"messages": [USER]})[0] and None, engine=engine)


def test_E1_an_empty_answer_is_kept():
    (sample,), _, notes = agent_group(twice, [], [HELLO, END])
    assert notes["first"]["content"] == ""
    assert sampled(sample) == [HELLO, END] and sample.status == "stop"
    (sample,), *_ = agent_group(lambda task, notes: ask(task, [USER])["content"], [])
    assert (sample.status, sample.response, sample.loss_mask.sum()) == ("stop", "", 0)


def test_an_answer_that_nobody_waited_for_is_not_trained():
    """The client gives up while the engine samples: the request is cancelled, and the second try is all there is."""
    import socket

    def agent(task, notes):
        host, port = task.base_url.split("/")[2].split(":")
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {task.api_key}\r\n"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not engine.requests:
                time.sleep(0.01)
        ask(task, [USER])

    engine = StubEngine(answer=lambda weight, request: [HE, END], token_s=0.15)
    samples, engine, _ = agent_group(agent, engine=engine)
    assert len(engine.requests) == 2 and len(samples) == 1


def test_the_gateway_ends_with_its_event_loop():
    import urllib.error

    _, _, notes = agent_group(twice, [HE, END], [HE, END])
    task = type("Task", (), {"base_url": notes["gateway"].base_url, "api_key": "x"})
    with pytest.raises(urllib.error.URLError):
        post(task, {"messages": [USER]})
    assert notes["gateway"].counts == {"opened": 1, "closed": 1}


def test_templates_that_refuse_are_a_bad_request():
    def agent(task, notes):
        notes["answer"] = post(task, {"messages": [{"role": "tool", "content": "x"}]})
        ask(task, [USER])

    _, _, notes = agent_group(agent, tokenizer=WordTokenizer(strict=True))
    assert notes["answer"][0] == 400 and "cannot be rendered" in notes["answer"][1]["error"]["message"]


def test_text_prompts_reach_the_agent():
    def agent(task, notes):
        notes["prompt"] = (task.prompt, task.label, task.metadata)
        ask(task, [{"role": "user", "content": task.prompt}])

    prompt = Prompt(id="p", text="what?", label="x", metadata={"a": 1})
    _, _, notes = agent_group(agent, prompt=prompt)
    assert notes["prompt"] == ("what?", "x", {"a": 1})
