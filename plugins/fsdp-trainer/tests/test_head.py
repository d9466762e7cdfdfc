"""The fused head against log_softmax written out. R rows, V vocabulary, E hidden size, P pairs."""

import pytest
import torch

from miles_fsdp_trainer.head import fused_head, top_tokens

R, V, E, P = 37, 50, 8, 60


def case(seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(R, E, generator=g).requires_grad_()
    weight = torch.randn(V, E, generator=g).requires_grad_()
    rows = torch.randint(0, R, (P,), generator=g)
    targets = torch.randint(0, V, (P,), generator=g)
    temperature = 0.5 + torch.rand(R, generator=g)
    return hidden, weight, rows, targets, temperature


def naive(hidden, weight, rows, targets, temperature):
    logprobs = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    logsumexp = (hidden @ weight.T / temperature[:, None]).logsumexp(-1)
    return logprobs[rows, targets], logsumexp, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 16, 36, 37, 1000])
@pytest.mark.parametrize("warm", [False, True])
def test_values_and_gradients_equal_log_softmax(chunk_rows, warm):
    *inputs, temperature = case()
    temperature = temperature if warm else torch.ones(R)
    g = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(n, generator=g) for n in (P, R, R))  # arbitrary cotangents for all three outputs
    results = []
    for fused in (True, False):
        hidden, weight = (x.detach().clone().requires_grad_() for x in inputs[:2])
        if fused:
            given = 1 / temperature if warm else None
            out = fused_head(hidden, weight, given, *inputs[2:], chunk_rows=chunk_rows, want_entropy=True)
        else:
            out = naive(hidden, weight, *inputs[2:], temperature)
        ((out[0] * a).sum() + (out[1] * b).sum() + (out[2] * c).sum()).backward()
        results.append([*out, hidden.grad, weight.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_F11_logits_are_divided_by_the_temperature():
    # Logits [2, 0], T = 0.5: softmax([4, 0])[0] = 1 / (1 + e^-4) = 0.98201; untempered it would be 0.8808.
    out = fused_head(
        torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([2.0]), torch.tensor([0]), torch.tensor([0]), chunk_rows=8
    )
    assert out.logprobs.exp().item() == pytest.approx(0.98201, abs=1e-5)


def test_no_more_than_chunk_rows_of_logits_exist_at_a_time():
    hidden, weight, rows, targets, _ = case()
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor))
            return out

    with Spy():
        fused_head(hidden, weight, None, rows, targets, chunk_rows=4, want_entropy=True).logprobs.sum().backward()
    assert max(sizes) <= max(4 * V, V * E)


def test_P1_log_probabilities_are_fp32_even_from_bf16_operands():
    hidden, weight, rows, targets, _ = case()
    low = fused_head(hidden.bfloat16(), weight.bfloat16(), None, rows, targets, chunk_rows=64).logprobs
    exact = naive(hidden.bfloat16().float(), weight.bfloat16().float(), rows, targets, torch.ones(R))[0]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, rtol=1e-5, atol=1e-5)


def test_nothing_to_predict():
    hidden, weight = torch.zeros(0, E, requires_grad=True), torch.randn(V, E, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    fused_head(hidden, weight, None, none, none, chunk_rows=4).logprobs.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_top_tokens():
    hidden, weight, *_ = case()
    assert top_tokens(hidden, weight, 3, 5).equal((hidden @ weight.T).topk(3, dim=-1).indices)
