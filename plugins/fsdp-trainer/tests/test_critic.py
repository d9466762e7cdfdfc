"""The critic: a model of its own, or a head on the policy's trunk."""

import fsdp_support as support
import numpy as np
import pytest
import torch
from fsdp_support import PG, close, parameters, random_batch, rank_of
from safetensors.torch import load_file

from miles_core import LossOutput
from miles_core.errors import ConfigError, RunFailed

SHARED = {"critic": {"shared": True}}
SEPARATE = {"critic": {}}
MODES = pytest.mark.parametrize("roles", [SEPARATE, SHARED], ids=["separate", "shared"])


def squares(x):
    error = x.get("values") - x.get("returns")
    return LossOutput(per_token=error.square(), scope="value", metrics={"error": (error.abs().sum(), x.mask.sum(), "mean")})


VALUE = ("value", squares)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def critic_batch(seed=0, **more):
    """Random returns, and the same token weights for both scopes."""
    batch = random_batch(seed=seed, **more)
    rng = np.random.default_rng(seed + 100)
    batch.columns["returns"] = [(rng.normal(size=len(m)) * m).astype(np.float32) for m in batch.mask]
    batch.token_weights["value"] = batch.token_weights["policy"]
    return batch


def set_head(rank, seed=3):
    """A head that is not zero, so that gradients reach the trunk."""
    torch.manual_seed(seed)
    head = rank.roles["critic"].model.value_head
    torch.nn.init.normal_(head.weight, std=0.3)
    torch.nn.init.constant_(head.bias, 0.1)
    return head.weight.detach().clone(), head.bias.detach().clone()


def plain_values(model, sample, weight, bias):
    """float32 [T]: the value before token t is read off the hidden state of token t - 1, like its log-probability."""
    ids = torch.as_tensor(sample.tokens.astype(np.int64))[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    return torch.cat([torch.zeros(1), (hidden @ weight.T + bias)[:, 0]])


def plain_value_loss(model, batch, weight, bias):
    total = torch.zeros(())
    for i, s in enumerate(batch.samples):
        error = plain_values(model, s, weight, bias) - torch.as_tensor(batch.columns["returns"][i])
        total = total + (torch.as_tensor(batch.token_weights["value"][i] * batch.mask[i]) * error.square()).sum()
    return total


def caught_step(rank, batch, role):
    """Report and gradients of one step by role, with the optimizers' own steps left out."""
    caught = {}
    for name, owner in rank.roles.items():
        optimizer = owner.optimizer

        def catch(norm, name=name, optimizer=optimizer):
            caught[name] = {n: p.grad.clone() for n, p in optimizer.named.items() if p.grad is not None}
            optimizer.zero_grad()

        optimizer.step = catch
    return rank.step(batch, role), caught


@pytest.mark.parametrize("options", [{}, {"max_tokens": 20}, {"packing": False}], ids=str)
def test_a_shared_critic_is_a_term_of_the_policys_step(tiny, options):
    """One backward pass: the trunk gets both gradients, and the norm is that of trunk and head together."""
    batch, model = critic_batch(), support.plain_model(tiny["llama"])
    rank = rank_of(tiny["llama"], [PG, (*VALUE, 0.5)], roles=SHARED, **options)
    weight, bias = (x.requires_grad_() for x in set_head(rank))
    policy, value = support.reference_loss(model, batch), plain_value_loss(model, batch, weight, bias)
    (policy + 0.5 * value).backward()
    report, caught = caught_step(rank, batch, "policy")
    assert report.loss == pytest.approx((policy + 0.5 * value).item(), rel=1e-5)
    assert report.metrics["critic/loss/value/value"][0] == pytest.approx(0.5 * value.item(), rel=1e-5)
    close(caught["policy"], {"lm." + n: p.grad for n, p in model.named_parameters()})
    close(caught["critic"], {"value_head.weight": weight.grad, "value_head.bias": bias.grad})
    grads = [*(p.grad for p in model.parameters()), weight.grad, bias.grad]
    assert report.grad_norm == pytest.approx(torch.cat([g.flatten() for g in grads]).norm().item(), rel=1e-5)


def test_a_separate_critic_is_trained_alone_and_has_no_language_head(tiny):
    batch, model = critic_batch(), support.plain_model(tiny["llama"])
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=SEPARATE)
    weight, bias = (x.requires_grad_() for x in set_head(rank))
    value = plain_value_loss(model, batch, weight, bias)
    value.backward()
    report, caught = caught_step(rank, batch, "critic")
    assert report.loss == pytest.approx(value.item(), rel=1e-5) and caught.keys() == {"critic"}
    total, count, _ = report.metrics["critic/loss/value/error"]
    assert count == batch.num_trainable and total > 0
    want = {"lm." + n.removeprefix("model."): p.grad for n, p in model.named_parameters() if not n.startswith("lm_head")}
    want |= {"value_head.weight": weight.grad, "value_head.bias": bias.grad}
    close(caught["critic"], want, rtol=1e-4, atol=1e-5)
    assert not any("lm_head" in n for n in rank.roles["critic"].parameters)


@MODES
def test_a_new_critic_says_zero_everywhere_and_leaves_the_trunk_alone_at_first(tiny, roles):
    batch = critic_batch()
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=roles)
    values = rank.forward(batch, "critic", frozenset({"values"}))["values"]
    assert not any(v.any() for v in values)
    _, caught = caught_step(rank, batch, "critic")
    assert caught["critic"]["value_head.weight"].abs().sum() > 0
    assert all(not g.any() for n, g in caught["critic"].items() if not n.startswith("value_head"))


def test_values_and_log_probabilities_of_a_shared_trunk_come_from_one_pass(tiny):
    batch, model = critic_batch(), support.plain_model(tiny["llama"])
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=SHARED)
    weight, bias = set_head(rank)
    passes = []
    rank.roles["policy"].model.register_forward_hook(lambda *args: passes.append(1))
    both = rank.forward(batch, "policy", frozenset({"logprobs", "values"}))
    assert len(passes) == 1
    alone = rank.forward(batch, "critic", frozenset({"values"}))["values"]
    for i, s in enumerate(batch.samples):
        want = plain_values(model, s, weight, bias).detach().numpy() * batch.mask[i]
        np.testing.assert_allclose(both["values"][i], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(alone[i], both["values"][i])


def test_a_shared_critic_alone_trains_its_head_and_nothing_else(tiny):
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=SHARED, critic_lr=0.05, weight_decay=0.5)
    set_head(rank)
    before, batch = parameters(rank), critic_batch()
    losses = [rank.step(batch, "critic").loss for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    after = parameters(rank)
    moved = {n for n in after if not after[n].equal(before[n])}
    assert moved == {"value_head.weight", "value_head.bias"}
    assert all(p.grad is None for p in rank.roles["policy"].parameters.values())  # it would end up in the next step
    assert rank.roles["policy"].optimizer.step_count == 0 and rank.roles["critic"].optimizer.step_count == 20


@MODES
def test_each_role_has_its_own_rate_and_the_policys_schedule_starts_after_the_warmup(tiny, roles):
    roles = {"critic": {**roles["critic"], "warmup_steps": 4}}
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=roles, lr=0.1, critic_lr=0.2, schedule="linear", steps=10)
    # Linear to 0 at the last of 10 - 4 = 6 policy steps: 0.1, 0.08, ...; of 10 critic steps: 0.2, 0.2 * 8/9, ...
    rank.step(critic_batch(), "critic")
    assert rank.roles["critic"].optimizer.lr == pytest.approx(0.2 * 8 / 9)
    assert rank.roles["policy"].optimizer.lr == 0.1
    rank.step(critic_batch())
    assert rank.roles["policy"].optimizer.lr == pytest.approx(0.08)


@MODES
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_C5_a_checkpoint_with_a_critic_continues_bit_for_bit(tiny, tmp_path, name, roles):
    """In the middle of a critic's warm-up, when the two optimizers have taken different numbers of steps."""
    options = {"schedule": "linear", "warmup_steps": 2, "critic_lr": 0.03}
    rank, other = (rank_of(tiny[name], [PG, VALUE], roles=roles, **options) for _ in range(2))
    for seed in range(3):
        rank.step(critic_batch(seed=seed), "critic")
    rank.step(critic_batch(seed=3))
    rank.save(tmp_path)
    other.load(tmp_path)
    for role in rank.roles:
        moments = [r.roles[role].optimizer.moments() for r in (other, rank)]
        close(*moments, rtol=0, atol=0)
    for role in ("policy", "critic"):
        a, b = (r.step(critic_batch(seed=7), role) for r in (rank, other))
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
        close(parameters(other, role), parameters(rank, role), rtol=0, atol=0)


@MODES
def test_C5_the_critics_files_are_part_of_the_checkpoint(tiny, tmp_path, roles):
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=roles)
    rank.step(critic_batch(), "critic")
    rank.save(tmp_path)
    heads = {name: {k for k in load_file(tmp_path / f"{name}.safetensors") if "value_head" in k} for name in rank.roles}
    assert heads == {"policy": set(), "critic": {"value_head.weight", "value_head.bias"}}
    for file in ("critic.safetensors", "critic-optimizer.safetensors"):
        content = (tmp_path / file).read_bytes()
        (tmp_path / file).unlink()
        with pytest.raises(RunFailed, match="critic is missing"):
            rank_of(tiny["llama"], [PG, VALUE], roles=roles).load(tmp_path)
        (tmp_path / file).write_bytes(content)


def test_a_shared_head_is_not_published_to_engines(tiny, tmp_path):
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=SHARED)
    names = {spec.name for bucket in rank.export("hf_full", 1 << 20) for spec in bucket.tensors}
    rank.save_model(tmp_path)
    assert names == set(load_file(tmp_path / "model.safetensors")) and not any("value_head" in n for n in names)


def test_a_critic_may_be_another_model(tiny):
    rank = rank_of(tiny["llama"], [PG, VALUE], roles={"critic": {"path": str(tiny["qwen3"])}})
    assert type(rank.roles["critic"].model.lm).__name__ == "Qwen3Model"
    with pytest.raises(ConfigError, match=r"roles.critic.path: no folder /no/where"):
        rank_of(tiny["llama"], [PG, VALUE], roles={"critic": {"path": "/no/where"}})


@MODES
def test_values_that_are_not_finite_stop_the_step_and_name_it(tiny, roles):
    rank = rank_of(tiny["llama"], [PG, VALUE], roles=roles)
    torch.nn.init.constant_(rank.roles["critic"].model.value_head.bias, float("nan"))
    with pytest.raises(
        RunFailed, match=r"no weight was changed: values of the critic are not finite in samples g0/0, g0/1"
    ):
        rank.step(critic_batch(), "critic")


def test_log_probabilities_that_are_not_finite_stop_the_step_and_name_it(tiny):
    """NaN in the embedding of one token: every sample that reads it, and the model, not the loss, is named."""
    rank = rank_of(tiny["llama"])
    batch = support.batch_of([support.sample("g", i, [5, 6], [7 + i, 8]) for i in range(3)])
    with torch.no_grad():
        rank.roles["policy"].model.lm.model.embed_tokens.weight[8 + 0] = float("nan")  # read by g/1 alone before its end
    with pytest.raises(RunFailed, match=r"log-probabilities of the policy are not finite in samples g/1\n"):
        rank.step(batch)
