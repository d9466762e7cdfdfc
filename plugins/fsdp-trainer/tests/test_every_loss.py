"""Every registered loss: no split into microbatches, no packing and no number of ranks changes its value or its gradient,
in fp32 and in bf16. New losses are covered as soon as they are registered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from every_loss import SHARED, VARIANTS, loss_and_gradient, make_models, rank_with_roles, roles_with

SPLITS = [{"max_tokens": 1}, {"max_tokens": 24}, {"packing": False, "max_tokens": 30}]
NEAR = {"float32": 2e-5, "bfloat16": 0.05}
"""Largest relative difference of loss and gradient (2-norm over all parameters). bf16 keeps 8 bits: each product is off by
up to 2**-9, and the parts of a split add up in another order."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def ranks(request, models):
    torch.set_num_threads(1)
    policy, teacher = models
    return request.param, *(rank_with_roles(policy, r, dtype=request.param) for r in (roles_with(teacher), SHARED))


@pytest.fixture(scope="module")
def whole(ranks):
    """One pass, one rank: computed once per loss and number format."""
    found = {}

    def get(key, rank, name):
        if name not in found:
            found[name] = loss_and_gradient(rank, key)
        return found[name]

    return get


def apart(a, b):
    """2-norm of the difference of two gradients, over that of the second."""
    assert a.keys() == b.keys() and b
    return (sum((a[n] - b[n]).square().sum() for n in b) / sum(g.square().sum() for g in b.values())).sqrt().item()


CASES = [(key, False) for key in VARIANTS] + [(k, True) for k, (c, _) in VARIANTS.items() if c.traits["scope"] == "value"]
IDS = [key + ", shared" * shared for key, shared in CASES]


@pytest.mark.parametrize(("key", "shared"), CASES, ids=IDS)
def test_no_split_changes_loss_or_gradient(ranks, whole, key, shared):
    dtype, rank = ranks[0], ranks[1 + shared]
    loss, gradient = whole(key, rank, key + ", shared" * shared)
    assert loss != 0 and any(g.any() for g in gradient.values())
    for options in SPLITS:
        other, others = loss_and_gradient(rank, key, **options)
        assert other == pytest.approx(loss, rel=NEAR[dtype]), options
        assert apart(others, gradient) < NEAR[dtype], options


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    """What two ranks made of the same batches, by (number format, loss)."""
    folder = tmp_path_factory.mktemp("pair")
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                Path(__file__).parent / "every_loss.py",
                json.dumps({"rank": r, "folder": str(folder), "model": str(models[0]), "teacher": str(models[1])}),
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
    return [torch.load(folder / f"results-{r}.pt", weights_only=False) for r in range(2)]


@pytest.mark.parametrize(("key", "shared"), CASES, ids=IDS)
def test_two_ranks_equal_one(pair, ranks, whole, key, shared):
    dtype, rank = ranks[0], ranks[1 + shared]
    name = key + ", shared" * shared
    loss, gradient = whole(key, rank, name)
    (first, ours), (second, theirs) = (results[dtype, name] for results in pair)
    assert first + second == pytest.approx(loss, rel=NEAR[dtype])
    assert apart(ours, theirs) == 0
    assert apart(ours, gradient) < NEAR[dtype]
