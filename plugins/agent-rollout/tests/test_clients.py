"""Clients and agents that nobody here wrote: the official openai package, and smolagents."""

from __future__ import annotations

import asyncio
import sys

import pytest
from agent_words import END, HE, HELLO, LLO, agent_group, call, ids, run_group, sampled

openai = pytest.importorskip("openai", reason="needs the official client (miles-agent-rollout[test])")

USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "try again"}
PROMPT = ids("<user>hi<end><assistant>")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def client(task, **more):
    return openai.OpenAI(base_url=task.base_url, api_key=task.api_key, **more)


def joined(chunks):
    """(content, tool calls, finish reason, usage) of a stream."""
    content, calls, finish, usage = "", [], None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    return content, calls, finish, usage


def test_T1_the_official_client():
    """Two requests, the first answer echoed as the client gives it: ids in the sample are those that were sampled."""

    def agent(task, notes):
        chat = client(task).chat.completions
        first = chat.create(model="policy", messages=[USER], logprobs=True)
        notes["first"], notes["models"] = first, [m.id for m in client(task).models.list()]
        second = chat.create(model="policy", messages=[USER, first.choices[0].message, AGAIN], max_completion_tokens=50)
        return second.choices[0].message.content

    (sample,), _, notes = agent_group(agent, [HE, LLO, END], [HELLO, END])
    assert sample.tokens.tolist() == [*PROMPT, HE, LLO, END, *ids("<user>try again<end><assistant>"), HELLO, END]
    assert sampled(sample) == [HE, LLO, END, HELLO, END] and sample.response == "hello"
    assert (notes["first"].usage.prompt_tokens, notes["first"].usage.completion_tokens) == (len(PROMPT), 3)
    assert [row.token for row in notes["first"].choices[0].logprobs.content] == ["he", "llo", "<end>"]
    assert notes["models"] == ["policy"]


def test_the_official_client_streams():
    def agent(task, notes):
        chat = client(task).chat.completions
        options = {"include_usage": True}
        notes["text"] = joined(chat.create(model="m", messages=[USER], stream=True, stream_options=options))
        said = {"role": "assistant", "content": notes["text"][0]}
        notes["call"] = joined(chat.create(model="m", messages=[USER, said, AGAIN], stream=True, tools=[ADD]))

    samples, _, notes = agent_group(agent, [HE, LLO, END], call("add", a=2))
    content, _, finish, usage = notes["text"]
    assert (content, finish, usage.completion_tokens) == ("hello", "stop", 3)
    _, (made,), finish, usage = notes["call"]
    assert (made.function.name, made.function.arguments, finish, usage) == ("add", '{"a": 2}', "tool_calls", None)
    # tools came with the second request only, so the system prompt changed: a segment of its own
    assert [sampled(s) for s in samples] == [[HE, LLO, END], call("add", a=2)]


def test_the_official_client_with_tools():
    def agent(task, notes):
        chat = client(task).chat.completions
        messages = [USER]
        reply = chat.create(model="m", messages=messages, tools=[ADD], parallel_tool_calls=True).choices[0]
        (made,) = reply.message.tool_calls
        messages += [reply.message, {"role": "tool", "tool_call_id": made.id, "content": "3"}]
        return chat.create(model="m", messages=messages, tools=[ADD]).choices[0].message.content

    (sample,), *_ = agent_group(agent, call("add", a=2), [HE, LLO, END])
    assert sampled(sample) == [*call("add", a=2), HE, LLO, END] and sample.response == "hello"


def test_the_asynchronous_client_in_parallel():
    """Four requests at once are four segments of one trajectory."""

    async def agent(task, notes):
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as asks:
            texts = [[{"role": "user", "content": str(i)}] for i in range(4)]
            answers = await asyncio.gather(*(asks.chat.completions.create(model="m", messages=t) for t in texts))
            stream = await asks.chat.completions.create(model="m", messages=[USER], stream=True)
            notes["streamed"] = joined([chunk async for chunk in stream])[0]
            return answers[0].choices[0].message.content

    samples, engine, notes = agent_group(agent)
    assert notes["streamed"] == "hello"
    assert [s.segment for s in samples] == list(range(5)) and {s.trajectory_id for s in samples} == {"p@0/0"}
    asked = {tuple(r.token_ids.tolist()) for r in engine.requests}
    assert {tuple(s.tokens[: s.prompt_len].tolist()) for s in samples} == asked


@pytest.mark.parametrize(
    ("key", "request_", "error", "code"),
    [
        ("wrong", {}, "AuthenticationError", "invalid_api_key"),
        (None, {"temperature": 0.0}, "BadRequestError", "unsupported_value"),
        (None, {"messages": [{"role": "user", "content": "x" * 5000}]}, "BadRequestError", "context_length_exceeded"),
    ],
)
def test_errors_are_those_of_the_official_client(key, request_, error, code):
    """And it does not try again by itself."""

    def agent(task, notes):
        try:
            made = openai.OpenAI(base_url=task.base_url, api_key=key or task.api_key)
            made.chat.completions.create(**{"model": "m", "messages": [USER], **request_})
        except openai.APIStatusError as raised:
            notes["error"], notes["code"] = type(raised).__name__, raised.code
        client(task).chat.completions.create(model="m", messages=[USER])

    _, engine, notes = agent_group(agent)
    assert (notes["error"], notes["code"]) == (error, code)
    assert len(engine.requests) == 1


PROGRAM = """
import sys, openai
answer = openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": sys.argv[1]}])
assert answer.choices[0].message.content == "hello"
"""


def test_a_program_with_the_official_client_needs_nothing_but_its_environment():
    group, *_ = run_group("agent", {"command": (sys.executable, "-c", PROGRAM, "{prompt}")}, [[HE, LLO, END]])
    (sample,) = group.samples
    assert (sample.status, sampled(sample)) == ("stop", [HE, LLO, END]), sample.reason


# --- An agent loop that nobody here wrote ----------------------------------------------------------------------------


def small_agent(kind, task, **more):
    smolagents = pytest.importorskip("smolagents", reason="needs smolagents (miles-agent-rollout[test])")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One number.
            b: Another number.
        """
        return a + b

    model = smolagents.OpenAIServerModel("policy", api_base=task.base_url, api_key=task.api_key)
    return getattr(smolagents, kind)(tools=[add], model=model, verbosity_level=0, max_steps=4, **more)


def every_answer(samples, engine):
    """Checks that what was trained is exactly what was sampled: each answer once, with its context before it."""
    trained = []
    for sample in samples:
        for start, stop, *_ in sample.metadata["turns"]:
            trained.append((tuple(sample.tokens[:start].tolist()), tuple(sample.tokens[start:stop].tolist())))
            assert sample.loss_mask[start:stop].all()
        assert sample.loss_mask.sum() == sum(stop - start for start, stop, *_ in sample.metadata["turns"])
    answers = {tuple(r.token_ids.tolist()): tuple(engine.answers[r.id]) for r in engine.requests}
    assert sorted(trained) == sorted(answers.items())


def recording(*answers):
    """A stub engine that keeps what it answered."""
    from agent_words import scripted

    from miles_core.testing.engines import StubEngine

    script, kept = scripted(*answers), {}

    def answer(weight, request):
        if request.id not in kept:
            kept[request.id] = script(weight, request)
        return kept[request.id]

    engine = StubEngine(answer=answer)
    engine.answers = kept
    return engine


def test_an_agent_that_nobody_here_wrote_calls_tools():
    """smolagents' ToolCallingAgent: it asks for tool_choice = "required", and tells its history in words of its own, so
    that each step is a segment; one trajectory, and the ids trained are those sampled."""
    engine = recording(call("add", a=2, b=3), call("final_answer", answer="hello"))

    def agent(task, notes):
        return str(small_agent("ToolCallingAgent", task).run("What is 2 + 3?"))

    pytest.importorskip("smolagents", reason="needs smolagents (miles-agent-rollout[test])")
    samples, engine, _ = agent_group(agent, engine=engine, max_context=200_000, options={"unsupported": "ignore"})
    assert {s.status for s in samples} == {"stop"}, samples[0].reason
    assert samples[-1].response == "hello" and len(engine.requests) == 2
    every_answer(samples, engine)
    assert samples[0].metadata["ignored_parameters"] == 2


def test_an_agent_that_nobody_here_wrote_writes_code():
    """smolagents' CodeAgent, with its stop strings."""
    engine = recording(
        [*ids("Thought: add\n<code>\nx = add(a=2, b=3)\nprint(x)\n</code>"), END],
        [*ids("Thought: done\n<code>\nfinal_answer(x)\n</code>"), END],
    )

    def agent(task, notes):
        return str(small_agent("CodeAgent", task).run("What is 2 + 3?"))

    pytest.importorskip("smolagents", reason="needs smolagents (miles-agent-rollout[test])")
    samples, engine, _ = agent_group(agent, engine=engine, max_context=200_000)
    assert {s.status for s in samples} == {"stop"}, samples[0].reason
    assert samples[-1].response == "5" and len(engine.requests) == 2
    assert all(r.params.stop for r in engine.requests)
    every_answer(samples, engine)


def test_T1_an_agent_that_nobody_here_wrote_keeps_one_segment():
    """The loop of openai-agents echoes its history as it came: three requests with two tool calls are one segment, id by
    id."""
    sdk = pytest.importorskip("agents", reason="needs openai-agents (miles-agent-rollout[test])")
    first = [*ids("I will add. "), HE, LLO, *call("add", a=2, b=3)]
    engine = recording(first, call("add", a=5, b=1), [HE, LLO, END])

    async def agent(task, notes):
        @sdk.function_tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        sdk.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as asks:
            model = sdk.OpenAIChatCompletionsModel("policy", openai_client=asks)
            made = sdk.Agent(name="small", instructions="Be brief.", tools=[add], model=model)
            return (await sdk.Runner.run(made, "What is 2 + 3 + 1?")).final_output

    samples, engine, _ = agent_group(agent, engine=engine, max_context=100_000)
    (sample,) = samples
    assert (sample.status, sample.response, len(engine.requests)) == ("stop", "hello", 3), sample.reason
    every_answer([sample], engine)
    assert sampled(sample) == [*first, *call("add", a=5, b=1), HE, LLO, END]
    assert sample.metadata["rewrites"] == 0
