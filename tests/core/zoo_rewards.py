"""Rewards that behave in every way a reward can: a plugin file for the tests of scoring. Each acts on `sample.index`."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import numpy as np

from miles_core import Component, ComponentConfig, Score, hookimpl


class Options(ComponentConfig):
    bad: tuple[int, ...] = (2,)
    """Indices of the samples on which the reward misbehaves."""
    note: str = ""
    """A file that gets one line per call."""


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Zoo:
    def __init__(self, options, context):
        self.options, self.context = options, context

    def called(self, index):
        if self.options.note:
            with open(self.options.note, "a") as file:
                file.write(f"{index} {os.getpid()}\n")

    def score(self, sample):
        self.called(sample.index)
        return self.misbehave(sample) if sample.index in self.options.bad else float(sample.index)

    def misbehave(self, sample):
        raise ValueError("bad sample")


class StopsIteration(Zoo):
    def misbehave(self, sample):
        raise StopIteration


class Exits(Zoo):
    def misbehave(self, sample):
        sys.exit(3)


class RaisesUnpicklable(Zoo):
    def misbehave(self, sample):
        raise Unpicklable


class OutOfMemory(Zoo):
    def misbehave(self, sample):
        raise MemoryError


class Nothing(Zoo):
    def misbehave(self, sample):
        return None


class NotANumber(Zoo):
    def misbehave(self, sample):
        return float("nan")


class Infinite(Zoo):
    def misbehave(self, sample):
        return Score(value=1.0, parts={"format": float("inf")})


class Text(Zoo):
    def misbehave(self, sample):
        return "correct"


class Kinds(Zoo):
    """bool, int, numpy scalars and Score are all numbers."""

    def score(self, sample):
        full = Score(value=0.25, parts={"format": 1.0}, reason="half right")
        return [True, 2, np.float32(0.5), np.int64(3), full, Score(value=None, reason="unsure")][sample.index]


class Hangs(Zoo):
    def misbehave(self, sample):
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass


class Spawns(Zoo):
    """Waits for ever for a grandchild that left its session."""

    def misbehave(self, sample):
        subprocess.run(["sleep", "1000"], start_new_session=True)


class Daemonises(Zoo):
    """A grandchild whose parent is gone, in another session, without an inherited environment."""

    def misbehave(self, sample):
        code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True, env={})"
        subprocess.run([sys.executable, "-c", code], check=True)
        time.sleep(1000)


class KillsItself(Zoo):
    def misbehave(self, sample):
        os.kill(os.getpid(), 9)


class Slow(Zoo):
    def misbehave(self, sample):
        time.sleep(0.3)
        return 1.0


class Asynchronous(Zoo):
    async def score(self, sample):
        await asyncio.sleep(0.5)
        return super().score(sample)


class AsynchronousSlow(Zoo):
    async def score(self, sample):
        await asyncio.sleep(1000 if sample.index in self.options.bad else 0.01)
        return float(sample.index)


class AsynchronousBlocks(Zoo):
    async def score(self, sample):
        await asyncio.sleep(0)
        if sample.index in self.options.bad:
            time.sleep(1000)
        return float(sample.index)


class Prints(Zoo):
    def score(self, sample):
        print('["d", 0, "not the protocol"]', flush=True)
        os.write(1, b"raw\n")
        self.context.metric("calls", 1.0, "sum")
        return 1.0


class Environment(Zoo):
    def score(self, sample):
        found = os.environ.get("ZOO_API_KEY", "")
        return Score(value=float(bool(found)), reason=found + " " + self.context.secrets.get("ZOO_API_KEY", ""))


class Group(Zoo):
    """`bad[0]` says what is returned for the group."""

    def score_group(self, group):
        self.called(-1)
        n = len(group.samples)
        answers = {
            0: lambda: [float(s.index) for s in group.samples],
            1: lambda: [1.0],
            2: lambda: [1.0] * (n + 1),
            3: lambda: 1.0,
            4: lambda: (1.0 for _ in range(n - 1)),
            5: lambda: (float(s.index) for s in group.samples),
            6: lambda: {"a": 1.0},
            7: lambda: "111",
            8: lambda: [1.0, None, float("nan")],
            9: lambda: np.array([0.0, 1.0, 2.0]),
            10: lambda: time.sleep(1000),
            11: lambda: [][0],
            12: lambda: iter(int, 1),
            13: lambda: None,
        }
        return answers[self.options.bad[0]]()


class AsynchronousGroup(Zoo):
    async def score_group(self, group):
        await asyncio.sleep(0)
        return [float(s.index) for s in group.samples]


class Neither:
    def __init__(self, options, context):
        pass


def _broken(options, context):
    raise RuntimeError("no model file")


def kebab(name):
    return "".join("-" + c.lower() if c.isupper() else c for c in name).lstrip("-")


CLASSES = [
    Zoo, StopsIteration, Exits, RaisesUnpicklable, OutOfMemory, Nothing, NotANumber, Infinite, Text, Kinds, Hangs, Spawns,
    Daemonises, KillsItself, Slow, Asynchronous, AsynchronousSlow, AsynchronousBlocks, Prints, Group, AsynchronousGroup,
    Environment, Neither,
]  # fmt: skip
COMPONENTS = {kebab(c.__name__): Component(name=kebab(c.__name__), summary="zoo", config=Options, build=c) for c in CLASSES}
COMPONENTS["fails-to-build"] = Component(name="fails-to-build", summary="zoo", config=Options, build=_broken)
COMPONENTS["told-the-secret"] = Component(
    name="told-the-secret", summary="zoo", config=Options, build=Environment, secrets=("ZOO_API_KEY",)
)


@hookimpl
def miles_rewards():
    return list(COMPONENTS.values())
