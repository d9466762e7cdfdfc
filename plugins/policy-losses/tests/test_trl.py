"""The same numbers as TRL on the same tensors, to 1e-6: value of the loss, and its gradient by every log-probability.

TRL's own `_compute_loss` runs, on a stand-in for its trainer that has the settings and hands out given log-probabilities
instead of a model's. Where its normalisation differs from ours:

- "grpo" and "sapo" average tokens within each sequence and then sequences: our "sequence-mean-token-mean". TRL does so per
  microbatch and divides by the number of microbatches, which is the same only when they hold equally many sequences.
- "dapo" and "cispo" divide by the tokens of the whole generation batch, as our "token-mean" does; "bnpo" by those of the
  microbatch, which is "token-mean" for one microbatch.
- "dr_grpo" divides by sequences times `max_completion_length`: our "constant-length".
- a sequence without a trained token counts in TRL's number of sequences, and not in ours.
- RLOO's ratio is that of the whole sequence (`gspo` with length_norm = false), one term per sequence.
- the KL term is inside TRL's per-token loss with factor beta; here it is a `[[loss]]` of its own with weight beta.
- DPO averages over pairs; here through the weights of scope "pair".
- GRPO adds 1e-4 to the standard deviation of rewards where our default is 1e-6; RLOO's baseline is the same.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason='TRL is not installed: pip install "miles-policy-losses[trl]"')
import losses_support as support  # noqa: E402 - needs torch
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

from miles_core.batch import token_weights  # noqa: E402
from miles_core.testing.samples import make_sample  # noqa: E402
from miles_core.types import TrainBatch  # noqa: E402
from miles_core.weights import weigh  # noqa: E402

B, T, L = 6, 7, 16
"""Sequences, longest completion, `max_completion_length`."""
NEAR = {"rtol": 1e-6, "atol": 1e-7}


class Accelerator:
    """One process."""

    num_processes, device = 1, torch.device("cpu")

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction="sum"):
        return tensor

    gather_for_metrics = gather


def tensors(seed=0, spread=0.3):
    """[B, T] numbers: log-probabilities of three policies, advantages [B], and a mask with gaps and uneven lengths."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(B, T, generator=generator)  # noqa: E731
    mask = torch.zeros(B, T, dtype=torch.long)
    for row, length in enumerate((7, 1, 4, 6, 2, 5)):
        mask[row, :length] = 1
    mask[3, 2] = 0  # a tool's token
    logps = -noise().abs() - 0.05
    return {
        "logps": logps,
        "old": logps + spread * noise(),
        "ref": logps + spread * noise(),
        "advantages": torch.tensor([1.2, -0.7, 0.0, 2.0, -1.5, 0.3]),
        "mask": mask,
    }


def trainer(logps, **settings):
    """What `_compute_loss` reads of a GRPO or RLOO trainer."""
    args = {
        "use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }  # fmt: skip
    values = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0,
        "importance_sampling_level": "token", "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "use_vllm": False, "vllm_importance_sampling_correction": False, "max_completion_length": L,
        "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False,
    }  # fmt: skip
    args |= {k: v for k, v in settings.items() if k in args}
    values |= {k: v for k, v in settings.items() if k not in args}
    return SimpleNamespace(
        **values,
        args=SimpleNamespace(**args),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, torch.zeros_like(logps), None),
    )


def theirs(data, cls=GRPOTrainer, **settings):
    """(loss, gradient by log-probabilities [B, T]) of TRL."""
    logps, mask = data["logps"].clone().requires_grad_(), data["mask"]
    inputs = {
        "prompt_ids": torch.zeros(B, 2, dtype=torch.long),
        "prompt_mask": torch.ones(B, 2, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "old_logps": (data["old"] * mask).sum(1),
        "ref_per_token_logps": data["ref"],
        "num_items_in_batch": mask.sum(),
    }
    loss = cls._compute_loss(trainer(logps, **settings), None, inputs)
    loss.backward()
    return loss.item(), logps.grad


def ours(data, terms, aggregation, split=((0, 1, 2, 3, 4, 5),)):
    """The same of `terms`, rows of (name, weight, options), over any split into microbatches. Token 0 of each sequence is
    one of the prompt."""
    masks = [np.concatenate([[False], row.bool().numpy()]) for row in data["mask"]]
    weights = [w.tolist() for w in token_weights(masks, range(B), aggregation, L)]

    def padded(rows, i):
        return [0.0, *rows[i].tolist()]

    rows = [
        {
            "mask": masks[i].tolist(),
            "advantages": [data["advantages"][i].item()] * (T + 1),
            "logprobs": padded(data["logps"], i),
            "old_logprobs": padded(data["old"], i),
            "reference_logprobs": padded(data["ref"], i),
        }
        for i in range(B)
    ]
    value, gradient = 0.0, torch.zeros(B, T)
    for name, factor, options in terms:
        part, grads = support.over_split(support.built(name, **options), rows, weights, split)
        value += factor * part
        gradient += factor * torch.tensor([g["logprobs"][1:] for g in grads])
    return value, gradient


SEQ, TOKEN, CONSTANT = "sequence-mean-token-mean", "token-mean", "constant-length"
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "GRPO": ({"loss_type": "grpo"}, [("ppo-clip", 1, {})], SEQ),
    "PPO-clip, token-mean": ({"loss_type": "bnpo"}, [("ppo-clip", 1, {})], TOKEN),
    "PPO-clip, dual": ({"loss_type": "bnpo", "delta": 1.3}, [("ppo-clip", 1, {"dual_clip": 1.3})], TOKEN),
    "PPO-clip, asymmetric": (
        {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.4},
        [("ppo-clip", 1, {"clip_low": 0.1, "clip_high": 0.4})],
        SEQ,
    ),
    "Dr. GRPO": ({"loss_type": "dr_grpo"}, [("ppo-clip", 1, {})], CONSTANT),
    "DAPO": ({"loss_type": "dapo", "epsilon_high": 0.28}, [("dapo", 1, {})], TOKEN),
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 5.0}, [("cispo", 1, {})], TOKEN),
    "CISPO, bounded at 1.1": ({"loss_type": "cispo", "epsilon_high": 1.1}, [("cispo", 1, {"ratio_max": 1.1})], TOKEN),
    "SAPO": ({"loss_type": "sapo"}, [("sapo", 1, {})], SEQ),
    "SAPO, other taus": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 3.0},
        [("sapo", 1, {"tau_positive": 0.5, "tau_negative": 3.0})],
        SEQ,
    ),
    "GSPO": (SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}, [("gspo", 1, {})], SEQ),
    "GSPO, wide": (SEQUENCE, [("gspo", 1, {"clip_low": 0.2, "clip_high": 0.2})], SEQ),
    "k3": ({"beta": 0.04}, [("ppo-clip", 1, {}), ("kl", 0.04, {"estimator": "k3"})], SEQ),
    "unbiased k3": (
        {"beta": 0.04, "use_bias_correction_kl": True, "loss_type": "bnpo"},
        [("ppo-clip", 1, {}), ("kl", 0.04, {"estimator": "unbiased"})],
        TOKEN,
    ),
}


@pytest.mark.parametrize("split", [((0, 1, 2, 3, 4, 5),), ((4,), (0, 2, 5), (3, 1))], ids=["whole", "three"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_family(case, split, seed):
    settings, terms, aggregation = CASES[case]
    data = tensors(seed)
    loss, gradient = theirs(data, **settings)
    value, own = ours(data, terms, aggregation, split)
    assert value == pytest.approx(loss, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(own, gradient, **NEAR)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_rloo(spread):
    """Clipped ratio of the whole sequence, one term per sequence."""
    data = tensors(2, spread)
    data["mask"][3, 2] = 1  # TRL's RLOO knows no tool mask
    loss, gradient = theirs(data, RLOOTrainer)
    options = {"length_norm": False, "clip_low": 0.2, "clip_high": 0.2}
    value, own = ours(data, [("gspo", 1, options)], SEQ)
    assert value == pytest.approx(loss, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(own, gradient, **NEAR)


def test_rloo_on_policy_is_reinforce():
    """At a ratio of 1 the gradient is that of `reinforce` summed over each sequence; the value is another one."""
    data = tensors(2)
    data["old"] = data["logps"].clone()
    _, gradient = theirs(data, RLOOTrainer)
    _, own = ours(data, [("reinforce", 1, {})], "sequence-mean-token-sum")
    torch.testing.assert_close(own, gradient, **NEAR)


def test_k1_is_the_penalty_of_rloo():
    """TRL's RLOO takes sum_t (old - ref) from each reward: k1 at the old policy, summed over tokens."""
    data = tensors(3)
    expected = ((data["old"] - data["ref"]) * data["mask"]).sum(-1).mean().item()  # rloo_trainer: per_token_kl, kl
    value, _ = ours(data | {"logps": data["old"]}, [("kl", 1, {"estimator": "k1"})], "sequence-mean-token-sum")
    assert value == pytest.approx(expected, rel=1e-6)


def test_k2_has_the_gradient_of_trls_unbiased_kl_near_the_reference():
    """TRL has no k2. At the old policy, d = log(ref/p): TRL's corrected k3 has gradient k3 + 1 - e^d = -d, as k2 has."""
    data = tensors(4)
    data["old"] = data["logps"].clone()
    without = theirs(data | {"advantages": torch.zeros(B)}, beta=1.0, use_bias_correction_kl=True, loss_type="bnpo")
    _, own = ours(data, [("kl", 1, {"estimator": "k2"})], TOKEN)
    torch.testing.assert_close(own, without[1], rtol=1e-5, atol=1e-7)


# --- DPO ---------------------------------------------------------------------------------------------------------------


def preference_trainer(logps, ref, **settings):
    zeros = torch.zeros_like(logps)
    outputs = lambda values: SimpleNamespace(  # noqa: E731
        log_probs=values, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
    )
    values = {
        "aux_loss_enabled": False, "precompute_ref_logps": False, "ld_alpha": None, "f_divergence_type": "reverse_kl",
        "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1, "label_smoothing": 0.0, "use_weighting": False,
        "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    policy, reference = (lambda **k: outputs(logps)), (lambda **k: outputs(ref))
    model = SimpleNamespace(training=True)
    fake = SimpleNamespace(
        **(values | settings), accelerator=Accelerator(), model=model, ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    return fake, policy


PAIRS, LENGTHS = 3, (5, 2, 4, 3, 6, 1)
"""Completion lengths: three chosen answers, then three rejected ones, as TRL has them."""


@pytest.mark.parametrize("split", [((0, 1, 2, 3, 4, 5),), ((2, 5), (0, 3, 1, 4)), ((3, 0), (4, 1), (5, 2))])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"beta": 2.0}, {"beta": 2.0}),
        ({"loss_types": ["ipo"], "beta": 0.5}, {"variant": "ipo", "beta": 0.5}),
    ],
)
def test_dpo(settings, options, split, monkeypatch):
    import contextlib

    import trl.trainer.dpo_trainer as module

    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *a: contextlib.nullcontext())
    monkeypatch.setattr(module, "is_peft_model", lambda model: False)
    generator = torch.Generator().manual_seed(5)
    width = 2 + max(LENGTHS)  # two prompt tokens
    completion = torch.zeros(2 * PAIRS, width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        completion[row, 2 : 2 + length] = 1
    shifted = completion[:, 1:]
    logps = (-torch.randn(2 * PAIRS, width - 1, generator=generator).abs() * shifted).requires_grad_()
    ref = -torch.randn(2 * PAIRS, width - 1, generator=generator).abs() * shifted
    fake, policy = preference_trainer(logps, ref, **settings)
    inputs = {"completion_mask": completion, "input_ids": torch.zeros_like(completion)}
    inputs["attention_mask"] = torch.ones_like(completion)
    loss = DPOTrainer._compute_loss(fake, policy, inputs, False)
    (gradient,) = torch.autograd.grad((loss), logps)

    samples = [
        make_sample(length, prompt_len=2, index=i, metadata={"pair": i % PAIRS, "chosen": i < PAIRS})
        for i, length in enumerate(LENGTHS)
    ]
    pairs = [(i, i + PAIRS) for i in range(PAIRS)]
    batch = TrainBatch(samples=samples, mask=[s.loss_mask for s in samples], shared=pairs)
    weigh(batch, batch.mask, "token-mean", 0, ["pair"])
    rows = [
        {
            "mask": sample.loss_mask.tolist(),
            "advantages": [0.0] * sample.num_tokens,
            "logprobs": [0.0, *logps[i, : sample.num_tokens - 1].tolist()],
            "reference_logprobs": [0.0, *ref[i, : sample.num_tokens - 1].tolist()],
            **{name: batch.columns[name][i].tolist() for name in ("pair_ids", "pair_sign")},
        }
        for i, sample in enumerate(samples)
    ]
    weights = [w.tolist() for w in batch.token_weights["pair"]]
    value, grads = support.over_split(support.built("dpo", **options), rows, weights, split)
    assert value == pytest.approx(loss.item(), rel=1e-6)
    for i, sample in enumerate(samples):
        n = sample.num_tokens - 1
        # The masked first place of a completion row is a prompt token: TRL's row carries a zero log-probability there.
        own = torch.tensor(grads[i]["logprobs"][1:])
        torch.testing.assert_close(own, gradient[i, :n] * shifted[i, :n], **NEAR)
