"""Python functions that a model may call: their schema, and calls that end in time and never raise."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from miles_agent_rollout.isolate import Workers, as_text
from miles_agent_rollout.references import load, reference_to
from miles_core.errors import ConfigError
from miles_core.types import Prompt

REGISTERED: dict[str, Callable[..., Any]] = {}
"""Functions decorated with `tool`, by name."""


def tool(function: Callable[..., Any] | None = None, *, name: str = "") -> Any:
    """Registers a function, in a plugin file for example, so that `tools = ["its_name"]` finds it."""

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        REGISTERED[name or f.__name__] = f
        return f

    return register if function is None else register(function)


@dataclass(slots=True, kw_only=True)
class ToolContext:
    """What a tool gets that has a parameter named `context`: whose trajectory it is, and a place for what it remembers
    from call to call of this trajectory."""

    prompt: Prompt
    index: int
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of a call: `kind` is "ok", "error" or "timeout"; `text` is what the model reads."""

    text: str
    kind: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function with a signature that says what a call must look like."""

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    description: str
    wants_context: bool

    @classmethod
    def of(cls, function: Callable[..., Any], name: str = "") -> Tool:
        """Raises ConfigError for a function whose parameters have no names or types that a schema can say."""
        name = name or function.__name__
        signature = inspect.signature(function, eval_str=True)
        fields: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f'the tool "{name}" has a parameter {parameter}: all must have names of their own')
            if parameter.name != "context":
                kind = Any if parameter.annotation is parameter.empty else parameter.annotation
                fields[parameter.name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
            model.model_json_schema()
        except Exception as error:
            raise ConfigError(f'the parameters of the tool "{name}" have no JSON schema: {error}') from error
        return cls(
            name=name,
            function=function,
            arguments=model,
            description=inspect.cleandoc(function.__doc__ or ""),
            wants_context="context" in signature.parameters,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's API, which chat templates read too."""
        parameters = self.arguments.model_json_schema()
        parameters.pop("title", None)
        for entry in parameters.get("properties", {}).values():
            entry.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the function takes them. Raises ValueError that tells the model what is wrong."""
        try:
            made = self.arguments.model_validate(arguments)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
            raise ValueError("; ".join(problems)) from None
        return {name: getattr(made, name) for name in made.model_fields_set}


def load_tools(names: Sequence[str]) -> dict[str, Tool]:
    """Tools by the name that the model calls them. Raises ConfigError for one that is missing or comes twice."""
    tools: dict[str, Tool] = {}
    for name in names:
        known = f"registered with @tool: {', '.join(REGISTERED) or 'none'}"
        function = REGISTERED.get(name) or load(name, "tool", known)
        own = next((n for n, f in REGISTERED.items() if f is function), "")
        made = Tool.of(function, own)
        if made.name in tools:
            raise ConfigError(f'two tools are named "{made.name}"; the model could not tell them apart')
        tools[made.name] = made
    return tools


class Toolbox:
    """Calls tools: each within `timeout_s`, in a thread of its own or, isolated, in a process that is killed then.

    A thread cannot be ended from outside: one that is late goes on, its result is dropped, and `abandoned` counts it.
    """

    def __init__(self, tools: Mapping[str, Tool], *, timeout_s: float, max_chars: int, workers: Workers | None) -> None:
        self.tools, self.timeout_s, self.max_chars, self.workers = dict(tools), timeout_s, max_chars, workers
        self.abandoned = 0
        for made in tools.values() if workers else ():
            reference_to(made.function)
            if made.wants_context:
                raise ConfigError(
                    f'the tool "{made.name}" asks for a context, which lives in this process',
                    "leave isolate_tools = false, or do without the parameter `context`",
                )

    async def call(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Result:
        """Never raises but for being cancelled: whatever the tool does, the model is told."""
        made = self.tools.get(name)
        if made is None:
            return Result(text=f'error: no tool named "{name}"; there are {", ".join(self.tools)}', kind="error")
        try:
            kwargs = made.checked(arguments)
        except ValueError as error:
            return Result(text=f"error: arguments of {name}: {error}", kind="error")
        if self.workers is not None:
            kind, text = await self.workers.call(
                {"reference": reference_to(made.function), "kwargs": made.arguments(**kwargs).model_dump(mode="json")},
                self.timeout_s,
            )
        else:
            if made.wants_context:
                kwargs["context"] = context
            kind, text = await self._in_process(made.function, kwargs)
        if kind == "timeout":
            text = f"error: {name} did not answer within {self.timeout_s:g} s"
        elif kind == "error":
            text = f"error: {text}"
        return Result(text=self._shortened(text), kind=kind)

    async def _in_process(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[str, str]:
        if inspect.iscoroutinefunction(function):
            work = asyncio.ensure_future(function(**kwargs))
        else:
            work = in_thread(lambda: function(**kwargs))
        try:
            done, _ = await asyncio.wait({work}, timeout=self.timeout_s)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not done:
            work.cancel()
            self.abandoned += 1
            return "timeout", ""
        try:
            return "ok", as_text(work.result())
        except asyncio.CancelledError:
            return "error", "the tool cancelled itself"
        except Exception as error:
            return "error", f"{type(error).__name__}: {error}"

    def _shortened(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        half = self.max_chars // 2
        return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """`function` in a daemon thread of its own: one that never ends keeps neither a pool nor the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = RuntimeError(f"StopIteration: {raised}") if isinstance(raised, StopIteration) else raised
        except BaseException as raised:  # SystemExit of a tool is no reason to end anything
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="miles-agent-rollout", daemon=True).start()
    return future


def dumps(value: Any) -> str:
    """Compact JSON, for arguments of calls that were parsed."""
    return json.dumps(value, ensure_ascii=False, default=str)
