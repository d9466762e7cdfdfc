"""The rollout `tools`: the model calls Python functions, turn by turn, until it answers without a call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles_agent_rollout import ToolsConfig
from miles_agent_rollout.groups import GroupRollout, Requests, allowance, request_id, sampling_of
from miles_agent_rollout.history import answer_text, appended, continued
from miles_agent_rollout.parsers import Call, Parsed, get_parser
from miles_agent_rollout.tools import Result, Toolbox, ToolContext
from miles_agent_rollout.turns import Message, Outcome, Turn, make_samples, restore_turns, trajectory_id
from miles_core.builtin.rollouts import UNTRAINABLE
from miles_core.errors import ConfigError
from miles_core.generations import join_generations
from miles_core.interfaces import Tokenizer
from miles_core.seeds import continue_seed, derive_seed
from miles_core.types import GenerateRequest, Generation, RolloutContext, Sample


@dataclass(slots=True, kw_only=True)
class Talk:
    """One trajectory on its way. `raw` is the conversation with answers as they were sampled, `parsed` the same with tool
    calls taken apart, for templates that want them so."""

    raw: list[Message]
    parsed: list[Message]
    tools: list[Any]
    context: np.ndarray
    parent: Turn | None = None
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: ToolContext | None = None
    so_far: Generation | None = None

    @property
    def spent(self) -> int:
        return sum(len(turn.answer.token_ids) for turn in self.turns)


class ToolsRollout(GroupRollout):
    """See `ToolsConfig` for its options."""

    def __init__(self, config: ToolsConfig, toolbox: Toolbox) -> None:
        self.config, self.toolbox = config, toolbox
        self.parse = get_parser(config.parser)
        self.schemas = {name: tool.schema for name, tool in toolbox.tools.items()}

    async def trajectory(
        self, context: RolloutContext, requests: Requests, index: int, partial: Sequence[Sample]
    ) -> list[Sample]:
        params = sampling_of(context, index)
        talk = self._begin(requests, index)
        start = talk.context
        self._resume(talk, partial)
        outcome = await self._talk(context, requests, index, talk)
        last = talk.turns[-1].answer if talk.turns else None
        outcome.response = context.tokenizer.decode(last.token_ids, skip_special=True) if last else ""
        outcome.metadata = {
            "cached_tokens": sum(turn.answer.cached_tokens for turn in talk.turns),
            "num_turns": len(talk.turns),
            **{name: talk.counts[name] for name in ("tool_calls", "tool_errors", "tool_timeouts", "rewrites")},
        }
        return make_samples(context, index, talk.turns, outcome, start, params.temperature)

    # --- One trajectory ----------------------------------------------------------------------------------------------

    async def _talk(self, context: RolloutContext, requests: Requests, index: int, talk: Talk) -> Outcome:
        """Answers and tool calls in turn, until the outcome."""
        asked = sampling_of(context, index).max_new_tokens
        if talk.so_far is None and talk.turns:
            calls = self._parsed(context.tokenizer, talk.turns[-1].answer).calls
            if ended := await self._carry_out(context, requests, talk, calls):
                return ended
        while True:
            may = allowance(context, len(talk.context), talk.spent, self.config.max_tokens, asked)
            if may.limit < 1 or not len(talk.context):
                return _no_room(talk, may.text)
            answer = await self._answer(context, requests, index, talk, may.limit)
            turn = self._record(talk, answer, context.tokenizer)
            if answer.finish in UNTRAINABLE:
                return Outcome(status=answer.finish, reason=answer.reason)
            if answer.finish == "length":
                if may.truncates(first=len(talk.turns) == 1):
                    return Outcome(status="truncated", reason=f"turn {len(talk.turns)}: {may.text}")
                return Outcome(status="length")
            calls = self._parsed(context.tokenizer, turn.answer).calls
            if not calls:
                return Outcome(status="stop")
            if ended := await self._carry_out(context, requests, talk, calls):
                return ended

    async def _answer(self, context: RolloutContext, requests: Requests, index: int, talk: Talk, limit: int) -> Generation:
        """The next answer; one that had been cut goes on after its last token."""
        number, so_far = len(talk.turns), talk.so_far
        done = len(so_far.token_ids) if so_far else 0
        if so_far and done >= limit:
            return replace(so_far, finish="length")
        seed = derive_seed(context.seed, context.prompt.id, context.prompt.draw, index, number)
        name = trajectory_id(context, index)
        answer = await requests.generate(
            GenerateRequest(
                id=request_id(context, name, f"turn-{number}"),
                token_ids=np.concatenate([talk.context, so_far.token_ids]).astype(np.int32) if so_far else talk.context,
                params=replace(sampling_of(context, index), max_new_tokens=limit - done),
                seed=continue_seed(seed, done) if done else seed,
                images=context.prompt.images,
                fields=context.fields,
                session=name,
            )
        )
        talk.so_far = None
        if so_far and answer.finish not in ("error", "timeout"):
            return join_generations(so_far, answer)
        return answer

    def _record(self, talk: Talk, answer: Generation, tokenizer: Tokenizer) -> Turn:
        text = answer_text(tokenizer, answer)
        talk.raw = _with_answer(talk.raw, {"content": text})
        turn = Turn(context=talk.context, answer=answer, parent=talk.parent, messages=talk.raw)
        talk.turns.append(turn)
        return turn

    def _parsed(self, tokenizer: Tokenizer, answer: Generation) -> Parsed:
        return self.parse(answer_text(tokenizer, answer))

    async def _carry_out(
        self, context: RolloutContext, requests: Requests, talk: Talk, calls: Sequence[Call]
    ) -> Outcome | None:
        """Calls the tools, all of a turn side by side, and puts their results into the next context. An outcome when the
        trajectory ends here."""
        if len(talk.turns) >= self.config.max_turns:
            return Outcome(status="truncated", reason=f"{self.config.max_turns} turns, and the last one calls a tool")
        assert talk.memory is not None
        work = asyncio.gather(*(self._call(call, talk.memory) for call in calls))
        if not await requests.unless_cancelled(work):
            return Outcome(status="aborted", reason="the group was cancelled")
        results: list[Result] = work.result()
        talk.counts["tool_calls"] += len(results)
        talk.counts["tool_errors"] += sum(r.kind == "error" for r in results)
        talk.counts["tool_timeouts"] += sum(r.kind == "timeout" for r in results)
        answers = [
            {"role": "tool", "name": call.name, "tool_call_id": _call_id(talk, place), "content": result.text}
            for place, (call, result) in enumerate(zip(calls, results, strict=True))
        ]
        self._extend(context.tokenizer, talk, calls, answers)
        return None

    async def _call(self, call: Call, memory: ToolContext) -> Result:
        if call.problem:
            return Result(text=f"error: {call.problem}", kind="error")
        return await self.toolbox.call(call.name, call.arguments, memory)

    def _extend(self, tokenizer: Tokenizer, talk: Talk, calls: Sequence[Call], answers: list[Message]) -> None:
        """The next context: what was sampled, id by id, and the new messages; a rewritten history opens a segment."""
        turn = talk.turns[-1]
        assert talk.memory is not None
        images = talk.memory.prompt.images
        told = self._parsed(tokenizer, turn.answer)
        rows = [
            {"id": _call_id(talk, i), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(calls)
        ]
        talk.parsed = [*_with_answer(talk.parsed, {"content": told.content, "tool_calls": rows}), *answers]
        talk.raw = [*talk.raw, *answers]
        if self.config.history == "append":
            talk.context, talk.parent = appended(tokenizer, turn.ids, answers, talk.tools), turn
            return
        ids = continued(tokenizer, turn.ids, (talk.raw, talk.parsed), talk.tools, images)
        if ids is not None:
            talk.context, talk.parent = ids, turn
        else:
            talk.counts["rewrites"] += 1
            talk.context, talk.parent = _render(tokenizer, (talk.raw, talk.parsed), talk.tools, images), None

    # --- Beginning and going on --------------------------------------------------------------------------------------

    def _begin(self, requests: Requests, index: int) -> Talk:
        context, prompt = requests.context, requests.context.prompt
        messages = prompt.messages if prompt.messages is not None else [{"role": "user", "content": prompt.text or ""}]
        tools = self._tools_of(context)
        if requests.start is None:
            ids = context.tokenizer.render(messages, tools, prompt.images).token_ids
            requests.start = np.asarray(ids, dtype=np.int32)
        return Talk(
            raw=list(messages),
            parsed=list(messages),
            tools=tools,
            context=requests.start,
            memory=ToolContext(prompt=prompt, index=index),
        )

    def _tools_of(self, context: RolloutContext) -> list[Any]:
        """Schemas shown to the model: of all tools, or of those that the prompt names."""
        known = self.schemas
        if not context.prompt.tools:
            return list(known.values())
        names = [t if isinstance(t, str) else (t.get("function") or t).get("name") for t in context.prompt.tools]
        if missing := [name for name in names if name not in known]:
            raise ConfigError(
                f'prompt "{context.prompt.id}" names tools that the run does not have: {", ".join(map(str, missing))}',
                f"there are {', '.join(known)} (rollout.tools.tools)",
            )
        shown = zip(context.prompt.tools, names, strict=True)
        return [known[name] if isinstance(t, str) else t for t, name in shown]

    def _resume(self, talk: Talk, partial: Sequence[Sample]) -> None:
        """Puts an aborted trajectory where it stopped. What tools remembered is gone, and tool calls of earlier turns are
        told as raw text."""
        for sample in partial:
            turns, so_far, context, messages = restore_turns(sample)
            talk.turns += turns
            talk.so_far = so_far
            if turns or (so_far and sample.segment):
                talk.context, talk.parent = context, turns[-1] if turns else None
                talk.raw, talk.parsed = list(messages), list(messages)


def _with_answer(messages: Sequence[Message], answer: Message) -> list[Message]:
    """The conversation and an answer; where its last message is an opened answer, that goes on."""
    if messages and messages[-1].get("role") == "assistant":
        opened = messages[-1]
        return [*messages[:-1], {**opened, **answer, "content": (opened.get("content") or "") + answer["content"]}]
    return [*messages, {"role": "assistant", **answer}]


def _render(
    tokenizer: Tokenizer, versions: Sequence[Sequence[Message]], tools: Sequence[Any], images: Sequence[Any]
) -> np.ndarray:
    """The first version of a conversation that the template takes. Raises what it says about the last one."""
    for messages in versions[:-1]:
        try:
            return np.asarray(tokenizer.render(messages, tools, images).token_ids, dtype=np.int32)
        except ValueError:  # UserError: some templates want parsed tool calls
            continue
    return np.asarray(tokenizer.render(versions[-1], tools, images).token_ids, dtype=np.int32)


def _call_id(talk: Talk, place: int) -> str:
    return f"call{len(talk.turns):03d}{place:02d}"


def _no_room(talk: Talk, bound: str) -> Outcome:
    if talk.turns:
        return Outcome(status="truncated", reason=f"before turn {len(talk.turns) + 1}: {bound}")
    reason = f"the prompt leaves no room for an answer: {bound}" if len(talk.context) else "the prompt has no tokens"
    return Outcome(status="error", reason=reason)
