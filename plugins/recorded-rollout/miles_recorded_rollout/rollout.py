"""From the answers of a row to samples. Letters: P tokens of a prompt, R of an answer with its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.builtin.rollouts import SingleTurn, group_id, prompt_tokens, room
from miles_core.errors import ConfigError, DataError
from miles_core.interfaces import Tokenizer
from miles_core.types import Prompt, RolloutContext, Sample, SampleGroup, VersionSpan
from miles_recorded_rollout import RecordedConfig


class Recorded:
    """See `RecordedConfig`. Evaluations sample from the engines, as `single-turn` does."""

    def __init__(self, config: RecordedConfig, logger: logging.Logger) -> None:
        self.config, self.log = config, logger
        self.too_long = 0
        self._sampling = SingleTurn()

    async def run_group(self, context: RolloutContext) -> SampleGroup:
        """One sample per recorded answer, in their order. Raises DataError for a row without an answer, ConfigError when a
        row does not bring as many answers as a group has samples, or when an advantage asks for a greedy baseline."""
        prompt, answers = split_row(context.prompt, self.config)
        if context.evaluation:
            return await self._sampling.run_group(replace(context, prompt=prompt))
        if context.baseline:
            raise ConfigError(
                "an advantage asks for a greedy baseline, which recorded answers cannot be compared with",
                "choose another advantage: for sft and dpo it does not matter which",
            )
        if len(answers) != context.num_samples:
            raise ConfigError(
                f'prompt "{prompt.id}" has {len(answers)} answers, and rollout.samples_per_group is {context.num_samples}',
                f"set rollout.samples_per_group = {len(answers)}",
            )
        stop = self.stop_token(context.tokenizer, chat=prompt.messages is not None)
        samples = [self._sample(context, prompt, i, answer, stop) for i, answer in enumerate(answers)]
        return SampleGroup(
            id=group_id(prompt),
            prompt=prompt,
            samples=samples,
            num_samples=context.num_samples,
            born_version=context.pool.version,
            order=context.order,
        )

    def stop_token(self, tokenizer: Tokenizer, chat: bool) -> int:
        """The id that ends an answer. Raises ConfigError when the option names none of the tokenizer's stop tokens: the
        policy would learn an end at which no engine stops."""
        wanted, stops = self.config.stop_token_id, tokenizer.stop_token_ids
        if wanted is not None and wanted not in stops:
            raise ConfigError(
                f"rollout.recorded.stop_token_id = {wanted} is none of the tokenizer's stop tokens: {str(stops)[1:-1]}"
            )
        if wanted is not None:
            return wanted
        return end_of_turn(tokenizer) if chat else stops[0]

    def _sample(self, context: RolloutContext, prompt: Prompt, index: int, answer: str, stop: int) -> Sample:
        ids, given = answer_tokens(prompt, answer, context.tokenizer)
        given = np.append(given, np.int32(stop))
        limit = room(len(ids), context.max_context, context.sampling.max_new_tokens)
        status, reason = "stop", ""
        if len(given) > limit:
            status, reason = self._cut(prompt, len(given), limit)
            given = given[:limit]
        start, total = len(ids), len(ids) + len(given)
        mask = np.zeros(total, dtype=bool)
        mask[max(start, 1) :] = status != "error"
        pair = {"pair": 0, "chosen": index == 0} if self.config.answers == "pair" else {}
        return Sample(
            group_id=group_id(prompt),
            trajectory_id=f"{group_id(prompt)}/{index}",
            index=index,
            tokens=np.concatenate([ids, given]).astype(np.int32),
            prompt_len=start,
            loss_mask=mask,
            logprobs=np.zeros(total, dtype=np.float32),
            versions=(VersionSpan(start=start, stop=total, version=context.pool.version),) if len(given) else (),
            status=status,  # type: ignore[arg-type]
            temperature=context.sampling.temperature,
            prompt=prompt,
            response=context.tokenizer.decode(given, skip_special=True),
            metadata={"recorded": True, **pair},
            reason=reason,
        )

    def _cut(self, prompt: Prompt, length: int, limit: int) -> tuple[str, str]:
        """(status, reason) of an answer that is too long; the first one is logged."""
        reason = f"the recorded answer has {length} tokens with its end, and there is room for {limit}"
        skipped = self.config.long_answers == "skip" or limit < 1
        self.too_long += 1
        if self.too_long == 1:
            what = "is not trained" if skipped else "is cut"
            self.log.warning(
                'prompt "%s": %s; it %s (rollout.recorded.long_answers); see rollout.sampling.max_new_tokens and '
                "model.max_context. Further ones are only marked",
                prompt.id, reason, what,
            )  # fmt: skip
        return ("error" if skipped else "length"), reason


# --- Rows ------------------------------------------------------------------------------------------------------------


def split_row(prompt: Prompt, config: RecordedConfig) -> tuple[Prompt, list[str]]:
    """The prompt without its answers, and the texts of those. Raises DataError naming the prompt and what it lacks."""
    if config.answers == "last-message":
        messages = prompt.messages or []
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(
                f'prompt "{prompt.id}" does not end with a message of the assistant, and that is to be its answer '
                '(rollout.recorded.answers = "last-message")'
            )
        return replace(prompt, messages=messages[:-1]), [_text(messages[-1], "the last message", prompt)]
    if config.answers == "label":
        found = [("label", prompt.label)]
    else:
        keys = (config.response_key,) if config.answers == "response" else (config.chosen_key, config.rejected_key)
        found = [(f'"{key}"', prompt.metadata.get(key)) for key in keys]
    texts = []
    for name, value in found:
        if value is None:
            held = ", ".join(prompt.metadata) or "none"
            raise DataError(f'prompt "{prompt.id}" has no {name} to take its answer from', f"its further columns: {held}")
        several = isinstance(value, (list, tuple)) and config.answers != "pair"
        texts += [_text(one, name, prompt) for one in (value if several else [value])]
    return prompt, texts


def _text(value: Any, name: str, prompt: Prompt) -> str:
    """The text of an answer: a string, a number (of a label), an assistant message, or a list of one such message."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping) and value.get("role") == "assistant":
        value = value.get("content")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(f'prompt "{prompt.id}": {name} is neither a text nor one message of the assistant: {value!r:.80}')
    return value


# --- Tokens ----------------------------------------------------------------------------------------------------------


def answer_tokens(prompt: Prompt, answer: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """int32[P] of the prompt and int32 of the answer after it, without an end.

    Prompt and answer are encoded together, as a model continues a prompt; where that changes the prompt's own tokens (a
    merge across the seam, or a template that writes past answers in another way) the answer is encoded by itself.
    """
    ids = np.asarray(prompt_tokens(prompt, tokenizer).token_ids, np.int32)
    if prompt.messages is None:
        whole = tokenizer.encode((prompt.text or "") + answer)
    else:
        messages, opened = list(prompt.messages), ""
        if messages and messages[-1].get("role") == "assistant":
            opened = _text(messages.pop(), "the message that opens the answer", prompt)
        message = {"role": "assistant", "content": opened + answer}
        whole = tokenizer.render([*messages, message], prompt.tools, prompt.images)
    both = np.asarray(whole.token_ids, np.int32)
    if np.array_equal(both[: len(ids)], ids):
        return ids, both[len(ids) :]
    alone = np.asarray(tokenizer.encode(answer).token_ids, np.int32)
    return ids, alone[len(tokenizer.encode("").token_ids) :]


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The stop token that the chat template puts between an answer and what follows it; else the first stop token."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    start = len(tokenizer.render(turn).token_ids)
    try:
        after = tokenizer.render([*turn, {"role": "user", "content": "c"}]).token_ids[start:]
    except DataError:  # a template for another kind of conversation
        after = ()
    return next((int(i) for i in after if int(i) in tokenizer.stop_token_ids), tokenizer.stop_token_ids[0])
