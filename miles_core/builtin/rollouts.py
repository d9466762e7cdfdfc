"""`single-turn`: one prompt, one answer per sample. And the rule of how much room a prompt leaves (case D5)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.component import Component, NoOptions
from miles_core.errors import ContractError
from miles_core.fields import FieldSpec, check_field, fill_field
from miles_core.generations import join_generations
from miles_core.interfaces import Tokenizer
from miles_core.seeds import continue_seed, derive_seed
from miles_core.types import (
    GenerateRequest,
    Generation,
    Prompt,
    PromptTokens,
    RolloutContext,
    Sample,
    SampleGroup,
    SamplingParams,
    VersionSpan,
)

UNTRAINABLE = ("aborted", "error", "timeout")
BASELINE = -1
"""Index of the greedy baseline among its siblings: it never takes a sample's seed."""


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer) -> PromptTokens:
    """The prompt's token ids: messages through the chat template, text as it is."""
    if prompt.messages is not None:
        return tokenizer.render(prompt.messages, prompt.tools, prompt.images)
    return tokenizer.encode(prompt.text or "")


def room(prompt_len: int, max_context: int, max_new_tokens: int) -> int:
    """How many tokens may be sampled: min(max_new_tokens, max_context - prompt_len), 0 when the prompt fills the
    context. 0 as `max_context` means that there is no limit."""
    return max(min(max_new_tokens, max_context - prompt_len), 0) if max_context else max_new_tokens


def fits(prompt_len: int, max_context: int) -> bool:
    """Whether a prompt leaves room for at least one new token; those that do not are dropped, or refused, at load."""
    return room(prompt_len, max_context, 1) == 1


class SingleTurn:
    """The `Rollout` of most runs. It keeps no state: everything comes with the context.

    The ids that the engine returned are the ids of the sample; text is decoded from them and never encoded. Which
    tokens are trained follows from how many the engine returned, never from looking for an end or padding token.
    """

    async def run_group(self, context: RolloutContext) -> SampleGroup:
        """All samples of one prompt. Samples of `context.partial` that ended are kept, and aborted ones go on after
        their last token. A prompt that leaves no room sends no request: its samples are errors that say so."""
        prompt = context.prompt
        ids = np.asarray(prompt_tokens(prompt, context.tokenizer).token_ids, dtype=np.int32)
        born = context.pool.version
        known = {s.index: s for s in context.partial.samples} if context.partial else {}
        todo = [i for i in range(context.num_samples) if i not in known or known[i].status == "aborted"]
        extra = [BASELINE] if context.baseline and not (context.partial and context.partial.baseline) else []
        work = [self._sample(context, ids, index, known.get(index)) for index in (*todo, *extra)]
        made = dict(zip((*todo, *extra), await _all_or_cancel(work, context, (*todo, *extra)), strict=True))
        baseline = made.pop(BASELINE, context.partial.baseline if context.partial else None)
        samples = [made.get(i) or known[i] for i in range(context.num_samples)]
        add_fields(context, samples)
        return SampleGroup(
            id=group_id(prompt),
            prompt=prompt,
            samples=samples,
            num_samples=context.num_samples,
            born_version=min([born, *(s.oldest_version for s in samples if s.oldest_version is not None)]),
            baseline=baseline,
            order=context.order,
        )

    async def _sample(self, context: RolloutContext, ids: np.ndarray, index: int, partial: Sample | None) -> Sample:
        params = context.sampling
        if index == BASELINE:
            params = replace(params, temperature=0.0, top_p=1.0, top_k=0)
        limit = room(len(ids), context.max_context, params.max_new_tokens)
        so_far = _generation_of(partial) if partial is not None else None
        count = len(so_far.token_ids) if so_far else 0
        if limit < 1 or len(ids) < 1:
            answer = _no_room(len(ids), context.max_context)
        elif count >= limit:
            answer = replace(so_far, finish="length")  # type: ignore[type-var]
        else:
            seed = derive_seed(context.seed, context.prompt.id, context.prompt.draw, index)
            answer = await context.pool.generate(
                GenerateRequest(
                    id=_request_id(context, index),
                    token_ids=np.concatenate([ids, so_far.token_ids]) if so_far else ids,
                    params=replace(params, max_new_tokens=limit - count),
                    seed=continue_seed(seed, count) if count else seed,
                    images=context.prompt.images,
                    fields=context.fields,
                )
            )
            if so_far and answer.finish not in ("error", "timeout"):
                answer = join_generations(so_far, answer)
        return make_sample(context, ids, index, answer, params)


def group_id(prompt: Prompt) -> str:
    return f"{prompt.id}@{prompt.draw}"


def make_sample(context: RolloutContext, ids: np.ndarray, index: int, answer: Generation, params: SamplingParams) -> Sample:
    """The sample of one answer: tokens int32[T], T = P + R; exactly the R tokens that the engine returned are in
    `loss_mask`, none when the answer failed. An empty answer is a sample of length 0."""
    prompt, start, count = context.prompt, len(ids), len(answer.token_ids)
    mask = np.zeros(start + count, dtype=bool)
    logprobs = np.zeros(start + count, dtype=np.float32)
    logprobs[start:] = answer.logprobs
    mask[start:] = answer.finish not in UNTRAINABLE
    return Sample(
        group_id=group_id(prompt),
        trajectory_id=f"{group_id(prompt)}/{'baseline' if index == BASELINE else index}",
        index=index,
        tokens=np.concatenate([ids, np.asarray(answer.token_ids, dtype=np.int32)]),
        prompt_len=start,
        loss_mask=mask,
        logprobs=logprobs,
        versions=tuple(VersionSpan(start=s.start + start, stop=s.stop + start, version=s.version) for s in answer.versions),
        status=answer.finish,
        temperature=params.temperature,
        prompt=prompt,
        response=context.tokenizer.decode(answer.token_ids, skip_special=True) if count else "",
        extras=dict(answer.extras),
        metadata={"cached_tokens": answer.cached_tokens},
        reason=answer.reason,
    )


def _request_id(context: RolloutContext, index: int) -> str:
    kind = "eval/" if context.evaluation else ""
    return f"{kind}{group_id(context.prompt)}/{'baseline' if index == BASELINE else index}"


def _no_room(prompt_len: int, max_context: int) -> Generation:
    reason = f"a prompt of {prompt_len} tokens leaves no room for an answer in a context of {max_context}"
    return Generation(
        id="",
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish="error",
        versions=(),
        reason=reason if prompt_len else "the prompt has no tokens",
    )


def _generation_of(sample: Sample) -> Generation:
    """What had been sampled of an aborted sample."""
    start = sample.prompt_len
    moved = (VersionSpan(start=s.start - start, stop=s.stop - start, version=s.version) for s in sample.versions)
    return Generation(
        id="",
        token_ids=sample.tokens[start:],
        logprobs=sample.logprobs[start:],
        finish="aborted",
        versions=tuple(moved),
        cached_tokens=sample.metadata.get("cached_tokens", 0),
    )


async def _all_or_cancel(
    work: Sequence[Coroutine[Any, Any, Sample]], context: RolloutContext, indices: Sequence[int]
) -> list[Sample]:
    """All results. One that raises cancels the others; `context.cancelled` aborts the requests, which then return what
    they have."""
    tasks = [asyncio.ensure_future(w) for w in work]
    watch = asyncio.ensure_future(_abort_when(context, indices)) if context.cancelled else None
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        if watch is not None:
            watch.cancel()


async def _abort_when(context: RolloutContext, indices: Sequence[int]) -> None:
    assert context.cancelled is not None
    await context.cancelled.wait()
    await context.pool.abort([_request_id(context, index) for index in indices])


def add_fields(context: RolloutContext, samples: Sequence[Sample]) -> None:
    """Checks the side channels that were asked for against their declarations, and treats missing ones as declared:
    an error, a sample that is not trained, or a fill value."""
    specs: Mapping[str, FieldSpec] = context.field_specs
    for name in sorted(context.fields & set(specs)):
        spec = specs[name]
        alive = [s for s in samples if s.status not in UNTRAINABLE]
        for sample in alive:
            if name in sample.extras:
                sample.extras[name] = check_field(spec, sample.extras[name], sample.num_tokens, sample.trajectory_id)
        tails = [s.extras[name].shape[1:] for s in alive if isinstance(s.extras.get(name), np.ndarray)]
        for sample in (s for s in alive if name not in s.extras):
            if spec.missing.startswith("fill:") and spec.axes and not tails:
                raise ContractError(f'no sample of group {sample.group_id} came with the field "{name}" that was asked for')
            tail = tails[0] if tails else ()
            try:
                value = fill_field(spec, sample.num_tokens, tail)
            except ContractError as error:
                raise ContractError(f"{sample.trajectory_id}: {error}") from error
            if value is None:
                sample.loss_mask = np.zeros_like(sample.loss_mask)
                sample.reason = f'the engine did not return the field "{name}"'
            else:
                sample.extras[name] = value


COMPONENTS = {
    "miles_rollouts": [
        Component(
            name="single-turn",
            summary="one answer per sample, no tools",
            config=NoOptions,
            build=lambda config, context: SingleTurn(),
        )
    ]
}
