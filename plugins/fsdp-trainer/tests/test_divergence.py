"""KL between whole distributions, against log_softmax written out. R rows, V vocabulary, E and F hidden sizes, P pairs."""

from itertools import pairwise

import fsdp_support as support
import numpy as np
import pytest
import torch
from fsdp_support import PG, VOCAB, close, gradients, random_batch, rank_of
from transformers import AutoModelForCausalLM, LlamaConfig

from miles_core import LossOutput
from miles_core.errors import ConfigError
from miles_fsdp_trainer.divergence import HeadInputs, divergence

R, V, E, F = 21, 50, 8, 12
NAMES = ["reverse_kl:teacher", "forward_kl:teacher", "reverse_kl:teacher:5", "forward_kl:teacher:5"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def case(spread=1.0):
    g = torch.Generator().manual_seed(0)
    policy = HeadInputs(
        torch.randn(R, E, generator=g).mul_(spread).requires_grad_(),
        torch.randn(V, E, generator=g).requires_grad_(),
        0.5 + torch.rand(R, generator=g),
    )
    other = HeadInputs(
        torch.randn(R, F, generator=g) * spread, torch.randn(V, F, generator=g), 0.5 + torch.rand(R, generator=g)
    )
    return policy, other


def coarse(logp, ids):
    """[R, K + 1]: the tokens `ids` one by one, all others together."""
    rest = torch.ones_like(logp).scatter(-1, ids, 0) * logp.exp()
    return torch.cat([logp.gather(-1, ids), rest.sum(-1, keepdim=True).log()], dim=-1)


def written_out(z, y, reverse, k):
    p, q = z.double().log_softmax(-1), y.double().log_softmax(-1)
    if k:
        ids = q.topk(k, dim=-1).indices
        p, q = coarse(p, ids), coarse(q, ids)
    a, b = (p, q) if reverse else (q, p)
    return (a.exp() * (a - b)).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 16, 20, 21, 1000])
@pytest.mark.parametrize("k", [0, 1, 7, V - 1, V])
@pytest.mark.parametrize("reverse", [True, False])
def test_values_and_gradients_equal_the_formula_written_out(reverse, k, chunk_rows):
    weights = torch.randn(R, generator=torch.Generator().manual_seed(1))  # an arbitrary cotangent
    results = []
    for ours in (True, False):
        policy, other = case()
        if ours:
            value = divergence(policy, other, reverse=reverse, k=k, chunk_rows=chunk_rows)
        else:
            logits = [h.hidden @ h.weight.T * h.scale[:, None] for h in (policy, other)]
            value = written_out(*logits, reverse, 0 if k == V else k).float()
        (value * weights).sum().backward()
        results.append([value, policy.hidden.grad, policy.weight.grad])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_two_tokens_by_hand():
    # p = (0.8, 0.2), q = (0.5, 0.5): KL(p || q) = 0.8 ln 1.6 + 0.2 ln 0.4 = 0.192745;
    # KL(q || p) = 0.5 ln 0.625 + 0.5 ln 2.5 = 0.223144. Both vanish where the two are equal.
    policy = HeadInputs(torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log(), torch.eye(2), None)
    other = HeadInputs(torch.zeros(2, 2), torch.eye(2), None)
    for reverse, value in ((True, 0.192745), (False, 0.223144)):
        got = divergence(policy, other, reverse=reverse, k=0, chunk_rows=8)
        assert got.tolist() == pytest.approx([value, 0], abs=1e-6)


def test_the_top_k_form_is_a_lower_bound_that_grows_with_k():
    policy, other = case()
    for reverse in (True, False):
        values = [divergence(policy, other, reverse=reverse, k=k, chunk_rows=8) for k in (1, 5, 20, V)]
        full = divergence(policy, other, reverse=reverse, k=0, chunk_rows=8)
        for smaller, larger in pairwise(values):
            assert (smaller <= larger + 1e-5).all() and (smaller >= -1e-6).all()
        torch.testing.assert_close(values[-1], full, rtol=0, atol=0)


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("reverse", [True, False])
def test_F7_distributions_that_are_far_apart_stay_finite(reverse, k):
    policy, other = case(spread=200.0)  # logits of hundreds: most probabilities are 0 in fp32
    value = divergence(policy, other, reverse=reverse, k=k, chunk_rows=8)
    value.sum().backward()
    assert value.isfinite().all() and value.max() > 100
    assert policy.hidden.grad.isfinite().all() and policy.weight.grad.isfinite().all()


@pytest.mark.parametrize("k", [0, 5])
def test_no_more_than_chunk_rows_of_logits_of_either_model_exist_at_a_time(k):
    policy, other = case()
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor))
            return out

    with Spy():
        divergence(policy, other, reverse=True, k=k, chunk_rows=4).sum().backward()
    assert max(sizes) <= max(4 * V, V * F) < R * V


# --- Through a rank --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of another shape with the same vocabulary."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, initializer_range=0.4, tie_word_embeddings=False,
    )  # fmt: skip
    return save(config, tmp_path_factory.mktemp("teacher"))


def save(config, folder):
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def distill(name):
    return (name, lambda x: LossOutput(per_token=x.get(name)))


def plain_divergences(model, teacher, batch, name):
    """Per sample [T], with whole logits of both models, at the sample's temperature; differentiable."""
    kind, _, k = (*name.split(":"), 0)[:3]
    for s in batch.samples:
        ids = torch.as_tensor(s.tokens.astype(np.int64))[None]
        z, y = (m(input_ids=ids, use_cache=False).logits[0, :-1] / s.temperature for m in (model, teacher))
        value = written_out(z, y.detach(), kind == "reverse_kl", int(k)).float()
        yield torch.cat([torch.zeros(1), value])


@pytest.mark.parametrize("options", [{}, {"max_tokens": 20}, {"logit_rows": 3}, {"packing": False}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_distillation_equals_whole_logits_in_plain_torch(tiny, teacher, name, options):
    batch = random_batch(temperature=0.7)
    model, other = support.plain_model(tiny["qwen3"]), support.plain_model(teacher)
    rows = list(plain_divergences(model, other, batch, name))
    total = sum(
        (w[1] * row[torch.as_tensor(m)]).sum()
        for w, m, row in zip(batch.token_weights["policy"], batch.mask, rows, strict=True)
    )
    total.backward()
    rank = rank_of(tiny["qwen3"], [distill(name)], roles={"teacher": {"path": str(teacher)}}, needs=(name,), **options)
    report, gradient = gradients(rank, batch)
    assert report.loss == pytest.approx(total.item(), rel=1e-5)
    close(gradient, {"lm." + n: p.grad for n, p in model.named_parameters()}, rtol=1e-4, atol=1e-5)
    forward = rank.forward(batch, "policy", frozenset({name, "logprobs"}))
    for got, want, m in zip(forward[name], rows, batch.mask, strict=True):
        np.testing.assert_allclose(got[m], want.detach().numpy()[m], rtol=1e-4, atol=1e-5)
        assert not got[~m].any()


def test_the_exact_kl_to_the_reference_is_0_at_first_and_grows(tiny):
    name, batch = "reverse_kl:reference", random_batch()
    rank = rank_of(tiny["llama"], [PG, distill(name)], roles=("reference",), needs=(name,))
    values = [rank.step(batch).metrics[f"loss/{name}/value"][0] for _ in range(2)]
    assert values[0] == pytest.approx(0, abs=1e-6) and values[1] > 1e-3


def test_a_divergence_that_only_the_driver_reads_costs_no_second_pass(tiny, teacher):
    name = "reverse_kl:teacher"
    rank = rank_of(tiny["llama"], roles={"teacher": {"path": str(teacher)}}, needs=(name,))
    rank.context.loss_needs = frozenset()
    calls = []
    rank.roles["teacher"].model.register_forward_hook(lambda *args: calls.append(1))
    rank.step(random_batch())
    assert calls == []
    rank.forward(random_batch(), "policy", frozenset({name}))
    assert calls == [1]


def test_forward_refuses_a_divergence_from_a_role_that_is_not_there(tiny):
    with pytest.raises(ConfigError, match=r"role policy cannot give reverse_kl:teacher"):
        rank_of(tiny["llama"]).forward(random_batch(), "policy", frozenset({"reverse_kl:teacher"}))


@pytest.mark.parametrize(("tokens", "fits"), [(VOCAB, True), (VOCAB + 1, False)])
def test_vocabularies_may_differ_above_the_tokenizers_own(tiny, tmp_path, tokens, fits):
    """The teacher's head has 64 rows and the policy's 61: padding, if the tokenizer knows no more than 61 ids."""
    wide = support.CONFIGS["llama"].__class__(**{**support._SHAPE, "vocab_size": 64}, tie_word_embeddings=False)
    save(wide, tmp_path)
    rank = rank_of(
        tiny["llama"], [distill(NAMES[0])], roles={"teacher": {"path": str(tmp_path)}}, needs=(NAMES[0],), start=False
    )
    rank.context.tokenizer = type("Tokenizer", (), {"vocab_size": tokens})()
    if not fits:
        with pytest.raises(ConfigError, match="the teacher's vocabulary has 64 tokens and the policy's 61"):
            rank.start()
        return
    rank.start()
    batch = random_batch()
    model, other = support.plain_model(tiny["llama"]), support.plain_model(tmp_path)
    other.lm_head.weight.data = other.lm_head.weight.data[:VOCAB]
    rows = plain_divergences(model, other, batch, NAMES[0])
    total = sum(
        (w * m * r.detach().numpy()).sum() for w, m, r in zip(batch.token_weights["policy"], batch.mask, rows, strict=True)
    )
    assert rank.step(batch).loss == pytest.approx(total, rel=1e-5)
