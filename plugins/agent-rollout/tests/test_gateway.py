"""The gateway: exact ids over requests, rewritten and branching histories, tool calls, what is honoured."""

from __future__ import annotations

import threading
import time

import pytest
from agent_demo_agents import ask, post
from agent_words import (
    AGAIN,
    CALL,
    END,
    HE,
    HELLO,
    LLO,
    PROMPT,
    THINK,
    THOUGHT,
    USER,
    WordTokenizer,
    agent_group,
    call,
    ids,
    sampled,
    twice,
    user,
)

from miles_core.testing.engines import StubEngine

ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


# --- Exact ids -------------------------------------------------------------------------------------------------------


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
