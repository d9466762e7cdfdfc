"""The gateway: exact ids over requests, rewritten and branching histories, what is honoured, errors in OpenAI's form."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest
from agent_demo_agents import ask, post
from agent_words import (
    CALL,
    END,
    HE,
    HELLO,
    LLO,
    THINK,
    THOUGHT,
    WordTokenizer,
    agent_group,
    call,
    ids,
    run_group,
    sampled,
    scripted,
)

from miles_agent_rollout import AgentConfig
from miles_agent_rollout.agent_rollout import AgentRollout
from miles_agent_rollout.agents import ThreadAgent
from miles_core.errors import RunFailed
from miles_core.testing.engines import Script, StubEngine
from miles_core.types import Prompt

USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "try again"}
PROMPT = ids("<user>hi<end><assistant>")
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def user(text: str) -> list[int]:
    """What a user's next message adds after an answer that ended."""
    return ids(f"<user>{text}<end><assistant>")


# --- Exact ids -------------------------------------------------------------------------------------------------------


def twice(task, notes):
    """A conversation that grows, and echoes what it was told."""
    first = ask(task, [USER])
    notes["first"] = first
    return ask(task, [USER, first, AGAIN])["content"]


def test_T1_ids_of_earlier_requests_are_kept():
    """ "hello" was sampled as [he, llo]: the next request's context holds these two, not [hello]."""
    (sample,), engine, notes = agent_group(twice, [HE, LLO, END], [HELLO, END])
    assert notes["first"]["content"] == "hello"
    assert sample.tokens.tolist() == [*PROMPT, HE, LLO, END, *user("try again"), HELLO, END]
    assert sampled(sample) == [HE, LLO, END, HELLO, END]
    assert engine.requests[1].token_ids.tolist() == sample.tokens.tolist()[:-2]
    assert (sample.status, sample.prompt_len, sample.response) == ("stop", len(PROMPT), "hello")


def test_T6_what_others_say_is_masked():
    (sample,), *_ = agent_group(twice, [HE, LLO], [LLO, HE])
    assert sample.loss_mask.sum() == 4
    mask = sample.loss_mask[sample.prompt_len :].tolist()
    assert mask == [True, True, *[False] * (len(user("try again")) + 1), True, True]  # + 1: the <end> it did not say
    assert not sample.logprobs[~sample.loss_mask].any()


def test_T3_a_template_that_drops_thinking_opens_a_segment():
    first = [THINK, HE, THOUGHT, HE, LLO, END]
    samples, engine, _ = agent_group(twice, first, [HELLO, END], tokenizer=WordTokenizer(forgets=True))
    assert [(s.segment, sampled(s)) for s in samples] == [(0, first), (1, [HELLO, END])]
    assert {s.trajectory_id for s in samples} == {"p@0/0"}
    text = WordTokenizer().decode(engine.requests[1].token_ids, skip_special=False)
    assert text == "<user>hi<end><assistant>hello<end><user>try again<end><assistant>"


def test_T3_or_appends_to_the_raw_ids():
    first = [THINK, HE, THOUGHT, HE, LLO, END]
    samples, *_ = agent_group(
        twice, first, [HELLO, END], tokenizer=WordTokenizer(forgets=True), options={"history": "append"}
    )
    (sample,) = samples
    assert sample.tokens.tolist() == [*PROMPT, *first, *user("try again"), HELLO, END]


@pytest.mark.parametrize(
    "rewritten",
    [
        lambda first: {**first, "content": "something else"},
        lambda first: {**first, "content": first["content"].strip() + " "},
    ],
)
def test_T3_an_agent_that_rewrites_history_opens_a_segment(rewritten):
    def agent(task, notes):
        first = ask(task, [USER])
        ask(task, [USER, rewritten(first), AGAIN])

    samples, engine, _ = agent_group(agent, [HE, LLO, END], [HELLO, END])
    assert [sampled(s) for s in samples] == [[HE, LLO, END], [HELLO, END]]
    assert samples[1].tokens[: samples[1].prompt_len].tolist() == engine.requests[1].token_ids.tolist()
    assert [s.metadata["rewrites"] for s in samples] == [1, 1]


def test_a_conversation_of_its_own_is_a_segment_and_no_rewrite():
    """A sub-agent asks something else in between; the main conversation goes on from its own answer."""

    def agent(task, notes):
        first = ask(task, [USER])
        ask(task, [{"role": "system", "content": "sub"}, {"role": "user", "content": "x"}])
        ask(task, [USER, first, AGAIN])

    samples, *_ = agent_group(agent, [HE, LLO, END], [HE, END], [HELLO, END])
    assert [sampled(s) for s in samples] == [[HE, END], [HE, LLO, END, HELLO, END]]
    assert samples[0].metadata["rewrites"] == 0


def test_branches_train_every_answer_once():
    """Two requests go on from one answer: the later branch trains it, in the other it is context."""

    def agent(task, notes):
        first = ask(task, [USER])
        ask(task, [USER, first, {"role": "user", "content": "a"}])
        ask(task, [USER, first, {"role": "user", "content": "b"}])

    samples, *_ = agent_group(agent, [HE, LLO, END], [HE, END], [HELLO, END])
    shared = [*PROMPT, HE, LLO, END]
    assert samples[0].tokens.tolist() == [*shared, *user("a"), HE, END]
    assert samples[1].tokens.tolist() == [*shared, *user("b"), HELLO, END]
    assert [sampled(s) for s in samples] == [[HE, END], [HE, LLO, END, HELLO, END]]
    assert samples[0].prompt_len == len(shared) + len(user("a"))


def test_the_same_request_twice_is_two_answers():
    def agent(task, notes):
        ask(task, [USER])
        ask(task, [USER])

    samples, engine, _ = agent_group(agent, [HE, END], [LLO, END])
    assert [sampled(s) for s in samples] == [[HE, END], [LLO, END]]
    assert len({r.seed for r in engine.requests}) == 2


def test_E3_seeds_do_not_depend_on_the_order_of_parallel_requests():
    """Three requests at once, in two orders, for two samples: six seeds, each bound to sample and context."""

    def agent_in(order):
        def agent(task, notes):
            threads = []
            for place in order:
                message = [{"role": "user", "content": str(place)}]
                threads.append(threading.Thread(target=ask, args=(task, message)))
                threads[-1].start()
                time.sleep(0.03)
            for thread in threads:
                thread.join()

        return agent

    def seeds(order):
        engine = StubEngine(token_s=0.05, answer=lambda weight, request: [HE, END])
        samples, engine, _ = agent_group(agent_in(order), engine=engine, num_samples=2)
        assert len(samples) == 6
        return {(r.session, tuple(r.token_ids.tolist())): r.seed for r in engine.requests}

    first, second = seeds([0, 1, 2]), seeds([2, 1, 0])
    assert first == second and len(set(first.values())) == 6


# --- Tool calls ------------------------------------------------------------------------------------------------------


def test_tool_calls_go_out_parsed_and_their_ids_stay():
    """The client names the call otherwise and writes its arguments otherwise: the same conversation, one segment."""
    first = [*ids("so "), *call("add", a=2)]

    def agent(task, notes):
        notes["first"] = reply = ask(task, [USER], tools=[ADD])
        echoed = [{"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{ "a":2 }'}}]
        said = {"role": "assistant", "content": reply["content"], "tool_calls": echoed}
        ask(task, [USER, said, {"role": "tool", "tool_call_id": "mine", "content": "3"}], tools=[ADD])

    (sample,), _, notes = agent_group(agent, first, [HELLO, END])
    (made,) = notes["first"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 2}'} and notes["first"]["content"] == "so"
    start = ids("<system>1<end><user>hi<end><assistant>")
    assert sample.tokens.tolist() == [*start, *first, *ids("<tool>3<end><assistant>"), HELLO, END]


def test_a_call_that_does_not_parse_stays_text():
    def agent(task, notes):
        notes["first"] = ask(task, [USER], tools=[ADD])

    _, _, notes = agent_group(agent, [CALL, HE, END])
    assert "tool_calls" not in notes["first"] and notes["first"]["content"] == "<tool_call>he"


# --- What is honoured ------------------------------------------------------------------------------------------------


def test_stop_and_max_tokens_reach_the_engine():
    def agent(task, notes):
        notes["reply"] = post(task, {"messages": [USER], "stop": ["l", "o"], "max_completion_tokens": 7})[1]
        ask(task, [USER, notes["reply"]["choices"][0]["message"], AGAIN], max_tokens=10_000)

    (sample,), engine, notes = agent_group(agent, [HE, LLO, END], sampling={"max_new_tokens": 20})
    assert (engine.requests[0].params.stop, engine.requests[0].params.max_new_tokens) == (("l", "o"), 7)
    assert engine.requests[1].params.max_new_tokens == 20  # the run's limit holds
    assert notes["reply"]["choices"][0]["message"]["content"] == "he"
    assert sampled(sample)[:3] == [HE, LLO, END]  # the client saw less than was sampled, and it is one segment


def test_a_stop_string_that_the_agent_puts_back_is_no_rewrite():
    """It was sampled, and only cut from the answer: the same conversation, one segment."""

    def agent(task, notes):
        reply = ask(task, [USER], stop=["llo"])
        notes["told"] = reply["content"]
        ask(task, [USER, {"role": "assistant", "content": reply["content"] + "llo"}, AGAIN])

    (sample,), _, notes = agent_group(agent, [HE, LLO], [HELLO, END])
    assert notes["told"] == "he"
    assert sampled(sample) == [HE, LLO, HELLO, END] and sample.metadata["rewrites"] == 0


def test_usage_and_logprobs_are_filled():
    def agent(task, notes):
        notes["reply"] = post(task, {"model": "m", "messages": [USER], "logprobs": True})[1]

    _, _, notes = agent_group(agent, [HE, LLO, END])
    usage = notes["reply"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(PROMPT), 3, len(PROMPT) + 3)
    rows = notes["reply"]["choices"][0]["logprobs"]["content"]
    assert [(r["token"], r["logprob"]) for r in rows] == [("he", -1.0), ("llo", -1.0), ("<end>", -1.0)]
    assert rows[0]["bytes"] == [104, 101] and notes["reply"]["model"] == "m"


def test_a_cut_answer_says_length():
    def agent(task, notes):
        notes["reply"] = post(task, {"messages": [USER], "max_tokens": 2})[1]

    (sample,), _, notes = agent_group(agent, [HE, HE, HE])
    assert notes["reply"]["choices"][0]["finish_reason"] == "length"
    assert sample.status == "length"


REFUSED = [
    ("temperature", 0.5, "the run samples with temperature = 1"),
    ("top_p", 0.9, "the run samples with top_p = 1"),
    ("n", 2, "only 1 is possible"),
    ("seed", 7, "seeds come from the run"),
    ("tool_choice", "required", "the model decides"),
    ("response_format", {"type": "json_object"}, "only"),
    ("top_logprobs", 3, "only 0"),
    ("presence_penalty", 1, "only 0"),
    ("best_of", 2, "does not know this parameter"),
]


@pytest.mark.parametrize(("name", "value", "why"), REFUSED)
def test_F11_what_would_change_the_distribution_is_refused_or_ignored(name, value, why):
    def agent(task, notes):
        notes["status"], notes["body"] = post(task, {"messages": [USER], name: value})
        ask(task, [USER])

    (sample,), engine, notes = agent_group(agent)
    assert (notes["status"], notes["body"]["error"]["param"]) == (400, name)
    assert why in notes["body"]["error"]["message"]
    assert len(engine.requests) == 1 and sample.metadata["refused"] == 1
    samples, engine, notes = agent_group(agent, options={"unsupported": "ignore"})
    assert notes["status"] == 200 and samples[0].metadata["ignored_parameters"] == 1
    assert {(r.params.temperature, r.params.top_p) for r in engine.requests} == {(1.0, 1.0)}
    assert {s.temperature for s in samples} == {1.0}


def test_F11_the_runs_own_values_are_no_problem():
    neutral = {"temperature": 1.0, "top_p": 1, "n": 1, "tool_choice": "auto", "presence_penalty": 0, "seed": None}

    def agent(task, notes):
        ask(task, [USER], **neutral)

    (sample,), *_ = agent_group(agent)
    assert sample.status == "stop"


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
            time.sleep(0.15)
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
    assert replace(prompt).text == "what?"
