"""One rank of several (gloo), started by test_layouts.py: one layout after another in the same processes, since starting
Python and Megatron is what takes time. Writes results-<rank>.pt: {layout: what happened there}."""

import json
import sys
from pathlib import Path

import megatron_support as support
import numpy as np
import torch

import miles_policy_losses
from miles_core.errors import RunFailed
from miles_core.trainers import shard_indices
from miles_core.types import TrainBatch

LAYOUTS = {
    "one": (1, {}, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"max_tokens": 24}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, {"max_tokens": 24}),
    "cp2": (2, {"context_parallel_size": 2}, {"max_tokens": 24}),
    "dp2": (2, {}, {}),
    "dp2-distributed": (2, {"use_distributed_optimizer": True}, {"max_tokens": 24}),
    "dp2-bf16": (2, {"use_distributed_optimizer": True, "bf16": True}, {}),
    "tp2-bf16": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True}, {}),
    "pp2-recompute": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"max_tokens": 24},
    ),
    "tp2-pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
        {"max_tokens": 24},
    ),
    "pp2-cp2": (
        4,
        {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "use_distributed_optimizer": True},
        {"max_tokens": 24},
    ),
    "tp2-dp2": (
        4,
        {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "make_vocab_size_divisible_by": 64},
        {},
    ),
}
"""(ranks, Megatron's arguments, options). The vocabulary of 61 is padded to 62 by TP2, to 128 by the last, whose second
tensor rank then holds padding only."""
STEPS = 3
MODELS = {name: ("qwen3", "qwen2", "llama") if name in ("one", "tp2", "pp2") else ("qwen3",) for name in LAYOUTS}
CASES = [(layout, model) for layout, models in MODELS.items() for model in models]
LOSSES = [component for component in miles_policy_losses.miles_losses() if component.traits.get("scope") == "policy"]


def shard_of(batch, info):
    return batch.select(shard_indices(batch, info.dp_size)[info.dp_rank])


def loss_batch(component, config):
    """A batch with whatever column the loss needs and no model computes."""
    batch = support.random_batch(seed=5)
    for name in component.needed(config) - {"logprobs", "entropy", "logsumexp"} - batch.columns.keys():
        rng = np.random.default_rng(len(name))
        batch.columns[name] = [(m * (rng.normal(size=len(m)) - 4)).astype(np.float32) for m in batch.mask]
    return batch


def supported(component):
    needs = component.needed(component.config())
    return all(name.partition(":")[0] not in ("topk", "values", "reverse_kl", "forward_kl") for name in needs)


def every_loss(make):
    """{loss: (loss, gradient norm)} of one step of each registered policy loss, each from the model's first weights."""
    found = {}
    for component in filter(supported, LOSSES):
        config = component.config()
        loss = (component.name, component.build(config, None))
        rank, info = make([loss], needs=component.needed(config))
        report = rank.step(shard_of(loss_batch(component, config), info))
        found[component.name] = (report.loss, report.grad_norm)
        rank.close()
    return found


def run_layout(name, rank, models, folder):
    world, args, options = LAYOUTS[name]
    out, count = {}, iter(range(1000))

    def make(losses=(support.PG,), model="qwen3", **context):
        meet = f"file://{folder}/meet-{name}-{next(count)}"
        made = support.megatron_rank(
            models[model], losses, args=args, options=options, index=rank, world_size=world, rendezvous=meet, start=False,
            **context,
        )  # fmt: skip
        return made, made.start()

    for model in MODELS[name]:
        trainer, info = make(model=model, roles=("reference",))
        found = {"info": info}
        found["steps"] = [
            (r.loss, r.grad_norm, r.lr, r.metrics)
            for r in (trainer.step(shard_of(support.random_batch(seed=seed), info)) for seed in range(STEPS))
        ]
        found["weights"], found["hash"] = support.exported(trainer), trainer.state_hash()
        batch = shard_of(support.random_batch(seed=9, temperature=0.7), info)
        found["forward"] = trainer.forward(batch, "policy", frozenset({"logprobs", "entropy", "logsumexp"}))
        found["reference"] = trainer.forward(batch, "reference", frozenset({"logprobs"}))
        out[model] = found
        if model == "qwen3":
            out |= refusals(trainer, info)
            out |= files(trainer, info, folder / f"saved-{name}", folder / f"model-{name}")
        trainer.close()
    if name in ("tp2", "pp2", "cp2"):
        out["losses"] = every_loss(make)
    return out


def refusals(trainer, info):
    """What must move nothing, then one step in which only data-parallel rank 0 has samples."""
    out, before = {}, trainer.state_hash()
    bad = support.random_batch(seed=5)
    bad.columns["advantages"][-1] *= float("nan")
    try:
        trainer.step(shard_of(bad, info))
        out["failure"] = "none"
    except RunFailed as error:
        out["failure"] = str(error)
    nothing = support.random_batch(seed=6)
    nothing.mask = [np.zeros_like(m) for m in nothing.mask]
    out["skipped"] = trainer.step(shard_of(nothing, info)).skipped
    out["unmoved"] = trainer.state_hash() == before
    return out


def files(trainer, info, saved, model):
    """A checkpoint after three steps; then the fourth step, before and after loading it again. And one empty shard."""
    for folder in (saved, model):
        folder.mkdir(exist_ok=True)
    trainer.save(saved)
    trainer.save_model(model)
    whole, empty = support.random_batch(seed=8), TrainBatch(samples=[], token_weights={"policy": []})
    fourth = trainer.step(whole if info.dp_rank == 0 else empty)
    after = trainer.state_hash()
    weights = support.exported(trainer)
    trainer.load(saved)
    again = trainer.step(whole if info.dp_rank == 0 else empty)
    return {
        "fourth": (fourth.loss, fourth.grad_norm),
        "fourth_weights": weights,
        "resumed": again.grad_norm == fourth.grad_norm and trainer.state_hash() == after,
    }


def load_elsewhere(name, rank, models, folder, source):
    """The checkpoint of another layout: the fourth step from it."""
    world, args, options = LAYOUTS[name]
    trainer = support.megatron_rank(
        models["qwen3"], args=args, options=options, index=rank, world_size=world, start=False, roles=("reference",),
        rendezvous=f"file://{folder}/meet-{name}-from-{source}",
    )  # fmt: skip
    info = trainer.start()
    trainer.load(folder / f"saved-{source}")
    whole, empty = support.random_batch(seed=8), TrainBatch(samples=[], token_weights={"policy": []})
    report = trainer.step(whole if info.dp_rank == 0 else empty)
    out = (report.loss, report.grad_norm, report.lr, support.exported(trainer))
    trainer.close()
    return out


def main(rank, world, folder, models, elsewhere) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, (size, *_) in LAYOUTS.items():
        if size == world:
            results[name] = run_layout(name, rank, models, folder)
    for name, source in elsewhere:
        if LAYOUTS[name][0] == world:
            results[name, source] = load_elsewhere(name, rank, models, folder, source)
    torch.save(results, folder / f"results-{world}-{rank}.pt")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(
        given["rank"],
        given["world"],
        Path(given["folder"]),
        {name: Path(path) for name, path in given["models"].items()},
        [tuple(pair) for pair in given["elsewhere"]],
    )
