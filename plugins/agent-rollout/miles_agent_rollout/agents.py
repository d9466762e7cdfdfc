"""Agents: what one is told, the ways to run one, and what it may give back."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles_agent_rollout.isolate import Child, Process, child_environment
from miles_agent_rollout.references import load, reference_to
from miles_core.errors import ConfigError

RESULT_KEYS = ("reward", "response", "metadata")
RESULT_VARIABLE, TASK_VARIABLE = "MILES_RESULT", "MILES_TASK"


@dataclass(slots=True, kw_only=True)
class AgentTask:
    """One trajectory as the agent sees it: the prompt, and where its model answers."""

    id: str
    draw: int
    index: int
    """Which of the samples of the prompt; -1 is the greedy baseline."""
    base_url: str
    api_key: str
    model: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    label: Any = None
    tools: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    evaluation: bool = False

    @property
    def prompt(self) -> str:
        """The task as one text: the plain prompt, or the last message of a user."""
        if self.text is not None:
            return self.text
        users = [m for m in self.messages or () if m.get("role") == "user"]
        content = users[-1].get("content") if users else ""
        if isinstance(content, list):
            return "\n".join(str(part.get("text", "")) for part in content)
        return str(content or "")

    @property
    def environment(self) -> dict[str, str]:
        """What makes an unmodified client of OpenAI's API talk to the gateway."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "OPENAI_API_KEY": self.api_key}


@dataclass(slots=True, kw_only=True)
class AgentResult:
    """What an agent gave back. `error` says why there is nothing to believe."""

    reward: float | None = None
    response: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def result_row(value: Any) -> dict[str, Any]:
    """What an agent returned, as a row of JSON. None: nothing. A number: its reward. Text: its answer, for rewards to
    judge. A mapping: any of "reward", "response", "metadata". Raises ValueError for anything else, NaN included."""
    row: dict[str, Any]
    if value is None:
        row = {}
    elif isinstance(value, bool | int | float):
        row = {"reward": float(value)}
    elif isinstance(value, str):
        row = {"response": value}
    elif isinstance(value, Mapping):
        row = dict(value)
    else:
        raise ValueError(f"the agent returned a {type(value).__name__}; expected None, a number, text or a mapping")
    if unknown := sorted(set(row) - set(RESULT_KEYS), key=str):
        raise ValueError(f"the agent returned {unknown}; known are {', '.join(RESULT_KEYS)}")
    reward, response, metadata = (row.get(key) for key in RESULT_KEYS)
    if reward is not None and (not isinstance(reward, bool | int | float) or not math.isfinite(reward)):
        raise ValueError(f"the agent's reward is {reward!r}, not a finite number")
    if response is not None and not isinstance(response, str):
        raise ValueError(f"the agent's response is a {type(response).__name__}, not text")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ValueError(f"the agent's metadata is a {type(metadata).__name__}, not a mapping")
    try:
        return json.loads(json.dumps(row, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the agent's result is not JSON: {error}") from None


def read_result(row: Mapping[str, Any]) -> AgentResult:
    reward = row.get("reward")
    return AgentResult(
        reward=None if reward is None else float(reward),
        response=row.get("response"),
        metadata=dict(row.get("metadata") or {}),
    )


class Agent:
    """Runs one trajectory. `run` returns whatever happens; being cancelled ends what it started, as far as that goes."""

    async def run(self, task: AgentTask) -> AgentResult:
        raise NotImplementedError


class ThreadAgent(Agent):
    """A function in a thread of its own; a coroutine function on an event loop of its own there, so that an agent that
    blocks does not stop the engines. A thread cannot be killed: one that is late goes on, but its key is void."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def run(self, task: AgentTask) -> AgentResult:
        from miles_agent_rollout.tools import in_thread

        inner: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

        async def whole(awaitable: Any) -> Any:
            inner.append((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
            return await awaitable

        def work() -> dict[str, Any]:
            value = self.function(task)
            return result_row(asyncio.run(whole(value)) if inspect.isawaitable(value) else value)

        try:
            return read_result(await in_thread(work))
        except asyncio.CancelledError:
            for loop, running in inner:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(running.cancel)
            raise
        except Exception as error:
            return AgentResult(error=f"{type(error).__name__}: {error}")


class ProcessAgent(Agent):
    """A function in a process of its own, with the gateway's address and key in its environment."""

    def __init__(self, reference: str, log_dir: Path, declared: frozenset[str] = frozenset()) -> None:
        self.reference, self.log_dir, self.declared = reference, log_dir, declared

    async def run(self, task: AgentTask) -> AgentResult:
        env = child_environment(task.environment, self.declared)
        child = Child(env, self.log_dir / "agents.log")
        try:
            kind, value = await child.call({"reference": self.reference, "task": asdict(task)}, None)
        finally:
            await child.close()
        return read_result(value) if kind == "ok" else AgentResult(error=str(value))


class CommandAgent(Agent):
    """A program. "{prompt}", "{base_url}", "{api_key}" and "{model}" in its arguments are replaced; the environment holds
    OPENAI_BASE_URL, OPENAI_API_KEY, and the names of two files: MILES_TASK (JSON, to read) and MILES_RESULT (JSON, to
    write if it likes). It works in a folder of its own, which is deleted afterwards."""

    def __init__(self, command: Sequence[str], declared: frozenset[str] = frozenset()) -> None:
        self.command, self.declared = list(command), declared

    async def run(self, task: AgentTask) -> AgentResult:
        folder = Path(tempfile.mkdtemp(prefix="miles-agent-"))
        try:
            return await self._run(task, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, task: AgentTask, folder: Path) -> AgentResult:
        values = {name: getattr(task, name) for name in ("prompt", "base_url", "api_key", "model")}
        result = folder / "result.json"
        (folder / "task.json").write_text(json.dumps(asdict(task), default=str), "utf-8")
        files = {TASK_VARIABLE: str(folder / "task.json"), RESULT_VARIABLE: str(result)}
        env = child_environment(task.environment | files, self.declared)
        try:
            process = Process([filled(a, values) for a in self.command], env, folder / "output.log", folder=folder)
        except OSError as error:
            return AgentResult(error=f"{self.command[0]} does not start: {error}")
        try:
            code = await process.wait()
        finally:
            await process.kill()
        if code:
            return AgentResult(error=f"{self.command[0]} ended with code {code}: {process.tail()[-400:]}")
        try:
            return read_result(result_row(json.loads(result.read_text("utf-8")) if result.exists() else None))
        except (OSError, ValueError) as error:
            return AgentResult(error=f"what it wrote to {RESULT_VARIABLE} cannot be used: {error}")


def filled(argument: str, values: Mapping[str, str]) -> str:
    """`argument` with its placeholders replaced, once: what a prompt holds is not looked at again."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match.group(1)], argument)


def make_agent(function: str, command: Sequence[str], mode: str, log_dir: Path, env: Sequence[str]) -> Agent:
    """The agent of the options. Raises ConfigError when it cannot be found."""
    declared = frozenset(env)
    if bool(function) == bool(command):
        raise ConfigError('the rollout "agent" runs either a function or a command', 'set one of "agent" and "command"')
    if command:
        if shutil.which(command[0]) is None:
            raise ConfigError(f'there is no program "{command[0]}" (of "command")', "give a path, or put it on PATH")
        for argument in command[1:]:
            if not os.path.isabs(argument) and os.path.isfile(argument):
                raise ConfigError(
                    f'the argument "{argument}" (of "command") is a file here, but each agent works in a folder of its own',
                    f"give its absolute path: {Path(argument).resolve()}",
                )
        return CommandAgent([str(Path(shutil.which(command[0]) or "").absolute()), *command[1:]], declared)
    found = load(function, "agent")
    if mode == "process":
        return ProcessAgent(reference_to(found), log_dir, declared)
    return ThreadAgent(found)
