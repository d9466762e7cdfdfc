"""Every layout of ranks against the trainer `fsdp` on one rank: same model, same batches, three AdamW steps in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import layouts
import megatron_support as support
import numpy as np
import pytest
import torch
from layouts import CASES as ALL_CASES
from layouts import LAYOUTS, LOSSES, STEPS

ELSEWHERE = [("pp2", "tp2"), ("dp2-distributed", "tp2"), ("tp2", "dp2-distributed"), ("tp2-pp2", "tp2"), ("tp2", "cp2")]
"""(layout, whose checkpoint it loads)"""
FULL = [name for name in LAYOUTS if not name.endswith("bf16")]
CASES = [case for case in ALL_CASES if case[0] in FULL]
NEAR = {"rel": 2e-5, "abs": 1e-6}


def spawn(world, folder, models):
    """Starts the ranks, and waits."""
    given = {
        "world": world,
        "folder": str(folder),
        "models": {k: str(v) for k, v in models.items()},
        "elsewhere": ELSEWHERE,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, Path(__file__).parent / "layouts.py", json.dumps({**given, "rank": r})],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        logs = [p.communicate(timeout=200)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * world, "\n".join(log[-2500:] for log in logs)
    ranks = [torch.load(folder / f"results-{world}-{r}.pt", weights_only=False) for r in range(world)]
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """{layout: [what each rank found]}"""
    folder = tmp_path_factory.mktemp("layouts")
    one = {"one": [layouts.run_layout("one", 0, tiny, folder)]}
    return SimpleNamespace(folder=folder, of={**one, **spawn(2, folder, tiny), **spawn(4, folder, tiny)})


@pytest.fixture(scope="module")
def plain(tiny):
    """{model: what fsdp on one rank makes of the same batches}"""
    found = {}
    for model in ("qwen3", "qwen2", "llama"):
        rank = support.fsdp_rank(tiny[model], roles=("reference",))
        reports = [rank.step(support.random_batch(seed=seed)) for seed in range(STEPS)]
        weights = support.exported(rank)
        batch = support.random_batch(seed=9, temperature=0.7)
        forward = rank.forward(batch, "policy", frozenset({"logprobs", "entropy", "logsumexp"}))
        reference = rank.forward(batch, "reference", frozenset({"logprobs"}))
        fourth = rank.step(support.random_batch(seed=8))
        found[model] = SimpleNamespace(
            reports=reports, weights=weights, forward=forward, reference=reference, batch=batch, fourth=fourth,
            fourth_weights=support.exported(rank),
        )  # fmt: skip
    return found


def outputs(ranks):
    """What the output rank of each data-parallel rank found."""
    chosen = {}
    for found in ranks:
        info = found["qwen3"]["info"]
        if info.output:
            chosen[info.dp_rank] = found
    return [chosen[r] for r in sorted(chosen)]


def same(got, want):
    """Weights: a hundredth of one step of Adam, whose learning rate is 1e-2."""
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_losses_and_gradient_norms_equal_those_of_fsdp(results, plain, layout, model):
    parts = [found[model]["steps"] for found in outputs(results.of[layout])]
    for step, report in enumerate(plain[model].reports):
        assert sum(part[step][0] for part in parts) == pytest.approx(report.loss, **NEAR)
        assert {round(part[step][2], 12) for part in parts} == {report.lr}
        for found in results.of[layout]:
            assert found[model]["steps"][step][1] == pytest.approx(report.grad_norm, rel=1e-4)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_W3_C6_weights_after_three_steps_equal_those_of_fsdp(results, plain, layout, model):
    published = [found[model]["weights"] for found in results.of[layout]]
    same(published[0], plain[model].weights)
    assert not any(published[1:])  # rank 0 publishes; the others took part
    assert len({found[model]["hash"] for found in results.of[layout]}) == 1


@pytest.mark.parametrize("role", ["forward", "reference"])
@pytest.mark.parametrize("layout", FULL)
def test_forward_passes_equal_those_of_fsdp(results, plain, layout, role):
    want = plain["qwen3"]
    dp = outputs(results.of[layout])
    shards = layouts.shard_indices(want.batch, len(dp))
    for shard, found in zip(shards, dp, strict=True):
        assert found["qwen3"][role].keys() == getattr(want, role).keys()
        for name, rows in found["qwen3"][role].items():
            for got, i in zip(rows, shard, strict=True):
                np.testing.assert_allclose(got, getattr(want, role)[name][i], atol=2e-3 if role == "forward" else 2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_that_is_not_finite_stops_all_ranks_with_the_same_words(results, layout):
    messages = {found["failure"] for found in results.of[layout]}
    assert len(messages) == 1
    assert 'loss "pg" is nan in samples g2/3' in messages.pop()
    assert all(found["unmoved"] and found["skipped"] == "nothing trainable" for found in results.of[layout])


@pytest.mark.parametrize("layout", FULL)
def test_F6_one_empty_shard_equals_the_single_rank(results, plain, layout):
    for found in results.of[layout]:
        assert found["fourth"][1] == pytest.approx(plain["qwen3"].fourth.grad_norm, rel=1e-3)
    same(results.of[layout][0]["fourth_weights"], plain["qwen3"].fourth_weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_C5_a_checkpoint_continues_bit_for_bit(results, layout):
    assert all(found["resumed"] for found in results.of[layout])


@pytest.mark.parametrize(("layout", "source"), ELSEWHERE)
def test_a_checkpoint_continues_in_another_layout(results, plain, layout, source):
    ranks = results.of[layout, source]
    for _, norm, lr, _ in ranks:
        assert norm == pytest.approx(plain["qwen3"].fourth.grad_norm, rel=1e-3)
        assert lr == pytest.approx(1e-2)
    same(ranks[0][3], plain["qwen3"].fourth_weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_saved_model_is_what_was_published(results, layout):
    from safetensors.torch import load_file

    written = load_file(results.folder / f"model-{layout}" / "model.safetensors")
    published = results.of[layout][0]["qwen3"]["weights"]
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], published[name]) for name in written)


@pytest.mark.parametrize("loss", [c.name for c in filter(layouts.supported, LOSSES)])
def test_every_policy_loss_equals_that_of_fsdp(results, tiny, loss):
    (component,) = [c for c in LOSSES if c.name == loss]
    config = component.config()
    rank = support.fsdp_rank(tiny["qwen3"], [(loss, component.build(config, None))], needs=component.needed(config))
    want = rank.step(layouts.loss_batch(component, config))
    for layout in ("tp2", "pp2", "cp2"):
        for found in results.of[layout]:
            assert found["losses"][loss][1] == pytest.approx(want.grad_norm, rel=1e-4)
        assert outputs(results.of[layout])[0]["losses"][loss][0] == pytest.approx(want.loss, **NEAR)


@pytest.mark.parametrize("layout", ["dp2-bf16", "tp2-bf16"])
def test_bf16_is_near_fp32_and_publishes_bf16(results, plain, layout):
    """A bf16 number is off by up to 2**-9 of itself; the loss is a mean of some fifty log-probabilities of about 4."""
    parts = [found["qwen3"]["steps"] for found in outputs(results.of[layout])]
    report = plain["qwen3"].reports[0]
    assert sum(part[0][0] for part in parts) == pytest.approx(report.loss, abs=0.02)
    assert parts[0][0][1] == pytest.approx(report.grad_norm, rel=0.05)
    published = results.of[layout][0]["qwen3"]["weights"]
    assert {t.dtype for t in published.values()} == {torch.bfloat16}
    from safetensors.torch import load_file

    master = load_file(results.folder / f"saved-{layout}" / "policy-00001.safetensors")
    assert {t.dtype for t in master.values()} == {torch.float32}
    assert any((t.bfloat16().float() != t).any() for t in master.values())  # not bf16 numbers in fp32's clothes
    assert all(torch.equal(t.bfloat16(), published[name]) for name, t in master.items())
