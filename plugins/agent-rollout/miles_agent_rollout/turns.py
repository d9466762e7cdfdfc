"""What was sampled in one trajectory, turn by turn, and the training segments that come of it.

Shape letters: T tokens of a segment, C of a turn's context, R sampled in a turn.

A turn is a context and an answer. Its parent is the turn whose tokens its context begins with, id by id. A conversation
that only grows is a chain; one whose history was rewritten starts again at a root; requests that branch off one answer
are siblings. Each way from a root to a leaf is one segment, and every answer is trained in exactly one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles_core.builtin.rollouts import BASELINE, UNTRAINABLE, group_id
from miles_core.fields import FieldSpec, check_field
from miles_core.generations import merge_spans
from miles_core.types import Generation, RolloutContext, Sample, Status, VersionSpan

Message = dict[str, Any]


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """One answer of the model. `messages` is the conversation including the answer, its text exactly as sampled."""

    context: np.ndarray
    """int32[C]"""
    answer: Generation
    parent: Turn | None = None
    messages: list[Message] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        """int32[C + R]: the context and what was sampled, never encoded again."""
        return np.concatenate([self.context, np.asarray(self.answer.token_ids, dtype=np.int32)])


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a trajectory ended, for all of its segments."""

    status: Status
    reason: str = ""
    response: str = ""
    """What rewards are shown: the text of the last answer, or what an agent says was its answer."""
    metadata: dict[str, Any] = field(default_factory=dict)


def trajectory_id(context: RolloutContext, index: int) -> str:
    return f"{group_id(context.prompt)}/{'baseline' if index == BASELINE else index}"


def paths(turns: Sequence[Turn]) -> list[tuple[Turn, list[Turn]]]:
    """(leaf, turns that are trained in its segment), the leaf that was answered last in the last place.

    `turns` are in the order in which they were answered. A turn that several leaves share is trained with the latest of
    them, since there the outcome is known; in the others it is context.
    """
    inner = {id(turn.parent) for turn in turns if turn.parent is not None}
    taken: set[int] = set()
    found = []
    for leaf in reversed([turn for turn in turns if id(turn) not in inner]):
        own, at = [], leaf
        while at is not None and id(at) not in taken:
            own.append(at)
            taken.add(id(at))
            at = at.parent
        found.append((leaf, own[::-1]))
    return found[::-1]


def make_samples(
    context: RolloutContext, index: int, turns: Sequence[Turn], outcome: Outcome, start: np.ndarray, temperature: float
) -> list[Sample]:
    """The segments of one trajectory; `start` int32[P] stands for it when nothing was sampled.

    Exactly the tokens that an engine returned are in the loss mask, none of them when the trajectory failed. Tokens of
    tools and users have log-probability 0. Only the last segment has the trajectory's status, where that is no failure.
    """
    common = {
        "group_id": group_id(context.prompt),
        "trajectory_id": trajectory_id(context, index),
        "index": index,
        "temperature": temperature,
        "prompt": context.prompt,
        "response": outcome.response,
        "reason": outcome.reason,
    }
    if not turns:
        zeros = np.zeros(len(start), dtype=np.float32)
        empty = Sample(
            **common, tokens=start, prompt_len=len(start), loss_mask=zeros.astype(bool), logprobs=zeros,
            status=outcome.status, metadata=dict(outcome.metadata),
        )  # fmt: skip
        return [empty]
    failed = outcome.status in UNTRAINABLE
    samples = []
    for number, (leaf, own) in enumerate(found := paths(turns)):
        last = number == len(found) - 1
        tokens = leaf.ids
        mask, logprobs, spans = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32), []
        for turn in own:
            at, stop = len(turn.context), len(turn.context) + len(turn.answer.token_ids)
            mask[at:stop] = not failed
            logprobs[at:stop] = turn.answer.logprobs
            spans += [VersionSpan(start=s.start + at, stop=s.stop + at, version=s.version) for s in turn.answer.versions]
        sample = Sample(
            **common,
            segment=number,
            tokens=tokens,
            prompt_len=len(own[0].context),
            loss_mask=mask,
            logprobs=logprobs,
            versions=merge_spans(spans),
            status=outcome.status if failed or last else leaf.answer.finish,
            extras={}
            if outcome.status in ("error", "timeout")
            else stitched(leaf, context.field_specs, common["trajectory_id"]),
            metadata={**outcome.metadata, "turns": [turn_row(turn) for turn in own], "messages": leaf.messages},
        )
        samples.append(sample)
    return samples


def stitched(leaf: Turn, specs: Mapping[str, FieldSpec], owner: str) -> dict[str, Any]:
    """Side channels of a segment. An engine returns them for context and answer of each turn; with `merge = "concat"`, rows
    of earlier turns stay those of sampling time, and a turn adds the rows that are new.

    A field that the last turn lacks is left out: its declaration says what that means. Raises ContractError, with both
    lengths, for a turn whose rows do not fit its tokens (case M2).
    """
    chain, at = [], leaf
    while at is not None:
        chain.append(at)
        at = at.parent
    extras: dict[str, Any] = {}
    for name in sorted(leaf.answer.extras):
        spec, merged = specs.get(name), None
        for turn in (t for t in reversed(chain) if name in t.answer.extras):
            value = turn.answer.extras[name]
            if spec is not None:
                value = check_field(spec, value, len(turn.ids), owner)
            rows = spec is not None and spec.align in ("token", "transition") and spec.merge == "concat"
            if rows and isinstance(value, np.ndarray) and isinstance(merged, np.ndarray):
                value = np.concatenate([merged, value[len(merged) :]])
            merged = value
        extras[name] = merged
    return extras


# --- Partial trajectories --------------------------------------------------------------------------------------------


def turn_row(turn: Turn) -> list[Any]:
    """What a sample's metadata keeps of a turn: [start, stop, messages before the answer, how it ended]."""
    start = len(turn.context)
    return [start, start + len(turn.answer.token_ids), len(turn.messages) - 1, turn.answer.finish]


def restore_turns(sample: Sample) -> tuple[list[Turn], Generation | None, np.ndarray, list[Message]]:
    """What an unfinished segment holds: its complete turns, the answer that was cut if there is one, the context of the
    next answer, and the conversation before it. Without any turn the context is empty."""
    turns: list[Turn] = []
    messages: list[Message] = []
    for start, stop, num_messages, finish in sample.metadata.get("turns", ()):
        if start > sample.num_tokens:
            break
        end = min(stop, sample.num_tokens)
        spans = [replace(s, start=max(s.start, start), stop=min(s.stop, end)) for s in sample.versions]
        answer = Generation(
            id="",
            token_ids=sample.tokens[start:end],
            logprobs=sample.logprobs[start:end],
            finish=finish if end == stop else "aborted",
            versions=tuple(replace(s, start=s.start - start, stop=s.stop - start) for s in spans if s.start < s.stop),
            extras=dict(sample.extras) if end == sample.num_tokens else {},
        )
        before = sample.metadata["messages"][:num_messages]
        if answer.finish == "aborted":
            return turns, answer, sample.tokens[:start], before
        messages = sample.metadata["messages"][: num_messages + 1]
        turns.append(Turn(context=sample.tokens[:start], answer=answer, messages=messages, parent=(turns or [None])[-1]))
    return turns, None, turns[-1].ids if turns else sample.tokens[:0], messages
