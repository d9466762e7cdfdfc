"""The rollout `tools`: exact ids over turns, what is masked, limits, failures as data, going on where it stopped."""

from __future__ import annotations

import time
from dataclasses import replace

import agent_demo_tools
import numpy as np
import pytest
from agent_words import (
    CALL,
    DEMO,
    END,
    HE,
    HELLO,
    LLO,
    THINK,
    THOUGHT,
    WordTokenizer,
    call,
    delta,
    ids,
    sampled,
    tools_group,
)

from miles_agent_rollout.tools import REGISTERED, load_tools
from miles_core.errors import ConfigError
from miles_core.seeds import derive_seed
from miles_core.types import Prompt

# --- Exact ids -------------------------------------------------------------------------------------------------------


def test_T1_ids_of_earlier_turns_are_kept_and_never_encoded_again():
    """The model says "hello" as [he, llo] before it calls; a second encoding would make it [hello]."""
    first = [HE, LLO, *call("add", a=2)]
    group, engine = tools_group(first, [HELLO, END])
    (sample,) = group.samples
    prompt = ids("<system>1<end><user>hi<end><assistant>")
    assert sample.tokens.tolist() == [*prompt, *first, *delta("3"), HELLO, END]
    assert engine.requests[1].token_ids.tolist() == [*prompt, *first, *delta("3")]
    assert len(sample.tokens) == len(sample.loss_mask) == len(sample.logprobs)
    assert sampled(sample) == [*first, HELLO, END]


def test_T6_tokens_of_tools_are_masked():
    """Two sampled tokens, the tool's, two sampled: the mask is [1, 1, 0 ..., 1, 1] and its sum is 4."""
    options = {"parser": f"{DEMO}:first_is_call", "max_turns": 3}
    group, _ = tools_group([HE, END], [LLO, END], options=options)
    (sample,) = group.samples
    answer = sample.loss_mask[sample.prompt_len :].tolist()
    assert answer == [True, True, *[False] * len(delta("2")), True, True]
    assert sample.loss_mask.sum() == 4
    assert not sample.logprobs[~sample.loss_mask].any()
    assert sample.logprobs[sample.loss_mask].tolist() == [-1.0] * 4  # what the stub says under weight 0
    covered = [i for span in sample.versions for i in range(span.start, span.stop)]
    assert covered == np.flatnonzero(sample.loss_mask).tolist()


def test_the_end_of_a_turn_is_added_where_the_model_did_not_say_it():
    """It stopped at a stop string, say: the template's <end> comes before the tool's turn, masked."""
    first = call("add", a=2)[:-1]
    group, _ = tools_group(first, [HELLO, END])
    (sample,) = group.samples
    rest = sample.tokens[sample.prompt_len + len(first) :].tolist()
    assert rest == [END, *delta("3"), HELLO, END]
    assert not sample.loss_mask[sample.prompt_len + len(first)]


THOUGHTFUL = [THINK, HE, LLO, THOUGHT, *call("add", a=2)]


def test_T3_a_template_that_rewrites_history_opens_a_segment():
    """The template drops the thinking of the first answer: two segments of one trajectory, the second with a prompt as the
    template wants it. Each answer is trained once, and the result of the tool is in the second context."""
    group, engine = tools_group(THOUGHTFUL, [HELLO, END], tokenizer=WordTokenizer(forgets=True))
    first, second = group.samples
    assert (first.segment, second.segment) == (0, 1)
    assert first.trajectory_id == second.trajectory_id == "p@0/0"
    assert first.index == second.index == 0
    assert (sampled(first), sampled(second)) == (THOUGHTFUL, [HELLO, END])
    context = WordTokenizer().decode(engine.requests[1].token_ids, skip_special=False)
    assert "<tool>3<end>" in context and "<think>" not in context
    assert second.tokens[: second.prompt_len].tolist() == engine.requests[1].token_ids.tolist()
    assert first.metadata["rewrites"] == 1
    assert (first.status, second.status) == ("stop", "stop")


def test_T3_or_appends_to_the_raw_ids():
    group, engine = tools_group(
        THOUGHTFUL, [HELLO, END], tokenizer=WordTokenizer(forgets=True), options={"history": "append"}
    )
    (sample,) = group.samples
    start = sample.prompt_len
    assert sample.tokens[start:].tolist() == [*THOUGHTFUL, *delta("3"), HELLO, END]
    assert len(engine.requests) == 2


def test_T3_one_trajectory_is_one_vote():
    """Three samples of which one has two segments: three votes."""
    from miles_core.votes import trajectory_rewards, votes

    group, _ = tools_group(THOUGHTFUL, [HELLO, END], tokenizer=WordTokenizer(forgets=True), num_samples=3)
    assert [s.segment for s in group.samples] == [0, 1] * 3
    for sample in group.samples:
        sample.reward = float(sample.index)
    assert list(votes(group.samples, trajectory_rewards(group.samples)).values()) == [0.0, 1.0, 2.0]


def test_a_template_that_wants_parsed_calls_gets_them():
    """It prints the same text from parsed calls, so that the raw ids go on."""
    text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    group, _ = tools_group([*ids(text), END], [HELLO, END], tokenizer=WordTokenizer(strict=True))
    (sample,) = group.samples
    assert sampled(sample) == [*ids(text), END, HELLO, END]


def test_an_opened_answer_goes_on():
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so: "}])
    group, engine = tools_group(call("add", a=2), prompt=prompt)
    assert WordTokenizer().decode(engine.requests[1].token_ids, skip_special=False).count("so: ") == 1
    assert len(group.samples) == 1


# --- Limits ----------------------------------------------------------------------------------------------------------


def test_D5_a_context_that_is_full_at_turn_3_truncates():
    """Room for two turns and their tools: the third request is never sent, and two turns are trained."""
    first = call("add", a=2)
    prompt = len(ids("<system>1<end><user>hi<end><assistant>"))
    full = prompt + 2 * (len(first) + len(delta("3")))
    group, engine = tools_group(first, first, first, max_context=full, num_samples=2)
    assert len(engine.requests) == 4 and all(r.params.max_new_tokens >= 1 for r in engine.requests)
    for sample in group.samples:
        assert (sample.status, sampled(sample)) == ("truncated", first * 2)
        assert sample.reason == f"before turn 3: {full} tokens in a context of {full}"
        assert sample.num_tokens <= full
    assert [s.index for s in group.samples] == [0, 1]


def test_D5_an_answer_that_the_context_cuts_at_turn_2_truncates():
    first = call("add", a=2)
    fits = len(ids("<system>1<end><user>hi<end><assistant>")) + len(first) + len(delta("3"))
    group, engine = tools_group(first, [HE] * 50, max_context=fits + 7)
    (sample,) = group.samples
    assert engine.requests[1].params.max_new_tokens == 7
    assert (sample.status, sampled(sample)) == ("truncated", [*first, *[HE] * 7])
    assert "turn 2" in sample.reason


def test_the_first_answer_cut_by_the_context_is_a_length():
    start = len(ids("<system>1<end><user>hi<end><assistant>"))
    group, _ = tools_group([HE] * 50, max_context=start + 4)
    assert (group.samples[0].status, sampled(group.samples[0])) == ("length", [HE] * 4)


def test_turns_and_tokens_are_bounded():
    first = call("add", a=2)
    group, engine = tools_group(*[first] * 5, options={"max_turns": 2})
    assert (group.samples[0].status, len(engine.requests)) == ("truncated", 2)
    assert group.samples[0].reason == "2 turns, and the last one calls a tool"
    budget = len(first) + 3
    group, engine = tools_group(first, [HE] * 50, options={"max_tokens": budget})
    assert engine.requests[1].params.max_new_tokens == 3
    assert group.samples[0].status == "truncated" and f"at most {budget}" in group.samples[0].reason
    assert group.samples[0].loss_mask.sum() == budget


def test_E1_an_empty_answer_is_kept():
    group, _ = tools_group([])
    (sample,) = group.samples
    assert (sample.status, sample.response, sample.loss_mask.sum()) == ("stop", "", 0)


def test_E3_every_turn_of_every_sample_has_a_seed_of_its_own():
    _, engine = tools_group(call("add", a=2), num_samples=2)
    seeds = {r.id: r.seed for r in engine.requests}
    assert seeds == {f"p@0/{i}/turn-{t}": derive_seed(42, "p", 0, i, t) for i in range(2) for t in range(2)}
    assert len(set(seeds.values())) == 4


# --- Tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said", "counted"),
    [
        (call("add", a=2, b=3), "5", "tool_calls"),
        (call("add", a="2"), "3", "tool_calls"),  # text that is a number, as models write it
        (call("shout", text="x"), "X", "tool_calls"),  # a coroutine
        (call("rows"), '{"b": [1, 2]}', "tool_calls"),
        (call("boom"), "error: ValueError: no luck", "tool_errors"),
        (call("sub", a=2), 'error: no tool named "sub"; there are add, boom, rows, shout', "tool_errors"),
        (call("add"), "error: arguments of add: a: Field required", "tool_errors"),
        (call("add", a=1, c=2), "error: arguments of add: c: Extra inputs are not permitted", "tool_errors"),
        ([CALL, HE, END], "error: the tool call is not JSON: Expecting value: line 1 column 1 (char 0)", "tool_errors"),
    ],
)
def test_what_the_model_reads_of_a_call(answer, said, counted):
    group, engine = tools_group(answer, tools=("add", "boom", "rows", "shout"))
    text = WordTokenizer().decode(engine.requests[1].token_ids, skip_special=False)
    assert text.endswith(f"<tool>{said}<end><assistant>")
    assert group.samples[0].status == "stop"
    assert group.samples[0].metadata[counted] == 1


@pytest.mark.parametrize("isolate", [False, True])
def test_R5_a_tool_that_hangs_is_told_to_the_model(isolate, tmp_path):
    options = {"tool_timeout_s": 0.3, "isolate_tools": isolate, "workers": 1}
    began = time.monotonic()
    group, engine = tools_group(call("spin"), call("add", a=1), tools=("spin", "add"), options=options, run_dir=tmp_path)
    texts = [WordTokenizer().decode(r.token_ids, skip_special=False) for r in engine.requests[1:]]
    assert texts[0].endswith("<tool>error: spin did not answer within 0.3 s<end><assistant>")
    assert texts[1].endswith("<tool>2<end><assistant>")  # the next call finds a tool that works
    assert group.samples[0].metadata["tool_timeouts"] == 1
    assert time.monotonic() - began < 20, "0.3 s, and two starts of a process"


def test_an_isolated_tool_may_die(tmp_path):
    _, engine = tools_group(
        call("die"), call("add", a=1), tools=("die", "add"), options={"isolate_tools": True}, run_dir=tmp_path
    )
    texts = [WordTokenizer().decode(r.token_ids, skip_special=False) for r in engine.requests[1:]]
    assert "<tool>error: it died with exit code 7" in texts[0]
    assert texts[1].endswith("<tool>2<end><assistant>")


def test_a_tool_remembers_within_a_trajectory_only():
    _, engine = tools_group(call("remember", word="a"), call("remember", word="b"), tools=("remember",), num_samples=2)
    last = [WordTokenizer().decode(r.token_ids, skip_special=False) for r in engine.requests if r.id.endswith("turn-2")]
    assert len(last) == 2 and all(text.endswith("<tool>a b<end><assistant>") for text in last)


def test_long_results_are_cut_in_the_middle():
    _, engine = tools_group(call("shout", text="x" * 50), tools=("shout",), options={"max_result_chars": 10})
    text = WordTokenizer().decode(engine.requests[1].token_ids, skip_special=False)
    assert "<tool>XXXXX\n... 40 characters left out ...\nXXXXX<end>" in text


def test_prompts_choose_among_the_tools():
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "hi"}], tools=("boom",))
    _, engine = tools_group(prompt=prompt, tools=("add", "boom"))
    assert WordTokenizer().decode(engine.requests[0].token_ids, skip_special=False).startswith("<system>1<end>")
    with pytest.raises(ConfigError, match='prompt "p" names tools that the run does not have: sub'):
        tools_group(prompt=replace(prompt, tools=("sub",)))


def test_the_schema_is_that_of_the_signature():
    (made,) = load_tools([f"{DEMO}:add"]).values()
    parameters = {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}}
    assert made.schema["function"] == {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {"type": "object", "properties": parameters, "required": ["a"], "additionalProperties": False},
    }


def test_registered_tools_go_by_their_name():
    assert REGISTERED["add"] is agent_demo_tools.add
    assert load_tools(["add"])["add"].function is agent_demo_tools.add


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere:f",), 'the tool "nowhere:f" does not import'),
        ((f"{DEMO}:nothing",), 'no function "nothing"'),
        (("subtract",), 'no tool "subtract": write "module:function"'),
        (("/no/file.py:f",), "there is no file /no/file.py"),
        ((f"{DEMO}:add", f"{DEMO}:add"), 'two tools are named "add"'),
        ((f"{DEMO}:anything",), "all must have names of their own"),
    ],
)
def test_a_tool_that_cannot_be_had_is_refused_at_the_start(names, message):
    with pytest.raises(ConfigError, match=message):
        load_tools(names)


def test_an_isolated_tool_cannot_have_a_context():
    with pytest.raises(ConfigError, match="asks for a context"):
        tools_group(tools=("remember",), options={"isolate_tools": True})
