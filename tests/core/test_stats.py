"""Numbers about what was sampled, each derived beside it."""

import math

import numpy as np
import pytest

from miles_core.batch import logprob_gap, rollout_metrics
from miles_core.errors import ContractError
from miles_core.stats import value_metrics
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import Score


def test_T3_reward_statistics_count_trajectories():
    samples = [make_sample(index=0, segment=s, reward=1.0, scores={"m": Score(value=1.0)}) for s in range(3)]
    samples.append(make_sample(index=1, reward=0.0, scores={"m": Score(value=0.0)}))
    metrics = rollout_metrics([group_of(samples)])
    assert metrics["reward/mean"] == 0.5  # two votes, not four
    assert metrics["score/m/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5))  # ddof=1 over 1, 0


def test_groups_are_counted_by_kind():
    rewards = {"zero": [0.0, 0.0], "one": [1.0, 1.0], "half": [0.5, 0.5], "mixed": [0.0, 1.0], "none": [None, None]}
    metrics = rollout_metrics([make_group(r, name=n) for n, r in rewards.items()])
    got = {k: metrics[f"groups/{k}"] for k in ("dead", "all_zero", "all_one", "no_verdict")}
    assert got == {"dead": 3, "all_zero": 1, "all_one": 1, "no_verdict": 1}
    assert metrics["reward/no_verdict"] == 2


def test_statuses_are_counted():
    group = group_of([make_sample(index=i, status=s) for i, s in enumerate(["error", "timeout", "stop", "aborted"])])
    metrics = rollout_metrics([group])
    got = {k: metrics[f"status/{k}"] for k in ("error", "timeout", "aborted")}
    assert got == {"error": 1, "timeout": 1, "aborted": 1}


# d = trainer - rollout. k3 = e^d - 1 - d: ln 2 -> 2 - 1 - 0.6931, -ln 2 -> 0.5 - 1 + 0.6931, 100 -> clamped at 20.
@pytest.mark.parametrize(
    ("d", "k1", "k3"),
    [(0.0, 0, 0), (math.log(2), -0.6931, 0.3069), (-math.log(2), 0.6931, 0.1931), (100.0, -100, math.exp(20) - 21)],
)
def test_F7_gap_estimates(d, k1, k3):
    gap = logprob_gap([np.array([9, -1.0])], [np.array([9, d - 1.0])], [np.array([False, True])])
    assert gap["kl_k1"] == pytest.approx(k1, abs=1e-4)
    assert gap["kl_k3"] == pytest.approx(k3, rel=1e-6, abs=1e-4)
    assert gap["clamped"] == (abs(d) > 20)


def test_P1_the_gap_reports_tail_and_mean():
    # 100 tokens, one off by 0.5: mean 0.005, maximum 0.5; the 95th percentile does not see it.
    rollout, trainer = np.zeros(100, np.float32), np.zeros(100, np.float32)
    trainer[3] = -0.5
    gap = logprob_gap([rollout], [trainer], [np.ones(100, bool)])
    assert (gap["mean_abs"], gap["p95_abs"], gap["max_abs"]) == (pytest.approx(0.005), 0.0, 0.5)


def test_F7_a_nan_gap_is_an_error_and_an_empty_one_absent():
    mask = np.array([False, True])
    with pytest.raises(ContractError, match="1 of 1 log-probabilities are not finite"):
        logprob_gap([np.zeros(2)], [np.array([0, np.nan])], [mask])
    assert logprob_gap([np.zeros(2)], [np.array([np.nan, 0])], [np.zeros(2, bool)]) == {}


@pytest.mark.parametrize(
    ("values", "returns", "explained"),
    [
        ([1.0, 2.0], [1.0, 2.0], 1.0),
        ([0.5, 0.5], [1.0, 2.0], 0.0),  # a constant explains nothing
        ([1.0, 1.5], [1.0, 2.0], 0.75),  # errors 0 and 1/2: Var 1/16, and Var(returns) 1/4
        ([0.0, 1.0], [3.0, 3.0], None),  # nothing to explain
    ],
)
def test_explained_variance_of_a_critic(values, returns, explained):
    mask = [np.array([False, True, True])]
    columns = {"old_values": [np.array([np.nan, *values])], "returns": [np.array([np.inf, *returns])]}
    found = value_metrics(columns, mask)
    assert found.get("critic/explained_variance") == (None if explained is None else pytest.approx(explained))
    assert found["critic/value_mean"] == pytest.approx(np.mean(values))


def test_value_metrics_are_absent_without_a_critic_or_anything_trainable():
    rows = [np.zeros(2)]
    assert value_metrics({"old_values": rows}, [np.array([False, True])]) == {}
    assert value_metrics({"old_values": rows, "returns": rows}, [np.zeros(2, bool)]) == {}
