"""Tool calls in the text of an answer. What does not parse is data: the model is told, and may try again."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miles_agent_rollout.references import load

_TAG = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(slots=True, kw_only=True)
class Call:
    """One tool call. `problem` says why it cannot be carried out."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class Parsed:
    """An answer taken apart: the text beside the calls, and the calls in order."""

    content: str
    calls: list[Call] = field(default_factory=list)


Parser = Callable[[str], Parsed]


def hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it, any number of
    times. A last tag that is not closed counts; what is said while thinking does not."""
    start = _after_thinking(text)
    tail = text[start:]
    calls = [_from_json(match.group(1)) for match in _TAG.finditer(tail)]
    return Parsed(content=(text[:start] + _TAG.sub("", tail)).strip() if calls else text, calls=calls)


def python(text: str) -> Parsed:
    """The whole answer is a call, or a list of calls, in Python's syntax with literal keyword arguments:
    `[weather(city="Oslo"), time()]`. Anything else is plain text."""
    start = _after_thinking(text)
    try:
        tree = ast.parse(text[start:].strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return Parsed(content=text)
    nodes = tree.elts if isinstance(tree, ast.List) and tree.elts else [tree]
    if not all(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) for node in nodes):
        return Parsed(content=text)
    return Parsed(content=text[:start].strip(), calls=[_from_python(node) for node in nodes])


PARSERS: dict[str, Parser] = {"hermes": hermes, "python": python}


def get_parser(name: str) -> Parser:
    """A parser of `PARSERS`, or "module:function" with the signature of one. Raises ConfigError."""
    return PARSERS.get(name) or load(name, "parser", f"parsers: {', '.join(PARSERS)}")


def _after_thinking(text: str) -> int:
    """Where the answer begins behind its thinking; the end when the thinking never ends."""
    closed = text.rfind("</think>")
    opened = text.rfind("<think>")
    if opened > closed:
        return len(text)
    return closed + len("</think>") if closed >= 0 else 0


def _from_json(text: str) -> Call:
    try:
        row = json.loads(text.strip())
    except (ValueError, RecursionError) as error:
        return Call(name="", problem=f"the tool call is not JSON: {error}")
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return Call(name="", problem='a tool call is an object with "name" and "arguments"')
    arguments = row.get("arguments", row.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return Call(name=row["name"], problem=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(name=row["name"], problem="the arguments are not an object")
    return Call(name=row["name"], arguments=arguments)


def _from_python(node: ast.Call) -> Call:
    name = node.func.id  # type: ignore[attr-defined]
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Call(name=name, problem="arguments are given by keyword")
    try:
        return Call(name=name, arguments={k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg})
    except (ValueError, TypeError, MemoryError, RecursionError):
        return Call(name=name, problem="arguments must be literals")
