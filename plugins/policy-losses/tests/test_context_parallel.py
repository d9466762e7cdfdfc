"""Losses with sequence statistics give the same when each sequence is cut in two and its halves lie on two ranks.

Two threads stand for the ranks: `seq` adds up over both, and its backward pass adds up the gradients, as an all-reduce in
a context-parallel trainer does.
"""

import threading

import pytest

torch = pytest.importorskip("torch")
import losses_support as support  # noqa: E402 - needs torch

from miles_core.testing.contracts.loss import Sequences  # noqa: E402

CASES = [
    ("gspo", {"clip_low": 0.5, "clip_high": 0.5}),
    ("gspo", {"clip_low": 0.5, "clip_high": 0.5, "variant": "token"}),
    ("gspo", {"clip_low": 0.5, "clip_high": 0.9, "length_norm": False}),
    ("dpo", {"beta": 0.5}),
    ("dpo", {"variant": "ipo"}),
]


class Exchange:
    """Sums over two threads."""

    def __init__(self):
        self.barrier, self.slots = threading.Barrier(2, timeout=30), {}

    def total(self, rank, tensor):
        self.slots[rank] = tensor.detach().clone()
        self.barrier.wait()
        result = self.slots[0] + self.slots[1]
        self.barrier.wait()
        return result


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, exchange, rank):
        ctx.exchange, ctx.rank = exchange, rank
        return exchange.total(rank, tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange.total(ctx.rank, grad), None, None


class TwoRankSequences(Sequences):
    """`seq` of one of two ranks: every sum is a sum over both."""

    exchange, rank, num = None, 0, 0

    def sum(self, values):
        kept = values.where(self.mask, values.new_zeros(()))
        own = values.new_zeros(self.num).index_add(0, self.seq_ids, kept)
        if not own.requires_grad:  # both ranks must meet in the backward pass as well, or in none
            return self.exchange.total(self.rank, own)
        return AllReduce.apply(own, self.exchange, self.rank)


def columns():
    """Three pairs of sequences of 4, 2, 3, 5, 2, 2 tokens; numbers without a pattern."""
    generator, lengths = torch.Generator().manual_seed(1), (4, 2, 3, 5, 2, 2)
    n = sum(lengths)
    draw = lambda: (-torch.rand(n, generator=generator) - 0.1).tolist()  # noqa: E731
    spread = lambda row: [v for v, length in zip(row, lengths, strict=True) for _ in range(length)]  # noqa: E731
    named = {"logprobs": draw(), "old_logprobs": draw(), "reference_logprobs": draw()}
    named |= {"pair_ids": spread((1, 1, 2, 3, 2, 3)), "pair_sign": spread((1, -1, -1, 1, 1, -1))}
    mask = [i % 5 != 0 for i in range(n)]
    return named, mask, spread((1.0, -1.0, 0.5, 2.0, -0.5, 1.0)), spread(range(6))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_halves_on_two_ranks_give_the_whole(name, options):
    named, mask, advantages, seq_ids = columns()
    whole, gradients, _ = support.evaluate(name, named, mask=mask, advantages=advantages, seq_ids=seq_ids, options=options)
    exchange, halves = Exchange(), ([], [])
    for i in range(len(mask)):
        halves[i % 2].append(i)
    results, errors = {}, []

    def work(rank):
        try:
            pick = lambda row: [row[i] for i in halves[rank]]  # noqa: E731
            made = support.micro(
                {k: pick(v) for k, v in named.items()},
                mask=pick(mask), advantages=pick(advantages), seq_ids=pick(seq_ids),
            )  # fmt: skip
            seq = TwoRankSequences(torch, made.inputs.seq_ids, made.inputs.mask)
            seq.exchange, seq.rank, seq.num = exchange, rank, 6
            made.inputs.seq = seq
            out = support.built(name, **options)(made.inputs)
            out.per_token.sum().backward()
            results[rank] = (out.per_token.tolist(), made.leaves["logprobs"].grad.tolist())
        except Exception as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors
    for rank, half in enumerate(halves):
        values, grads = results[rank]
        assert values == pytest.approx([whole[i] for i in half], rel=1e-5)
        assert grads == pytest.approx([gradients["logprobs"][i] for i in half], rel=1e-5, abs=1e-7)
