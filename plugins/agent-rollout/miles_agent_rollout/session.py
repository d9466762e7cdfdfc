"""One trajectory as the gateway sees it: which request goes on from which answer, and the exact ids of both."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from miles_agent_rollout import AgentConfig
from miles_agent_rollout.chat import ApiError, Ask, Reply, as_object, bad, message_key
from miles_agent_rollout.groups import Requests, allowance, request_id, sampling_of
from miles_agent_rollout.history import answer_text, appended, continued
from miles_agent_rollout.parsers import Parsed, Parser
from miles_agent_rollout.tools import dumps
from miles_agent_rollout.turns import Message, Turn, trajectory_id
from miles_core.errors import ContractError, MilesError, RunFailed, UserError
from miles_core.seeds import derive_seed
from miles_core.types import GenerateRequest, Generation

GRACE_S = 1.0
"""How long an agent may take to end by itself once no engine can answer."""


class Session:
    """The requests of one agent's run, under one key.

    A request whose conversation begins with one that was answered here goes on from that answer, id by id; any other
    begins a segment of its own. Requests may overlap: two that go on from one answer are branches. Nothing is recorded
    of a request whose client went away, or that was answered with an error.
    """

    def __init__(self, requests: Requests, index: int, config: AgentConfig, parser: Parser) -> None:
        self.requests, self.context, self.index, self.config, self.parser = (
            requests,
            requests.context,
            index,
            config,
            parser,
        )
        self.key = f"miles-{secrets.token_urlsafe(24)}"
        self.sampling = sampling_of(self.context, index)
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.closed = ""
        """Why no further request is answered."""
        self.truncated = ""
        """Why a request was refused, or an answer cut, for want of room."""
        self.failure = ""
        self.fatal: MilesError | None = None
        """What must fail the run: no engine is left, or one breaks its contract."""
        self.over = asyncio.Event()
        """Set when the session was closed before its agent ended."""
        self.reaped = False
        self._answered: dict[bytes, Turn] = {}  # digest of a conversation that ends with an answer -> the turn
        self._contexts: Counter[bytes] = Counter()
        self._running: set[asyncio.Task[Any]] = set()

    # --- Life --------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Refuses further requests and ends those that run; the first reason counts."""
        if not self.closed:
            self.closed = reason
        self.over.set()
        for task in self._running:
            task.cancel()

    def reap(self, reason: str) -> None:
        """Closes it because its time is over."""
        self.reaped = True
        self.close(reason)

    # --- Requests ----------------------------------------------------------------------------------------------------

    async def complete(self, ask: Ask) -> Reply:
        """Answers one request. Raises ApiError."""
        self.counts["requests"] += 1
        self.counts["ignored_parameters"] += len(ask.ignored)
        work = asyncio.ensure_future(self._complete(ask))
        self._running.add(work)
        try:
            return await work
        except ApiError:
            self.counts["refused"] += 1
            raise
        except asyncio.CancelledError:
            if self.closed and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise self._closed_error() from None
            work.cancel()
            raise
        finally:
            self._running.discard(work)

    async def _complete(self, ask: Ask) -> Reply:
        if self.closed:
            raise self._closed_error()
        if len(self.turns) + len(self._running) > self.config.max_turns:
            self.truncated = f"more than {self.config.max_turns} requests"
            raise ApiError(403, f"this session may make {self.config.max_turns} requests (max_turns)", "max_turns")
        digest, parent, context, told = self._place(ask)
        asked = min(ask.max_tokens or self.sampling.max_new_tokens, self.sampling.max_new_tokens)
        spent = sum(len(turn.answer.token_ids) for turn in self.turns)
        may = allowance(self.context, len(context), spent, self.config.max_tokens, asked)
        if may.limit < 1:
            self.truncated = f"request {len(self.turns) + 1}: {may.text}"
            raise bad(f"no token can be sampled: {may.text}", "messages", "context_length_exceeded")
        answer = await self._generate(ask, context, may.limit)
        if answer.finish == "length" and may.truncates(first=not self.turns):
            self.truncated = f"answer {len(self.turns) + 1} was cut: {may.text}"
        raw = answer_text(self.context.tokenizer, answer)
        turn = Turn(context=context, answer=answer, parent=parent, messages=with_answer(told, raw))
        self.turns.append(turn)
        reply = self._reply(ask, turn, raw)
        said: Message = {"role": "assistant", "content": reply.content}
        if reply.calls:
            said["tool_calls"] = [
                {"function": {"name": c["function"]["name"], "arguments": as_object(c["function"]["arguments"])}}
                for c in reply.calls
            ]
        else:  # some agents put back the stop string that ended an answer: it was sampled after all
            plain = self.context.tokenizer.decode(answer.token_ids, skip_special=True)
            self._answered[step(digest, {"role": "assistant", "content": plain})] = turn
        self._answered[step(digest, said)] = turn
        return reply

    async def _generate(self, ask: Ask, context: np.ndarray, limit: int) -> Generation:
        number = self.counts["generations"]
        self.counts["generations"] += 1
        name, prompt = trajectory_id(self.context, self.index), self.context.prompt
        request = GenerateRequest(
            id=request_id(self.context, name, f"call-{number}"),
            token_ids=context,
            params=replace(
                self.sampling, max_new_tokens=limit, stop=tuple(dict.fromkeys((*self.sampling.stop, *ask.stop)))
            ),
            seed=derive_seed(self.context.seed, prompt.id, prompt.draw, self.index, self._turn_number(context)),
            fields=self.context.fields,
            session=name,
        )
        try:
            answer = await self.requests.generate(request)
        except (RunFailed, ContractError) as error:
            self.fatal = error
            asyncio.get_running_loop().call_later(GRACE_S, self.close, "no engine can answer")
            raise ApiError(503, f"no engine can answer: {error}", "no_engine") from error
        if self.closed:
            raise self._closed_error()
        if answer.finish in ("error", "timeout"):
            self.failure = f"request {number + 1}: {answer.reason or answer.finish}"
            raise ApiError(502, f"the engine failed: {answer.reason}", "engine_failed", retry=True)
        if answer.finish == "aborted":
            self.failure = answer.reason
            raise ApiError(503, "the request was aborted", "aborted")
        return answer

    def _turn_number(self, context: np.ndarray) -> int:
        """Stands for the turn in the seed. It depends on the context, and how often that was asked for, rather than on the
        order in which requests arrive: agents that ask in parallel get the same answers again."""
        digest = blake2b(np.ascontiguousarray(context, dtype=np.int32).tobytes(), digest_size=7).digest()
        seen = self._contexts[digest]
        self._contexts[digest] += 1
        return int.from_bytes(digest) + (seen << 56)

    # --- History -----------------------------------------------------------------------------------------------------

    def _place(self, ask: Ask) -> tuple[bytes, Turn | None, np.ndarray, list[Message]]:
        """(digest of the conversation, the turn it goes on from, int32[C] context, the conversation as it was sampled)."""
        digest = blake2b(dumps(ask.tools).encode(), digest_size=16).digest()
        parent, length = None, 0
        for place, message in enumerate(ask.messages, start=1):
            digest = step(digest, message)
            if (found := self._answered.get(digest)) is not None:
                parent, length = found, place
        new = ask.messages[length:]
        if parent is not None and new:
            told = [*parent.messages, *new]
            ids = self._continued(parent, told, ask, new)
            if ids is not None:
                return digest, parent, ids, told
            self.counts["rewrites"] += 1
        elif any(m["role"] == "assistant" for m in ask.messages) and self.turns:
            self.counts["rewrites"] += 1
        try:
            ids = self.context.tokenizer.render(ask.messages, ask.tools).token_ids
        except UserError as error:
            raise bad(f"the messages cannot be rendered: {error}", "messages") from error
        return digest, None, np.asarray(ids, dtype=np.int32), list(ask.messages)

    def _continued(self, parent: Turn, told: list[Message], ask: Ask, new: list[Message]) -> np.ndarray | None:
        tokenizer = self.context.tokenizer
        if self.config.history == "append":
            try:
                return appended(tokenizer, parent.ids, new, ask.tools)
            except UserError as error:
                raise bad(f"the messages cannot be rendered: {error}", "messages") from error
        return continued(tokenizer, parent.ids, (told, ask.messages), ask.tools)

    # --- Answers -----------------------------------------------------------------------------------------------------

    def _reply(self, ask: Ask, turn: Turn, raw: str) -> Reply:
        answer, number = turn.answer, len(self.turns)
        parsed = self.parser(raw) if ask.tools else Parsed(content=raw)
        calls = [
            {
                "id": f"call_{number:03d}{place:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": dumps(call.arguments)},
            }
            for place, call in enumerate(c for c in parsed.calls if not c.problem)
        ]
        plain = self.context.tokenizer.decode(answer.token_ids, skip_special=True)
        content = parsed.content if calls else plain
        for text in ask.stop:
            content = content.partition(text)[0]
        return Reply(
            id=f"chatcmpl-{self.index}-{number}",
            model=ask.model or self.config.model,
            created=int(time.time()),
            content=content,
            calls=calls,
            finish="length" if answer.finish == "length" else "tool_calls" if calls else "stop",
            prompt_tokens=len(turn.context),
            completion_tokens=len(answer.token_ids),
            cached_tokens=answer.cached_tokens,
            logprobs=self._logprobs(answer) if ask.logprobs else None,
        )

    def _logprobs(self, answer: Generation) -> list[dict[str, Any]]:
        rows = []
        for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
            text = self.context.tokenizer.decode([int(token)], skip_special=False)
            rows.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
        return rows

    def _closed_error(self) -> ApiError:
        return ApiError(403, f"this session is closed: {self.closed}", "session_closed")


def step(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message."""
    return blake2b(digest + message_key(message).encode(), digest_size=16).digest()


def with_answer(messages: list[Message], text: str) -> list[Message]:
    """A conversation and an answer; where its last message is an opened answer, that goes on."""
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": (messages[-1].get("content") or "") + text}]
    return [*messages, {"role": "assistant", "content": text}]
