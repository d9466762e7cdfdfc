"""The data source: problem after problem, told as chats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from miles_core.errors import ConfigError, DataError
from miles_core.interfaces import DataSource
from miles_core.types import Prompt
from miles_reasoning_gym import ReasoningGymConfig
from miles_reasoning_gym.problems import CHUNK, METADATA, Problem, dataset_seed, entry_of, open_dataset


class ReasoningGymSource(DataSource):
    """An endless stream, or `size` problems over and over. The n-th prompt depends on seed, options and n alone."""

    def __init__(self, config: ReasoningGymConfig, seed: int) -> None:
        self.config = config
        self.taken = 0
        self._seed = seed
        self._params = json.dumps(config.params, sort_keys=True)

    @property
    def num_prompts(self) -> int | None:
        return self.config.size

    def next(self, n: int) -> list[Prompt]:
        prompts = [self._prompt(draw) for draw in range(self.taken, self.taken + n)]
        self.taken += n
        return prompts

    def _prompt(self, draw: int) -> Prompt:
        problem = self.problem(draw)
        try:
            entry = entry_of(problem)
        except Exception as error:
            raise DataError(f"reasoning-gym could not make {problem}: {type(error).__name__}: {error}") from error
        return Prompt(
            id=f"{problem.dataset}-{problem.seed:08x}-{problem.index}",
            draw=draw,
            messages=messages(self.config, entry["question"]),
            label=entry["answer"],
            metadata={METADATA: list(problem)},
        )

    def problem(self, draw: int) -> Problem:
        """Coordinates of the problem behind the draw-th prompt."""
        config, size = self.config, self.config.size or CHUNK
        chunk = 0 if config.size else draw // size
        seed = dataset_seed(self._seed, config.seed_offset, config.dataset, chunk)
        return Problem(config.dataset, self._params, seed, size, draw % size)

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken, "first": list(self.problem(0))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises DataError when the options or the seed give other problems than those of the checkpoint."""
        if list(state["first"]) != list(self.problem(0)):
            raise DataError(
                f"data.reasoning-gym gives other problems than the checkpoint's: {self.problem(0)}, not {state['first']}",
                "go on with the dataset, params, size, seed_offset and run seed of the checkpoint, or start a new run",
            )
        self.taken = state["taken"]


def messages(config: ReasoningGymConfig, question: str) -> list[dict[str, Any]]:
    """A question as a chat: system message, shots, the user's turn, and what opens the answer.

    Raises DataError when `pattern` finds nothing in the question.
    """
    part = ""
    if config.pattern is not None:
        found = re.search(config.pattern, question)
        if found is None:
            raise DataError(f"data.reasoning-gym.pattern {config.pattern!r} finds nothing in the question {question!r}")
        part = found.group(1 if found.re.groups else 0) or ""
    chat = [] if config.system is None else [{"role": "system", "content": config.system}]
    for asked, answered in config.shots:
        chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    chat.append({"role": "user", "content": config.template.format(question=question, part=part)})
    if config.open_answer is not None:
        chat.append({"role": "assistant", "content": config.open_answer.format(question=question, part=part)})
    return chat


def check(config: ReasoningGymConfig, where: str) -> None:
    """Makes the first problem, so that whatever reasoning-gym refuses is refused before anything starts."""
    from reasoning_gym.factory import DATASETS

    at = f" ({where})" if where else ""
    if config.dataset not in DATASETS:
        close = get_close_matches(config.dataset, DATASETS, 1, 0.5)
        hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(sorted(DATASETS))}"
        raise ConfigError(f'reasoning-gym has no dataset "{config.dataset}"{at}', hint)
    for name, instead in (
        ("seed", "the run's seed and data.reasoning-gym.seed_offset"),
        ("size", "data.reasoning-gym.size"),
    ):
        if name in config.params:
            raise ConfigError(f"data.reasoning-gym.params.{name} is set by {instead}{at}", "take it out of params")
    source = ReasoningGymSource(config, 0)
    first = source.problem(0)
    try:
        open_dataset(first.dataset, first.params, first.seed, first.size)
    except Exception as error:
        names = [name for name in DATASETS[config.dataset][1].__dataclass_fields__ if name not in ("seed", "size")]
        raise ConfigError(
            f'reasoning-gym refuses data.reasoning-gym.params of "{config.dataset}": {error}{at}',
            f"its parameters: {', '.join(names)}",
        ) from error
    source.next(1)
