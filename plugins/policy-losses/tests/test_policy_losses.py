"""What holds for every loss, and `ppo-clip`, `kl`, `entropy`. Each number is derived beside it."""

import json
import math
import subprocess
import sys
from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

import miles_policy_losses
from miles_core import Environment
from miles_core.errors import ConfigError

torch = pytest.importorskip("torch")
import losses_support as support  # noqa: E402 - needs torch

COMPONENTS = support.COMPONENTS
ALL = {
    "logprobs": -1.0, "old_logprobs": -1.1, "reference_logprobs": -1.2, "entropy": 1.0, "logsumexp": 2.0, "values": 0.5,
    "old_values": 0.4, "returns": 1.0, "reverse_kl:teacher": 0.1, "pair_ids": 1.0, "pair_sign": 1.0,
}  # fmt: skip
"""One number for everything that some loss reads."""


def inputs(columns, *, mask=None, advantages=None):
    """(leaves, LossInputs) of one sequence."""
    made = support.micro(columns, mask=mask, advantages=advantages)
    return SimpleNamespace(tensors=made.leaves), made.inputs


def run(name, x, **options):
    component = COMPONENTS[name]
    return component.build(component.config(**options), None)(x)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.5, 1, -1.2),  # above 1 + 0.2: clipped
        (1.5, -1, 1.5),  # the pessimistic branch is the unclipped one
        (0.5, 1, -0.5),
        (0.5, -1, 0.8),  # below 1 - 0.2: clipped
        (1.0, 2, -2.0),
    ],
)
def test_F7_ppo_clip_sanity(ratio, advantage, loss):
    _, x = inputs({"logprobs": [math.log(ratio)], "old_logprobs": [0.0]}, advantages=[advantage])
    assert run("ppo-clip", x).per_token.item() == pytest.approx(loss, rel=1e-6)


def test_ppo_clip_bounds_may_differ():
    _, x = inputs({"logprobs": [math.log(2), math.log(0.5)], "old_logprobs": [0, 0]}, advantages=[1, -1])
    assert run("ppo-clip", x, clip_low=0.1, clip_high=0.3).per_token.tolist() == pytest.approx([-1.3, 0.9])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    columns = {"logprobs": [math.log(8), math.log(8), math.log(2)], "old_logprobs": [0, 0, 0]}
    # ratio 8, A -1: min(8, 3); ratio 8, A +1: clipped at 1.2 as ever; ratio 2, A -1: 2 is below the bound of 3.
    _, x = inputs(columns, advantages=[-1, 1, -1])
    assert run("ppo-clip", x, dual_clip=3.0).per_token.tolist() == pytest.approx([3.0, -1.2, 2.0])


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_F7_overflowing_ratio_gives_finite_loss_and_gradient(advantage):
    leaf, x = inputs({"logprobs": [-2.0], "old_logprobs": [-91.0]}, advantages=[advantage])  # exp(89) is inf in fp32
    out = run("ppo-clip", x)
    out.per_token.sum().backward()
    want = {1.0: -1.2, -1.0: math.exp(20), 0.0: 0.0}[advantage]  # e^20 = 4.85e8 after the clamp
    assert out.per_token.item() == pytest.approx(want, rel=1e-5)
    assert torch.isfinite(leaf.tensors["logprobs"].grad).all()


def test_F7_clamped_tokens_are_counted():
    _, x = inputs({"logprobs": [-2, -2, -40, -2], "old_logprobs": [-91, -2, -2, -99]}, mask=[True, True, True, False])
    total, count, reduce = run("ppo-clip", x).metrics["log_ratio_clamped"]
    assert (float(total), float(count), reduce) == (2, 3, "sum")  # +89 and -38; the fourth is masked


@pytest.mark.parametrize("junk", [-91.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("loss", COMPONENTS)
def test_F7_a_masked_token_contributes_exactly_zero(loss, junk):
    columns = {name: [junk, value] for name, value in ALL.items()}
    leaf, x = inputs(columns, mask=[False, True], advantages=[float("nan"), 1])
    out = run(loss, x)
    out.per_token.sum().backward()
    assert out.per_token[0].item() == 0
    for tensor in leaf.tensors.values():
        assert tensor.grad is None or (tensor.grad[0].item() == 0 and torch.isfinite(tensor.grad).all())
    assert all(math.isfinite(float(total)) for total, _, _ in out.metrics.values())


def test_F7_window_case():
    # Log-ratios 1000 and 0, A = 1; a window [0.5, 5] has masked the first and kept its place in the mean over two.
    leaf, x = inputs({"logprobs": [1000, 0], "old_logprobs": [0, 0]}, mask=[False, True], advantages=[1, 1])
    loss = (run("ppo-clip", x).per_token * torch.tensor([0.5, 0.5])).sum()
    loss.backward()
    assert loss.item() == -0.5
    assert leaf.tensors["logprobs"].grad.tolist() == [0, -0.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("loss", COMPONENTS)
def test_F7_what_is_not_finite_at_a_trained_token_stays_visible(loss, bad):
    """Also an infinity that a clamp would hide; at the other tokens of the sequence too where the loss has one ratio."""
    for name in COMPONENTS[loss].needed(COMPONENTS[loss].config()) - {"pair_ids", "pair_sign"}:
        columns = {n: [bad if n == name else v, v] for n, v in ALL.items()}
        _, x = inputs(columns, advantages=[1, 1])
        assert not math.isfinite(run(loss, x).per_token[0].item()), f"{bad} in {name}"


@pytest.mark.parametrize(
    ("estimator", "d", "value", "gradient"),  # d = log(ref / p); the gradient is with respect to log p = -dk/dd
    [
        ("k1", 2.0, -2.0, 1.0),
        ("k2", 2.0, 2.0, -2.0),  # d^2 / 2, -d
        ("k3", 0.0, 0.0, 0.0),
        ("k3", math.log(2), 2 - 1 - math.log(2), -1.0),  # 0.3069, 1 - e^d
        ("k3", -math.log(2), 0.5 - 1 + math.log(2), 0.5),  # 0.1931
        ("k3", 100.0, math.exp(20) - 21, 0.0),  # clamped at 20
    ],
)
def test_F7_kl_estimators(estimator, d, value, gradient):
    leaf, x = inputs({"logprobs": [-1.0], "reference_logprobs": [d - 1.0]})
    out = run("kl", x, estimator=estimator)
    out.per_token.sum().backward()
    assert out.per_token.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert leaf.tensors["logprobs"].grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-6)


def test_gradient_is_the_policy_gradient_inside_the_clip():
    # d(-r A)/d logp = -r A with r = e^0.1; outside the clip range and improving (r = 1.5, A = 1) it is 0.
    leaf, x = inputs({"logprobs": [0.1, math.log(1.5)], "old_logprobs": [0, 0]}, advantages=[2, 1])
    run("ppo-clip", x).per_token.sum().backward()
    assert leaf.tensors["logprobs"].grad.tolist() == pytest.approx([-2 * math.exp(0.1), 0])


def test_metrics_are_sums_and_counts_over_the_mask():
    _, x = inputs(
        {"logprobs": [math.log(1.5), 0, 0], "old_logprobs": [0, 0, 5]}, mask=[True, True, False], advantages=[1, 1, 1]
    )
    metrics = {k: (float(s), float(n), r) for k, (s, n, r) in run("ppo-clip", x).metrics.items()}
    assert metrics == {
        "clip_fraction": (1, 2, "mean"),
        "ratio": (2.5, 2, "mean"),
        "log_ratio_clamped": (0, 2, "sum"),
        "ratio_max": (1.5, 2, "max"),
    }


def test_entropy_bonus_raises_entropy():
    leaf, x = inputs({"entropy": [0.5, 2.0]}, mask=[True, False])
    out = run("entropy", x)
    out.per_token.sum().backward()
    assert out.per_token.tolist() == [-0.5, 0]
    assert leaf.tensors["entropy"].grad.tolist() == [-1, 0]
    assert float(out.metrics["entropy"][0]) == 0.5


def test_an_empty_microbatch_is_allowed():
    _, x = inputs({name: [] for name in ALL})
    for name in COMPONENTS:
        assert run(name, x).per_token.shape == (0,)


@pytest.mark.parametrize("options", [{"clip_low": 1.5}, {"dual_clip": 0.9}, {"log_ratio_clamp": 100.0}, {"clip": 0.2}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        miles_policy_losses.PpoClipConfig(**options)


def test_what_each_loss_needs_and_requires():
    assert {n: c.needed(c.config()) for n, c in COMPONENTS.items()} == {
        **{name: {"logprobs", "old_logprobs"} for name in ("ppo-clip", "dapo", "gspo", "cispo", "sapo")},
        "reinforce": {"logprobs"},
        "sft": {"logprobs"},
        "kl": {"logprobs", "reference_logprobs"},
        "dpo": {"logprobs", "reference_logprobs", "pair_ids", "pair_sign"},
        "value": {"values", "old_values", "returns"},
        "entropy": {"entropy"},
        "z-loss": {"logsumexp"},
        "distill": {"reverse_kl:teacher"},
    }
    assert {n: c.required(c.config()) for n, c in COMPONENTS.items() if c.required(c.config())} == {
        "kl": ("role/reference",),
        "dpo": ("role/reference",),
        "value": ("role/critic", "column/returns"),
        "distill": ("role/teacher",),
    }
    kl, distill = COMPONENTS["kl"], COMPONENTS["distill"]
    assert "old_logprobs" in kl.needed(kl.config(estimator="unbiased")) & kl.needed(kl.config(estimator="unbiased-k1"))
    assert distill.needed(distill.config(divergence="forward", top_k=8)) == {"forward_kl:teacher:8"}


def test_which_losses_let_samples_without_advantage_be_left_out():
    promised = {n for n, c in COMPONENTS.items() if c.traits.get("zero_advantage") == "no-gradient"}
    assert promised == {"ppo-clip", "dapo", "gspo", "cispo", "sapo", "reinforce"}  # the contract suite holds them to it


def test_F11_only_gspo_weighs_whole_sequences():
    assert {n for n, c in COMPONENTS.items() if c.traits.get("ratio") == "sequence"} == {"gspo"}


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_dapo_is_refused_with_another_aggregation(aggregation):
    env = Environment(run_config=SimpleNamespace(train=SimpleNamespace(aggregation=aggregation)), where="loss[0].use")
    check = partial(COMPONENTS["dapo"].check, COMPONENTS["dapo"].config(), env)
    if aggregation == "token-mean":
        check()
    else:
        with pytest.raises(ConfigError, match="the loss dapo is a mean over tokens"):
            check()


@pytest.mark.parametrize(
    ("rollout", "filters", "losses", "refused"),
    [
        ("single-turn", (), ("sft",), True),
        ("single-turn", ("nonzero-std",), ("sft",), False),
        ("single-turn", (), ("ppo-clip", "sft"), False),
        ("recorded", (), ("sft",), False),
    ],
)
def test_sft_is_refused_on_all_of_the_models_own_answers(rollout, filters, losses, refused):
    config = SimpleNamespace(rollout=SimpleNamespace(use=rollout), filter=filters, loss=losses)
    check = partial(
        COMPONENTS["sft"].check, COMPONENTS["sft"].config(), Environment(run_config=config, where="loss[0].use")
    )
    if not refused:
        return check()
    with pytest.raises(ConfigError, match=r'loss\[0\].use: loss "sft" makes all answers likelier alike'):
        check()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"variant": "ipo", "label_smoothing": 0.1}),
        ("gspo", {"variant": "pair"}),
        ("cispo", {"ratio_max": 0.5}),
        ("sapo", {"tau_negative": 0.0}),
        ("kl", {"estimator": "k4"}),
        ("value", {"clip": 0.0}),
        ("distill", {"top_k": -1}),
    ],
)
def test_options_without_a_meaning_are_refused(name, options):
    with pytest.raises(ValidationError):
        COMPONENTS[name].config(**options)


def test_index_names_the_components():
    index = json.loads(files(miles_policy_losses).joinpath("miles-components.json").read_text())
    assert [(c["name"], c["summary"]) for c in index["components"]] == [(c.name, c.summary) for c in COMPONENTS.values()]


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, miles_policy_losses as m; list(m.miles_losses()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
