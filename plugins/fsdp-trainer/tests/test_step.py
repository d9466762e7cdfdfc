"""One optimizer step of a single process, against plain torch on the same tiny models."""

import fsdp_support as support
import numpy as np
import pytest
import torch
from fsdp_support import NLL, PG, VOCAB, batch_of, close, gradients, parameters, random_batch, rank_of, sample

from miles_core import LossOutput
from miles_core.errors import ConfigError, ContractError, RunFailed
from miles_core.fields import FieldSpec

VARIANTS = [
    {},
    {"shared_prefix": False},
    {"packing": False},
    {"max_tokens": 20},
    {"logit_rows": 3},
    {"activation_checkpointing": True},
]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("name", sorted(support.CONFIGS))
def test_loss_and_gradient_equal_plain_torch_for_every_packing(tiny, name, options):
    batch, model = random_batch(), support.plain_model(tiny[name])
    loss = support.reference_loss(model, batch)
    loss.backward()
    report, got = gradients(rank_of(tiny[name], **options), batch)
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    close(got, {"lm." + n: p.grad for n, p in model.named_parameters()})


def test_shared_prefix_computes_fewer_tokens(tiny):
    batch = random_batch()
    computed = [
        rank_of(tiny["llama"], shared_prefix=share).step(batch).metrics["packing/computed_tokens"][0]
        for share in (True, False)
    ]
    assert computed[0] < computed[1] / 2
    assert computed[1] == sum(s.num_tokens - 1 for s in batch.samples)  # the last token predicts nothing


def test_two_minibatches_equal_two_hand_made_steps(tiny):
    options = {"lr": 1e-2, "weight_decay": 0.1, "grad_clip": 0.5, "warmup_steps": 4, "betas": (0.9, 0.95)}
    rank, model = rank_of(tiny["llama-tied"], **options), support.plain_model(tiny["llama-tied"])
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}],
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    for k in range(2):
        batch = random_batch(seed=k)
        report = rank.step(batch)
        support.reference_loss(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * (k + 1) / 4
        adamw.step()
        adamw.zero_grad()
        assert (report.lr, report.grad_norm) == (pytest.approx(1e-2 * (k + 1) / 4), pytest.approx(norm.item(), rel=1e-5))
    close(parameters(rank), {"lm." + n: p.detach() for n, p in model.named_parameters()}, rtol=1e-5, atol=1e-5)


def f4_batch(scheme):
    """Sequence A: one token with L = 3; sequence B: three tokens with L = 1; weights by hand."""
    a, b = sample("g", 0, [5, 6], [7]), sample("g", 1, [5, 6], [8, 9, 10])
    per_a, per_b = {
        "token-mean": (1 / 4, 1 / 4),
        "sequence-mean-token-mean": (1 / 2, 1 / 6),
        "sequence-mean-token-sum": (1 / 2, 1 / 2),
        "constant-length": (1 / 8, 1 / 8),  # L = 4, two sequences
    }[scheme]
    weights = [np.full(3, per_a, np.float32), np.full(5, per_b, np.float32)]
    values = [np.array([0, 0, 3], np.float32), np.array([0, 0, 1, 1, 1], np.float32)]
    return batch_of([a, b], weights=weights, columns={"given": values})


def given_loss(x):
    """L is what the batch says, and its gradient goes through the model: L * exp(logp - detached logp)."""
    logprobs = x.get("logprobs")
    return LossOutput(per_token=x.get("given") * (logprobs - logprobs.detach()).exp())


@pytest.mark.parametrize(
    ("scheme", "loss"),
    [
        ("token-mean", 1.5),  # 6 / 4
        ("sequence-mean-token-mean", 2.0),  # (3 + 1) / 2
        ("sequence-mean-token-sum", 3.0),  # (3 + 3) / 2
        ("constant-length", 0.75),  # 6 / (2 * 4)
    ],
)
def test_F4_loss_and_gradient_do_not_depend_on_microbatches(tiny, scheme, loss):
    batch = f4_batch(scheme)
    results = [
        gradients(rank_of(tiny["llama"], [("given", given_loss)], **options), batch)
        for options in ({}, {"max_tokens": 1}, {"shared_prefix": False, "max_tokens": 6}, {"packing": False})
    ]
    for report, gradient in results:
        assert report.loss == pytest.approx(loss, rel=1e-6)
        close(gradient, results[0][1])


def test_F6_nothing_trainable_moves_nothing(tiny):
    rank = rank_of(tiny["llama"], weight_decay=0.5, warmup_steps=3)
    rank.step(random_batch())
    before, count = parameters(rank), rank.roles["policy"].optimizer.step_count
    moments = {k: v.clone() for k, v in rank.roles["policy"].optimizer.moments().items()}
    batch = random_batch(seed=1)
    batch.mask = [np.zeros_like(m) for m in batch.mask]
    report = rank.step(batch)
    assert (report.skipped, report.loss, report.grad_norm) == ("nothing trainable", 0.0, 0.0)
    close(parameters(rank), before, rtol=0, atol=0)
    close(rank.roles["policy"].optimizer.moments(), moments, rtol=0, atol=0)
    assert rank.roles["policy"].optimizer.step_count == count
    assert rank.step(batch_of([])).skipped == "nothing trainable"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_F7_an_overflowing_ratio_does_no_harm(tiny, advantage):
    batch = batch_of([sample("g", i, [5, 6], [7, 8]) for i in range(2)])
    batch.columns["advantages"] = [np.full(4, advantage, np.float32)] * 2
    batch.columns["old_logprobs"] = [np.array([0, 0, -500, -3], np.float32), np.array([0, 0, -3, -3], np.float32)]
    rank = rank_of(tiny["llama"], [support.component_loss("ppo-clip")])
    report, gradient = gradients(rank, batch)
    assert np.isfinite(report.loss) and all(g.isfinite().all() for g in gradient.values())
    assert report.metrics["loss/ppo-clip/log_ratio_clamped"][0] == 1


def test_F7_a_nan_of_a_trained_token_stops_the_step_and_names_it(tiny):
    batch = random_batch()
    batch.columns["old_logprobs"][5][batch.mask[5]] = np.nan
    rank = rank_of(tiny["llama"], [NLL, support.component_loss("ppo-clip")])
    before = parameters(rank)
    with pytest.raises(RunFailed, match=r'no weight was changed: loss "ppo-clip" is nan in samples g1/1$'):
        rank.step(batch)
    close(parameters(rank), before, rtol=0, atol=0)
    assert all(p.grad is None for p in rank.roles["policy"].model.parameters())


def test_F7_a_gradient_that_is_not_finite_stops_the_step(tiny):
    def explode(x):
        return LossOutput(per_token=(x.get("logprobs") - x.get("logprobs").detach()).abs().sqrt())  # slope inf at 0

    rank = rank_of(tiny["llama"], [("explode", explode)])
    before = parameters(rank)
    with pytest.raises(RunFailed, match=r'gradient of loss "explode" is not finite in .*; samples g0/0, g0/1'):
        rank.step(random_batch())
    close(parameters(rank), before, rtol=0, atol=0)


def per_token(change):
    return lambda x: LossOutput(per_token=change(x.get("logprobs")))


BAD_LOSSES = [
    (lambda x: None, ContractError, 'loss "own" returned NoneType, not LossOutput'),
    (lambda x: -x.get("logprobs"), ContractError, 'loss "own" returned Tensor, not LossOutput'),
    (per_token(lambda p: p.detach().numpy()), ContractError, 'loss "own" returned a ndarray as per_token'),
    (per_token(lambda p: p.bfloat16()), ContractError, 'loss "own" returned a tensor of torch.bfloat16 as per_token'),
    (per_token(lambda p: p.long()), ContractError, 'loss "own" returned a tensor of torch.int64 as per_token'),
    (per_token(lambda p: p[:, None]), ContractError, r'loss "own" returned shape \(\d+, 1\) for \d+ tokens'),
    (per_token(lambda p: -p.detach()), ContractError, r"no loss \(own\) has a gradient for the policy; was it detached"),
    (lambda x: LossOutput(per_token=x.get("logprobs"), scope="value"), ContractError, 'loss "own" has scope "value"'),
    (lambda x: LossOutput(per_token=x.get("logprobs"), metrics={"m": 1.0}), ContractError, 'float 1.0 as its metric "m"'),
    (lambda x: {}["a"], RunFailed, "loss \"own\" raised KeyError: 'a'"),
    (lambda x: x.get("advantage"), ContractError, 'a loss asked for "advantage", which is not here'),
]


@pytest.mark.parametrize(("loss", "kind", "message"), BAD_LOSSES)
def test_a_loss_that_breaks_its_contract_is_named(tiny, loss, kind, message):
    with pytest.raises(kind, match=message):
        rank_of(tiny["llama"], [("own", loss)]).step(random_batch())


def test_F11_log_probabilities_are_those_of_the_sampling_temperature(tiny):
    samples = [sample("g", i, [5, 6, 7], [8, 9], temperature=t) for i, t in enumerate((0.5, 1.0, 2.0, 0.5))]
    batch, model = batch_of(samples), support.plain_model(tiny["llama"])
    got = rank_of(tiny["llama"]).forward(batch, "policy", frozenset({"logprobs"}))["logprobs"]
    for s, values in zip(samples, got, strict=True):
        want = support.reference_logprobs(model, s).detach().numpy() * s.loss_mask
        np.testing.assert_allclose(values, want, rtol=1e-5, atol=2e-6)
    loss = support.reference_loss(model, batch)
    loss.backward()
    _, gradient = gradients(rank_of(tiny["llama"]), batch)
    close(gradient, {"lm." + n: p.grad for n, p in model.named_parameters()})


def test_F11_greedy_samples_are_refused(tiny):
    with pytest.raises(ConfigError, match="g/0 was sampled at temperature 0"):
        rank_of(tiny["llama"]).step(batch_of([sample("g", 0, [5], [6], temperature=0.0)]))


def t6_batch():
    """Model 2 tokens, tool 3, model 2."""
    mask = [True, True, False, False, False, True, True]
    samples = [sample("g", i, [5, 6], [7, 8, 20, 21, 22, 9 + i, 10], mask=mask) for i in range(2)]
    return batch_of(samples)


@pytest.mark.parametrize("junk", [0.0, -50.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("losses", [[PG], [("ppo-clip",)], [("ppo-clip",), ("kl",)]], ids=["pg", "clip", "clip+kl"])
def test_T6_tool_tokens_leave_loss_and_gradient_bit_identical(tiny, losses, junk):
    losses = [entry if len(entry) > 1 else support.component_loss(*entry) for entry in losses]
    results = []
    for value in (-1.5, junk):
        batch = t6_batch()
        assert batch.mask[0].tolist() == [False, False, True, True, False, False, False, True, True]
        assert batch.token_weights["policy"][0][2] == np.float32(1 / 8)  # denominator 4 per sample
        batch.columns["reference_logprobs"] = [np.full(9, -2, np.float32) for _ in range(2)]
        for column in batch.columns.values():
            for values in column:
                values[4:7] = value
        results.append(gradients(rank_of(tiny["llama"], losses), batch))
    assert results[0][0].loss == results[1][0].loss and np.isfinite(results[0][0].loss)
    close(results[1][1], results[0][1], rtol=0, atol=0)


def test_T7_the_mask_is_not_off_by_one(tiny):
    # Prompt of 3, response of 2, the last is EOS: of the 4 predictions exactly those of tokens 3 and 4 count.
    s = sample("g", 0, [5, 6, 7], [8, 1])
    rank, model = rank_of(tiny["llama"], [NLL]), support.plain_model(tiny["llama"])
    logprobs = support.reference_logprobs(model, s).detach().numpy()
    report = rank.step(batch_of([s], weights=[np.array([3, 5, 7, 11, 13], np.float32)]))
    assert report.loss == pytest.approx(-(11 * logprobs[3] + 13 * logprobs[4]), rel=1e-5)
    np.testing.assert_allclose(report.columns["logprobs"][0], [0, 0, 0, logprobs[3], logprobs[4]], atol=1e-6)


def test_P1_log_probabilities_are_fp32_and_the_on_policy_ratio_is_one(tiny):
    batch = random_batch()
    rank = rank_of(tiny["llama"], [support.component_loss("ppo-clip")])
    old = rank.forward(batch, "policy", frozenset({"logprobs"}))["logprobs"]
    batch.columns["old_logprobs"] = old
    report = rank.step(batch)
    assert all(v.dtype == np.float32 for v in [*old, *report.columns["logprobs"]])
    total, count, _ = report.metrics["loss/ppo-clip/ratio"]
    assert total / count == pytest.approx(1, abs=1e-6)
    assert report.metrics["loss/ppo-clip/ratio_max"][0] == pytest.approx(1, abs=1e-5)


def test_old_is_current_takes_the_own_log_probabilities(tiny):
    batch = random_batch(old_is_current=True)
    del batch.columns["old_logprobs"]
    report = rank_of(tiny["llama"], [support.component_loss("ppo-clip")]).step(batch)
    total, count, _ = report.metrics["loss/ppo-clip/ratio"]
    assert total == count == report.trainable


def test_terms_add_up_with_the_weights_of_their_tables(tiny):
    batch = random_batch(
        columns={"reference_logprobs": [np.full(s.num_tokens, -4, np.float32) for s in random_batch().samples]}
    )
    alone = [gradients(rank_of(tiny["llama"], [loss]), batch) for loss in (PG, support.component_loss("kl"))]
    both = gradients(rank_of(tiny["llama"], [(*PG, 2.0), (*support.component_loss("kl"), 0.5)]), batch)
    assert both[0].loss == pytest.approx(2 * alone[0][0].loss + 0.5 * alone[1][0].loss, rel=1e-5)
    close(both[1], {n: 2 * alone[0][1][n] + 0.5 * alone[1][1][n] for n in both[1]})


def test_the_multiplier_of_corrections_scales_the_policy_loss(tiny):
    batch = random_batch()
    half = random_batch(columns={"multiplier": [np.full(s.num_tokens, 0.5, np.float32) for s in batch.samples]})
    losses = [rank_of(tiny["llama"]).step(b).loss for b in (batch, half)]
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-6)


def test_sequence_reductions_are_differentiable_and_per_sample(tiny):
    def geometric(x):  # GSPO's ratio: exp of the sample's mean log-ratio, the same for all its tokens
        mean = x.seq.mean(x.get("logprobs") - x.get("old_logprobs"))
        return LossOutput(per_token=-x.seq.broadcast(mean.exp()) * x.advantages)

    batch, model = random_batch(), support.plain_model(tiny["llama"])
    total = torch.zeros(())
    for i, s in enumerate(batch.samples):
        m = torch.as_tensor(batch.mask[i])
        d = support.reference_logprobs(model, s)[m] - torch.as_tensor(batch.columns["old_logprobs"][i])[m]
        weights, advantages = (
            torch.as_tensor(v[i])[m] for v in (batch.token_weights["policy"], batch.columns["advantages"])
        )
        total = total - (weights * advantages * d.mean().exp()).sum()
    total.backward()
    for options in ({}, {"max_tokens": 20}):
        report, gradient = gradients(rank_of(tiny["llama"], [("gspo", geometric)], **options), batch)
        assert report.loss == pytest.approx(total.item(), rel=1e-5)
        close(gradient, {"lm." + n: p.grad for n, p in model.named_parameters()}, rtol=1e-4)


def test_entropy_and_topk_reach_a_loss_that_needs_them(tiny):
    seen = {}

    def look(x):
        seen.update(entropy=x.get("entropy"), topk=x.get("topk:3"), lse=x.get("logsumexp"), mask=x.mask)
        return LossOutput(per_token=x.get("entropy") + x.get("topk:3").logprobs.sum(-1))

    batch, model = random_batch(), support.plain_model(tiny["llama"])
    total, entropies, ids = torch.zeros(()), [], []
    for i, s in enumerate(batch.samples):
        p = model(input_ids=torch.as_tensor(s.tokens.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
        p = torch.cat([torch.zeros(1, VOCAB), p])[torch.as_tensor(batch.mask[i])]
        top = p.topk(3, dim=-1)
        entropies.append(-(p.exp() * p).sum(-1))
        ids.append(top.indices)
        total = total + ((entropies[-1] + top.values.sum(-1)) * batch.token_weights["policy"][i][1]).sum()
    total.backward()
    report, gradient = gradients(rank_of(tiny["llama"], [("look", look)], needs=("entropy", "topk:3", "logsumexp")), batch)
    assert report.loss == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(seen["entropy"][seen["mask"]], torch.cat(entropies), rtol=1e-4, atol=1e-4)
    assert seen["topk"].ids[seen["mask"]].equal(torch.cat(ids))
    close(gradient, {"lm." + n: p.grad for n, p in model.named_parameters()}, rtol=1e-4, atol=1e-5)


def test_a_loss_that_asks_for_what_it_did_not_announce_is_told_so(tiny):
    def greedy(x):
        return LossOutput(per_token=x.get("reference_logprobs"))

    with pytest.raises(ContractError, match=r'asked for "reference_logprobs".*\n.*old_logprobs'):
        rank_of(tiny["llama"], [("greedy", greedy)]).step(random_batch())


def test_a_loss_of_the_wrong_shape_is_refused(tiny):
    with pytest.raises(ContractError, match='loss "mean" returned shape'):
        rank_of(tiny["llama"], [("mean", lambda x: LossOutput(per_token=x.get("logprobs").mean()))]).step(random_batch())


def test_a_metric_with_the_name_of_the_weighted_loss_is_refused(tiny):
    def clash(x):
        return LossOutput(per_token=-x.get("logprobs"), metrics={"value": (1.0, 1.0, "mean")})

    with pytest.raises(ContractError, match='loss "clash" has a metric "value"'):
        rank_of(tiny["llama"], [("clash", clash)]).step(random_batch())


def test_metrics_are_exact_over_microbatches(tiny):
    batch = random_batch()
    reports = [rank_of(tiny["llama"], [NLL], **options).step(batch) for options in ({}, {"max_tokens": 20})]
    sums = [r.metrics["loss/nll/nll"] for r in reports]
    assert sums[0][1] == sums[1][1] == batch.num_trainable
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-5)


def test_bfloat16_keeps_fp32_master_weights(tiny):
    batch = random_batch()
    exact, low = rank_of(tiny["llama"]), rank_of(tiny["llama"], dtype="bfloat16")
    a, b = exact.step(batch), low.step(batch)
    assert all(p.dtype == torch.float32 for p in parameters(low).values())
    assert b.loss == pytest.approx(a.loss, rel=0.1)
    assert all(spec.dtype == "bfloat16" for bucket in low.export("hf_full", 1 << 20) for spec in bucket.tensors)


def test_the_reference_stays_as_it_was(tiny):
    batch = random_batch()
    rank = rank_of(tiny["llama"], roles=("reference",))
    before = rank.forward(batch, "reference", frozenset({"logprobs"}))["logprobs"]
    rank.step(batch)
    after = rank.forward(batch, "reference", frozenset({"logprobs"}))["logprobs"]
    policy = rank.forward(batch, "policy", frozenset({"logprobs"}))["logprobs"]
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert any((x != y).any() for x, y in zip(before, policy, strict=True))
    with pytest.raises(ConfigError, match="frozen"):
        rank.step(batch, "reference")


def test_a_critic_learns_values(tiny):
    def value_loss(x):
        return LossOutput(per_token=(x.get("values") - x.get("returns")).square(), scope="value")

    batch = random_batch(scope="value")
    batch.columns["returns"] = [m.astype(np.float32) for m in batch.mask]  # 1 everywhere
    rank = rank_of(tiny["llama"], [PG, ("value", value_loss)], roles=("critic",), critic_lr=0.01)
    policy = parameters(rank)
    losses = [rank.step(batch, "critic").loss for _ in range(30)]
    assert losses[0] == pytest.approx(1, rel=1e-5)  # values start at 0: mean of (0 - 1)^2
    assert losses[-1] < 0.05
    values = rank.forward(batch, "critic", frozenset({"values"}))["values"]
    assert all(v.shape == m.shape and (v[~m] == 0).all() for v, m in zip(values, batch.mask, strict=True))
    close(parameters(rank), policy, rtol=0, atol=0)


def test_a_role_that_the_run_does_not_have_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"no role critic here\n  it holds policy"):
        rank_of(tiny["llama"]).forward(random_batch(), "critic", frozenset({"values"}))


def test_a_side_channel_reaches_a_loss_one_row_per_token(tiny):
    """Transition-aligned: T - 1 rows and a zero row after each sample, so row n belongs to input token n."""
    spec = FieldSpec(name="routes", dtype="int16", axes=("layer",), align="transition")
    seen = []

    def loss(x):
        seen.append(x.get("routes"))
        return support.weighted_policy(x)

    samples = [sample("g", 0, [5, 6], [7, 8]), sample("g", 1, [5, 6], [9])]  # 4 and 3 tokens
    for s in samples:
        s.extras["routes"] = np.arange(s.num_tokens - 1, dtype=np.int16)[:, None] + 10 * (s.index + 1)
    rank = rank_of(tiny["llama"], [("routed", loss)])
    rank.context.fields = {"routes": spec}
    rank.step(batch_of(samples))
    assert seen[0].dtype == torch.int16
    assert seen[0][:, 0].tolist() == [10, 11, 12, 0, 20, 21, 0]
    del samples[1].extras["routes"]
    with pytest.raises(ContractError, match='field "routes" of sample g/1 is missing'):
        rank.step(batch_of(samples))
