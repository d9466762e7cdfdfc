"""A plugin file: a game for the toy policy. It must ask for the secret - by answering with an even digit - and then
repeat what the tool said."""

from __future__ import annotations

import miles_core
from miles_agent_rollout import tool
from miles_agent_rollout.parsers import Call, Parsed


def secret_of(prompt) -> str:
    """An odd digit that only the tool tells."""
    return str((int(prompt.label) * 4 + 3) % 10)


@tool
def secret(context) -> str:
    """Tells the secret of this task."""
    return secret_of(context.prompt)


def even_asks(text: str) -> Parsed:
    return Parsed(content=text, calls=[Call(name="secret")] if text in "02468" and text else [])


@miles_core.reward("repeats-secret")
def repeats_secret(sample):
    return float(sample.metadata["tool_calls"] == 1 and sample.response == secret_of(sample.prompt))


def player(task):
    """The same game as an agent: it asks for one answer, tells the secret, and asks again."""
    from agent_demo_agents import ask

    messages = list(task.messages)
    reply = ask(task, messages)
    told = str((int(task.label) * 4 + 3) % 10)
    reply = ask(task, [*messages, reply, {"role": "tool", "content": told}])
    return {"reward": float(reply["content"] == told), "metadata": {"told": told}}
