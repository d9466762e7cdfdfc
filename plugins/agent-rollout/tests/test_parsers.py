"""Tool calls in text, and what is none."""

from __future__ import annotations

import pytest

from miles_agent_rollout.parsers import Call, get_parser, hermes, python
from miles_core.errors import ConfigError


def one(name, **arguments):
    return [Call(name=name, arguments=arguments)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ('a <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> b', "a  b", one("f", x=1)),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}', "", one("f", x=1)),  # not closed
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", one("f", x=1)),
        ('<tool_call>{"name": "f"}</tool_call>', "", one("f")),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', "", [*one("f"), *one("g")]),
        ('<think>x</think><tool_call>{"name": "f"}</tool_call>', "<think>x</think>", one("f")),
    ],
)  # fmt: skip
def test_hermes(text, content, calls):
    parsed = hermes(text)
    assert (parsed.content, parsed.calls) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '<think><tool_call>{"name": "f"}</tool_call></think>no',
        '<tool_call>{"name": "f"}</tool_call></think>no',  # the prompt opened the thinking
        '<think>never ends <tool_call>{"name": "f"}</tool_call>',
    ],
)
def test_R8_a_call_inside_thinking_is_no_call(text):
    parsed = hermes(text)
    assert (parsed.content, parsed.calls) == (text, [])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("not json", "the tool call is not JSON"),
        ("[1]", 'an object with "name"'),
        ('{"name": 3}', 'an object with "name"'),
        ('{"name": "f", "arguments": [1]}', "the arguments are not an object"),
        ('{"name": "f", "arguments": "{"}', "the arguments are not JSON"),
        ("[" * 100_000, "the tool call is not JSON"),
    ],
)
def test_hermes_says_what_is_wrong(body, problem):
    (call,) = hermes(f"<tool_call>{body}</tool_call>").calls
    assert problem in call.problem


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[weather(city="Oslo", days=[1, 2]), time()]', [*one("weather", city="Oslo", days=[1, 2]), *one("time")]),
        ("time()", one("time")),
        ("<think>time()</think>now(x=-1)", one("now", x=-1)),
        ("It is time() to go", []),
        ("[]", []),
        ("a.b(x=1)", []),
        ("(" * 500, []),
    ],
)
def test_python(text, calls):
    assert python(text).calls == calls


@pytest.mark.parametrize("text", ["f(1)", "f(**{'a': 1})", "f(x=g())", "f(x=y)"])
def test_python_says_what_is_wrong(text):
    (call,) = python(text).calls
    assert call.problem


def test_an_unknown_parser_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match="parsers: hermes, python"):
        get_parser("xml")
