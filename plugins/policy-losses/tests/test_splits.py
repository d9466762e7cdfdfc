"""F4: the weighted sum of a loss and its gradient are the same for every split of the sequences into microbatches.

All four aggregations of the core, its own token weights, every set partition of four sequences (15), fp32 and bf16 inputs;
the whole is compared with the objective written out sequence by sequence.
"""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import losses_support as support  # noqa: E402 - needs torch

from miles_core.batch import token_weights  # noqa: E402
from miles_core.testing.samples import make_sample  # noqa: E402
from miles_core.types import TrainBatch  # noqa: E402
from miles_core.weights import _weigh_pairs  # noqa: E402

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length")
MASKS = ([0, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0])
"""Lengths 1, 3, 2, 2 of trained tokens, 8 in all, as the first is a prompt token and two lie inside or at the end."""
RATIOS = ([0, 0.2], [0, 0.3, -0.1, 0.1], [0, 9.0, -0.4, 0.2], [0, 0.1, 0.1, -9.0])
"""Log-ratios; 9 stands where the mask is False."""
ADVANTAGES = (1.0, -0.5, 2.0, -1.0)


def sequences():
    made = []
    for mask, ratio, advantage in zip(MASKS, RATIOS, ADVANTAGES, strict=True):
        logprobs = [-0.5 - 0.25 * i for i in range(len(mask))]
        made.append(
            {
                "mask": mask,
                "advantages": [advantage] * len(mask),
                "logprobs": logprobs,
                "old_logprobs": [p - r for p, r in zip(logprobs, ratio, strict=True)],
                "reference_logprobs": [p + r / 2 for p, r in zip(logprobs, ratio, strict=True)],
                "entropy": [1.0 + r for r in ratio],
                "logsumexp": [2.0 - r for r in ratio],
                "values": [0.5 + r for r in ratio],
                "old_values": [0.25] * len(mask),
                "returns": [1.0] * len(mask),
                "reverse_kl:teacher": [0.5 + r * r for r in ratio],
            }
        )
    return made


def weights_of(aggregation):
    rows = token_weights([np.array(m, dtype=bool) for m in MASKS], range(4), aggregation, 4)
    return [row.tolist() for row in rows]


def flat(rows):
    return [v for row in rows for leaf in sorted(row) for v in row[leaf]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(set(support.COMPONENTS) - {"dpo"}))
def test_F4_every_split_gives_the_same_loss_and_gradient(name, dtype):
    options = {"gspo": {"clip_low": 0.25, "clip_high": 0.25}}.get(name, {})
    loss, rows = support.built(name, **options), sequences()
    for aggregation in AGGREGATIONS:
        weights = weights_of(aggregation)
        whole, gradient = support.over_split(loss, rows, weights, [(0, 1, 2, 3)], dtype)
        assert any(flat(gradient))
        for split in support.partitions([0, 1, 2, 3]):
            value, got = support.over_split(loss, rows, weights, split, dtype)
            assert value == pytest.approx(whole, rel=1e-6, abs=1e-7), f"{aggregation}, {split}"
            assert flat(got) == pytest.approx(flat(gradient), rel=1e-6, abs=1e-7), f"{aggregation}, {split}"


def test_F4_gspo_by_hand():
    """s of each sequence from its trained log-ratios: e^0.2, e^0.1, e^-0.1, e^0.1; clip 0.25 leaves all inside."""
    s = [math.exp(v) for v in (0.2, (0.3 - 0.1 + 0.1) / 3, (-0.4 + 0.2) / 2, (0.1 + 0.1) / 2)]
    objective = [-v * a for v, a in zip(s, ADVANTAGES, strict=True)]  # the loss at each token of a sequence
    want = {
        "token-mean": sum(n * v for n, v in zip((1, 3, 2, 2), objective, strict=True)) / 8,
        "sequence-mean-token-mean": sum(objective) / 4,  # the paper's
        "sequence-mean-token-sum": sum(n * v for n, v in zip((1, 3, 2, 2), objective, strict=True)) / 4,
        "constant-length": sum(n * v for n, v in zip((1, 3, 2, 2), objective, strict=True)) / 16,
    }
    loss = support.built("gspo", clip_low=0.25, clip_high=0.25)
    for aggregation in AGGREGATIONS:
        value, rows = support.over_split(loss, sequences(), weights_of(aggregation), [(0, 2), (1,), (3,)])
        assert value == pytest.approx(want[aggregation], rel=1e-6)
        # Under sequence-mean-token-mean: d / d logp_t = -A s / n / 4 at each of a sequence's n trained tokens.
        if aggregation == "sequence-mean-token-mean":
            for row, mask, v, n in zip(rows, MASKS, objective, (1, 3, 2, 2), strict=True):
                assert row["logprobs"] == pytest.approx([m * v / n / 4 for m in mask])


def test_F4_reinforce_by_hand():
    """-A log p summed over trained tokens; log p = -0.5 - 0.25 i at place i, so the sums are 0.75, 3, 2.25 and 1.75."""
    sums = [0.75, 0.75 + 1.0 + 1.25, 1.0 + 1.25, 0.75 + 1.0]
    assert sums == [0.75, 3.0, 2.25, 1.75]
    total = sum(a * v for a, v in zip(ADVANTAGES, sums, strict=True))  # 0.75 - 1.5 + 4.5 - 1.75 = 2
    means = sum(a * v / n for a, v, n in zip(ADVANTAGES, sums, (1, 3, 2, 2), strict=True))
    want = {"token-mean": total / 8, "sequence-mean-token-mean": means / 4, "sequence-mean-token-sum": total / 4,
            "constant-length": total / 16}  # fmt: skip
    for aggregation, value in want.items():
        got, _ = support.over_split(support.built("reinforce"), sequences(), weights_of(aggregation), [(0,), (1, 2, 3)])
        assert got == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"variant": "ipo"}])
def test_F4_pairs_in_every_split_that_keeps_them_whole(options, dtype):
    """Sequences 0 and 2 are a pair, and 1 and 3. With the weights of scope "pair" the sum is the mean of the two losses."""
    samples = [
        make_sample(len(m), prompt_len=0, mask=m, index=i, metadata={"pair": i % 2, "chosen": i < 2})
        for i, m in enumerate(MASKS)
    ]
    batch = TrainBatch(samples=samples, mask=[s.loss_mask for s in samples], shared=[(0, 2), (1, 3)])
    _weigh_pairs(batch, alone=True)
    weights = [w.tolist() for w in batch.token_weights["pair"]]
    rows = sequences()
    for i, row in enumerate(rows):
        row |= {name: batch.columns[name][i].tolist() for name in ("pair_ids", "pair_sign")}
    loss = support.built("dpo", **options)
    whole, gradient = support.over_split(loss, rows, weights, [(0, 1, 2, 3)], dtype)
    for split in ([(0, 2), (1, 3)], [(3, 2, 1, 0)], [(1, 3), (2, 0)]):
        value, got = support.over_split(loss, rows, weights, split, dtype)
        assert value == pytest.approx(whole, rel=1e-6)
        assert flat(got) == pytest.approx(flat(gradient), rel=1e-6, abs=1e-8)
    if not options and dtype is torch.float32:
        # log p - log ref = -ratio / 2 at trained tokens: h = -0.1, -0.15, 0.1, -0.1; margins -0.2 and -0.05, beta 0.1.
        assert whole == pytest.approx(sum(math.log1p(math.exp(0.1 * m)) for m in (0.2, 0.05)) / 2, rel=1e-6)
    with pytest.raises(AssertionError):  # and a pair that is torn apart is another loss: only `shared` keeps it whole
        value, _ = support.over_split(loss, rows, weights, [(0, 1), (2, 3)], dtype)
        assert value == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", support.COMPONENTS)
def test_F6_nothing_trainable_gives_zero_and_no_nan(name):
    rows = [row | {"mask": [0] * len(row["mask"]), "pair_ids": [0] * len(row["mask"]), "pair_sign": [0] * len(row["mask"])}
            for row in sequences()]  # fmt: skip
    weights = [[1.0] * len(row["mask"]) for row in rows]
    value, gradient = support.over_split(support.built(name), rows, weights, [(0, 1, 2, 3)])
    assert value == 0 and not any(flat(gradient))


def test_F5_a_masked_truncated_sample_leaves_numerator_and_denominator():
    """30 tokens of loss 1 (-logp), 5 of them of a truncated sample: 25/25 with the mask, 30/30 without it."""
    rows = [{"mask": [1] * n, "advantages": [1.0] * n, "logprobs": [-1.0] * n} for n in (25, 5)]
    for cut, total in ((True, 25), (False, 30)):
        rows[1]["mask"] = [0 if cut else 1] * 5
        weights = token_weights([np.array(r["mask"], dtype=bool) for r in rows], range(2), "token-mean")
        value, gradient = support.over_split(support.built("sft"), rows, [w.tolist() for w in weights], [(0,), (1,)])
        assert value == pytest.approx(1.0) and gradient[0]["logprobs"] == pytest.approx([-1 / total] * 25)
        assert gradient[1]["logprobs"] == pytest.approx([0 if cut else -1 / total] * 5)
