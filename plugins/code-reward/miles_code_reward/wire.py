"""How a program and the process that tests it talk. Standard library only: in the text of `runner.py` and `tester.py` this
file takes the place of its import, since neither box has this package.

Lines of JSON over two pipes. Plain data travels by value and arrives as exactly that type: a subclass of `int` with an
`__eq__` of its own arrives as an `int`. Anything else stays where it is, and a reference travels.
"""

import json
import os
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real

ANSWER_BYTES = 16 << 20
"""Longest answer to one call."""


class Gone(BaseException):
    """The other side ended, or does not keep to the protocol."""


class Channel:
    def __init__(self, read_fd, write_fd):
        self._file, self._fd = os.fdopen(read_fd, "rb"), write_fd

    def send(self, *message):
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            raise Gone("the program is gone") from None

    def receive(self):
        line = self._file.readline(ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise Gone("the program is gone" if len(line) < ANSWER_BYTES else "the program's answer is too long")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, list) or not message:
            raise Gone("the program does not keep to the protocol")
        return message


class Codec:
    """`own(x)` gives a number to an object that stays here; `owned(n)` is that object; `theirs(n)` stands for one of the
    other side; `number(x)` is the number of such a stand-in, or None."""

    def encode(self, x):
        if x is None or x is True or x is False:
            return x
        if isinstance(x, str):
            return str.__str__(x)
        if isinstance(x, int):
            value = int(x)
            return value if -(2**63) < value < 2**63 else ["i", hex(value)]
        if isinstance(x, float):
            return ["f", float(x).hex()]
        number = self.number(x)
        if number is not None:
            return ["yours", number]
        for tag, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
            if isinstance(x, kind):
                return [tag, *map(self.encode, kind.__iter__(x))]
        if isinstance(x, dict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in dict.items(x))]
        if isinstance(x, (bytes, bytearray)):
            return [type(x).__name__ if type(x) in (bytes, bytearray) else "bytes", bytes(x).hex()]
        if isinstance(x, complex):
            return ["c", x.real.hex(), x.imag.hex()]
        if isinstance(x, Fraction):
            return ["q", hex(x.numerator), hex(x.denominator)]
        if isinstance(x, Decimal):
            return ["d", str(x)]
        return self._encode_other(x)

    def _encode_other(self, x):
        if type(x).__module__ == "numpy" and getattr(x, "shape", None) == ():
            return self.encode(x.item())
        if isinstance(x, Integral):
            return self.encode(int(x))
        if isinstance(x, Real):
            return self.encode(float(x))
        return ["mine", self.own(x)]

    def decode(self, x):
        if not isinstance(x, list):
            return x
        tag, *rest = x
        if tag in ("list", "tuple", "set", "frozenset"):
            kind = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag]
            return kind(map(self.decode, rest))
        if tag == "dict":
            return {self.decode(k): self.decode(v) for k, v in rest}
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray).fromhex(rest[0])
        if tag == "i":
            return int(rest[0], 16)
        if tag == "f":
            return float.fromhex(rest[0])
        if tag == "c":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        if tag == "q":
            return Fraction(int(rest[0], 16), int(rest[1], 16))
        if tag == "d":
            return Decimal(rest[0])
        if tag == "mine":
            return self.theirs(rest[0])
        if tag == "yours":
            return self.owned(rest[0])
        raise ValueError(f"no such tag: {tag!r}")
