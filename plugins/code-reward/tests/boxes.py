"""What the tests of the box share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from miles_code_reward import CodeConfig
from miles_code_reward.reward import CodeReward
from miles_code_reward.sandbox import Limits, Refused, Sandbox
from miles_core import BuildContext, Prompt, Score
from miles_core.testing.samples import make_sample

SMALL = Limits(memory_bytes=256 << 20, processes=4, disk_bytes=4 << 20, open_files=32, output_bytes=64 << 10, cpu_s=5)
PYTHONS = (sys.executable, "/usr/bin/python3")


def box(mode: str) -> Sandbox | None:
    """A sandbox of this mode with a Python that runs in it, or None where there is none."""
    for python in PYTHONS:
        if os.path.exists(python):
            sandbox = Sandbox(mode, python=python, limits=SMALL)
            try:
                if sandbox.run([*sandbox.python, "-c", "print(1)"], {}, limit_s=10).stdout == b"1\n":
                    return sandbox
            except Refused:
                continue
    return None


def reward(**options) -> CodeReward:
    context = BuildContext(component="reward/code", run_dir=Path("."), seed=0, run_config=None)
    return CodeReward(CodeConfig(**{"test_timeout_s": 3.0} | options), context)


def judged(made: CodeReward, program: str, label) -> Score:
    sample = make_sample(2, prompt=Prompt(id="p", text="q", label=label))
    sample.response = f"Here it is:\n```python\n{program}\n```\n"
    return made.score(sample)


def alive(mark: str) -> list[str]:
    """Command lines of living processes that hold `mark`; a zombie has none."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if mark in line and "ps -eo" not in line]
