"""A tokenizer with drift, a scripted engine, and one group on the two of them.

Vocabulary: he=1, llo=2, hello=3, a token for each special word, and one for each other character. Encoding takes the
longest match, so that text sampled as [1, 2] comes back as [3]: whatever encodes a second time is found out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from agent_demo_agents import ask

pytest.importorskip("aiohttp", reason="the gateway needs aiohttp (miles-agent-rollout[runtime])")

import miles_agent_rollout
from miles_agent_rollout import AgentConfig
from miles_agent_rollout.agent_rollout import AgentRollout
from miles_agent_rollout.agents import ThreadAgent
from miles_core.component import BuildContext
from miles_core.engines import EnginePool
from miles_core.errors import DataError
from miles_core.interfaces import Tokenizer
from miles_core.testing.clock import run_virtual
from miles_core.testing.engines import StubEngine
from miles_core.types import GenerateRequest, Prompt, PromptTokens, RolloutContext, SampleGroup, SamplingParams

HE, LLO, HELLO, END, THINK, THOUGHT, CALL, CALLED = 1, 2, 3, 4, 5, 6, 7, 8
WORDS = {
    HE: "he", LLO: "llo", HELLO: "hello", END: "<end>", THINK: "<think>", THOUGHT: "</think>", CALL: "<tool_call>",
    CALLED: "</tool_call>", 9: "<system>", 10: "<user>", 11: "<assistant>", 12: "<tool>",
}  # fmt: skip
SPECIAL = (4, 9, 10, 11, 12)
WORDS |= {100 + i: chr(i) for i in range(9, 127)} | {99: "\ufffd"}
BY_TEXT = sorted(((text, i) for i, text in WORDS.items()), key=lambda row: -len(row[0]))
HERE = Path(__file__).parent
DEMO = f"{HERE}/agent_demo_tools.py"
USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "try again"}


def ids(text: str) -> list[int]:
    """Greedy encoding."""
    found = []
    while text:
        word, token = next((row for row in BY_TEXT if text.startswith(row[0])), (text[0], 99))
        found.append(token)
        text = text[len(word) :]
    return found


def call(name: str, **arguments) -> list[int]:
    """An answer that calls a tool."""
    return [*ids("<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"), END]


PROMPT = ids("<user>hi<end><assistant>")


class WordTokenizer(Tokenizer):
    """`forgets`: the template leaves out the thinking of every answer but the last message's. `strict`: it refuses tool
    messages after an answer without parsed tool calls, and prints those itself."""

    def __init__(self, *, forgets: bool = False, strict: bool = False) -> None:
        self.forgets, self.strict = forgets, strict
        self.encoded: list[str] = []

    def render(self, messages, tools=(), images=()):
        text = f"<system>{len(tools)}<end>" if tools else ""
        for place, message in enumerate(messages):
            content = message["content"] or ""
            before = messages[place - 1] if place else {}
            if self.strict and message["role"] == "tool" and not (before.get("tool_calls") or before.get("role") == "tool"):
                raise DataError("a tool message without a tool call")
            if self.strict and message["role"] == "assistant":
                for row in message.get("tool_calls", ()):
                    content += "<tool_call>" + json.dumps(row["function"]) + "</tool_call>"
            if self.forgets and message["role"] == "assistant" and place < len(messages) - 1 and "</think>" in content:
                content = content.partition("</think>")[2]
            text += f"<{message['role']}>{content}<end>"
        if messages and messages[-1]["role"] == "assistant":
            text = text.removesuffix("<end>")
        else:
            text += "<assistant>"
        return self.encode(text)

    def encode(self, text):
        self.encoded.append(text)
        return PromptTokens(token_ids=np.array(ids(text), np.int32), text=text)

    def decode(self, token_ids, *, skip_special=True):
        return "".join(WORDS.get(int(t), WORDS[99]) for t in token_ids if not (skip_special and int(t) in SPECIAL))

    stop_token_ids = (END,)
    vocab_size = 300
    template_hash = ""


def scripted(*answers: list[int]):
    """An engine's answers: the n-th request of each trajectory gets the n-th, further ones "hello"."""
    seen: dict[str, int] = {}

    def answer(weight: int, request: GenerateRequest) -> list[int]:
        name = request.session or ""
        number = seen.get(request.id.partition("#")[0])
        if number is None:
            number = seen[request.id.partition("#")[0]] = sum(key.startswith(name + "/") for key in seen)
        return answers[number] if number < len(answers) else [HELLO, END]

    return answer


def run_group(rollout: str, options: dict, answers=(), *, prompt=None, engine=None, tokenizer=None, built=None, **fields):
    """(group, engine, rollout) of one group on a stub engine; `fields` are those of `RolloutContext`. `virtual`: on a clock
    that jumps, for what uses no thread and no socket."""
    components = {c.name: c for c in miles_agent_rollout.miles_rollouts()}
    engine = engine or StubEngine(answer=scripted(*answers))
    component = components[rollout]
    run_dir = fields.pop("run_dir", Path("/nonexistent"))
    clock = run_virtual if fields.pop("virtual", False) else asyncio.run
    sampling = SamplingParams(**{"max_new_tokens": 200, "stop_token_ids": (END,), **fields.pop("sampling", {})})

    async def main() -> tuple[SampleGroup, StubEngine, object]:
        pool = EnginePool([engine], timeout_s=20.0, sync_timeout_s=5.0, max_attempts=fields.pop("max_attempts", 3))
        await pool.start()
        cancel_after = fields.pop("cancel_after", None)
        cancelled = asyncio.Event()
        cancel_when = fields.pop("cancel_when", None)

        async def watch() -> None:
            while not cancel_when():
                await asyncio.sleep(0.02)
            cancelled.set()

        watching = asyncio.ensure_future(watch()) if cancel_when else None
        if cancel_after is not None:
            asyncio.get_running_loop().call_later(cancel_after, cancelled.set)
        context = RolloutContext(
            prompt=prompt or Prompt(id="p", messages=[{"role": "user", "content": "hi"}]),
            sampling=sampling,
            pool=pool,
            tokenizer=tokenizer or WordTokenizer(),
            cancelled=cancelled,
            **({"num_samples": 1, "seed": 42, "max_context": 4000} | fields),
        )
        made = built or component.build(
            component.config(**options),
            BuildContext(component=f"rollout/{rollout}", run_dir=run_dir, seed=0, run_config=None),
        )
        try:
            return await made.run_group(context), engine, made
        finally:
            if watching is not None:
                watching.cancel()
            await pool.close()

    return clock(asyncio.wait_for(main(), 60))


def sampled(sample) -> list[int]:
    return sample.tokens[sample.loss_mask].tolist()


def agent_group(function, *answers, options=None, **fields):
    """(samples, engine, what the agent noted) of one group; `function(task, notes)` is the agent."""
    notes: dict = {}
    config = AgentConfig(agent="unused", **(options or {}))
    built = AgentRollout(config, ThreadAgent(lambda task: function(task, notes)), logging.getLogger("test"))
    group, engine, _ = run_group("agent", {}, answers, built=built, **fields)
    notes["gateway"] = built._gateway
    return group.samples, engine, notes


def user(text: str) -> list[int]:
    """What a user's next message adds after an answer that ended."""
    return ids(f"<user>{text}<end><assistant>")


def twice(task, notes):
    """A conversation that grows, and echoes what it was told."""
    first = ask(task, [USER])
    notes["first"] = first
    return ask(task, [USER, first, AGAIN])["content"]


def tools_group(*answers, tools=("add",), options=None, **fields):
    names = tuple(name if ":" in name else f"{DEMO}:{name}" for name in tools)
    group, engine, _ = run_group("tools", {"tools": names, **(options or {})}, answers, **fields)
    return group, engine


def delta(result: str) -> list[int]:
    """What stands between two answers when the model ended its turn."""
    return ids(f"<tool>{result}<end><assistant>")
