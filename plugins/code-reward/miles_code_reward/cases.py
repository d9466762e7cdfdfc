"""What a label says about how to test a program, in one form.

    {"stdin": [{"input": "1 2\\n", "output": "3\\n"}, ...]}                       also {"inputs": [...], "outputs": [...]}
    {"function": "add", "calls": [{"args": [1, 2], "kwargs": {}, "expected": 3}]}  also {"fn_name", "inputs", "outputs"}
    {"assertions": ["assert add(1, 2) == 3", ...], "setup": "import math"}         also {"test_list", "test_setup_code"}
    {"test": "def check(candidate): ...", "entry_point": "add"}
    ["assert add(1, 2) == 3", ...]

or any of these as a text of JSON. The other spellings are those of data sets in wide use.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """Either `stdin` (what goes in, what comes out), or `asked`: assertions as text and calls as mappings. `names` are what
    those and `setup` use without defining it."""

    stdin: tuple[tuple[str, str], ...] = ()
    asked: tuple[Any, ...] = ()
    setup: str = ""
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.stdin) + len(self.asked)

    def first(self, number: int) -> Tests:
        return Tests(stdin=self.stdin[:number], asked=self.asked[:number], setup=self.setup, names=self.names)


def tests_of(label: Any) -> Tests:
    """Raises ValueError that says what is wrong with a label: 0 would be a verdict."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError:
            raise ValueError(f"code needs tests as the label, and this text is not JSON: {label[:80]!r}") from None
    if isinstance(label, (list, tuple)):
        label = {"assertions": label}
    if not isinstance(label, Mapping):
        raise ValueError(f"code needs tests as the label, and the prompt's is {label!r:.80}")
    found = _read(label)
    if not len(found):
        raise ValueError(f"the label holds no test; it has {', '.join(map(str, label)) or 'nothing'}")
    return found


def _read(label: Mapping[str, Any]) -> Tests:
    function = label.get("function") or label.get("fn_name")
    setup = str(label.get("setup") or label.get("test_setup_code") or "")
    if "test" in label:
        entry = str(label.get("entry_point") or function or "candidate")
        return _asking((f"{label['test']}\n\ncheck({entry})",), setup)
    assertions = label.get("assertions") or label.get("test_list")
    if assertions:
        return _asking(tuple(str(one) for one in assertions), setup)
    if "calls" in label:
        if not function:
            raise ValueError('a label with "calls" needs "function"')
        return Tests(asked=tuple(_call(str(function), one) for one in label["calls"]))
    if "stdin" in label:
        return Tests(stdin=tuple((str(one["input"]), str(one["output"])) for one in label["stdin"]))
    inputs, outputs = label.get("inputs") or (), label.get("outputs") or ()
    if len(inputs) != len(outputs):
        raise ValueError(f"the label has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if function:
        return Tests(asked=tuple(_call(str(function), {"args": i, "expected": o}) for i, o in pairs))
    return Tests(stdin=tuple((_text(i), _text(o)) for i, o in pairs))


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, (list, tuple)) else str(lines)


def _call(function: str, one: Mapping[str, Any]) -> dict[str, Any]:
    if "expected" not in one:
        raise ValueError(f'a call of {function} lacks "expected"')
    args = one.get("args", ())
    if not isinstance(args, (list, tuple)):
        raise ValueError(f"the args of a call of {function} are {args!r:.60}, not a list")
    return {"function": function, "args": list(args), "kwargs": dict(one.get("kwargs") or {}), "expected": one["expected"]}


def _asking(tests: tuple[str, ...], setup: str) -> Tests:
    used: set[str] = set()
    defined: set[str] = set(dir(builtins))
    for text in (setup, *tests):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"a test of the label is no Python: {error}: {text[:80]!r}") from None
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    defined.add(name)
                case ast.alias(name=name, asname=other):
                    defined.add(other or name.partition(".")[0])
                case ast.ExceptHandler(name=str(name)):
                    defined.add(name)
    return Tests(asked=tests, setup=setup, names=tuple(sorted(used - defined)))
