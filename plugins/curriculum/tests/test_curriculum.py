"""What the samplers pick; numbers are derived beside them."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miles_curriculum
from miles_core.types import Prompt

COMPONENTS = {c.name: c for c in miles_curriculum.miles_samplers()}


def build(name="difficulty", seed=0, groups_per_step=2, **options):
    component = COMPONENTS[name]
    run = SimpleNamespace(rollout=SimpleNamespace(groups_per_step=groups_per_step))
    return component.build(component.config(**options), SimpleNamespace(seed=seed, run_config=run))


def offers(ids, start=0):
    return [Prompt(id=str(i), draw=start + n, text="?") for n, i in enumerate(ids)]


def ids(prompts):
    return [p.id for p in prompts]


def test_near_and_unseen_prompts_are_always_taken_and_of_the_others_a_share():
    sampler = build(max_repeats=0.0, keep_far=0.2)
    history = {"near": 0.75, "hard": 0.0, "easy": 1.0}
    taken = Counter()
    for round_ in range(500):
        taken.update(ids(sampler.pick(offers(["near", "hard", "easy", f"new-{round_}"], start=4 * round_), history)))
    assert taken["near"] == 500 and sum(n for i, n in taken.items() if i.startswith("new")) == 500
    # 500 draws at 0.2: 100 +- 3 * sqrt(500 * .2 * .8) = 27
    assert 73 <= taken["hard"] <= 127 and 73 <= taken["easy"] <= 127


def test_the_edge_of_the_width_is_near():
    history = {"a": 0.3, "b": 0.7, "c": 0.29, "d": 0.71}
    sampler = build(width=0.2, keep_far=1e-9, max_repeats=0.0)
    assert ids(sampler.pick(offers("abcd"), history)) == ["a", "b"]


def test_repeats_are_near_prompts_that_have_rested_the_longest():
    # One repeat for each fresh prompt (half of all), rest of 1 step of 2 picks: places of last picks in brackets.
    sampler = build(max_repeats=0.5, rest_steps=1)
    history = {"a": 0.5, "b": 0.0, "c": 0.5}
    assert ids(sampler.pick(offers("abc"), {})) == ["a", "b", "c"]  # [0], [1], [2]
    # d[3]; a has rested for 4 - 0 > 2 picks: a[4]. e[5]; b is far and forgotten, c rested 6 - 2: c[6]. f[7], a 8 - 4: a[8].
    assert ids(sampler.pick(offers("def", start=3), history)) == ["d", "a", "e", "c", "f", "a"]


def test_a_prompt_that_was_not_judged_is_not_repeated():
    sampler = build(max_repeats=0.5, rest_steps=1)
    sampler.pick(offers("abcd"), {})
    assert ids(sampler.pick(offers("e", start=4), {})) == ["e"]


def test_nothing_is_hoarded_while_there_is_nothing_to_repeat():
    # 100 fresh prompts without a candidate, then one comes near: one repeat, not a hundred.
    sampler = build(max_repeats=0.5, rest_steps=1)
    sampler.pick(offers(range(100)), {})
    near = {str(i): 0.5 for i in range(100)}
    assert len(sampler.pick(offers(["x"], start=100), near)) == 2


def test_the_pool_is_bounded():
    sampler = build(pool=3)
    sampler.pick(offers(range(50)), {})
    assert [row[1]["id"] for row in sampler.state()["pool"]] == ["47", "48", "49"]


def test_solved_prompts_are_left_out_but_for_a_share():
    history = {"done": 1.0, "almost": 0.9}
    sampler, strict = build("drop-solved", keep=0.1), build("drop-solved", keep=0.0)
    taken = Counter()
    for round_ in range(1000):
        prompts = offers(["done", "almost", "new"], start=3 * round_)
        taken.update(ids(sampler.pick(prompts, history)))
        assert ids(strict.pick(prompts, history)) == ["almost", "new"]
    assert taken["almost"] == taken["new"] == 1000
    assert 72 <= taken["done"] <= 128  # 100 +- 3 * sqrt(1000 * .1 * .9) = 28


@pytest.mark.parametrize("name", ["difficulty", "drop-solved"])
def test_another_seed_keeps_others(name):
    prompts, history = offers(["x"] * 200), {"x": 1.0}
    picks = [[p.draw for p in build(name, seed=seed).pick(prompts, history)] for seed in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2]


STEPS = st.lists(st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.floats(0, 1)), max_size=25)


def play(sampler, steps, history):
    """Picks step by step; afterwards every picked prompt has the step's mean."""
    draws = 0
    for offered, mean in steps:
        picks = sampler.pick(offers(offered, start=draws), dict(history))
        draws += len(offered)
        history.update(dict.fromkeys(ids(picks), mean))
        yield offered, picks


@settings(max_examples=150, deadline=None)
@given(STEPS, st.floats(0, 0.9), st.integers(1, 3))
def test_unseen_prompts_are_never_left_out(steps, share, rest):
    sampler, history, draws = build(max_repeats=share, rest_steps=rest, keep_far=0.01), {}, 0
    for offered, mean in steps:
        prompts = offers(offered, start=draws)
        draws += len(offered)
        picks = sampler.pick(prompts, dict(history))
        assert [p for p in prompts if p.id not in history and p not in picks] == []
        history.update(dict.fromkeys(ids(picks), mean))


@settings(max_examples=150, deadline=None)
@given(STEPS, st.floats(0, 0.9))
def test_the_share_of_repeats_is_bounded_at_any_time(steps, share):
    sampler, history = build(max_repeats=share, rest_steps=1, keep_far=0.5), {}
    offered_draws, picked, repeats, draws = set(), 0, 0, 0
    for offered, picks in play(sampler, steps, history):
        now = {(str(i), draws + n) for n, i in enumerate(offered)}
        draws += len(offered)
        offered_draws |= now
        for prompt in picks:
            picked += 1
            repeats += (prompt.id, prompt.draw) not in now
            now.discard((prompt.id, prompt.draw))
            assert (prompt.id, prompt.draw) in offered_draws
            assert repeats <= share * picked + 1e-6


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 25))
def test_a_restored_sampler_goes_on_as_if_it_had_not_stopped(steps, cut):
    whole, history = build(max_repeats=0.4, rest_steps=1), {}
    expected = [[(p.id, p.draw) for p in picks] for _, picks in play(whole, steps, history)]
    first, history = build(max_repeats=0.4, rest_steps=1), {}
    got, draws = [], 0
    sampler = first
    for n, (offered, mean) in enumerate(steps):
        if n == cut:
            state = json.loads(json.dumps(sampler.state()))
            sampler = build(max_repeats=0.4, rest_steps=1)
            sampler.restore(state)
        picks = sampler.pick(offers(offered, start=draws), dict(history))
        draws += len(offered)
        history.update(dict.fromkeys(ids(picks), mean))
        got.append([(p.id, p.draw) for p in picks])
    assert got == expected
