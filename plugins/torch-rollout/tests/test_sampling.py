"""Sampling as mathematics: sets, frequencies, and randomness that belongs to the request alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_core.types import SamplingParams
from miles_torch_rollout.sampling import SamplingPlan, invert, limit, sample, uniforms

CPU = torch.device("cpu")


def plan(*params: SamplingParams, seeds: list[int] | None = None, vocab: int = 3) -> SamplingPlan:
    return SamplingPlan.of(params, seeds or list(range(len(params))), vocab, CPU)


def test_frequencies_follow_the_tempered_distribution():
    logits = torch.tensor([2.0, 0.0, 1.0]).repeat(20000, 1)
    tokens, logprobs = sample(logits.clone(), plan(*[SamplingParams(temperature=0.5)] * 20000), np.zeros(20000, dtype=int))
    expected = torch.softmax(logits[0] / 0.5, dim=-1)
    got = torch.bincount(tokens, minlength=3) / 20000
    assert torch.allclose(got, expected, atol=0.01)  # 3 standard deviations are 3 * sqrt(.25 / 20000) = 0.0106
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-5)


def test_F11_logprobs_are_after_temperature_and_before_top_p():
    # Temperature: logits [2, 0] at 0.5 are [4, 0]: p = 1 / (1 + e^-4) = 0.9820.
    _, logprob = sample(torch.tensor([[2.0, 0.0]]), plan(SamplingParams(temperature=0.5, top_k=1), vocab=2), np.array([0]))
    assert logprob.exp().item() == pytest.approx(0.9820, abs=1e-4)
    # Nucleus: of [.5, .3, .2] at 0.8 two remain; the log-probability of the first stays log .5 = -0.6931.
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    for position in range(50):
        token, logprob = sample(probs.log(), plan(SamplingParams(top_p=0.8)), np.array([position]))
        assert token.item() in (0, 1)
        assert logprob.item() == pytest.approx(probs[0, token].log().item(), abs=1e-5)


def test_greedy_rows_take_the_best_token_beside_sampled_rows():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits.clone(), plan(SamplingParams(temperature=0.0), SamplingParams()), np.array([0, 0]))
    assert tokens[0].item() == 1
    assert logprobs[0].item() == pytest.approx(torch.log_softmax(logits[0], -1)[1].item(), abs=1e-6)  # at temperature 1


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (5, 0.8, [0, 1, 3]),  # .4 + .3 = .7 < .8, and the .2 reaches it
        (5, 0.65, [1, 3]),
        (1, 1.0, [1]),
        (3, 1.0, [0, 1, 3]),
        (5, 1.0, [0, 1, 2, 3, 4]),
        (5, 1e-9, [1]),
    ],
)
def test_limits_keep_the_smallest_set(top_k, top_p, kept):
    probs = torch.tensor([[0.2, 0.4, 0.05, 0.3, 0.05]], dtype=torch.float64)
    out = limit(probs, torch.tensor([[top_k]]), torch.tensor([[top_p]], dtype=torch.float64))
    assert out[0].nonzero().flatten().tolist() == kept
    assert torch.equal(out[0][kept], probs[0][kept])


def test_a_nucleus_beyond_the_first_tokens_is_found_whole():
    probs = torch.full((1, 5000), 1 / 5000)
    out = limit(probs, torch.tensor([[5000]]), torch.tensor([[0.9]]))
    assert int((out > 0).sum()) == pytest.approx(4500, abs=2)


def test_inversion_never_picks_a_token_of_probability_zero():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 0.4999999, 0.5, 1 - 2**-24])
    assert invert(probs, uniform).tolist() == [1, 1, 3, 3]


def test_uniforms_depend_on_seed_and_position_alone():
    seeds = np.arange(4, dtype=np.uint64)
    whole = uniforms(seeds, np.array([0, 1, 2, 3]))
    assert np.array_equal(uniforms(seeds[2:3], np.array([2])), whole[2:3])
    many = uniforms(np.repeat(np.arange(300, dtype=np.uint64), 300), np.tile(np.arange(300), 300))
    assert len(np.unique(many)) > 0.99 * len(many)
    assert many.min() >= 0 and many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.004)  # standard deviation sqrt(1/12/90000) = 0.001
    grid = many.reshape(300, 300)
    for lagged in (
        np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel()),
        np.corrcoef(grid[:-1].ravel(), grid[1:].ravel()),
    ):
        assert abs(lagged[0, 1]) < 0.014  # neighbours in position, and in seed: 4 / sqrt(90000)


def test_seeds_of_any_size_are_accepted():
    a, b = (plan(SamplingParams(), seeds=[s]).seeds[0] for s in (2**64 + 5, -1))
    assert (a, b) == (5, 2**64 - 1)
