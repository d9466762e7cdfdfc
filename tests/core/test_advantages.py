"""Advantages and filters of the core. Every number is derived beside it; std has ddof=1, eps 1e-6."""

import numpy as np
import pytest

from miles_core.batch import apply_advantages, prepare
from miles_core.builtin import advantages, filters
from miles_core.errors import ConfigError
from miles_core.testing.samples import group_of, make_group, make_sample

ADVANTAGES = {c.name: c for c in advantages.COMPONENTS["miles_advantages"]}
FILTERS = {c.name: c for c in filters.COMPONENTS["miles_filters"]}


def run(name, groups, *, columns=None, **options):
    """The rollout batch after one advantage."""
    component = ADVANTAGES[name]
    batch = prepare(groups)
    for key, rows in (columns or {}).items():
        batch.put(key, rows, "test")
    apply_advantages(batch, [(name, component.build(component.config(**options), None))])
    return batch


def per_sample(batch):
    """The advantage of each sample at its last token."""
    return [float(row[-1]) for row in batch.columns["advantages"]]


def bf16(value):
    """`value` as bfloat16 holds it: the upper 16 bits of a float32, rounded to nearest."""
    bits = np.float32(value).view(np.uint32)
    return float(np.uint32((int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000).view(np.float32))


# --- grpo, rloo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float, np.float32, bf16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, 10.1, 100.3])
@pytest.mark.parametrize(("name", "options"), [("grpo", {}), ("grpo", {"std": False}), ("rloo", {})])
def test_F1_equal_rewards_give_exactly_zero(name, options, value, number):
    for size in (3, 6, 7, 12, 64):
        assert set(per_sample(run(name, [make_group([number(value)] * size)], **options))) == {0.0}


def test_F1_leave_one_out_of_the_odd_sample():
    # The others of the last are all 0.35: 0 - 0.35. Of each other: 0.35 - (6 * 0.35 + 0) / 7 = 0.05.
    assert per_sample(run("rloo", [make_group([0.35] * 7 + [0.0])])) == pytest.approx([0.05] * 7 + [-0.35], rel=1e-6)


def test_R2_no_verdict_is_left_out_of_the_statistics():
    # A over the valid three: mean 1/3, std 0.57735 -> 0.6667 / 0.57735. B: mean 1/2, std 0.57735 -> 0.5 / 0.57735.
    groups = [make_group([1.0, None, 0.0, 0.0], name="a"), make_group([1.0, 0.0, 0.0, 1.0], name="b")]
    batch = run("grpo", groups)
    want = [1.1547, 0, -0.5774, -0.5774, 0.8660, -0.8660, -0.8660, 0.8660]
    assert per_sample(batch) == pytest.approx(want, abs=1e-4)
    assert not batch.mask[1].any()


def test_R2_a_single_verdict_teaches_nothing():
    assert per_sample(run("grpo", [make_group([None, 1.0, None])])) == [0.0, 0.0, 0.0]


def test_F5_a_truncated_reward_counts_in_its_group():
    # Rewards 1 and 0, the second cut and not trained: mean 1/2, std 0.70711 -> 0.5 / 0.70711.
    batch = prepare([group_of([make_sample(reward=1.0), make_sample(index=1, status="length")])], train_truncated=False)
    apply_advantages(batch, [("grpo", ADVANTAGES["grpo"].build(advantages.GrpoConfig(), None))])
    assert per_sample(batch) == pytest.approx([0.7071, 0.0], abs=1e-4)


def test_T3_a_trajectory_has_one_vote():
    # Votes 1 (three segments) and 0: mean 1/2, std 0.70711. Four equal votes would give 0.5 and -1.5.
    samples = [make_sample(index=0, segment=s, reward=1.0) for s in range(3)] + [make_sample(index=1, reward=0.0)]
    assert per_sample(run("grpo", [group_of(samples)])) == pytest.approx([0.7071] * 3 + [-0.7071], abs=1e-4)


def test_std_off_only_centres():
    assert per_sample(run("grpo", [make_group([3.0, 1.0])], std=False)) == [1.0, -1.0]


def test_advantages_stand_on_trainable_tokens_only():
    batch = run("grpo", [group_of([make_sample(3, mask=[1, 0, 1], reward=1.0), make_sample(3, index=1)])], std=False)
    assert batch.columns["advantages"][0].tolist() == [0, 0, 0, 0.5, 0, 0.5]
    assert batch.columns["advantages"][0].dtype == np.float32


@pytest.mark.parametrize("name", ["grpo", "rloo", "gae"])
def test_an_advantage_that_would_discard_others_is_refused(name):
    component = ADVANTAGES[name]
    second = component.build(component.config(), None)
    first = ADVANTAGES["grpo"].build(advantages.GrpoConfig(), None)
    with pytest.raises(ConfigError, match=f'advantage "{name}" starts from rewards'):
        apply_advantages(prepare([make_group([0.0, 1.0])]), [("grpo", first), (name, second)])


# --- gae -------------------------------------------------------------------------------------------------------------


def gae_case(mask, values, reward, **options):
    """Advantages of one sample whose response has this mask and these values."""
    sample = make_sample(len(mask), prompt_len=1, mask=mask, reward=reward)
    batch = run("gae", [group_of([sample])], columns={"old_values": [np.array([9.0, *values])]}, **options)
    return batch.columns["advantages"][0][1:].tolist(), batch.columns["returns"][0][1:].tolist()


F10 = [
    # Token 2 has reward 1: delta 1, and 0 + 0.95 * 1 before it. The masked value 100 would give 5.7 and 6.
    ([1, 1, 0], [0, 0, 100], {}, [0.95, 1, 0]),
    # Two trainable tokens are neighbours, whatever is between: 0.95 once. Counting the gap gives 0.95^3 = 0.857.
    ([1, 0, 0, 1], [0, 0, 0, 0], {}, [0.95, 0, 0, 1]),
    ([1, 1, 0, 0], [0, 0, 0, 0], {}, [0.95, 1, 0, 0]),
    ([1, 1, 0, 0], [0, 0, 0, 0], {"gamma": 0.0}, [0, 1, 0, 0]),  # the reward is not lost behind the mask
]


@pytest.mark.parametrize(("mask", "values", "options", "want"), F10)
def test_F10_masked_tokens_are_skipped(mask, values, options, want):
    advantage, returns = gae_case(mask, values, 1.0, **options)
    assert advantage == pytest.approx(want, abs=1e-6)
    assert returns == pytest.approx(want, abs=1e-6)  # the values of trainable tokens are 0


def test_gae_with_values():
    # gamma 0.5, lambda 0.5, V = 1, 2, r = 4: delta 4 - 2 = 2 and 0.5 * 2 - 1 = 0; advantages 0 + 0.25 * 2 and 2.
    advantage, returns = gae_case([1, 1], [1, 2], 4.0, gamma=0.5, lam=0.5)
    assert advantage == pytest.approx([0.5, 2])
    assert returns == pytest.approx([1.5, 4])  # advantage + value


def test_gae_runs_through_the_segments_of_a_trajectory():
    # One reward at the end of the last segment, seen from the first at 0.95^2 and 0.95^3.
    samples = [make_sample(2, index=0, segment=s, reward=1.0) for s in range(2)]
    batch = run("gae", [group_of(samples[::-1])], columns={"old_values": [np.zeros(5)] * 2})
    second, first = (row[3:].tolist() for row in batch.columns["advantages"])
    assert first == pytest.approx([0.95**3, 0.95**2])
    assert second == pytest.approx([0.95, 1])


def test_E1_gae_of_an_empty_response():
    batch = run(
        "gae",
        [group_of([make_sample(0, reward=1.0), make_sample(1, index=1, reward=1.0)])],
        columns={"old_values": [np.zeros(3), np.zeros(4)]},
    )
    assert [row.tolist() for row in batch.columns["advantages"]] == [[0, 0, 0], [0, 0, 0, 1]]


# --- Filters ---------------------------------------------------------------------------------------------------------

VERDICTS = [
    ("nonzero-std", [0.0, 1.0], True, ""),
    ("nonzero-std", [100.3] * 6, False, "zero-std"),  # a standard deviation in fp32 would not be 0
    ("nonzero-std", [1.0, 1.0, None], False, "zero-std"),
    ("nonzero-std", [0.0, 1.0, None], True, ""),
    ("nonzero-std", [1.0, None], False, "too-few-verdicts"),
    ("nonzero-std", [None, None], False, "no-verdict"),
    ("all-verdicts", [0.0, 0.0], True, ""),
    ("all-verdicts", [0.0, None], False, "missing-verdict"),
]


@pytest.mark.parametrize(("name", "rewards", "keep", "reason"), VERDICTS)
def test_R2_filters_judge_valid_verdicts(name, rewards, keep, reason):
    component = FILTERS[name]
    verdict = component.build(component.config(), None).check(make_group(rewards))
    assert (verdict.keep, verdict.reason) == (keep, reason)


def test_T3_filters_count_trajectories():
    samples = [make_sample(index=0, segment=0, reward=0.0), make_sample(index=0, segment=1, reward=1.0)]
    group = group_of([*samples, make_sample(index=1, reward=1.0)])
    verdict = FILTERS["nonzero-std"].build(filters.NonzeroStdConfig(), None).check(group)
    assert verdict.reason == "zero-std"  # the votes are 1 and 1


def test_min_verdicts():
    component = FILTERS["nonzero-std"]
    check = component.build(filters.NonzeroStdConfig(min_verdicts=3), None).check
    assert check(make_group([0.0, 1.0, None])).reason == "too-few-verdicts"
    assert check(make_group([0.0, 1.0, 1.0])).keep
