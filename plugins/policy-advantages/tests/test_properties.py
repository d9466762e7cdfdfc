"""What holds for any rewards: shifts, scales, orders, segments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from advantage_support import last, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_core.testing.samples import group_of, make_sample
from miles_core.types import Score

QUICK = settings(deadline=None, max_examples=40)
"""No deadline: a busy machine is no failure."""
REWARDS = st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=5)
BATCHES = st.lists(REWARDS, min_size=1, max_size=3)
GDPO = {"weights": {"right": 1.0, "wrong": 0.5}, "eps": 0.0}
FROM_REWARDS = [
    ("dr-grpo", {}, 1),
    ("opo", {}, 1),
    ("reinforce-pp", {"eps": 0.0}, 0),
    ("reinforce-pp", {"eps": 0.0, "over": "trajectories"}, 0),
    ("reinforce-pp-baseline", {"eps": 0.0}, 0),
    ("gdpo", GDPO, 0),
]
"""(name, options, degree): a scale s of all rewards makes the advantages s**degree as large."""


def groups(batch, shift=0.0, scale=1.0):
    """One group per list of rewards, of answers with 1 to 3 tokens; two scores that say different things."""
    made = []
    for g, rewards in enumerate(batch):
        samples = []
        for i, reward in enumerate(rewards):
            value = shift + scale * reward
            scores = {"right": Score(value=value), "wrong": Score(value=shift + scale * abs(reward))}
            sample = make_sample(1 + i % 3, prompt_len=1, reward=value, group=f"g{g}@0", index=i, scores=scores)
            samples.append(sample)
        made.append(group_of(samples, name=f"g{g}"))
    return made


@pytest.mark.parametrize(("name", "options", "degree"), FROM_REWARDS)
@QUICK
@given(BATCHES, st.integers(-5, 5).map(float), st.integers(1, 5).map(float))
def test_a_shift_changes_nothing_and_a_scale_only_scales(name, options, degree, batch, shift, scale):
    plain = last(run(name, groups(batch), **options))
    moved = last(run(name, groups(batch, shift, scale), **options))
    assert moved == pytest.approx([a * scale**degree for a in plain], abs=1e-4)


@pytest.mark.parametrize(("name", "options"), [row[:2] for row in FROM_REWARDS])
@QUICK
@given(BATCHES, st.randoms(use_true_random=False))
def test_the_order_of_groups_and_samples_does_not_matter(name, options, batch, random):
    plain = groups(batch)
    want = {s.trajectory_id: a for g, s, a in _rows(plain, last(run(name, plain, **options)))}
    mixed = [replace(g, samples=random.sample(g.samples, len(g.samples))) for g in plain]
    random.shuffle(mixed)
    for _, sample, got in _rows(mixed, last(run(name, mixed, **options))):
        assert got == pytest.approx(want[sample.trajectory_id], abs=1e-5)


def _rows(made, advantages):
    pairs = [(group, sample) for group in made for sample in group.samples]
    return [(group, sample, a) for (group, sample), a in zip(pairs, advantages, strict=True)]


NUMBERS = st.integers(-16, 16).map(lambda n: n / 8)
CHAINS = [
    [("dr-grpo", {})],
    [("opo", {})],
    [("reinforce-pp", {"kl_coef": 0.2})],
    [("reinforce-pp", {"kl_coef": 0.2, "over": "trajectories"})],
    [("reinforce-pp-baseline", {})],
    [("gdpo", {"weights": {"right": 1.0}})],
    [("remax", {})],
    [("on-policy-distillation", {"gamma": 0.5})],
    [("rloo", {"kl_coef": 0.2}), ("on-policy-distillation", {"gamma": 0.9, "clip": 0.5}), ("whiten", {})],
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "+".join(name for name, _ in chain))
@QUICK
@given(st.lists(NUMBERS, min_size=2, max_size=4), st.integers(1, 3), st.data())
def test_T3_where_a_trajectory_is_cut_does_not_matter(chain, rewards, cut, data):
    """Four tokens each, once whole and once with the first trajectory in two segments: the same advantage per token."""
    names = ("old_logprobs", "reference_logprobs", "teacher_logprobs")
    values = {n: [np.array([0.0, *data.draw(st.lists(NUMBERS, min_size=4, max_size=4))]) for _ in rewards] for n in names}
    whole = [
        make_sample(4, prompt_len=1, reward=r, index=i, scores={"right": Score(value=r)}) for i, r in enumerate(rewards)
    ]
    parts = [
        make_sample(n, prompt_len=1, reward=rewards[0], segment=s, scores=whole[0].scores)
        for s, n in enumerate([cut, 4 - cut])
    ]
    split = {
        n: [np.array([0.0, *rows[0][1 : 1 + cut]]), np.array([0.0, *rows[0][1 + cut :]]), *rows[1:]]
        for n, rows in values.items()
    }
    one, two = group_of(whole), group_of([*parts, *whole[1:]])
    one.baseline = two.baseline = make_sample(1, reward=0.25, index=99)
    a = run(chain, [one], columns=values).columns["advantages"]
    b = run(chain, [two], columns=split).columns["advantages"]
    np.testing.assert_allclose(np.concatenate([b[0][1:], b[1][1:]]), a[0][1:], atol=1e-5)
    for left, right in zip(b[2:], a[1:], strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


@QUICK
@given(REWARDS, st.floats(-0.5, 0.5))
def test_opo_takes_the_baseline_of_least_variance(rewards, away):
    """Squares of advantages, weighted by length, are what a gradient of independent tokens varies by."""
    assume(max(rewards) > min(rewards))
    lengths = np.array([1 + i % 3 for i in range(len(rewards))])
    best = np.array(last(run("opo", groups([rewards]))))
    assert lengths @ best**2 <= lengths @ (best + away) ** 2 + 1e-6


@QUICK
@given(BATCHES)
def test_reinforce_pp_has_mean_zero_and_deviation_one(batch):
    tokens = np.concatenate([row[1:] for row in run("reinforce-pp", groups(batch), eps=0.0).columns["advantages"]])
    if not tokens.any():
        assert len({r for rewards in batch for r in rewards}) == 1
        return
    assert tokens.mean() == pytest.approx(0, abs=1e-5)
    assert tokens.std(ddof=1) == pytest.approx(1, abs=1e-5)
