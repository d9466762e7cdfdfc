"""Whether a program does what it should. It is untrusted: it runs in a box, and is checked from outside."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl
from miles_core.errors import ConfigError


class CodeConfig(ComponentConfig):
    """Options of the reward `code`. What labels may look like stands in `cases.py` and in the README."""

    partial: bool = False
    """The score is the fraction of tests that pass, rather than 1 when all do and else 0."""
    max_tests: int | None = Field(default=None, gt=0)
    """Only so many tests of each label, the first ones."""
    compare: Literal["lines", "tokens", "exact"] = "lines"
    """How printed output is compared: without white space at the ends of lines; word by word with numbers within
    `tolerance`; or byte for byte."""
    tolerance: float = Field(default=1e-6, ge=0)
    """How far a number may be off, relative to the expected one or absolute, in "tokens" and in calls that expect a
    float."""
    require_fence: bool = True
    """Only a fenced block (three backticks) is a program; otherwise a response without any fence is one as a whole."""
    languages: tuple[str, ...] = ("python", "python3", "py")
    """Names after the fence that mark a program. The last such block counts, else the last one without a name."""
    command: tuple[str, ...] = ()
    """How to run programs that are tested by what they print, for example ["/bin/sh", "-c", "g++ -O1 -o p program.py &&
    ./p"]; the first word is an absolute path, and `file` lies in the working folder. Python by default."""
    file: str = Field(default="program.py", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the file that holds the program, for `command`."""
    python: str | None = None
    """The Python that runs programs; by default the one of the run."""
    packages: bool = False
    """Whether programs may import what is installed beside that Python."""
    readable: tuple[str, ...] = ()
    """Further files and folders that a program may read. Without namespaces it may read what every user may."""
    isolation: Literal["auto", "require"] = "auto"
    """"auto": namespaces where the kernel allows them, else limits and an unprivileged user alone, with a warning.
    "require": refuse to run without namespaces, and so without a network that is cut off."""
    test_timeout_s: float = Field(default=4.0, gt=0)
    """Time limit of one test."""
    total_s: float = Field(default=8.0, gt=0)
    """Time limit of all tests of a sample; tests that did not get their turn have not passed. Below the table's
    `timeout_s`, after which there would be no verdict."""
    memory_mib: int = Field(default=512, ge=64)
    """Address space of each process of a program."""
    processes: int = Field(default=8, ge=1)
    """Processes and threads of a program at once."""
    disk_mib: int = Field(default=64, ge=1)
    """What a program may write; each file without namespaces."""
    open_files: int = Field(default=64, ge=16)
    """Open files of each process."""
    output_kib: int = Field(default=1024, ge=1)
    """What a program may print; the test fails beyond that."""


def _check(config: CodeConfig, environment: Environment) -> None:
    tables = [t for t in getattr(environment.run_config, "reward", ()) if t.use.rpartition(":")[2] == "code"]
    longest = max((table.timeout_s for table in tables), default=None)
    if longest is not None and config.total_s >= longest:
        raise ConfigError(
            f"{environment.where}: total_s = {config.total_s:g} leaves no time for a verdict before the table's "
            f"timeout_s = {longest:g}",
            "raise timeout_s of the [[reward]] table, or lower total_s",
        )
    from miles_code_reward.reward import sandbox_of

    sandbox_of(config)


def _build(config: CodeConfig, context: BuildContext) -> Any:
    from miles_code_reward.reward import CodeReward

    return CodeReward(config, context)


@hookimpl
def miles_rewards() -> list[Component[Any]]:
    return [
        Component(
            name="code",
            summary="Runs the program of a response in a box; 1 when it passes the tests of the label, else 0.",
            config=CodeConfig,
            build=_build,
            check=_check,
        )
    ]
