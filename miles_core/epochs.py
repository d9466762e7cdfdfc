"""Sources that go through a set of rows epoch after epoch, with a cursor that is one number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.component import BuildContext, Environment
from miles_core.errors import DataError
from miles_core.interfaces import DataSource
from miles_core.rows import Digest, RowOptions
from miles_core.types import Prompt


class EpochSource(DataSource):
    """Epoch after epoch over `rows` rows. The n-th prompt depends on data, seed, options and n alone, so that `taken` is
    the whole cursor; the rest of the state only says what it is a cursor of.

    A request may cross an epoch's end: with fewer rows than a step needs, a step holds rows of several epochs, each under
    a draw of its own. With `epochs` the source ends after rows * epochs prompts, and what does not fill a step is left.
    """

    def __init__(self, options: RowOptions, context: BuildContext, rows: int) -> None:
        self.options, self.rows, self.taken = options, rows, 0
        self.seed = int(context.rng.integers(2**63))
        self._log = context.logger
        self._table = context.component.replace("/", ".")

    @abstractmethod
    def at(self, epoch: int, place: int) -> Prompt:
        """The prompt at a place, 0 to rows - 1, of an epoch's order. Its draw is set by `next`."""

    @abstractmethod
    def digest(self) -> str:
        """What tells this data from other data."""

    @property
    def order(self) -> str:
        """How rows are ordered, for the state: a cursor means nothing under another order."""
        return "shuffled" if self.options.shuffle else "as they come"

    @property
    def num_prompts(self) -> int:
        return self.rows

    @property
    def total(self) -> int | None:
        """Prompts until the source ends, or None."""
        return None if self.options.epochs is None else self.options.epochs * self.rows

    def next(self, n: int) -> list[Prompt]:
        if self.total is not None:
            n = min(n, self.total - self.taken)
        return [self._take() for _ in range(n)]

    def _take(self) -> Prompt:
        epoch, place = divmod(self.taken, self.rows)
        if place == 0 and epoch > 0:
            self._log.info("epoch %d of %s starts after %d prompts", epoch + 1, self.options.path, self.taken)
        prompt = replace(self.at(epoch, place), draw=self.taken)
        self.taken += 1
        return prompt

    def state(self) -> dict[str, Any]:
        return {
            "taken": self.taken,
            "rows": self.rows,
            "sha256": self.digest(),
            "seed": self.seed,
            "order": self.order,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises DataError when data, seed or order are not what the state was saved with."""
        path, table = self.options.path, self._table
        if (state["rows"], state["sha256"]) != (self.rows, self.digest()):
            raise DataError(
                f"{path} has changed since the checkpoint ({state['rows']} rows then, {self.rows} now)",
                "go on with the data of the checkpoint, or start a new run",
            )
        if (state["seed"], state["order"]) != (self.seed, self.order):
            now = "under another seed" if state["order"] == self.order else f"{self.order}, not {state['order']}"
            raise DataError(
                f"{path} would go on in another order than the checkpoint's: {now}",
                f"go on with the seed and the options of {table} of the checkpoint, or start a new run",
            )
        if self.total is not None and state["taken"] > self.total:
            raise DataError(
                f"{table}.epochs = {self.options.epochs} gives {self.total} prompts, and the checkpoint has taken "
                f"{state['taken']} already",
                "allow more epochs",
            )
        self.taken = state["taken"]


class ListSource(EpochSource):
    """Rows that can be had by number: a list in memory, or something that reads them when asked. The order of an epoch
    is a permutation of all of them."""

    def __init__(
        self, options: RowOptions, context: BuildContext, prompts: Sequence[Prompt] | Any, sha256: str | None = None
    ) -> None:
        super().__init__(options, context, len(prompts))
        self.prompts = prompts
        self._sha256 = sha256
        self._permutation: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def at(self, epoch: int, place: int) -> Prompt:
        if not self.options.shuffle:
            return self.prompts[place]
        if self._permutation[0] != epoch:
            self._permutation = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows))
        return self.prompts[int(self._permutation[1][place])]

    def digest(self) -> str:
        if self._sha256 is None:
            digest = Digest()
            for prompt in self.prompts:
                digest.add(prompt)
            self._sha256 = digest.hex()
        return self._sha256


def size_note(options: RowOptions, rows: int, environment: Environment, table: str) -> str:
    """What a fixed number of epochs means for the run, or "" when it lasts; nothing for an evaluation, which has no
    steps. Raises DataError when it fills no step."""
    run_config = environment.run_config
    if options.epochs is None or run_config is None or "eval[" in environment.where:
        return ""
    size, steps, have = run_config.rollout.groups_per_step, run_config.steps, rows * options.epochs
    said = f"{options.path} gives {have} prompts in {options.epochs} epochs"
    if have < size:
        raise DataError(
            f"{said}, and one step takes {size} (rollout.groups_per_step)",
            f"leave {table}.epochs out to go round again, or lower rollout.groups_per_step",
        )
    full, rest = divmod(have, size)
    lasts = f"{said}: enough for {full} of {steps} steps of {size}, with {rest} left over"
    return lasts if full < steps else ""
