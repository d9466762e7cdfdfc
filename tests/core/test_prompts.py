"""The stream of prompts: what fits, what a sampler makes of it, and that it resumes where it was (case D5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from miles_core.errors import ConfigError, ContractError, DataError, RunFailed
from miles_core.interfaces import DataSource
from miles_core.prompts import PromptFeed
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import Prompt, PromptTokens


class Lengths(DataSource):
    """Prompts "0", "1", ... whose lengths in tokens are given, over and over."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.cursor = lengths, 0

    @property
    def num_prompts(self) -> int:
        return len(self.lengths)

    def next(self, n: int) -> list[Prompt]:
        start, self.cursor = self.cursor, self.cursor + n
        return [
            Prompt(id=str(i % len(self.lengths)), draw=i, text="x" * self.lengths[i % len(self.lengths)])
            for i in range(start, start + n)
        ]

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]


class OneTokenPerLetter:
    def encode(self, text: str) -> PromptTokens:
        return PromptTokens(token_ids=np.zeros(len(text), np.int32), text=text)


def feed(
    *lengths: int, max_context: int = 64, refuse_long: bool = False, sampler: Any = None
) -> tuple[PromptFeed, list[str]]:
    notes: list[str] = []
    made = PromptFeed(
        Lengths(*lengths),
        OneTokenPerLetter(),
        max_context,
        refuse_long=refuse_long,
        sampler=sampler,
        note=lambda text, level: notes.append(text),
    )
    return made, notes


def test_D5_prompts_that_leave_no_room_are_dropped_and_counted() -> None:
    # Context 64: 81 and 64 tokens leave no room for a new one, 60 and 63 do.
    prompts, notes = feed(81, 60, 64, 63)
    assert [p.id for p in prompts.take(4)] == ["1", "3", "1", "3"]
    assert prompts.dropped == 4  # 81 and 64, twice each
    assert len(notes) == 1 and "81 tokens" in notes[0]


def test_D5_all_prompts_too_long_is_an_error() -> None:
    with pytest.raises(DataError, match="fill the context of 64"):
        feed(81, 64)[0].take(1)


def test_D5_a_long_prompt_may_be_refused() -> None:
    with pytest.raises(DataError, match='prompt "1" has 81 tokens'):
        feed(10, 81, refuse_long=True)[0].take(2)


def test_check_puts_the_source_back() -> None:
    prompts, _ = feed(81, 3, 4)
    prompts.check(groups_per_step=2)
    assert prompts.dropped == 0
    assert [p.id for p in prompts.take(2)] == ["1", "2"]


def test_D6_a_small_data_set_is_said() -> None:
    prompts, notes = feed(3, 4)
    prompts.check(groups_per_step=16)
    assert "2 prompts and a step takes 16" in notes[0]


class EasyOut:
    """Drops prompts that are solved already, the rest in reverse."""

    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        return [p for p in reversed(prompts) if history.get(p.id, 0.0) < 1.0]


def test_a_sampler_sees_the_rewards_and_decides() -> None:
    prompts, _ = feed(3, 3, 3, sampler=EasyOut())
    assert [p.id for p in prompts.take(3)] == ["2", "1", "0"]
    solved = make_group([1.0, 1.0])
    solved.prompt.id = "1"
    prompts.remember(solved)
    prompts.settle()
    assert [p.id for p in prompts.take(2)] == ["0", "2"]
    copy, _ = feed(3, 3, 3, sampler=EasyOut())
    copy.restore(prompts.state())
    assert [p.id for p in copy.take(4)] == [p.id for p in prompts.take(4)]


def test_a_sampler_that_keeps_nothing_is_an_error_and_not_a_loop() -> None:
    class Nothing:
        def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
            return []

    with pytest.raises(DataError, match="the sampler kept nothing"):
        feed(3, sampler=Nothing())[0].take(1)


BAD_PICKS = [
    (lambda prompts: None, ContractError, r"the sampler \(sampler.use\) returned None, not a list of prompts"),
    (lambda prompts: ["a"], ContractError, r"the sampler \(sampler.use\) returned 'a' among its picks, which is no Prompt"),
    (lambda prompts: prompts["x"], RunFailed, r"the sampler \(sampler.use\) raised TypeError: list indices"),
]


@pytest.mark.parametrize(("pick", "kind", "message"), BAD_PICKS)
def test_a_sampler_that_gives_no_prompts_is_named(pick: Any, kind: type[Exception], message: str) -> None:
    class Own:
        def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
            return pick(prompts)

    with pytest.raises(kind, match=message):
        feed(3, sampler=Own())[0].take(1)


class Twice:
    """Picks every prompt twice, which is more than was asked for."""

    def pick(self, prompts: list[Prompt], history: Mapping[str, Any]) -> list[Prompt]:
        return [p for p in prompts for _ in range(2)]


def test_what_a_sampler_picks_too_many_waits_and_each_pick_is_a_draw_of_its_own() -> None:
    prompts, _ = feed(3, 3, 3, sampler=Twice())
    prompts.check(groups_per_step=1)  # asks no sampler
    first = prompts.take(3)
    assert [p.id for p in first] == ["0", "0", "1"]
    copy, _ = feed(3, 3, 3, sampler=Twice())
    copy.restore(prompts.state())
    for one in (prompts, copy):
        rest = one.take(4)
        assert [p.id for p in rest] == ["1", "2", "2", "0"]
        assert [p.draw for p in first + rest] == list(range(7))


def test_history_is_of_the_steps_before_whatever_ends_first() -> None:
    prompts, _ = feed(3, 3, sampler=Twice())
    for order, reward in ((1, 1.0), (0, 0.0)):  # the second group of prompt "p" ends first
        group = make_group([reward, reward])
        group.order = order
        prompts.remember(group)
    assert prompts.history == {}
    prompts.settle()
    assert prompts.history == {"p": 1.0}


def test_T3_history_counts_trajectories_and_not_segments() -> None:
    prompts, _ = feed(3, sampler=Twice())
    segments = [make_sample(reward=1.0, segment=s) for s in range(3)]
    prompts.remember(group_of([*segments, make_sample(index=1, reward=0.0)]))
    prompts.settle()
    assert prompts.history == {"p": 0.5}  # two votes, not four


def test_a_kind_that_nothing_would_use_is_refused(tmp_path: Any) -> None:
    from miles_core.config import load
    from miles_core.wiring import check_requirements

    plugin = tmp_path / "half.py"
    plugin.write_text(
        "from miles_core import Component, hookimpl\n"
        "@hookimpl\ndef miles_precision_recipes():\n"
        "    return [Component(name='half', summary='Half.', build=lambda config, context: None)]\n"
    )
    from tests.core import runs

    config = runs.write_config(tmp_path, '[precision]\nuse = "half"\n')
    run = load(config, files=[plugin], distributions=[])
    with pytest.raises(ConfigError, match=r'precision "half".* would never be used'):
        check_requirements(run)
