"""How several scores become one reward, through real workers; and where an answer counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_core.answers import ENDS, after_thinking, before_end, spoken
from miles_core.builtin.rewards import ExactMatch, ExactMatchConfig
from miles_core.scoring import Scorer, combine
from miles_core.settings import RewardsTable, RewardTable
from miles_core.stats import rollout_metrics
from miles_core.testing.samples import group_of, make_sample
from miles_core.types import Prompt

PLUGIN = '''
import miles_core
from miles_core import Score

@miles_core.reward("given")
def given(sample, *, key: str = "a"):
    """What the response says of this key, as "a=1 b=0.5"; "none" is no verdict."""
    said = dict(part.split("=") for part in sample.response.split())
    value = None if said[key] == "none" else float(said[key])
    return Score(value=value, parts={"length": float(len(said[key]))}, reason=f"as said of {key}")

def miles_rewards():
    return [given]
'''


def scored(folder: Path, responses: list[str], combine: str, **weights: float):
    """Samples with these responses, judged by one "given" for each name of `weights`."""
    file = folder / "given.py"
    file.write_text(PLUGIN)
    names: dict = {}
    exec(PLUGIN, names)
    component = names["given"]
    rows = [
        (name, component, component.config(key=name), RewardTable(use="given", name=name, weight=weight))
        for name, weight in weights.items()
    ]
    scorer = Scorer.from_components(rows, files=[file], table=RewardsTable(combine=combine))
    prompt = Prompt(id="p", text="?")
    samples = [make_sample(2, index=i, prompt=prompt, reward=None) for i in range(len(responses))]
    for sample, response in zip(samples, responses, strict=True):
        sample.response = response
    group = group_of(samples)
    group.prompt = prompt

    async def go():
        await scorer.start()
        try:
            await scorer.score_group(group)
        finally:
            await scorer.close()

    asyncio.run(go())
    return samples


@pytest.mark.parametrize(
    ("rule", "rewards"),
    [
        # a has weight 2, b 0.5, c is only logged. Responses: both; a is 0; a has no verdict; b has none; c has none.
        ("sum", [2 * 1 + 0.5 * 4, 0 + 0.5 * 4, None, None, 2 * 1 + 0.5 * 4]),
        ("product", [2 * 1 * 0.5 * 4, 0.0, None, None, 2 * 1 * 0.5 * 4]),
        ("gate", [2 * 1 + 0.5 * 4, 0.0, None, None, 2 * 1 + 0.5 * 4]),
    ],
)
def test_R2_a_score_without_verdict_takes_the_reward_along_unless_its_weight_is_zero(tmp_path, rule, rewards):
    responses = ["a=1 b=4 c=9", "a=0 b=4 c=9", "a=none b=4 c=9", "a=1 b=none c=9", "a=1 b=4 c=none"]
    samples = scored(tmp_path, responses, rule, a=2.0, b=0.5, c=0.0)
    assert [s.reward for s in samples] == rewards


def test_every_score_is_kept_by_name_with_parts_and_reason(tmp_path):
    (sample,) = scored(tmp_path, ["a=-1 b=none c=9"], "gate", a=2.0, b=0.5, c=0.0)
    assert sample.reward == -2.0  # the gate is not positive, and decides alone: 2 * -1
    assert {name: score.value for name, score in sample.scores.items()} == {"a": -1.0, "b": None, "c": 9.0}
    assert sample.scores["a"].parts == {"length": 2.0} and sample.scores["b"].reason == "as said of b"


def test_every_score_is_a_metric_of_its_own(tmp_path):
    samples = scored(tmp_path, ["a=1 b=none c=9", "a=3 b=2 c=9"], "sum", a=1.0, b=0.0, c=0.0)
    group = group_of(samples)
    metrics = rollout_metrics([group])
    assert metrics["score/a/mean"] == 2.0 and metrics["score/b/mean"] == 2.0 and metrics["score/c/mean"] == 9.0
    assert metrics["reward/mean"] == 2.0


@pytest.mark.parametrize(
    ("rule", "scores", "reward"),
    [
        # Nothing counts: a run that learns from a teacher, or only watches.
        ("sum", [(1.0, 0.0), (None, 0.0)], 0.0),
        ("product", [(1.0, 0.0)], 0.0),
        ("gate", [(None, 0.0)], 0.0),
        # The gate is the first score that counts.
        ("gate", [(0.0, 0.0), (1.0, 1.0), (2.0, 1.0)], 3.0),
        ("gate", [(1.0, 0.0), (0.0, 1.0), (2.0, 1.0)], 0.0),
        # A gate of negative weight: its value decides whether it is open, not the product.
        ("gate", [(1.0, -1.0), (3.0, 1.0)], 2.0),
        ("gate", [(-1.0, -1.0), (3.0, 1.0)], 1.0),
        # Negative weights are penalties in a sum, and change the sign of a product.
        ("sum", [(1.0, 1.0), (0.25, -2.0)], 0.5),
        ("product", [(0.5, 1.0), (1.0, -2.0)], -1.0),
        # A missing score is not hidden by a product that would be 0 anyway.
        ("product", [(None, 1.0), (0.0, 1.0)], None),
    ],
)
def test_rules_at_their_edges(rule, scores, reward):
    assert combine(scores, rule) == reward


# --- Where an answer counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_R8_what_follows_the_end_of_the_turn_does_not_count(end):
    assert before_end(f"42{end}43{end}") == "42"
    assert ExactMatch(ExactMatchConfig()).answer(f"42{end}\n43") == "42"
    assert ExactMatch(ExactMatchConfig(pattern=r"\d+")).answer(f"42{end}43") == "42"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("42", "42"),
        ("<think>41</think>42", "42"),
        ("41</think>42", "42"),  # the prompt has opened it
        ("<think>41</think>40<think>39</think>42", "42"),
        ("<think>42", None),
        ("<think>41</think>42<think>", None),
    ],
)
def test_R8_thinking_does_not_count(text, after):
    assert after_thinking(text) == after


def test_R8_an_end_inside_of_thinking_leaves_it_open():
    assert spoken("<think>41<|im_end|></think>42") is None
