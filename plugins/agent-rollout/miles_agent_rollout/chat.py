"""OpenAI's chat completions as data: what a request asks for, and what an answer looks like, whole or streamed.

The fields are those of the public API reference (platform.openai.com/docs/api-reference/chat).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_agent_rollout.turns import Message
from miles_core.types import SamplingParams

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
HARMLESS = frozenset({
    "model", "messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "logprobs",
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
})  # fmt: skip
"""Parameters that are honoured, or that change nothing about the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "top_logprobs": (0,),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True,), "tool_choice": ("auto", "none"),
    "modalities": (["text"],), "seed": (), "functions": ([],), "function_call": ("auto", "none"),
}  # fmt: skip
"""Values of other parameters that ask for nothing special."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form. `retry`: whether a client should try again by itself."""

    def __init__(self, status: int, message: str, code: str, *, param: str | None = None, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry = status, code, param, retry

    @property
    def body(self) -> dict[str, Any]:
        kind = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
        name = kind.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": name, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code, param=param)


@dataclass(slots=True, kw_only=True)
class Ask:
    """What a request asks for."""

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    model: str = ""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    usage_chunk: bool = False
    ignored: tuple[str, ...] = ()


def read_ask(body: Any, sampling: SamplingParams, unsupported: str) -> Ask:
    """A checked request. Raises ApiError 400 for what is malformed and, with `unsupported = "refuse"`, for what the
    gateway cannot do: tokens must be sampled as the run says, or their log-probabilities would not be the policy's."""
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object", code="invalid_json")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("a list of at least one message is needed", "messages")
    ignored = list(_unsupported(body, sampling))
    if ignored and unsupported == "refuse":
        name, why = ignored[0]
        raise bad(
            f"{name} = {json.dumps(body[name], default=str)[:200]} is not possible here: {why}", name, "unsupported_value"
        )
    tools = [] if body.get("tool_choice") == "none" else _list_of(body, "tools", dict)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise bad("the most tokens of an answer must be an integer of at least 1", "max_tokens")
    stop = body.get("stop")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise bad("stop must be a string or a list of strings", "stop")
    options = body.get("stream_options") or {}
    return Ask(
        messages=[read_message(m, i) for i, m in enumerate(messages)],
        tools=tools,
        model=str(body.get("model") or ""),
        stop=tuple(stop),
        max_tokens=limit,
        logprobs=body.get("logprobs") is True,
        stream=body.get("stream") is True,
        usage_chunk=isinstance(options, dict) and options.get("include_usage") is True,
        ignored=tuple(name for name, _ in ignored),
    )


def _unsupported(body: Mapping[str, Any], sampling: SamplingParams) -> Iterator[tuple[str, str]]:
    """(parameter, why it cannot be honoured) for each one that asks for something else than happens."""
    own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in own:
            if value != own[name]:
                yield name, f"the run samples with {name} = {own[name]:g}; leave it out"
        elif name == "seed":
            yield name, "seeds come from the run"
        elif name == "tool_choice":
            if value not in NEUTRAL[name]:
                yield name, "the model decides by itself whether it calls a tool"
        elif name not in NEUTRAL:
            yield name, "the gateway does not know this parameter"
        elif value not in NEUTRAL[name]:
            yield name, f"only {' or '.join(json.dumps(v) for v in NEUTRAL[name])} is possible"


def _list_of(body: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
        raise bad(f"{name} must be a list of objects", name)
    return value


def read_message(message: Any, place: int) -> Message:
    """One message in the form that chat templates read: text content, arguments of tool calls as objects."""
    where = f"messages[{place}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise bad(f"{where} needs a role, one of {', '.join(ROLES)}", where)
    made: Message = {"role": ROLES[message["role"]], "content": _text(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise bad(f"{where}.tool_calls must be a list", where)
    if calls and made["role"] == "assistant":
        made["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where}.content must be text or a list of parts", where)
    parts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad(f"{where}.content holds a part of type {kind}; only text is understood", where, "unsupported_value")
        parts.append(part["text"])
    return "\n".join(parts) if len(parts) > 1 else "".join(parts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"{where} needs a function with a name", where)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": as_object(function.get("arguments"))},
    }


def as_object(arguments: Any) -> Any:
    """Arguments as an object where they are one in JSON, else as they are."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def message_key(message: Message) -> str:
    """What two messages share that say the same. Ids of an assistant's tool calls do not count: clients rename them."""
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    rest = [] if message["role"] == "assistant" else [message.get("name"), message.get("tool_call_id")]
    return json.dumps([message["role"], message["content"], calls, rest], sort_keys=True, ensure_ascii=True, default=str)


# --- Answers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Reply:
    """One answer. `calls` are tool calls as the API writes them; `logprobs` one row per sampled token."""

    id: str
    model: str
    created: int
    content: str
    calls: list[dict[str, Any]]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        return message | ({"tool_calls": self.calls} if self.calls else {}) | {"refusal": None}

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def body(self) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else {"content": self.logprobs, "refusal": None}
        choice = {"index": 0, "message": self.message, "logprobs": logprobs, "finish_reason": self.finish}
        return self._head("chat.completion") | {"choices": [choice], "usage": self.usage}

    def events(self, usage_chunk: bool) -> Iterator[bytes]:
        """The answer as server-sent events. It is complete before the first one is sent, so that a failure can still be
        an HTTP error."""
        yield self._event({"role": "assistant", "content": ""}, logprobs=self.logprobs)
        if self.content:
            yield self._event({"content": self.content})
        for place, call in enumerate(self.calls):
            yield self._event({"tool_calls": [{"index": place, **call}]})
        yield self._event({}, finish=self.finish)
        if usage_chunk:
            yield _data(self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, delta: dict[str, Any], finish: str | None = None, logprobs: Sequence[Any] | None = None) -> bytes:
        rows = None if logprobs is None else {"content": list(logprobs), "refusal": None}
        choice = {"index": 0, "delta": delta, "logprobs": rows, "finish_reason": finish}
        return _data(self._head("chat.completion.chunk") | {"choices": [choice]})


def _data(row: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(row).encode() + b"\n\n"
