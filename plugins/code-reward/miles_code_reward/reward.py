"""The reward `code`."""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from miles_code_reward import CodeConfig
from miles_code_reward.cases import Tests, tests_of
from miles_code_reward.program import program_in, same_output
from miles_code_reward.sandbox import Limits, Sandbox, choose, drive
from miles_core import BuildContext
from miles_core.types import Sample, Score

LOADING = "while loading: "
_START_S = 1.0
"""For two Pythons to start; part of the first test's time only."""


@dataclass(slots=True)
class Outcome:
    """Of the tests that were run: how many passed, and why the first that did not."""

    passed: int = 0
    ran: int = 0
    reason: str = ""

    def add(self, why: str | None) -> None:
        self.ran += 1
        self.passed += why is None
        if why is not None:
            self.fail(why)

    def fail(self, why: str) -> None:
        self.reason = self.reason or why


class CodeReward:
    """1 when the program passes every test, or the fraction that it passes; 0 where there is no program. Metrics:
    `isolated` (1 with namespaces, so without a network), `passed`, `program_found`, `seconds`."""

    def __init__(self, config: CodeConfig, context: BuildContext) -> None:
        self.config, self.context = config, context
        self.sandbox = sandbox_of(config)
        self.isolated = self.sandbox.mode != "plain"
        if not self.isolated:
            context.logger.warning(
                "programs are not cut off from the network and from readable files here: namespaces are not allowed%s",
                "" if self.sandbox.drops_user else ", and they run as the user of this run",
            )
            if not self.sandbox.drops_user:  # so that they cannot read the memory and environment of this process
                ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)

    def score(self, sample: Sample) -> Score:
        """Raises ValueError for a label without tests, and RuntimeError when the box cannot be made."""
        tests = tests_of(sample.prompt.label if sample.prompt is not None else None)
        if self.config.max_tests is not None:
            tests = tests.first(self.config.max_tests)
        program = program_in(sample.response, self.config.languages, self.config.require_fence)
        self.context.metric("isolated", float(self.isolated))
        self.context.metric("program_found", float(program is not None))
        if program is None:
            return Score(value=0.0, parts={"passed": 0.0, "program": 0.0}, reason="no program found")
        start = time.monotonic()
        job = Job(self.sandbox, self.config, program, tests, end=start + self.config.total_s)
        outcome = job.by_output() if tests.stdin else job.by_asking()
        self.context.metric("seconds", time.monotonic() - start)
        fraction = outcome.passed / len(tests)
        self.context.metric("passed", fraction)
        reason = outcome.reason + ("" if self.isolated else " (not isolated from the network)")
        value = fraction if self.config.partial else float(outcome.passed == len(tests))
        return Score(value=value, parts={"passed": fraction, "program": 1.0}, reason=reason.strip())


@dataclass
class Job:
    """One program and its tests, until `end` (monotonic)."""

    sandbox: Sandbox
    config: CodeConfig
    program: str
    tests: Tests
    end: float
    outcome: Outcome = field(default_factory=Outcome)

    def over(self) -> bool:
        """Whether there is nothing more to learn, or no time."""
        if self.outcome.reason and not self.config.partial:
            return True
        if time.monotonic() >= self.end:
            self.outcome.fail(f"the time for all tests was over after {self.outcome.ran} of {len(self.tests)}")
            return True
        return False

    def by_output(self) -> Outcome:
        """A new box for each test; input goes in, and what was printed is compared here."""
        argv = list(self.config.command) or [*self.sandbox.python, self.config.file]
        for given, expected in self.tests.stdin:
            if self.over():
                break
            limit_s = min(self.config.test_timeout_s, self.end - time.monotonic())
            ended = self.sandbox.run(argv, {self.config.file: self.program}, stdin=given.encode(), limit_s=limit_s)
            why: str | None = ended.reason
            if not why:
                printed = ended.stdout.decode("utf-8", "replace")
                right = same_output(printed, expected, self.config.compare, self.config.tolerance)
                why = None if right else "wrong output"
            self.outcome.add(why)
        return self.outcome

    def by_asking(self) -> Outcome:
        """One box with the program and one with the tests, joined by two pipes. A program that dies or hangs is started
        anew for the next test where each test counts."""
        while self.outcome.ran < len(self.tests) and not self.over():
            why = self._ask(self.outcome.ran)
            if self.outcome.ran < len(self.tests) and why:
                self.outcome.add(why)
            if why.startswith(LOADING):
                break
        return self.outcome

    def _ask(self, skip: int) -> str:
        """Runs the tests from `skip` on; the answer says what stopped them, if they did not come to their end."""
        token = secrets.token_hex(16)
        job = {
            "token": token,
            "tests": list(self.tests.asked),
            "setup": self.tests.setup,
            "names": list(self.tests.names),
            "skip": skip,
            "tolerance": self.config.tolerance,
        }
        verdicts = Verdicts(token, self.outcome, self.config.test_timeout_s, self.end, stop_early=not self.config.partial)
        to_program, to_tester = os.pipe(), os.pipe()
        runs = []
        try:
            files = {"program.py": self.program, "runner.py": script("runner")}
            fds = (to_program[0], to_tester[1])
            runs.append(self.sandbox.start([*self.sandbox.python, "runner.py"], files, fds=fds, capture=False))
            files = {"tester.py": script("tester")}
            fds = (to_tester[0], to_program[1])
            argv, given = [self.sandbox.python[0], "-I", "-S", "-B", "tester.py"], json.dumps(job).encode()
            runs.append(self.sandbox.start(argv, files, stdin=given, fds=fds, slot=1, limits=self.tester_limits))
            for fd in (*to_program, *to_tester):
                os.close(fd)
            to_program = to_tester = ()
            deadline = min(self.end, time.monotonic() + self.config.test_timeout_s + _START_S)
            ended = drive(runs, runs[1], deadline=deadline, on_output=verdicts.read)
        finally:
            for fd in (*to_program, *to_tester):
                os.close(fd)
            for run in runs:
                run.close()
        return verdicts.stopped(ended.reason)

    @cached_property
    def tester_limits(self) -> Limits:
        return Limits(memory_bytes=max(512 << 20, self.sandbox.limits.memory_bytes), output_bytes=16 << 20)


def script(name: str) -> str:
    """The text of a module that runs in a box, where this package cannot be imported."""
    imported = "from miles_code_reward.wire import Channel, Codec, Gone\n"
    text = source(name)
    assert imported in text, name
    return text.replace(imported, source("wire"))


def source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text("utf-8")


class Verdicts:
    """Reads the tester's lines. Only those that begin with this run's token are its own; others come from the tests."""

    def __init__(self, token: str, outcome: Outcome, timeout_s: float, end: float, *, stop_early: bool) -> None:
        self._token, self._outcome, self._timeout_s, self._end = token, outcome, timeout_s, end
        self._seen, self._stop_early = 0, stop_early
        self._gone = ""
        self.ended = False

    def read(self, output: bytearray) -> float | None:
        """A new deadline (monotonic) when a test has ended."""
        new = None
        while (end := output.find(b"\n", self._seen)) >= 0:
            line = output[self._seen : end].decode("utf-8", "replace")
            self._seen = end + 1
            match line.split(" ", 3):
                case [self._token, "passed", _]:
                    self._outcome.add(None)
                case [self._token, "failed", _, why]:
                    self._outcome.add(why)
                case [self._token, "gone", *why]:
                    self._gone = " ".join(why)
                case [self._token, "end"]:
                    self.ended = True
                case _:
                    continue
            new = min(self._end, time.monotonic() + self._timeout_s)
            if self._stop_early and self._outcome.reason and not self.ended:
                new = 0.0  # one failure decides
        return new

    def stopped(self, why: str) -> str:
        """What kept the tests from their end, or ""."""
        if self.ended and not self._gone:
            return ""
        return self._gone or why or "the tests ended without their token"


def sandbox_of(config: CodeConfig) -> Sandbox:
    """Raises RuntimeMissing when no box can be made here, or none that isolates where that is required."""
    limits = Limits(
        memory_bytes=config.memory_mib << 20,
        processes=config.processes,
        disk_bytes=config.disk_mib << 20,
        open_files=config.open_files,
        output_bytes=config.output_kib << 10,
        cpu_s=math.ceil(config.total_s),
    )
    python = config.python or sys.executable
    return choose(
        config.isolation == "require", python=python, packages=config.packages, readable=config.readable, limits=limits
    )
