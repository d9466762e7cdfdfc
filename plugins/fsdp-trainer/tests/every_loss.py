"""Loss and gradient of every registered loss, by split, number format and number of ranks. Run as a script it is one of
two ranks (gloo), started by test_every_loss.py; writes results-<rank>.pt."""

import json
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import fsdp_support as support
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import miles_policy_losses
from miles_core.trainers import shard_indices
from miles_core.weights import pair_tuples, weigh
from miles_fsdp_trainer import FsdpConfig
from miles_fsdp_trainer.objective import Term
from miles_fsdp_trainer.weights import full, like

SCOPES = ("policy", "value", "pair")
SHARED = {"critic": {"shared": True}}


def make_models(folder):
    """(policy, teacher): tiny models with small weights, so that bf16 is off by percents and not by its own size."""
    for name, seed in (("policy", 7), ("teacher", 8)):
        config = support.CONFIGS["llama"].__class__(**{**support._SHAPE, "initializer_range": 0.12})
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder / "policy", folder / "teacher"


def roles_with(teacher):
    return {"reference": {}, "teacher": {"path": str(teacher)}, "critic": {}}


def variants():
    """(id, component, options): each loss as it comes, and with each other value of each option that is a choice, or a
    number that may be left out."""
    for component in miles_policy_losses.miles_losses():
        yield component.name, component, {}
        for name, info in component.config.model_fields.items():
            if get_origin(info.annotation) is Literal:
                for value in get_args(info.annotation):
                    if value != info.default:
                        yield f"{component.name}, {name} = {value}", component, {name: value}
            elif type(None) in get_args(info.annotation):
                yield f"{component.name}, {name} = 3", component, {name: 3}


VARIANTS = {key: (component, options) for key, component, options in variants()}


def batch_for(needs):
    """Three groups of four, in pairs of two, with a random column for each of `needs` that no model computes."""
    batch = support.random_batch(seed=5, longest=5)
    rng = np.random.default_rng(17)
    for i, sample in enumerate(batch.samples):
        sample.reward, sample.metadata["pair"] = float(rng.normal()), i // 2
    batch.shared = pair_tuples(batch.samples)
    weigh(batch, batch.mask, "sequence-mean-token-mean", 0, SCOPES)
    for name in sorted(needs - batch.columns.keys()):
        # Log-probabilities are near those of a random model over 61 tokens, ln 61 = 4.1; values are near 0.
        centre = -4.0 if name.endswith("logprobs") else 0.0
        rows = [(centre + rng.normal(size=len(m)) * m).astype(np.float32) for m in batch.mask]
        batch.columns[name] = [r * m for r, m in zip(rows, batch.mask, strict=True)]
    batch.columns["multiplier"] = [rng.uniform(0.5, 1.5, len(m)).astype(np.float32) for m in batch.mask]
    return batch


def rank_with_roles(folder, roles, **more):
    """A rank whose value head is not zero, so that a gradient reaches the trunk."""
    rank = support.rank_of(folder, roles=roles, **more)
    torch.manual_seed(1)
    critic = rank.roles["critic"]
    critic.gather_nothing()
    own = critic.parameters["value_head.weight"]
    with torch.no_grad():
        own.copy_(like(torch.randn(own.shape) / 4, own))
    return rank


def loss_and_gradient(rank, key, **options):
    """(loss, {parameter: gradient}) of one step of a loss on the batch; on several ranks, each on its shard."""
    component, chosen = VARIANTS[key]
    config = component.config(**chosen)
    needs = component.needed(config)
    rank.terms = [Term(component.name, component.build(config, None), 1.0)]
    rank.context.needs = needs
    rank.config = FsdpConfig(**{**rank.config.model_dump(), "max_tokens": 0, "packing": True, **options})
    batch = batch_for(needs)
    if rank.world_size > 1:
        batch = batch.select(shard_indices(batch, rank.world_size)[rank.rank])
    scope = component.traits["scope"]
    role = "critic" if scope == "value" and not rank.roles["critic"].shared else "policy"
    caught = {}
    for owner in rank.roles.values():
        if owner.optimizer is not None:
            owner.optimizer.step = lambda norm, optimizer=owner.optimizer: catch(caught, optimizer)
    report = rank.step(batch, role)
    return report.loss, caught


def catch(caught, optimizer):
    caught.update({n: full(p.grad).clone() for n, p in optimizer.named.items() if p.grad is not None})
    optimizer.zero_grad()


def main(rank: int, folder: Path, model: Path, teacher: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for dtype in ("float32", "bfloat16"):
        made = {
            shared: rank_with_roles(
                model, roles=SHARED if shared else roles_with(teacher), index=rank, world_size=2, dtype=dtype,
                rendezvous=f"file://{folder}/rendezvous",
            )
            for shared in (False, True)
        }  # fmt: skip
        for key, (component, _) in VARIANTS.items():
            results[dtype, key] = loss_and_gradient(made[False], key, max_tokens=24)
            if component.traits["scope"] == "value":
                results[dtype, key + ", shared"] = loss_and_gradient(made[True], key, max_tokens=24)
    torch.save(results, folder / f"results-{rank}.pt")
    torch.distributed.barrier()  # gloo: a rank that leaves early cuts the other's last collective short


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(arguments["rank"], *(Path(arguments[name]) for name in ("folder", "model", "teacher")))
