"""Token weights under torch autograd: no split may change the loss or a gradient. Shape letters: T tokens, V vocabulary."""

import numpy as np
import pytest

from miles_core.builtin.losses import policy_gradient
from miles_core.settings import TrainTable
from miles_core.testing import toy_model
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.testing.toy_kit import batch_of, trainer
from miles_core.types import LossInputs

torch = pytest.importorskip("torch")
V = 32


def torch_loss(batch, parameter, loss=None, per_token=None):
    """The weighted loss of `batch` for a bigram model [V, V], all its samples packed in one microbatch, with
    gradients added to `parameter`. `per_token` gives L per sample instead of a loss function."""
    tokens = [torch.tensor(s.tokens, dtype=torch.long) for s in batch.samples]
    logprobs = torch.cat(
        [torch.cat([torch.zeros(1), parameter.log_softmax(-1)[t[:-1]].gather(1, t[1:, None])[:, 0]]) for t in tokens]
    )

    def packed(rows):
        return torch.tensor(np.concatenate(rows))

    mask, weights = packed(batch.mask), packed(batch.token_weights["policy"])
    columns = {name: packed(rows) for name, rows in batch.columns.items()}
    if per_token is not None:
        values = packed([per_token[s.trajectory_id] * np.ones(len(s.tokens), np.float32) for s in batch.samples])
        out = torch.where(mask, values * (1 + logprobs - logprobs.detach()), 0.0)
    else:
        columns["logprobs"] = logprobs
        ones = torch.ones(len(mask))
        out = loss(LossInputs(tokens=torch.cat(tokens), mask=mask, seq_ids=None, advantages=columns["advantages"],
                              multiplier=ones, seq=None, get=columns.__getitem__)).per_token  # fmt: skip
    total = (weights * out).sum()
    total.backward()
    return float(total.detach())


def gradient_over(parts, **options):
    torch.manual_seed(0)
    parameter = torch.randn(V, V, requires_grad=True)
    loss = sum(torch_loss(part, parameter, **options) for part in parts)
    return loss, parameter.grad


F4_TABLE = [
    ("token-mean", 1.5),  # (3 + 1 + 1 + 1) / 4
    ("sequence-mean-token-mean", 2.0),  # (3 + 3/3) / 2
    ("sequence-mean-token-sum", 3.0),  # (3 + 3) / 2
    ("constant-length", 0.75),  # (3 + 3) / (2 * 4)
]
# C has nothing trainable. Two data-parallel ranks are two parts whose gradients are summed, like two microbatches.
F4_SPLITS = [[[0], [1], [2]], [[1], [2, 0]], [[2], [0, 1]]]


@pytest.mark.parametrize(("aggregation", "value"), F4_TABLE)
def test_F4_every_split_gives_the_same_loss_and_gradient(aggregation, value):
    a, b, c = make_sample(1, index=0), make_sample(3, index=1), make_sample(2, index=2, status="error")
    batch = batch_of([group_of([a, b, c])], train=TrainTable(aggregation=aggregation, constant_length=4))
    values = {a.trajectory_id: 3.0, b.trajectory_id: 1.0, c.trajectory_id: 100.0}  # L
    loss, gradient = gradient_over([batch], per_token=values)
    assert loss == pytest.approx(value, rel=1e-6)
    assert gradient.abs().max() > 0
    for split in F4_SPLITS:
        other, other_gradient = gradient_over([batch.select(rows) for rows in split], per_token=values)
        assert other == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-5, atol=1e-7)


def test_F4_the_policy_gradient_does_not_depend_on_the_split():
    groups = [make_group([0.0] * 3, name=f"p{g}", response=2 + g, prompt_len=2) for g in range(3)]
    batch = batch_of(groups, advantage=0.7)
    loss, gradient = gradient_over([batch], loss=policy_gradient)
    assert loss == pytest.approx(-0.7, rel=1e-6)  # the mean of -A
    parts = [batch.select([i]) for i in range(9)]
    other, other_gradient = gradient_over(parts, loss=policy_gradient)
    assert other == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("junk", [float("nan"), float("-inf"), float("inf"), -90.0])
def test_T6_F7_masked_junk_gives_exactly_zero_loss_and_gradient(junk):
    logprobs = torch.tensor([junk, -1.0, junk], requires_grad=True)
    mask = torch.tensor([False, True, False])
    x = LossInputs(tokens=None, mask=mask, seq_ids=None, advantages=torch.tensor([junk, 2.0, 1.0]),
                   multiplier=torch.ones(3), seq=None, get={"logprobs": logprobs}.get)  # fmt: skip
    out = policy_gradient(x).per_token
    out.sum().backward()
    assert out.tolist() == [0, -2, 0]
    assert logprobs.grad.tolist() == [0, -2, 0]


def test_F7_nan_of_a_trained_token_stays_visible():
    x = LossInputs(tokens=None, mask=torch.tensor([True]), seq_ids=None, advantages=torch.tensor([1.0]),
                   multiplier=torch.ones(1), seq=None, get={"logprobs": torch.tensor([float("nan")])}.get)  # fmt: skip
    assert policy_gradient(x).per_token.isnan().all()


# --- The toy's own derivatives against autograd ----------------------------------------------------------------------


def toy_in_torch(params, batch, loss):
    """Loss and gradients of the toy network, written again in torch."""
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in params.items()}
    context, tokens, picked = [], [], {k: [] for k in ("advantages", "old_logprobs")}
    weights = []
    for i, sample in enumerate(batch.samples):
        places = np.flatnonzero(batch.mask[i])
        context.append(toy_model.windows(sample.tokens, places))
        tokens.append(sample.tokens[places])
        weights.append(batch.token_weights["policy"][i][places])
        for name, rows in picked.items():
            rows.append(batch.columns[name][i][places])
    context, tokens = torch.tensor(np.concatenate(context)), torch.tensor(np.concatenate(tokens)).long()
    rows = leaves["embed"][torch.arange(toy_model.WINDOW)[None, :], context].sum(1)
    logits = leaves["bigram"][context[:, -1]] + torch.tanh(rows + leaves["bias"]) @ leaves["head"]
    columns = {k: torch.tensor(np.concatenate(v)).double() for k, v in picked.items()}
    columns["logprobs"] = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    mask = torch.ones(len(tokens), dtype=torch.bool)
    x = LossInputs(tokens=tokens, mask=mask, seq_ids=None, advantages=columns["advantages"],
                   multiplier=torch.ones(len(tokens)).double(), seq=None, get=columns.__getitem__)  # fmt: skip
    total = (torch.tensor(np.concatenate(weights)).double() * loss(x).per_token).sum()
    total.backward()
    return float(total.detach()), {k: v.grad.numpy() for k, v in leaves.items()}


def plugin_loss(name, **options):
    plugin = pytest.importorskip("miles_policy_losses")
    component = next(c for c in plugin.miles_losses() if c.name == name)
    return component.build(component.config(**options), None)


LOSSES = {
    "policy-gradient": lambda: policy_gradient,
    "ppo-clip": lambda: plugin_loss("ppo-clip"),
    "ppo-clip, dual": lambda: plugin_loss("ppo-clip", dual_clip=1.5),
}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES.keys())
def test_the_toy_trainer_agrees_with_autograd(make, advantage):
    loss = make()
    groups = [make_group([1.0, 0.0], name=f"p{g}", response=3 + g) for g in range(2)]
    batch = batch_of(groups, advantage=advantage)
    made = trainer(loss)
    old = made.forward(batch, "policy", frozenset({"logprobs"}))["logprobs"]
    # Ratios spread over both sides of the clip range, some of it inside.
    shift = np.random.default_rng(0).normal(0, 0.4, sum(map(len, old))).astype(np.float32)
    batch.columns["old_logprobs"] = [o + shift[: len(o)] for o in old]
    value, grads, _, _ = made.loss_and_gradients(batch)
    want, want_grads = toy_in_torch(made.params, batch, loss)
    assert value == pytest.approx(want, rel=1e-6)  # the losses of the plugin compute in fp32 on tensors
    assert all(np.abs(g).max() > 0 for g in want_grads.values())
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, want_grads[name], rtol=1e-5, atol=1e-7)
