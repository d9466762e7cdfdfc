"""Filters of groups and the shaping of overlong answers; each number is derived beside it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miles_core
from miles_core.builtin import filters, overlong
from miles_core.component import Environment
from miles_core.drops import verdict_of
from miles_core.errors import ConfigError, ContractError, RunFailed
from miles_core.judging import Judge
from miles_core.scoring import Scorer, combine
from miles_core.settings import RewardsTable, RewardTable
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import Score, Verdict, VersionSpan

FILTERS = {c.name: c for c in filters.COMPONENTS["miles_filters"]}
(OVERLONG,) = overlong.COMPONENTS["miles_rewards"]


def check(name: str, group, **options) -> Verdict:
    component = FILTERS[name]
    return component.build(component.config(**options), None).check(group)


# --- Length, truncation, staleness -----------------------------------------------------------------------------------


def lengths(*numbers: int, **fields):
    return group_of([make_sample(n, index=i, **fields) for i, n in enumerate(numbers)])


LENGTHS = [
    ([1, 5, 9], {}, ""),  # one token is enough by default
    ([0, 5, 9], {}, "too-short"),
    ([1, 5, 9], {"max_tokens": 9}, ""),
    ([1, 5, 10], {"max_tokens": 9}, "too-long"),
    ([1, 1, 10], {"min_tokens": 2, "max_tokens": 9}, "too-short"),  # two are short, one is long
    ([0, 5, 5, 5], {"max_share": 0.25}, ""),  # one of four is not more than a quarter
    ([0, 0, 5, 5], {"max_share": 0.25}, "too-short"),
]


@pytest.mark.parametrize(("numbers", "options", "reason"), LENGTHS)
def test_length_drops_groups_with_too_many_answers_outside(numbers, options, reason):
    assert check("length", lengths(*numbers), **options) == Verdict(keep=not reason, reason=reason)


def test_T4_length_counts_what_was_sampled_over_all_segments():
    # Two segments with 2 and 1 sampled tokens (and 2 of a tool) are an answer of 3.
    segments = [make_sample(4, mask=[1, 1, 0, 0], segment=0), make_sample(1, segment=1)]
    group = group_of([*segments, make_sample(9, index=1)])
    assert check("length", group, min_tokens=3).keep and not check("length", group, min_tokens=4).keep


def test_failed_answers_do_not_count():
    # The failed answer has 0 tokens, and half of the three others were cut: one of two, not one of three.
    group = group_of(
        [
            make_sample(0, index=0, status="error"),
            make_sample(4, index=1, status="length"),
            make_sample(4, index=2),
        ]
    )
    assert check("length", group).keep
    assert check("truncation", group, max_share=0.5).keep and not check("truncation", group, max_share=0.4).keep
    assert check("length", lengths(0, 0, status="error")).keep  # nothing to judge


def test_length_bounds_must_be_in_order():
    with pytest.raises(ValueError, match="max_tokens = 3 is less than min_tokens = 5"):
        FILTERS["length"].config(min_tokens=5, max_tokens=3)


@pytest.mark.parametrize(
    ("cut", "max_share", "keep"), [(2, 0.5, True), (3, 0.5, False), (0, 0.0, True), (1, 0.0, False), (4, 0.75, False)]
)
def test_truncation_drops_groups_of_which_too_much_was_cut(cut, max_share, keep):
    statuses = ["length"] * (cut // 2) + ["truncated"] * (cut - cut // 2) + ["stop"] * (4 - cut)
    group = group_of([make_sample(index=i, status=s) for i, s in enumerate(statuses)])
    verdict = check("truncation", group, max_share=max_share)
    assert verdict == (Verdict(keep=True) if keep else Verdict(keep=False, reason="truncated"))


def test_a_cut_trajectory_is_one_answer_however_many_segments_it_has():
    segments = [make_sample(index=0, segment=s, status="length" if s == 2 else "stop") for s in range(3)]
    assert check("truncation", group_of([*segments, make_sample(index=1)]), max_share=0.5).keep  # one of two


# Spans of versions of each sample; the age of the group is newest - oldest over all of them.
AGES = [([[3], [3]], 0), ([[3], [4]], 1), ([[3, 4, 5], [5]], 2), ([[], [7]], 0)]


@pytest.mark.parametrize(("versions", "age"), AGES)
def test_staleness_drops_groups_whose_oldest_token_is_too_old(versions, age):
    samples = []
    for i, spans in enumerate(versions):
        made = make_sample(len(spans), index=i)
        at = made.prompt_len
        made.versions = tuple(VersionSpan(start=at + n, stop=at + n + 1, version=v) for n, v in enumerate(spans))
        samples.append(made)
    group = group_of(samples)
    assert check("staleness", group, max_age=age).keep
    if age:
        assert check("staleness", group, max_age=age - 1) == Verdict(keep=False, reason="stale")


# --- Dynamic sampling by one score -----------------------------------------------------------------------------------


def scored(accuracy, rewards):
    group = make_group(rewards)
    for sample, value in zip(group.samples, accuracy, strict=True):
        sample.scores = {"math": Score(value=value), "overlong": Score(value=0.0)}
    return group


@pytest.mark.parametrize(
    ("accuracy", "rewards", "by_reward", "by_score"),
    [
        (
            [1, 1, 1],
            [1.0, 0.5, 1.0],
            "",
            "zero-std",
        ),  # a penalty makes rewards differ, and nothing is to be learned of math
        ([1, 0, 1], [1.0, 1.0, 1.0], "zero-std", ""),
        ([1, None, 1], [1.0, None, 0.5], "", "zero-std"),
        ([None, None, None], [None, None, None], "no-verdict", "no-verdict"),
    ],
)
def test_nonzero_std_compares_the_reward_or_one_score(accuracy, rewards, by_reward, by_score):
    group = scored(accuracy, rewards)
    assert check("nonzero-std", group).reason == by_reward
    assert check("nonzero-std", group, score="math").reason == by_score


def overlong_reward(**options):
    return OVERLONG.build(OVERLONG.config(**options), SimpleNamespace(run_config=environment().run_config))


def environment(*rewards, combine="sum", max_new_tokens=100):
    run = SimpleNamespace(
        reward=tuple(RewardTable(**r) for r in rewards),
        rewards=RewardsTable(combine=combine),
        rollout=SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=max_new_tokens)),
    )
    return Environment(run_config=run, where="run.toml: here")


def test_a_score_that_no_reward_gives_is_refused():
    component = FILTERS["nonzero-std"]
    env = environment({"use": "exact-match"}, {"use": "acme:math", "name": "acc"}, {"use": "acme:length"})
    for name in ("", "exact-match", "acc", "length"):
        component.check(component.config(score=name), env)
    with pytest.raises(ConfigError, match='score "math", and no reward has that name') as error:
        component.check(component.config(score="math"), env)
    assert "exact-match, acc, length" in str(error.value)


# --- Overlong shaping ------------------------------------------------------------------------------------------------


# L_max = 20, L_cache = 5: free up to 15, then -1/5 per token, -1 from 20 on.
@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (15, 0), (16, -0.2), (18, -0.6), (20, -1), (21, -1), (50, -1)])
def test_overlong_is_a_ramp_before_the_limit(tokens, value):
    reward = overlong_reward(cache_tokens=5, max_tokens=20)
    assert reward.score(make_sample(tokens)).value == pytest.approx(value)


def test_overlong_takes_the_runs_own_limit_by_default():
    context = SimpleNamespace(run_config=environment(max_new_tokens=40).run_config)
    assert OVERLONG.build(OVERLONG.config(cache_tokens=8), context).max_tokens == 40


@pytest.mark.parametrize(
    ("rewards", "rule", "cache", "message"),
    [
        (["math", "overlong"], "sum", 20, ""),
        (["math", "overlong"], "gate", 20, ""),
        (["overlong", "math"], "sum", 20, ""),
        (["overlong", "math"], "gate", 20, 'combine = "gate"'),
        (["math", "overlong"], "product", 20, 'combine = "product"'),
        (["math", "overlong"], "sum", 101, "every answer would be punished"),
    ],
)
def test_overlong_refuses_what_would_wipe_out_the_other_scores(rewards, rule, cache, message):
    env = environment(*({"use": name} for name in rewards), combine=rule)
    if not message:
        return OVERLONG.check(OVERLONG.config(cache_tokens=cache), env)
    with pytest.raises(ConfigError, match=message):
        OVERLONG.check(OVERLONG.config(cache_tokens=cache), env)


def test_overlong_is_added_to_the_sum_and_kept_under_its_own_name():
    # Right and long: 1 + 0.5 * -0.6 = 0.7; right and short: 1. Limit 20, cache 5, weight 0.5.
    @miles_core.reward("right")
    def right(sample):
        return 1.0

    entries = [
        ("right", right, right.config(), RewardTable(use="right")),
        ("overlong", OVERLONG, OVERLONG.config(cache_tokens=5, max_tokens=20), RewardTable(use="overlong", weight=0.5)),
    ]
    scorer = Scorer.from_components(entries)
    context = SimpleNamespace(run_config=environment().run_config)
    for entry, (name, component, config, _) in zip(scorer.entries, entries, strict=True):
        entry.judge = Judge.of(name, component.build(config, context))
    group = lengths(18, 10)
    asyncio.run(scorer.score_group(group))
    assert [s.reward for s in group.samples] == pytest.approx([0.7, 1.0])
    assert [s.scores["overlong"].value for s in group.samples] == pytest.approx([-0.6, 0.0])
    assert [s.scores["right"].value for s in group.samples] == [1.0, 1.0]


def test_a_reward_without_verdict_keeps_none_with_a_penalty_beside_it():
    assert combine([(None, 1.0), (-0.5, 1.0)], "sum") is None


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 120))
def test_overlong_falls_from_0_to_minus_1_and_never_rises(cache, free, tokens):
    reward = overlong_reward(cache_tokens=cache, max_tokens=cache + free)
    now, then = (reward.score(make_sample(n)).value for n in (tokens, tokens + 1))
    assert -1 <= then <= now <= 0
    assert (now == 0) == (tokens <= free) and (now == -1) == (tokens >= free + cache)


# --- The decorator ---------------------------------------------------------------------------------------------------


def test_the_decorator_makes_a_filter_with_options_and_a_reason():
    @miles_core.filter("few-tokens")
    def few(group, *, most: int = 3):
        return max(s.num_response_tokens for s in group.samples) <= most

    built = few.build(few.config(most=2), None)
    assert built.check(lengths(2)) == Verdict(keep=True)
    assert built.check(lengths(3)) == Verdict(keep=False, reason="few-tokens")


def judged(check):
    """The verdict of a run with one filter "own" on a group "p@0"."""
    return verdict_of([("own", SimpleNamespace(check=check))], make_group([1.0, 0.0]))


def test_a_refusal_without_a_reason_goes_by_the_name_of_the_filter():
    assert judged(lambda group: Verdict(keep=False)) == Verdict(keep=False, reason="own")


@pytest.mark.parametrize("given", [None, True, Verdict(keep=False, reason=5)])
def test_what_is_no_verdict_names_the_filter_and_the_group(given):
    with pytest.raises(ContractError, match=r'filter "own" returned .* for group p@0, not a Verdict'):
        judged(lambda group: given)


def test_what_a_filter_raises_names_it_and_the_group():
    with pytest.raises(RunFailed, match='filter "own" raised KeyError on group p@0: 1'):
        judged(lambda group: {}[1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["stop", "length", "truncated", "error"]), min_size=1, max_size=8), st.floats(0, 0.99))
def test_verdicts_do_not_depend_on_the_order_of_samples(statuses, share):
    samples = [make_sample(i, index=i, status=s) for i, s in enumerate(statuses)]
    for name, options in (("truncation", {"max_share": share}), ("length", {"max_share": share, "min_tokens": 3})):
        verdicts = {check(name, group_of(order), **options) for order in (samples, samples[::-1])}
        assert len(verdicts) == 1
