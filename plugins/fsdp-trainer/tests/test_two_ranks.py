"""Two ranks against one. The pair of processes is started once for all tests of this file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fsdp_support as support
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_critic import SHARED, VALUE, critic_batch

STEPS = 3


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """Results of both ranks, and what one rank made of the same batches."""
    folder, model = tmp_path_factory.mktemp("pair"), tiny["llama-tied"]
    one = support.rank_of(model, roles=("reference", "critic"), warmup_steps=2)
    single = folder / "single"
    single.mkdir()
    reports = [one.step(support.random_batch(seed=s)) for s in range(STEPS)]
    weights, hash_ = support.parameters(one), one.state_hash()
    batch = support.random_batch(seed=9)
    forward = one.forward(batch, "policy", frozenset({"logprobs", "entropy"}))
    one.save(single)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                Path(__file__).parent / "two_ranks.py",
                json.dumps({"rank": r, "folder": str(folder), "model": str(model), "single": str(single)}),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        logs = [p.communicate(timeout=240)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(log[-2500:] for log in logs)
    ranks = [torch.load(folder / f"results-{r}.pt", weights_only=False) for r in range(2)]
    return SimpleNamespace(
        one=one, reports=reports, weights=weights, hash=hash_, batch=batch, forward=forward, ranks=ranks, folder=folder,
        model=model,
    )  # fmt: skip


def test_losses_and_gradient_norms_equal_those_of_one_rank(pair):
    for step, report in enumerate(pair.reports):
        losses, norms, rates = zip(*(rank["steps"][step] for rank in pair.ranks), strict=True)
        assert sum(losses) == pytest.approx(report.loss, rel=1e-5)
        assert norms[0] == norms[1] == pytest.approx(report.grad_norm, rel=1e-5)
        assert rates == (report.lr, report.lr)


def test_weights_after_three_steps_equal_those_of_one_rank(pair):
    support.close(pair.ranks[0]["weights"], pair.weights, rtol=1e-5, atol=1e-5)
    support.close(pair.ranks[0]["weights"], pair.ranks[1]["weights"], rtol=0, atol=0)


def test_forward_gives_each_rank_its_own_samples(pair):
    for name in ("logprobs", "entropy"):
        for rank in range(2):
            want = [v for v, s in zip(pair.forward[name], pair.batch.samples, strict=True) if (s.group_id == "g1") == rank]
            for got, expected in zip(pair.ranks[rank]["forward"][name], want, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_reference_and_critic_work_when_sharded(pair):
    # The reference still has the first weights: the policy of a fresh rank. A new critic's head is zero.
    fresh = support.rank_of(pair.model)
    want = fresh.forward(pair.batch, "policy", frozenset({"logprobs"}))["logprobs"]
    got = pair.ranks[0]["reference"]["logprobs"] + pair.ranks[1]["reference"]["logprobs"]
    order = [i for r in (False, True) for i, s in enumerate(pair.batch.samples) if (s.group_id == "g1") == r]
    for values, i in zip(got, order, strict=True):
        np.testing.assert_allclose(values, want[i], atol=1e-5)
    assert all((v == 0).all() for rank in pair.ranks for v in rank["values"]["values"])


def test_one_rank_with_a_bad_loss_stops_both_with_the_same_words(pair):
    messages = {rank["failure"] for rank in pair.ranks}
    assert len(messages) == 1
    assert 'loss "pg" is nan in samples g1/0' in messages.pop()
    assert all(rank["hash_after_failure"] == rank["hash"] for rank in pair.ranks)


def test_F6_nothing_trainable_on_any_rank_moves_nothing(pair):
    for rank in pair.ranks:
        assert rank["skipped"] == "nothing trainable"
        assert rank["hash_after_skip"] == rank["hash"]


def test_F6_one_empty_rank_equals_the_single_rank_result(pair, tmp_path):
    one = support.rank_of(pair.model, roles=("reference", "critic"), warmup_steps=2)
    for seed in range(STEPS):
        one.step(support.random_batch(seed=seed))
    report = one.step(support.random_batch(seed=8))
    losses = [rank["one_empty"][0] for rank in pair.ranks]
    assert losses[0] == pytest.approx(report.loss, rel=1e-5)
    assert losses[1] == 0.0
    for rank in pair.ranks:
        assert rank["one_empty"][1] == pytest.approx(report.grad_norm, rel=1e-5)
        support.close(rank["one_empty"][2], support.parameters(one), rtol=1e-5, atol=1e-5)


def test_rank_0_publishes_and_all_ranks_iterate_as_far(pair):
    published, silent = (rank["buckets"] for rank in pair.ranks)
    assert len(published) == len(silent) > 1
    assert all(tensors == [] for tensors in silent)
    names = [name for tensors in published for name, _, _ in tensors]
    assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_a_checkpoint_of_one_rank_continues_on_two(pair):
    for rank in pair.ranks:
        assert rank["loaded"][0] == pair.hash
    again = [pair.one.step(support.random_batch(seed=s)) for s in range(STEPS)]
    for step, report in enumerate(again):
        assert sum(rank["loaded"][1][step][0] for rank in pair.ranks) == pytest.approx(report.loss, rel=1e-4, abs=1e-6)
    support.close(pair.ranks[0]["loaded"][2], support.parameters(pair.one), rtol=1e-4, atol=2e-5)


def test_a_checkpoint_of_two_ranks_continues_on_one(pair):
    loaded = support.rank_of(pair.model, roles=("reference", "critic"), warmup_steps=2)
    loaded.load(pair.folder / "saved")
    assert loaded.state_hash() == pair.ranks[0]["hash"]
    assert loaded.roles["policy"].optimizer.step_count == STEPS
    report = loaded.step(support.random_batch(seed=8))
    assert report.loss == pytest.approx(pair.ranks[0]["one_empty"][0], rel=1e-5)
    support.close(support.parameters(loaded), pair.ranks[0]["one_empty"][2], rtol=1e-5, atol=1e-5)


def test_the_saved_model_of_two_ranks_loads_in_transformers(pair):
    model = support.plain_model(pair.folder / "model")
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), pair.ranks[0]["weights"]["lm." + name], rtol=0, atol=0)


def test_a_shared_critic_on_two_ranks_equals_one_rank_and_its_head_alone_moves_no_trunk(pair):
    one = support.rank_of(pair.model, [support.PG, VALUE], roles=SHARED, critic_lr=0.05)
    reports = [one.step(critic_batch(seed=seed), "critic") for seed in range(2)]
    head, trunk = support.parameters(one), support.parameters(support.rank_of(pair.model))
    reports.append(one.step(critic_batch(seed=2)))
    for rank in pair.ranks:
        weights, policy_steps = rank["shared"]["alone"]
        assert policy_steps == 0
        support.close({n: w for n, w in weights.items() if n in trunk}, trunk, rtol=0, atol=0)
        support.close(weights, head, rtol=1e-5, atol=1e-5)
        support.close(rank["shared"]["weights"], support.parameters(one), rtol=1e-5, atol=1e-5)
    for step, report in enumerate(reports):
        assert sum(rank["shared"]["steps"][step][0] for rank in pair.ranks) == pytest.approx(report.loss, rel=1e-5)
        assert pair.ranks[0]["shared"]["steps"][step][1] == pytest.approx(report.grad_norm, rel=1e-5)


def test_C5_a_checkpoint_with_a_shared_critic_of_two_ranks_continues_on_one(pair):
    loaded = support.rank_of(pair.model, [support.PG, VALUE], roles=SHARED, critic_lr=0.05)
    loaded.load(pair.folder / "shared")
    support.close(support.parameters(loaded), pair.ranks[0]["shared"]["weights"], rtol=0, atol=0)
    assert [loaded.roles[name].optimizer.step_count for name in ("policy", "critic")] == [1, 3]


def test_P1_a_bf16_checkpoint_after_a_forward_pass_holds_the_fp32_weights(pair):
    saved, own = load_file(pair.folder / "low" / "policy.safetensors"), load_file(pair.model / "model.safetensors")
    for name, value in own.items():
        torch.testing.assert_close(saved["lm." + name], value, rtol=0, atol=0)


def test_F11_temperatures_are_not_rounded_to_bf16(pair):
    for rank in pair.ranks:
        assert rank["temperatures"] and all(seen == [pytest.approx(0.7, rel=1e-6)] for seen in rank["temperatures"])
