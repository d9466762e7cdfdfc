"""Equality with TRL 1.16 on the same numbers: its trainers compute advantages in one method, which runs here on a stand-in
that hands it tokens, log-probabilities and rewards. Everything is float64, so that the comparison is to 1e-6 and better."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from advantage_support import last, run

from miles_core.testing.samples import group_of, make_sample
from miles_core.types import Score

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e plugins/policy-advantages[trl]")
torch = pytest.importorskip("torch")

EPS = 1e-4  # TRL's, fixed in its code
LENGTHS = [3, 1, 2, 4, 2, 3, 1, 2, 3]
REWARDS = [0.3, 1.0, -0.5, 2.0, 2.5, 0.25, 7.0, 0.0, 1.0]
SECOND = [10.0, 30.0, 20.0, -5.0, 0.0, 1.0, 3.0, 2.0, 2.5]
GROUP = 3


class Model(torch.nn.Module):
    is_gradient_checkpointing = False


class Numbers:
    """What TRL's method asks of its trainer: one process, answers of LENGTHS, the given rewards and log-probabilities."""

    def __init__(self, rewards: torch.Tensor, weights: list[float], beta: float = 0.0, **fields: Any) -> None:
        one = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, process_index=0, num_processes=1)
        one.reduce = lambda x, reduction: x
        self.accelerator, self.model, self.ref_model = one, Model(), Model()
        self.rewards, self.reward_weights = rewards, torch.tensor(weights, dtype=torch.float64)
        self.reward_funcs = self.reward_func_names = [f"r{i}" for i in range(len(weights))]
        self.beta, self.num_generations, self.num_generations_eval = beta, GROUP, GROUP
        self.args = SimpleNamespace(
            per_device_train_batch_size=len(rewards),
            per_device_eval_batch_size=len(rewards),
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            gradient_checkpointing_kwargs=None,
        )
        self.num_iterations = 1
        self._tokenizer = SimpleNamespace(pad_token_id=0)
        self.pad_to_multiple_of = None
        self.environment_factories = self.environments = self.tools = None
        self.mask_truncated_completions = self.use_vllm = self.log_multimodal = False
        self.reward_clip_range = None
        self._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        self._logs = {name: [] for name in ("prompt", "completion", "advantages", "images")}
        self._logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        for name, value in fields.items():
            setattr(self, name, value)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids = [[5] * n for n in LENGTHS[: len(prompts)]]
        first = ([[1]] * len(prompts), ids)
        return (*first, ids) if self.rloo else (*first, None, ids, None, {}, None, None)

    def _calculate_rewards(self, *ignored: Any) -> torch.Tensor:
        return self.rewards

    def _get_per_token_logps_and_entropies(self, model: Any, *ignored: Any, **more: Any) -> tuple[Any, None, None]:
        return (self.old if model is self.model else self.reference), None, None


def theirs(trainer: type, numbers: Numbers) -> list[float]:
    numbers.rloo = trainer is trl.RLOOTrainer
    inputs = [{"prompt": "?"} for _ in range(len(numbers.rewards))]
    return trainer._generate_and_score_completions(numbers, inputs)["advantages"].tolist()


def table(*columns: list[float | None]) -> torch.Tensor:
    """[N, number of rewards], NaN for no verdict, as TRL's reward functions give it."""
    rows = [[np.nan if v is None else v for v in row] for row in zip(*columns, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


def ours_on(rewards: list[float | None], scores: list[dict[str, float]] | None = None) -> list[Any]:
    groups = []
    for start in range(0, len(rewards), GROUP):
        samples = [
            make_sample(LENGTHS[i], prompt_len=1, reward=rewards[i], group=f"g{start}@0", index=i)
            for i in range(start, start + GROUP)
        ]
        for sample in samples if scores else []:
            sample.scores = {name: Score(value=value) for name, value in scores[sample.index].items()}
        groups.append(group_of(samples, name=f"g{start}"))
    return groups


CASES = {
    "plain": REWARDS,
    "no verdict": [None, *REWARDS[1:4], None, *REWARDS[5:]],
    "binary": [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("rewards", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("std", "scale"), [(True, "group"), (False, "none")])
def test_grpo_equals_trl(std, scale, rewards):
    numbers = Numbers(table(rewards), [1.0], scale_rewards=scale, multi_objective_aggregation="sum_then_normalize")
    mine = last(run("grpo", ours_on(rewards), std=std, eps=EPS))
    assert mine == pytest.approx(theirs(trl.GRPOTrainer, numbers), abs=1e-6)
    if not std:
        assert last(run("dr-grpo", ours_on(rewards))) == pytest.approx(mine)


@pytest.mark.parametrize("rewards", CASES.values(), ids=CASES)
def test_rloo_equals_trl(rewards):
    numbers = Numbers(table(rewards), [1.0], normalize_advantages=False)
    width = max(LENGTHS)
    numbers.old = numbers.reference = torch.zeros(len(rewards), width, dtype=torch.float64)
    assert last(run("rloo", ours_on(rewards))) == pytest.approx(theirs(trl.RLOOTrainer, numbers), abs=1e-6)


def test_rloo_with_a_kl_penalty_equals_trl():
    rng = np.random.default_rng(0)
    old, reference = (-rng.random((len(LENGTHS), max(LENGTHS))) for _ in range(2))
    numbers = Numbers(table(REWARDS), [1.0], beta=0.3, normalize_advantages=False)
    numbers.old, numbers.reference = torch.from_numpy(old), torch.from_numpy(reference)
    rows = {"old_logprobs": old, "reference_logprobs": reference}
    columns = {k: [np.array([0.0, *row[:n]]) for row, n in zip(v, LENGTHS, strict=True)] for k, v in rows.items()}
    mine = last(run("rloo", ours_on(REWARDS), columns=columns, kl_coef=0.3))
    assert mine == pytest.approx(theirs(trl.RLOOTrainer, numbers), abs=1e-6)


def test_gdpo_equals_trl():
    numbers = Numbers(table(REWARDS, SECOND), [1.0, 0.5], multi_objective_aggregation="normalize_then_sum")
    scores = [{"a": a, "b": b} for a, b in zip(REWARDS, SECOND, strict=True)]
    mine = last(run("gdpo", ours_on(REWARDS, scores), weights={"a": 1.0, "b": 0.5}, eps=EPS))
    assert mine == pytest.approx(theirs(trl.GRPOTrainer, numbers), abs=1e-6)
