"""Value and gradient of each loss by hand, with fp32 and with bf16 inputs. Each number is derived beside it."""

import math

import pytest

torch = pytest.importorskip("torch")
import losses_support as support  # noqa: E402 - needs torch

E, SIG = math.exp, lambda v: 1 / (1 + math.exp(-v))
LOG = math.log


def check(dtype, name, columns, values, gradients, *, leaf="logprobs", **kwargs):
    """Numbers by hand: to 1e-5 from fp32 inputs; from bf16 ones, whose 8 bits round -1.05 by up to 0.004, to 3%."""
    got, grads, _ = support.evaluate(name, columns, dtype=dtype, **kwargs)
    near = {"rel": 1e-5, "abs": 1e-6} if dtype is torch.float32 else {"rel": 0.03, "abs": 0.01}
    assert got == pytest.approx(values, **near)
    assert grads[leaf] == pytest.approx(gradients, **near)


both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# --- gspo: log-ratios 0.3 and -0.1 in one sequence: s = exp(0.2 / 2) = e^0.1 = 1.1052; token weights 1/2 ----------------
PAIR = {"logprobs": [-0.7, -1.1], "old_logprobs": [-1.0, -1.0]}
HALF = [0.5, 0.5]
S = E(0.1)


@both
@pytest.mark.parametrize(
    ("advantages", "options", "values", "gradients"),
    [
        # Inside the clip: -s A at both tokens. d s / d logp_t = s / 2, and the weights sum to 1: gradient -s A / 2 each.
        ([1, 1], {"clip_high": 0.2}, [-S, -S], [-S / 2, -S / 2]),
        ([-1, -1], {"clip_high": 0.2}, [S, S], [S / 2, S / 2]),
        # The paper's bound 4e-4: clipped for A > 0, without a gradient; for A < 0 the worse of both is the unclipped one.
        ([1, 1], {}, [-1.0004, -1.0004], [0, 0]),
        ([-1, -1], {}, [S, S], [S / 2, S / 2]),
        # The product of the ratios: s = exp(0.2), d s / d logp_t = s.
        ([1, 1], {"clip_high": 0.5, "length_norm": False}, [-E(0.2)] * 2, [-E(0.2)] * 2),
        # One ratio, two advantages: the sequence variant's gradient is s / 2 * (-1 + 1) / 2 = 0 at both tokens,
        ([1, -1], {"clip_high": 0.2}, [-S, S], [0, 0]),
        # the token variant's is -w s A_t at each.
        ([1, -1], {"clip_high": 0.2, "variant": "token"}, [-S, S], [-S / 2, S / 2]),
        ([1, 1], {"clip_high": 0.2, "variant": "token"}, [-S, -S], [-S / 2, -S / 2]),
    ],
)
def test_gspo(dtype, advantages, options, values, gradients):
    check(dtype, "gspo", PAIR, values, gradients, advantages=advantages, options=options, weights=HALF)


def test_gspo_ratios_are_of_the_trained_tokens_of_each_sequence():
    # Sequence 0: log-ratio 0.3 alone, its second token (5.0) is masked; sequence 1: -0.1.
    columns = {"logprobs": [-0.7, 4.0, -1.1], "old_logprobs": [-1.0, -1.0, -1.0]}
    got, _, out = support.evaluate(
        "gspo", columns, mask=[1, 0, 1], seq_ids=[0, 0, 1], advantages=[-1, -1, -1], options={"clip_low": 0.2}
    )
    assert got == pytest.approx([E(0.3), 0, E(-0.1)])
    assert support.numbers(out)["ratio"] == (pytest.approx(E(0.3) + E(-0.1)), 2, "mean")


def test_F7_gspo_clamps_the_sequence_ratio_and_counts():
    # Log-ratios 100 and 20: mean 60, beyond 20, at both tokens; the clamp has no gradient.
    got, grads, out = support.evaluate(
        "gspo", {"logprobs": [-1.0, -1.0], "old_logprobs": [-101.0, -21.0]}, advantages=[-1, -1], weights=HALF
    )
    assert got == pytest.approx([E(20)] * 2, rel=1e-5) and grads["logprobs"] == [0, 0]
    assert support.numbers(out)["log_ratio_clamped"] == (2, 2, "sum")


# --- other ratios ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "options", "value", "gradient"),
    [
        # -min(r, 5) A logp with logp = -0.5: the factor has no gradient, so the gradient is -min(r, 5) A.
        (LOG(2), 1, {}, 1.0, -2.0),
        (LOG(2), -1, {}, -1.0, 2.0),
        (LOG(8), 1, {}, 2.5, -5.0),  # 5 * 0.5
        (LOG(8), -1, {}, -2.5, 5.0),  # PPO's clip would keep 8 here
        (LOG(0.1), 1, {}, 0.05, -0.1),
        (LOG(0.1), 1, {"ratio_min": 0.5}, 0.25, -0.5),
    ],
)
def test_cispo(dtype, log_ratio, advantage, options, value, gradient):
    columns = {"logprobs": [-0.5], "old_logprobs": [-0.5 - log_ratio]}
    check(dtype, "cispo", columns, [value], [gradient], advantages=[advantage], options=options)


@both
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        # f(r) = 4 / tau * sigmoid(tau (r - 1)); df / dlogp = 4 sig (1 - sig) r, which is r at r = 1 whatever tau is.
        (1, 1, -2.0, -1.0),  # 4 * sigmoid(0)
        (1, -1, 2 / 1.05, 1.0),
        (2, 1, -4 * SIG(1), -4 * SIG(1) * SIG(-1) * 2),  # -2.9242, -1.5729
        (2, -1, 4 / 1.05 * SIG(1.05), 4 * SIG(1.05) * SIG(-1.05) * 2),
        (0.5, 1, -4 * SIG(-0.5), -4 * SIG(0.5) * SIG(-0.5) * 0.5),
        (1, 0, 0, 0),
    ],
)
def test_sapo(dtype, ratio, advantage, value, gradient):
    columns = {"logprobs": [-0.5], "old_logprobs": [-0.5 - LOG(ratio)]}
    check(dtype, "sapo", columns, [value], [gradient], advantages=[advantage])


def test_F7_sapo_far_from_the_old_policy_has_no_gradient():
    got, grads, out = support.evaluate("sapo", {"logprobs": [-1.0], "old_logprobs": [-1001.0]}, advantages=[-1])
    assert got == pytest.approx([4 / 1.05]) and grads["logprobs"] == [0]  # the gate is closed: sigmoid(1.05 e^20) = 1
    assert support.numbers(out)["log_ratio_clamped"] == (1, 1, "sum")


def test_dapo_clips_higher_above_than_below():
    columns = {"logprobs": [LOG(1.5), LOG(1.25), LOG(0.5)], "old_logprobs": [0, 0, 0]}
    got, grads, _ = support.evaluate("dapo", columns, advantages=[1, 1, -1])
    assert got == pytest.approx([-1.28, -1.25, 0.8])  # 1.25 would be clipped at 1.2
    assert grads["logprobs"] == pytest.approx([0, -1.25, 0])


@both
def test_reinforce_and_sft(dtype):
    columns = {"logprobs": [-1.5, -0.25]}
    check(dtype, "reinforce", columns, [3.0, -0.25], [-2, 1], advantages=[2, -1])  # -A logp, -A
    check(dtype, "sft", columns, [1.5, 0.25], [-1, -1], advantages=[7, 7])


# --- terms -------------------------------------------------------------------------------------------------------------


@both
def test_z_loss_and_distill(dtype):
    check(dtype, "z-loss", {"logsumexp": [3.0, -1.0]}, [9, 1], [6, -2], leaf="logsumexp")  # z^2, 2 z
    name = "reverse_kl:teacher"
    check(dtype, "distill", {name: [0.25, 2.0]}, [0, 2.0], [0, 1], leaf=name, mask=[0, 1])
    name = "forward_kl:teacher:4"
    options = {"divergence": "forward", "top_k": 4}
    check(dtype, "distill", {name: [0.25]}, [0.25], [1], leaf=name, options=options)


@both
@pytest.mark.parametrize(
    ("v", "old", "returns", "clip", "value", "gradient"),
    [
        (1.0, 0.0, 2.0, None, 0.5, -1.0),  # (1 - 2)^2 / 2, V - R
        (1.0, 0.0, 2.0, 0.25, 1.75**2 / 2, 0.0),  # held at 0.25: (0.25 - 2)^2 is worse, and it has no gradient
        (-1.0, 0.0, 2.0, 0.25, 4.5, -3.0),  # held at -0.25: (-2.25)^2 < (-3)^2
        (1.0, 0.875, 0.0, 0.25, 0.5, 1.0),  # moved by 0.125: both are (1 - 0)^2
    ],
)
def test_value(dtype, v, old, returns, clip, value, gradient):
    columns = {"values": [v], "old_values": [old], "returns": [returns]}
    check(dtype, "value", columns, [value], [gradient], leaf="values", options={"clip": clip})


def test_value_counts_what_was_clipped():
    columns = {"values": [1.0, 1.0, 9.0], "old_values": [0.0, 1.0, 0.0], "returns": [2.0, 2.0, 2.0]}
    metrics = support.numbers(support.evaluate("value", columns, mask=[1, 1, 0])[2])
    assert metrics == {"clip_fraction": (1, 2, "mean"), "predicted": (2, 2, "mean"), "return": (4, 2, "mean"),
                       "squared_error": (2, 2, "mean")}  # fmt: skip


W = E(0.5)  # p / old


@both
@pytest.mark.parametrize(
    ("estimator", "d", "value", "gradient"),  # d = log(ref / p); old = p - 0.5 where it is read
    [
        ("low-variance", 3.0, 10.0, 0.0),  # e^3 - 4 = 16.09, capped
        ("low-variance", LOG(2), 1 - LOG(2), -1.0),  # k3: 2 - 1 - ln 2, 1 - e^d
        ("low-variance", -20.0, 10.0, 0.0),  # e^-20 - 1 + 20 = 19
        ("unbiased", LOG(2), W * (1 - LOG(2)), W * (1 - LOG(2)) - W),  # w k3, w k3 + w (1 - e^d)
        ("unbiased", 0.0, 0.0, 0.0),
        ("unbiased-k1", 0.5, -0.5 * W, 0.5 * W),  # -w d, -w d + w
    ],
)
def test_kl_estimators_beyond_k3(dtype, estimator, d, value, gradient):
    columns = {"logprobs": [-1.0], "reference_logprobs": [d - 1.0], "old_logprobs": [-1.5]}
    check(dtype, "kl", columns, [value], [gradient], options={"estimator": estimator})


def test_expected_gradients_of_kl_estimators():
    """Over a vocabulary of three, exactly: sum over tokens of old(a) * gradient of the estimate at a, by the logits.

    "unbiased" and "unbiased-k1" give the gradient of KL(p || ref), also off policy; on policy k2 does too, k3 gives that
    of KL(ref || p), and k1 gives nothing.
    """
    logits = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64).log_softmax(0)
    far = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(0)

    def gradient(loss):
        leaf = logits.clone().requires_grad_()
        loss(leaf.log_softmax(0)).backward()
        return leaf.grad

    def estimate(estimator, old):
        def loss(logp):
            columns = {"logprobs": logp.float(), "reference_logprobs": reference.float(), "old_logprobs": old.float()}
            made = support.micro({"logprobs": [0.0] * 3})
            made.inputs.get = columns.__getitem__
            per_token = support.built("kl", estimator=estimator)(made.inputs).per_token
            return (per_token.double() * old.exp()).sum()

        return gradient(loss)

    true = gradient(lambda logp: (logp.exp() * (logp - reference)).sum())
    reverse = gradient(lambda logp: (reference.exp() * (reference - logp)).sum())
    here = logits.log_softmax(0)
    for old in (here, far):
        for estimator in ("unbiased", "unbiased-k1"):
            torch.testing.assert_close(estimate(estimator, old), true, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(estimate("k2", here), true, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(estimate("k3", here), reverse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(estimate("k1", here), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)


# --- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", support.COMPONENTS)
def test_P1_bf16_inputs_are_computed_in_fp32(name):
    """The same as fp32 inputs that hold the rounded numbers, bit by bit; the gradient is that one, rounded."""
    generator = torch.Generator().manual_seed(3)
    columns = {n: (torch.rand(8, generator=generator) - 1.5).bfloat16() for n in COLUMNS}
    columns |= {"pair_ids": torch.ones(8), "pair_sign": torch.tensor([1.0] * 4 + [-1.0] * 4)}
    columns = {n: v.float().tolist() for n, v in columns.items()}
    kwargs = {"seq_ids": [0] * 4 + [1] * 4, "advantages": [1.0, -1.0] * 4}
    exact, gradients, _ = support.evaluate(name, columns, **kwargs)
    got, rounded, out = support.evaluate(name, columns, dtype=torch.bfloat16, **kwargs)
    assert out.per_token.dtype is torch.float32 and got == exact
    for leaf, row in gradients.items():
        assert rounded[leaf] == torch.tensor(row).bfloat16().tolist()


COLUMNS = (
    "logprobs", "old_logprobs", "reference_logprobs", "entropy", "logsumexp", "values", "old_values", "returns",
    "reverse_kl:teacher",
)  # fmt: skip
