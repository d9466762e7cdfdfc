"""`dpo`: numbers by hand, and that a pair is found wherever its samples stand in a microbatch."""

import math

import pytest

torch = pytest.importorskip("torch")
import losses_support as support  # noqa: E402 - needs torch

SIG = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
NLL = lambda v: -math.log(SIG(v))  # noqa: E731

# Chosen: two tokens, log-ratio 0.5 each: h = 1. Rejected: one token, log-ratio -1. Margin 2 of sums, 1.5 of means.
COLUMNS = {
    "logprobs": [-0.5, -0.5, -2.0],
    "reference_logprobs": [-1.0, -1.0, -1.0],
    "pair_ids": [1, 1, 1],
    "pair_sign": [1, 1, -1],
}
KWARGS = {"seq_ids": [0, 0, 1], "weights": [1 / 3] * 3}  # one pair of three tokens: the weights of scope "pair"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("options", "value", "slope"),  # slope: d loss / d margin, of sums; of means for ipo
    [
        ({"beta": 0.5}, NLL(1), -0.5 * SIG(-1)),  # beta m = 1: 0.3133, -0.1345
        # 0.9 * 0.3133 + 0.1 * 1.3133; 0.5 * (-0.9 sig(-1) + 0.1 sig(1))
        ({"beta": 0.5, "label_smoothing": 0.1}, 0.9 * NLL(1) + 0.1 * NLL(-1), 0.5 * (-0.9 * SIG(-1) + 0.1 * SIG(1))),
        ({"beta": 0.5, "variant": "ipo"}, 0.25, 1.0),  # (1.5 - 1 / (2 * 0.5))^2, 2 * 0.5
        ({"beta": 0.25, "variant": "ipo"}, 0.25, -1.0),  # (1.5 - 2)^2
    ],
)
def test_dpo(dtype, options, value, slope):
    got, grads, _ = support.evaluate("dpo", COLUMNS, options=options, dtype=dtype, **KWARGS)
    each = slope / 2 if options.get("variant") == "ipo" else slope  # a token of two is half of a mean
    near = {"rel": 1e-5} if dtype is torch.float32 else {"rel": 0.01}
    assert got == pytest.approx([value] * 3, rel=1e-5)  # the inputs are bf16 numbers
    assert grads["logprobs"] == pytest.approx([each, each, -slope], **near)


def test_at_the_reference_the_loss_is_log_2_and_has_a_gradient():
    # m = 0: -log sigmoid(0) = ln 2, slope -beta / 2. A formula with abs() would have a corner here.
    columns = COLUMNS | {"logprobs": [-1.0, -1.0, -1.0]}
    got, grads, out = support.evaluate("dpo", columns, **KWARGS)
    assert got == pytest.approx([math.log(2)] * 3)
    assert grads["logprobs"] == pytest.approx([-0.05, -0.05, 0.05])
    assert support.numbers(out)["accuracy"] == (0, 1, "mean")


def test_F7_far_apart_is_finite():
    columns = COLUMNS | {"logprobs": [-2000.0, -2000.0, -1.0]}
    got, grads, _ = support.evaluate("dpo", columns, **KWARGS)
    assert got == pytest.approx([399.8] * 3)  # beta m = 0.1 * (-1999 * 2 - 0)
    assert grads["logprobs"] == pytest.approx([-0.1, -0.1, 0.1])


def test_pairs_are_found_wherever_they_stand():
    """Two pairs interleaved, an answer in two segments, and a sample without a pair, which counts for nothing."""
    # Sequences: 0 chosen of pair 2, 1 rejected of pair 7 in segments 1 and 3, 2 no pair, 4 rejected of 2, 5 chosen of 7
    columns = {
        "logprobs": [0.0, -3.0, -9.0, -4.0, -1.0, -2.0],
        "reference_logprobs": [-1.0, -2.0, -2.0, -2.0, -2.0, -2.0],
        "pair_ids": [2, 7, 0, 7, 2, 7],
        "pair_sign": [1, -1, 0, -1, -1, 1],
    }
    got, grads, out = support.evaluate("dpo", columns, seq_ids=range(6), options={"beta": 1.0})
    # Pair 2: h = 1 against 1: m = 0. Pair 7: 0 against -1 - 2 = -3: m = 3.
    assert got == pytest.approx([NLL(0), NLL(3), 0, NLL(3), NLL(0), NLL(3)])
    assert grads["logprobs"][2] == 0
    metrics = support.numbers(out)
    assert metrics["margin"] == (pytest.approx(3), 2, "mean") and metrics["accuracy"] == (1, 2, "mean")
    assert metrics["reward_chosen"] == (pytest.approx(1), 2, "mean")
    assert metrics["reward_rejected"] == (pytest.approx(1 - 3), 2, "mean")


def test_many_pairs_of_long_answers_are_told_apart():
    """The number of a pair is a mean over thousands of tokens, another count on each side: in fp32, 5001 * 4099 is beyond
    2^24, and the two sides of a pair would not have the same number."""
    long, short, first = 5001, 4001, 4099
    ids = [float(i) for pair in range(first, first + 3) for i in [pair] * (long + short)]
    sign = ([1.0] * long + [-1.0] * short) * 3
    logprobs = [v for h in (1.0, 2.0, 3.0) for v in [h / long] * long + [-1 / short] * short]
    columns = {"logprobs": logprobs, "reference_logprobs": [0.0] * len(ids), "pair_ids": ids, "pair_sign": sign}
    seq_ids = [s for s in range(6) for _ in range((long, short)[s % 2])]
    got, _, _ = support.evaluate("dpo", columns, seq_ids=seq_ids, options={"beta": 1.0})
    assert got[:: long + short] == pytest.approx([NLL(2), NLL(3), NLL(4)], rel=1e-4)  # m = h + 1
