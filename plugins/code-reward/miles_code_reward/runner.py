"""The program's end, in its own process inside the box: loads the program, and does what the tester asks.

The program may do with this process what it likes; all that it gains is to choose the values that it answers with.
"""

import json
import operator
import os
import sys
import types

from miles_code_reward.wire import Channel, Codec, Gone

TESTER_IN, TESTER_OUT = 3, 4
OPERATIONS = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    **{
        name: getattr(operator, name)
        for name in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul")
    },
}
MUTABLE = (list, dict, set, bytearray)


class Objects(Codec):
    def __init__(self):
        self.kept, self.numbers = {}, {}

    def number(self, x):
        return x.number if type(x) is Callback else None

    def own(self, x):
        if id(x) not in self.numbers:  # kept alive below, so that the id stays its own
            self.numbers[id(x)] = len(self.kept)
            self.kept[len(self.kept)] = x
        return self.numbers[id(x)]

    def owned(self, number):
        return self.kept[number]

    def theirs(self, number):
        return Callback(number)


class Callback:
    """A function that the test passed. It runs over there."""

    def __init__(self, number):
        self.number = number

    def __call__(self, *args):
        channel.send("ask", self.number, codec.encode(list(args)))
        return serve(until_answer=True)


def load(source):
    module = types.ModuleType("program")
    module.__file__ = "program.py"
    sys.modules["program"] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module


def serve(until_answer=False):
    while True:
        kind, *rest = channel.receive()
        if kind == "answer" and until_answer:
            return codec.decode(rest[0])
        if kind == "failed" and until_answer:
            raise RuntimeError(rest[0])
        try:
            channel.send("ok", *perform(kind, *rest))
        except Gone:
            raise
        except BaseException as error:
            channel.send("raised", type(error).__name__, str(error)[:500])


def perform(kind, *rest):
    """The encoded result, and the arguments that were changed on the way, as [position, encoded]."""
    if kind == "name":
        return codec.encode(getattr(program, rest[0])), []
    args, kwargs = codec.decode(rest[0]), {key: codec.decode(value) for key, value in rest[1].items()}
    places = [i for i, x in enumerate(args) if isinstance(x, MUTABLE)]
    before = {i: json.dumps(codec.encode(args[i])) for i in places}
    value = codec.encode(OPERATIONS[kind](*args, **kwargs))
    after = [(i, codec.encode(args[i])) for i in places]
    return value, [[i, now] for i, now in after if json.dumps(now) != before[i]]


if __name__ == "__main__":
    channel, codec = Channel(TESTER_IN, TESTER_OUT), Objects()
    with open("program.py", encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    try:
        program = load(text)
    except BaseException as error:
        channel.send("raised", type(error).__name__, str(error)[:500])
        os._exit(1)
    channel.send("ok", None, [])
    try:
        serve()
    except Gone:
        os._exit(0)
