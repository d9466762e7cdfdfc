"""The tests' end, in a box of its own without the program: executes the tests, in which the program's names stand for what
is asked of it through the pipes. The token that makes a verdict valid is known to this process and the worker alone.
"""

import builtins
import importlib
import json
import os
import sys
from decimal import Decimal
from fractions import Fraction

from miles_code_reward.wire import Channel, Codec, Gone

PROGRAM_IN, PROGRAM_OUT = 3, 4


class ProgramError(Exception):
    """The program raised something that has no built-in name."""


class Stands(Codec):
    def __init__(self):
        self.remotes, self.functions = {}, []

    def number(self, x):
        return object.__getattribute__(x, "_miles_number") if type(x) is Remote else None

    def own(self, x):
        if not callable(x):
            raise TypeError(f"a {type(x).__name__} of the test cannot be passed to the program")
        self.functions.append(x)
        return len(self.functions) - 1

    def owned(self, number):
        return self.functions[number]

    def theirs(self, number):
        return self.remotes.setdefault(number, Remote(number))


class Remote:
    """An object of the program. It equals only itself or what the program itself calls equal among its own objects: never
    plain data, so that no `__eq__` of the program decides a test."""

    __slots__ = ("_miles_number",)

    def __init__(self, number):
        object.__setattr__(self, "_miles_number", number)

    def __getattr__(self, name):
        return ask("getattr", self, name)

    def __setattr__(self, name, value):
        ask("setattr", self, name, value)

    def __call__(self, *args, **kwargs):
        return ask("call", self, *args, **kwargs)

    def __contains__(self, x):  # not the program's: it would be told what to contain
        return any(x == y for y in self)

    def __hash__(self):
        return hash(object.__getattribute__(self, "_miles_number"))

    def __eq__(self, other):
        if self is other or type(other) is not Remote:
            return self is other
        return bool(ask("eq", self, other))

    def __enter__(self):
        return ask("enter", self)

    def __exit__(self, *_):
        ask("exit", self)


def _method(name):
    def method(self, *args):
        return ask(name, self, *args)

    return method


def _between_objects(name):
    def method(self, other):
        return ask(name, self, other) if type(other) is Remote else NotImplemented

    return method


for _name in ("len", "bool", "iter", "next", "str", "repr", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _method(_name))
for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul"):
    setattr(Remote, f"__{_name}__", _between_objects(_name))


def ask(kind, *args, **kwargs):
    channel.send(kind, codec.encode(list(args)), {key: codec.encode(value) for key, value in kwargs.items()})
    value, changed = answer()
    for place, new in changed:
        update(args[place], new)
    return value


def answer():
    """What the program answers: (value, changed arguments). What it raised is raised; what it asks meanwhile is done."""
    while True:
        message = channel.receive()
        try:
            kind, *rest = message
            if kind == "ok":
                value, changed = codec.decode(rest[0]), [(int(i), codec.decode(new)) for i, new in rest[1]]
                return value, changed
            if kind == "ask":
                function, args = codec.owned(int(rest[0])), codec.decode(rest[1])
            elif kind == "raised":
                name, text = str(rest[0]), str(rest[1])
            else:
                raise ValueError(kind)
        except Exception:
            raise Gone("the program does not keep to the protocol") from None
        if kind == "raised":
            known = getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, UnicodeError):
                raise known(text)
            raise ProgramError(f"{name}: {text}")
        try:
            reply = ("answer", codec.encode(function(*args)))
        except Exception as error:
            reply = ("failed", f"{type(error).__name__}: {error}"[:500])
        channel.send(*reply)


def update(old, new):
    """A function may change its arguments in place: so they are changed here too."""
    if type(old) is not type(new) or type(old) not in (list, dict, set, bytearray):
        raise Gone("the program does not keep to the protocol")
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def named(name):
    """What the program calls `name`."""
    channel.send("name", name)
    return answer()[0]


def target(name):
    """The function to be called; "Class.method", or a method of a class Solution, is one of a new object."""
    head, _, method = name.partition(".")
    if method:
        return getattr(named(head)(), method)
    try:
        return named(head)
    except AttributeError:
        return getattr(named("Solution")(), head)


def same(value, expected, tolerance):
    """Whether a value is what the JSON says: tuples, sets excepted, are lists, keys are text, and numbers may be near."""
    if isinstance(expected, list):
        if isinstance(value, Remote):
            value = list(value)
        ok = isinstance(value, (list, tuple)) and len(value) == len(expected)
        return ok and all(same(v, e, tolerance) for v, e in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        texts = {key if isinstance(key, str) else json.dumps(key): item for key, item in value.items()}
        return texts.keys() == expected.keys() and all(same(texts[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, (int, float)):
        if not isinstance(value, (int, float, Fraction, Decimal)):
            return False
        if isinstance(expected, float) or not isinstance(value, int):
            return value == expected or abs(float(value) - expected) <= tolerance * max(1.0, abs(expected))
    return type(value) is type(expected) and value == expected


def run_test(test, namespace, tolerance):
    """None when it passed, else why not."""
    try:
        if isinstance(test, str):
            exec(compile(test, "test", "exec"), namespace)
            return None
        value = target(test["function"])(*test["args"], **test["kwargs"])
        right = same(value, test["expected"], tolerance)
        return None if right else f"{test['function']} gave something else than expected"
    except AssertionError as error:
        return f"assertion failed {str(error)[:100]}".strip()
    except Gone:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:200]


def main():
    job = json.loads(sys.stdin.read())
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(*words):
        os.write(out, (" ".join([job["token"], *words]) + "\n").encode("utf-8", "replace"))

    namespace = {"__name__": "tests"}
    todo = job["tests"][job["skip"] :]
    try:
        loaded()
        for name in job["names"]:
            bring(name, namespace)
        exec(compile(job["setup"], "setup", "exec"), namespace)
        for number, test in enumerate(todo, job["skip"]):
            why = run_test(test, namespace, job["tolerance"])
            say("passed" if why is None else "failed", str(number), *([why.replace("\n", " ")] if why else []))
    except Gone as error:
        say("gone", str(error))
    except BaseException as error:
        say("gone", f"{type(error).__name__}: {error}"[:200].replace("\n", " "))
    say("end")
    os._exit(0)


def loaded():
    """Waits until the program has been loaded."""
    try:
        answer()
    except Exception as error:
        raise Gone(f"while loading: {type(error).__name__}: {error}"[:200].replace("\n", " ")) from None
    except Gone:
        raise Gone("while loading: the program ended") from None


def bring(name, namespace):
    """A name that tests use: a module of the standard library is this process's own, all else is the program's."""
    if name in sys.stdlib_module_names:
        namespace[name] = importlib.import_module(name)
        return
    try:
        namespace[name] = named(name)
    except AttributeError:
        return  # a test that uses it fails with a NameError


if __name__ == "__main__":
    channel, codec = Channel(PROGRAM_IN, PROGRAM_OUT), Stands()
    main()
