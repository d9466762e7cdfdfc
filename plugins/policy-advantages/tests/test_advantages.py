"""Numbers of every advantage, derived by hand beside them. Standard deviations have ddof=1; eps is 1e-6 and shows in the
seventh digit."""

from __future__ import annotations

import numpy as np
import pytest
from advantage_support import answers, build, differences, last, metric, response, run

from miles_core.batch import prepare
from miles_core.errors import ContractError
from miles_core.testing.samples import group_of, make_sample
from miles_core.types import AdvantageInputs, Score

TEACHER = {"second": "teacher_logprobs"}


def close(*numbers: float):
    return pytest.approx(list(numbers), abs=1e-5)


# --- One number per trajectory ---------------------------------------------------------------------------------------


def test_dr_grpo_only_centres():
    assert last(run("dr-grpo", [answers(3.0, 1.0)])) == [1.0, -1.0]  # a standard deviation would make it 0.7071


def test_reinforce_pp_baseline_has_one_scale_for_the_batch():
    # Differences 0.5, -0.5 and 2, -2: std sqrt(8.5 / 3) = 1.683251. A standard deviation per group would make all 0.7071.
    batch = run("reinforce-pp-baseline", [answers(1.0, 0.0, name="a"), answers(4.0, 0.0, name="b")])
    assert last(batch) == close(0.297044, -0.297044, 1.188177, -1.188177)
    assert metric(batch, "reinforce-pp-baseline/std") == pytest.approx(1.683251)


def test_F1_a_group_with_equal_rewards_stays_zero_beside_others():
    # 0.5, -0.5, 2, -2, 0, 0: std sqrt(8.5 / 5) = 1.303840.
    groups = [answers(1.0, 0.0, name="a"), answers(4.0, 0.0, name="b"), answers(0.1, 0.1, 0.1, name="c")]
    batch = run("reinforce-pp-baseline", [*groups[:2], answers(0.1, 0.1, name="c")])
    assert last(batch) == close(0.383482, -0.383482, 1.533930, -1.533930, 0, 0)
    assert last(run("reinforce-pp-baseline", groups))[4:] == [0.0, 0.0, 0.0]
    assert metric(batch, "reinforce-pp-baseline/zero") == pytest.approx(2 / 6)


def test_remax_subtracts_the_greedy_answers_reward():
    batch = run("remax", [answers(1.0, 0.25, 0.0, baseline=0.25)])
    assert last(batch) == [0.75, 0.0, -0.25]
    assert metric(batch, "remax/baseline") == 0.25


def test_remax_leaves_out_a_group_whose_greedy_answer_failed():
    batch = run("remax", [answers(1.0, 0.0, baseline=0.5, name="a"), answers(1.0, 0.0, name="b")])
    assert last(batch) == [0.5, -0.5, 0.0, 0.0]
    assert metric(batch, "remax/no_baseline") == 1.0
    assert metric(batch, "remax/baseline") == 0.5


def test_remax_without_any_greedy_answer_is_an_error():
    with pytest.raises(ContractError, match='advantage "remax" compares with a greedy answer, and no group of 1 has one'):
        run("remax", [answers(1.0, 0.0)])


def test_opo_weighs_the_baseline_by_length():
    # b = (1 * 1 + 3 * 0) / 4 = 0.25; the plain mean would give 0.5 and -0.5.
    batch = run("opo", [answers(1.0, 0.0, lengths=[1, 3])])
    assert last(batch) == [0.75, -0.25]
    assert metric(batch, "opo/baseline") == 0.25


def test_F5_opo_counts_the_tokens_of_an_answer_that_is_not_trained():
    # As above: the second is cut and masked, and keeps its 3 tokens in the baseline.
    cut = make_sample(3, prompt_len=1, index=1, status="length")
    batch = run("opo", [group_of([make_sample(1, prompt_len=1, reward=1.0), cut])], train_truncated=False)
    assert last(batch) == [0.75, 0.0]


def test_T3_opo_adds_the_lengths_of_segments():
    parts = [make_sample(n, prompt_len=1, index=1, segment=i) for i, n in enumerate([1, 2])]
    batch = run("opo", [group_of([make_sample(1, prompt_len=1, reward=1.0), *parts])])
    assert last(batch) == [0.75, -0.25, -0.25]


# --- Several rewards -------------------------------------------------------------------------------------------------


def scored(*rows: dict[str, float | None], name: str = "p"):
    """A group whose samples have these scores, and their sum as reward."""
    group = answers(*(sum(v for v in row.values() if v is not None) for row in rows), name=name)
    for sample, row in zip(group.samples, rows, strict=True):
        sample.scores = {key: Score(value=value) for key, value in row.items()}
    return group


THREE = ({"right": 1.0, "short": 10.0}, {"right": 0.0, "short": 10.0}, {"right": 0.0, "short": 40.0})


def test_gdpo_normalises_each_reward_by_itself():
    # right: mean 1/3, std 0.57735 -> 1.15470, -0.57735, -0.57735. short: mean 20, std 17.32051 -> -0.57735 twice, 1.15470.
    # 1 and 0.5 of them: 0.866025, -0.866025, 0; their std is sqrt(1.5 / 2) = 0.866025.
    batch = run("gdpo", [scored(*THREE)], weights={"right": 1.0, "short": 0.5})
    assert last(batch) == close(1, -1, 0)
    assert metric(batch, "gdpo/std") == pytest.approx(0.866025, abs=1e-5)


def test_gdpo_does_not_see_the_scale_of_a_reward():
    louder = [{"right": row["right"], "short": 1000 * row["short"]} for row in THREE]
    weights = {"right": 1.0, "short": 0.5}
    want = last(run("gdpo", [scored(*THREE)], weights=weights))
    assert last(run("gdpo", [scored(*louder)], weights=weights)) == pytest.approx(want, abs=1e-5)


def test_R2_gdpo_leaves_a_missing_verdict_out_of_its_own_reward():
    # short over 10 and 40: mean 25, std 21.21320 -> -0.707107, none, 0.707107; right as above. Sums 0.447594, -0.577350,
    # 0.129757; std sqrt(0.550508 / 2) = 0.524646.
    rows = (THREE[0], {"right": 0.0, "short": None}, THREE[2])
    batch = run("gdpo", [scored(*rows)], weights={"right": 1.0, "short": 1.0})
    assert last(batch) == close(0.853134, -1.100456, 0.247322)


def test_gdpo_counts_groups_in_which_a_reward_says_nothing():
    same = scored({"right": 1.0, "short": 3.0}, {"right": 1.0, "short": 5.0}, name="q")
    batch = run("gdpo", [scored(*THREE), same], weights={"right": 1.0, "short": 0.5})
    assert metric(batch, "gdpo/equal/right") == 0.5
    assert metric(batch, "gdpo/equal/short") == 0.0


def test_gdpo_names_a_reward_that_a_sample_does_not_have():
    with pytest.raises(ContractError, match='advantage "gdpo" weighs a reward "brief", and sample p@0/0 was not judged'):
        run("gdpo", [scored(*THREE)], weights={"brief": 1.0})


# --- One number per token --------------------------------------------------------------------------------------------

REINFORCE_PP = [
    # Tokens 1, 1, 1, 0: mean 0.75, std sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5.
    ("tokens", [0.5, -1.5]),
    # Votes 1 and 0: mean 0.5, std 0.707107.
    ("trajectories", [0.707106, -0.707106]),
]


@pytest.mark.parametrize(("over", "want"), REINFORCE_PP)
def test_reinforce_pp_normalises_over_the_batch(over, want):
    groups = [answers(1.0, lengths=[3], name="a"), answers(0.0, lengths=[1], name="b")]
    batch = run("reinforce-pp", groups, over=over)
    assert last(batch) == close(*want)
    assert set(response(batch)) == {batch.columns["advantages"][0][-1]}


REINFORCE_PP_KL = [
    # Returns 1 - 0.2 * (0.5 - 0.25) = 0.95 and 1 + 0.2 * 0.25 = 1.05; and 0, 0. Mean 0.5; squares of 0.45, 0.55, 0.5, 0.5
    # sum to 1.005; std sqrt(1.005 / 3) = 0.578792.
    ("tokens", [0.777481, 0.950255], -0.863868),
    # Each token weighs 1/2: mean 0.5, std sqrt(0.5025 / 1) = 0.708872.
    ("trajectories", [0.634811, 0.775880], -0.705345),
]


@pytest.mark.parametrize(("over", "first", "second"), REINFORCE_PP_KL)
def test_reinforce_pp_takes_the_penalty_of_this_and_all_later_tokens(over, first, second):
    columns = differences([0.5, -0.25], [0.0, 0.0])
    batch = run("reinforce-pp", [answers(1.0, 0.0)], columns=columns, kl_coef=0.2, over=over)
    assert response(batch, 0) == close(*first)
    assert response(batch, 1) == close(second, second)
    assert metric(batch, "reinforce-pp/kl") == pytest.approx(0.25 / 4)


def test_F5_an_answer_that_is_not_trained_votes_over_trajectories():
    # Votes 1 and 0 although only the first has tokens to train; over tokens there is nothing but equal ones.
    group = group_of([make_sample(2, reward=1.0), make_sample(2, index=1, status="length")])
    assert last(run("reinforce-pp", [group], train_truncated=False, over="trajectories")) == close(0.707106, 0)
    assert last(run("reinforce-pp", [group], train_truncated=False)) == [0.0, 0.0]


def test_distillation_is_minus_the_difference_of_each_token():
    columns = differences([0.5, -0.25], **TEACHER)
    assert response(run("on-policy-distillation", [answers(0.0)], columns=columns, coef=2.0)) == close(-1, 0.5)


def test_distillation_may_look_ahead():
    # -0.25 at the last token, and 0.5 - 0.5 * 0.25 = 0.375 before it.
    columns = differences([0.5, -0.25], **TEACHER)
    assert response(run("on-policy-distillation", [answers(0.0)], columns=columns, gamma=0.5)) == close(-0.375, 0.25)


def test_distillation_clips_differences_and_counts_them():
    batch = run("on-policy-distillation", [answers(0.0)], columns=differences([0.5, -0.25], **TEACHER), clip=0.3)
    assert response(batch) == close(-0.3, 0.25)
    assert metric(batch, "on-policy-distillation/clipped") == 1.0
    assert metric(batch, "on-policy-distillation/reverse_kl") == pytest.approx(0.125)  # of what was not clipped


def test_distillation_estimates_the_reverse_kl():
    # Policy (1/2, 1/4, 1/4), teacher (1/4, 1/4, 1/2): KL = (1/2) ln 2 + 0 - (1/4) ln 2. Tokens drawn 2, 1, 1 times.
    tokens = [0, 0, 1, 2]
    policy, teacher = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.25, 0.5])
    columns = {
        "old_logprobs": [np.array([0.0, policy[t]]) for t in tokens],
        "teacher_logprobs": [np.array([0.0, teacher[t]]) for t in tokens],
    }
    batch = run("on-policy-distillation", [answers(0.0, 0.0, 0.0, 0.0, lengths=[1] * 4)], columns=columns)
    assert metric(batch, "on-policy-distillation/reverse_kl") == pytest.approx(0.25 * np.log(2), rel=1e-5)


def test_distillation_adds_to_what_stands_before_it():
    # rloo gives 1 and -1 on both tokens.
    columns = differences([0.5, -0.25], [0.0, 1.0], **TEACHER)
    batch = run([("rloo", {}), ("on-policy-distillation", {"coef": 0.5})], [answers(1.0, 0.0)], columns=columns)
    assert response(batch, 0) == close(0.75, 1.125)
    assert response(batch, 1) == close(-1, -1.5)


WHITEN = [
    # rloo gives 2 on three tokens and -2 on one: mean 1, std sqrt((3 * 1 + 9) / 3) = 2.
    (True, [0.5, -1.5]),
    (False, [1.0, -1.0]),
]


@pytest.mark.parametrize(("shift", "want"), WHITEN)
def test_whiten_normalises_over_tokens(shift, want):
    batch = run([("rloo", {}), ("whiten", {"shift": shift})], [answers(2.0, 0.0, lengths=[3, 1])])
    assert last(batch) == close(*want)
    assert (metric(batch, "whiten/mean"), metric(batch, "whiten/std")) == (1.0, 2.0)


def test_whiten_of_equal_advantages():
    equal = [("remax", {}), ("whiten", {"shift": True})]
    assert last(run(equal, [answers(0.7, 0.7, baseline=0.4)])) == [0.0, 0.0]
    kept = last(run([("remax", {}), ("whiten", {"shift": False})], [answers(0.75, 0.75, baseline=0.5)]))
    assert kept == [0.25, 0.25]  # no spread to divide by


def test_whiten_leaves_the_returns_of_gae_alone():
    # V = 0, lambda 1: advantages and returns 1, 1 and 0, 0; whitened 0.866, -0.866 (std 0.57735).
    columns = {"old_values": [np.zeros(3)] * 2}
    batch = run([("gae", {"lam": 1.0}), ("whiten", {})], [answers(1.0, 0.0)], columns=columns)
    assert response(batch) == close(0.866024, 0.866024)
    assert batch.columns["returns"][0].tolist() == [0, 1, 1]


ORDERS = [
    # rloo 1, 1, -1, -1; whitened (std 1.154701) 0.866025; then minus the differences.
    (("rloo", "whiten", "on-policy-distillation"), [0.366025, 0.866025, -0.866025, -0.866025]),
    # 0.5, 1, -1, -1: mean -0.125, squares sum to 0.390625 + 1.265625 + 2 * 0.765625 = 3.1875; std sqrt(1.0625) = 1.030776.
    (("rloo", "on-policy-distillation", "whiten"), [0.606339, 1.091410, -0.848875, -0.848875]),
]


@pytest.mark.parametrize(("names", "want"), ORDERS)
def test_the_order_of_a_chain_is_that_of_the_config(names, want):
    columns = differences([0.5, 0.0], [0.0, 0.0], **TEACHER)
    batch = run([(name, {}) for name in names], [answers(1.0, 0.0)], columns=columns)
    assert response(batch, 0) + response(batch, 1) == close(*want)


# --- No signal, no verdict, nothing to train -------------------------------------------------------------------------

STARTING = ["dr-grpo", "gdpo", "opo", "reinforce-pp", "reinforce-pp-baseline", "remax"]
OPTIONS = {"gdpo": {"weights": {"right": 1.0}}}


def group_for(*rewards: float | None, name: str = "p", baseline: float | None = None):
    """A group that any advantage can start from: the reward is also the score "right"."""
    group = answers(*rewards, lengths=[1 + i % 3 for i in range(len(rewards))], name=name, baseline=baseline)
    for sample in group.samples:
        sample.scores = {"right": Score(value=sample.reward)}
    return group


@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, 10.1, 100.3, float(np.float32(0.1))])
@pytest.mark.parametrize("name", STARTING)
def test_F1_equal_rewards_give_exactly_zero(name, value):
    for size in (3, 6, 7, 12, 64):
        batch = run(name, [group_for(*[value] * size, baseline=value)], **OPTIONS.get(name, {}))
        assert set(last(batch)) == {0.0}


@pytest.mark.parametrize("name", STARTING)
def test_R2_no_verdict_gets_nothing_and_changes_nothing(name):
    options = OPTIONS.get(name, {})
    with_none = run(name, [group_for(1.0, 0.0, 0.5, None, baseline=0.25)], **options)
    without = run(name, [group_for(1.0, 0.0, 0.5, baseline=0.25)], **options)
    assert last(with_none) == [*last(without), 0.0]


@pytest.mark.parametrize("name", [*STARTING, "on-policy-distillation", "whiten"])
def test_F6_nothing_trainable_gives_zeros(name):
    group = group_for(1.0, 0.0, baseline=0.5)
    batch = prepare([group])
    rows = [np.zeros(s.num_tokens, dtype=np.float32) for s in batch.samples]
    inputs = AdvantageInputs(
        samples=batch.samples,
        groups=batch.groups,
        rewards=batch.rewards,
        mask=[np.zeros(s.num_tokens, dtype=bool) for s in batch.samples],
        columns=dict.fromkeys(("old_logprobs", "reference_logprobs", "teacher_logprobs"), rows),
        baselines=batch.baselines,
        advantages=rows if name in ("on-policy-distillation", "whiten") else None,
    )
    output = build(name, **OPTIONS.get(name, {}))(inputs)
    assert not any(row.any() for row in output.advantages)
    assert all(np.isfinite(total) for total, _, _ in output.metrics.values())


@pytest.mark.parametrize(("name", "column"), [("on-policy-distillation", "old_logprobs"), ("reinforce-pp", "old_logprobs")])
def test_a_missing_column_names_who_reads_it(name, column):
    options = {"kl_coef": 0.1} if name == "reinforce-pp" else {}
    with pytest.raises(ContractError, match=f'advantage "{name}" reads the column "{column}"'):
        run(name, [answers(1.0, 0.0)], **options)
