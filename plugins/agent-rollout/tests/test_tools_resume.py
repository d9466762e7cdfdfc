"""The rollout `tools`: engines that fail, going on where it stopped, side channels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agent_words import (
    END,
    HE,
    HELLO,
    LLO,
    THINK,
    THOUGHT,
    WordTokenizer,
    call,
    delta,
    sampled,
    scripted,
    tools_group,
)

from miles_core.errors import RunFailed
from miles_core.fields import FieldSpec
from miles_core.seeds import derive_seed
from miles_core.testing.engines import Script, StubEngine

# --- Failures --------------------------------------------------------------------------------------------------------


def test_an_engine_that_fails_at_turn_2_makes_the_trajectory_an_error():
    engine = StubEngine(answer=scripted(call("add", a=2)))
    real, seen = engine.generate, []

    async def once(request):
        seen.append(request.id)
        return await real(request) if request.id.endswith("turn-0") else (await failing(request))

    async def failing(request):
        answer = await real(request)
        return replace(
            answer,
            finish="error",
            reason="out of memory",
            token_ids=answer.token_ids[:0],
            logprobs=answer.logprobs[:0],
            versions=(),
        )

    engine.generate = once
    group, _ = tools_group(engine=engine, max_attempts=1)
    (sample,) = group.samples
    assert sample.status == "error" and "out of memory" in sample.reason
    assert not sample.loss_mask.any()


def test_no_engine_left_fails_the_group():
    with pytest.raises(RunFailed):
        tools_group(engine=StubEngine(script=Script(dies_after=0)))


def test_the_baseline_is_greedy_and_apart():
    group, engine = tools_group(call("add", a=2), baseline=True)
    assert group.baseline.trajectory_id == "p@0/baseline"
    assert {r.params.temperature for r in engine.requests if "baseline" in r.id} == {0.0}
    assert len(group.samples) == 1


# --- Going on --------------------------------------------------------------------------------------------------------


def test_cancelled_while_a_tool_runs_is_aborted_and_goes_on_from_there():
    """The first answer is not sampled again; its tool is called again, and the second request has its own seed."""
    first = call("nap")
    group, _ = tools_group(first, tools=("nap",), cancel_after=5, virtual=True)
    assert group.samples[0].status == "aborted"
    again, other = tools_group([HELLO, END], tools=("nap",), partial=group, virtual=True)
    (sample,) = again.samples
    assert sampled(sample) == [*first, HELLO, END]
    assert [r.id for r in other.requests] == ["p@0/0/turn-1"]
    assert other.requests[0].seed == derive_seed(42, "p", 0, 0, 1)
    assert sample.versions[0].start == sample.prompt_len


def test_an_answer_that_was_cut_at_turn_2_goes_on_after_its_last_token():
    first, second = call("shout", text="a"), [HE, LLO, HE, LLO, END]
    engine = StubEngine(answer=scripted(first, second), token_s=0.1)
    cut, _ = tools_group(tools=("shout",), engine=engine, cancel_after=0.1 * (len(first) + 2.5), virtual=True)
    (sample,) = cut.samples
    assert sample.status == "aborted"
    done = sample.tokens[sample.prompt_len + len(first) + len(delta("A")) :].tolist()
    assert done == second[:2]
    engine = StubEngine(answer=lambda weight, request: second[2:])
    again, other = tools_group(tools=("shout",), partial=cut, engine=engine)
    (whole,) = again.samples
    assert sampled(whole) == [*first, *second]
    assert other.requests[0].token_ids.tolist() == sample.tokens.tolist()


def test_segments_before_the_cut_are_trained_after_all():
    first = [THINK, HE, THOUGHT, *call("shout", text="a")]
    tokenizer = WordTokenizer(forgets=True)
    names = ("shout", "nap")
    cut, _ = tools_group(first, call("nap"), tools=names, tokenizer=tokenizer, cancel_after=5, virtual=True)
    assert [s.status for s in cut.samples] == ["aborted"] * 2 and not any(s.loss_mask.any() for s in cut.samples)
    again, _ = tools_group([HELLO, END], tools=names, tokenizer=tokenizer, partial=cut, virtual=True)
    assert [sampled(s) for s in again.samples] == [first, [*call("nap"), HELLO, END]]


# --- Side channels ---------------------------------------------------------------------------------------------------


def test_M2_rows_of_two_turns_are_stitched_to_total_minus_1():
    """Prompt P, two answers: T - 1 rows. Rows of the first answer are those of its own pass (value 0), later ones those
    of the second (value 1)."""
    spec = FieldSpec(name="routes", dtype="int16", axes=("layer",), align="transition")
    engine = StubEngine(answer=scripted(call("add", a=2), [HELLO, END]))
    real = engine.generate

    async def with_rows(request):
        answer = await real(request)
        rows = len(request.token_ids) + len(answer.token_ids) - 1
        answer.extras = {"routes": np.full((rows, 2), int(request.id[-1]), dtype=np.int16)}
        return answer

    engine.generate = with_rows
    group, _ = tools_group(engine=engine, fields=frozenset({"routes"}), field_specs={"routes": spec})
    (sample,) = group.samples
    rows = sample.extras["routes"]
    before = sample.prompt_len + len(call("add", a=2)) - 1
    assert rows.shape == (sample.num_tokens - 1, 2)
    assert rows[:, 0].tolist() == [0] * before + [1] * (sample.num_tokens - 1 - before)
