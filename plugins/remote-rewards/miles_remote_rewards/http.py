"""The reward `http`: scores from a server of the user's own."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core import BuildContext
from miles_core.types import Sample, SampleGroup, Score
from miles_remote_rewards import HTTP_TOKEN, HttpConfig
from miles_remote_rewards.client import Client
from miles_remote_rewards.judge import text_of


class HttpReward:
    """Posts {"samples": [{"id": ..., "prompt": ..., "response": ..., "label": ...}, ...]}; the answer is {"scores": [...]},
    one for each sample, in order: a finite number, null for no verdict, or {"value", "parts", "reason"}.

    An answer with another number of scores, or with one that is none, is no answer: it is asked for again, and never cut
    or stretched. Metrics: `requests`, `retries`, `seconds` per request.
    """

    def __init__(self, config: HttpConfig, context: BuildContext) -> None:
        self.config = config
        token = context.secrets[HTTP_TOKEN] if config.token else ""
        self.client = Client(config.url, config, context, token)

    async def score_group(self, group: SampleGroup) -> list[Score]:
        """Raises NoAnswer after all tries, and ServerRefused: then no sample of the group has a verdict, and the error is
        counted for each."""
        size = self.config.batch_size
        batches = [group.samples[i : i + size] for i in range(0, len(group.samples), size)]
        scored = await asyncio.gather(*map(self._scores, batches))
        return [score for batch in scored for score in batch]

    async def _scores(self, samples: Sequence[Sample]) -> list[Score]:
        body = {"samples": [self.row(sample) for sample in samples]}
        return await self.client.post(body, lambda answer: scores_of(answer, len(samples)))

    def row(self, sample: Sample) -> dict[str, Any]:
        """What is sent of a sample. Raises ValueError for what is not JSON."""
        prompt = sample.prompt
        assert prompt is not None, "a sample that is scored has a prompt"
        known = {
            "prompt": lambda: text_of(prompt),
            "messages": lambda: prompt.messages,
            "response": lambda: sample.response,
            "label": lambda: prompt.label,
            "task": lambda: prompt.task,
            "metadata": lambda: prompt.metadata,
        }
        row = {"id": f"{sample.trajectory_id}#{sample.segment}", **{name: known[name]() for name in self.config.send}}
        try:
            return json.loads(json.dumps(row, default=_plain, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"sample {row['id']} cannot be sent as JSON: {error}") from None


def scores_of(answer: Any, expected: int) -> list[Score]:
    """Raises ValueError that says what is wrong with an answer."""
    rows = answer.get("scores") if isinstance(answer, Mapping) else answer
    if not isinstance(rows, list):
        raise ValueError(f'expected {{"scores": [...]}}, got {json.dumps(answer)[:200]}')
    if len(rows) != expected:
        raise ValueError(f"expected {expected} scores, got {len(rows)}")
    return [_score(row, place) for place, row in enumerate(rows)]


def _score(row: Any, place: int) -> Score:
    if not isinstance(row, Mapping):
        return Score(value=_number(row, f"score {place}"))
    if "value" not in row:
        raise ValueError(f'score {place} lacks "value"')
    parts = row.get("parts") or {}
    if not isinstance(parts, Mapping):
        raise ValueError(f'the "parts" of score {place} are {parts!r:.60}')
    numbers = {str(name): _number(part, f'part "{name}" of score {place}') for name, part in parts.items()}
    kept = {name: number for name, number in numbers.items() if number is not None}
    return Score(value=_number(row["value"], f"score {place}"), parts=kept, reason=str(row.get("reason") or ""))


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is {value!r:.60}, not a finite number or null")
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")
