"""A request on its way, and checking and joining of what engines return for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from miles_core.engine_members import Ticket
from miles_core.errors import ContractError
from miles_core.seeds import continue_seed
from miles_core.types import GenerateRequest, Generation, Status, VersionSpan


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: what it has so far and where it failed."""

    request: GenerateRequest
    ticket: Ticket
    so_far: Generation | None = None
    tries: int = 0
    failures: list[str] = field(default_factory=list)
    finish: Status = "error"
    aborted: bool = False

    def rest(self) -> GenerateRequest:
        """What is still to be sampled, under the id of this attempt."""
        request = replace(self.request, id=self.ticket.id)
        if self.so_far is None or not len(self.so_far.token_ids):
            return request
        count = len(self.so_far.token_ids)
        return replace(
            request,
            token_ids=np.concatenate([request.token_ids, self.so_far.token_ids]).astype(np.int32),
            params=replace(request.params, max_new_tokens=request.params.max_new_tokens - count),
            seed=continue_seed(request.seed, count),
        )

    def ended(self, finish: Status, reason: str) -> Generation:
        """An answer that is data about a failure; an abort, and the end of a whole answer, keep the tokens that
        there are."""
        if finish in ("aborted", "length") and self.so_far is not None:
            return replace(self.so_far, id=self.request.id, finish=finish, reason=reason)
        tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Generation(
            id=self.request.id, token_ids=tokens, logprobs=logprobs, finish=finish, versions=(), reason=reason
        )


def check_generation(answer: Generation, engine_id: str, version: int) -> None:
    """Raises ContractError naming the engine unless `logprobs` has one finite number per token and the version spans
    cover [0, R) in order, none newer than `version`."""
    count = len(answer.token_ids)
    where = f"engine {engine_id}, request {answer.id}"
    if len(answer.logprobs) != count:
        raise ContractError(f"{where}: {count} tokens but {len(answer.logprobs)} log-probabilities")
    if not np.all(np.isfinite(answer.logprobs)):
        raise ContractError(f"{where}: a log-probability of a sampled token is not finite")
    at = 0
    for span in answer.versions:
        if span.start != at or span.stop < span.start:
            break
        at = span.stop
    if at != count or (count and not answer.versions):
        spans = [(s.start, s.stop, s.version) for s in answer.versions]
        raise ContractError(f"{where}: version spans {spans} do not cover its {count} tokens in order")
    newest = max((s.version for s in answer.versions), default=version)
    if newest > version:
        raise ContractError(f"{where}: claims version {newest}, but the pool serves version {version}")


def join_generations(first: Generation, second: Generation) -> Generation:
    """`second` continued `first`: its context was the prompt and the tokens of `first`. Side channels are those of
    `second`, since an engine returns them for the whole context and answer."""
    offset = len(first.token_ids)
    moved = (VersionSpan(start=s.start + offset, stop=s.stop + offset, version=s.version) for s in second.versions)
    return replace(
        second,
        token_ids=np.concatenate([first.token_ids, second.token_ids]).astype(np.int32),
        logprobs=np.concatenate([first.logprobs, second.logprobs]).astype(np.float32),
        versions=merge_spans((*first.versions, *moved)),
        cached_tokens=first.cached_tokens,
    )


def merge_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same spans without empty ones, neighbours of one version joined."""
    merged: list[VersionSpan] = []
    for span in spans:
        if span.stop == span.start:
            continue
        if merged and merged[-1].version == span.version and merged[-1].stop == span.start:
            merged[-1] = replace(merged[-1], stop=span.stop)
        else:
            merged.append(span)
    return tuple(merged)
