"""One of two ranks (gloo), started by test_two_ranks.py: several checks in one pair of processes. Writes results.pt."""

import json
import sys
from pathlib import Path

import fsdp_support as support
import numpy as np
import torch
from test_critic import SHARED, VALUE, critic_batch

from miles_core.errors import RunFailed
from miles_core.types import TrainBatch


def shard_of(batch, rank):
    """Groups 0 and 2 on rank 0, group 1 on rank 1: uneven on purpose."""
    return batch.select([i for i, s in enumerate(batch.samples) if (s.group_id == "g1") == bool(rank)])


def three_steps(trainer, rank):
    reports = []
    for seed in range(3):
        reports.append(trainer.step(shard_of(support.random_batch(seed=seed), rank)))
    return [(r.loss, r.grad_norm, r.lr) for r in reports]


def hashes(trainer):
    return trainer.state_hash()


def shared_critic(make, rank, folder):
    """Two steps of the head alone, then one of trunk and head together; the checkpoint is taken after a pass without
    gradient, when FSDP shows gathered parameters."""
    trainer = make([support.PG, VALUE], roles=SHARED, critic_lr=0.05)
    reports = [trainer.step(shard_of(critic_batch(seed=seed), rank), "critic") for seed in range(2)]
    alone = (support.parameters(trainer), trainer.roles["policy"].optimizer.step_count)
    reports.append(trainer.step(shard_of(critic_batch(seed=2), rank)))
    trainer.forward(shard_of(critic_batch(), rank), "policy", frozenset({"logprobs", "values"}))
    (folder / "shared").mkdir(exist_ok=True)
    trainer.save(folder / "shared")
    return {"steps": [(r.loss, r.grad_norm) for r in reports], "alone": alone, "weights": support.parameters(trainer)}


def low_precision(make, rank, folder):
    """bf16 under FSDP: what the head is given as temperature, and what a checkpoint after a forward pass holds."""
    trainer, seen = make(dtype="bfloat16"), []
    model = trainer.roles["policy"].model
    head = model._head_inputs
    model._head_inputs = lambda hidden, temperature: (seen.append(temperature), head(hidden, temperature))[1]
    batch = support.random_batch(temperature=0.7)
    trainer.forward(shard_of(batch, rank), "policy", frozenset({"logprobs"}))
    (folder / "low").mkdir(exist_ok=True)
    trainer.save(folder / "low")
    return [t.unique().tolist() for t in seen]


def main(rank: int, folder: Path, model: Path, single: Path) -> None:
    make = lambda *args, **more: support.rank_of(  # noqa: E731
        model, *args, index=rank, world_size=2, rendezvous=f"file://{folder}/rendezvous", **more
    )
    trainer = make(max_tokens=24, roles=("reference", "critic"), warmup_steps=2)
    out = {"steps": three_steps(trainer, rank), "weights": support.parameters(trainer), "hash": hashes(trainer)}

    batch = support.random_batch(seed=9)
    out["forward"] = trainer.forward(shard_of(batch, rank), "policy", frozenset({"logprobs", "entropy"}))
    out["reference"] = trainer.forward(shard_of(batch, rank), "reference", frozenset({"logprobs"}))
    out["values"] = trainer.forward(shard_of(batch, rank), "critic", frozenset({"values"}))

    bad = support.random_batch(seed=5)
    if rank == 1:
        bad.columns["advantages"] = [a * np.float32("nan") for a in bad.columns["advantages"]]
    try:
        trainer.step(shard_of(bad, rank))
        out["failure"] = "none"
    except RunFailed as error:
        out["failure"] = str(error)
    out["hash_after_failure"] = hashes(trainer)

    nothing = support.random_batch(seed=6)
    nothing.mask = [np.zeros_like(m) for m in nothing.mask]
    out["skipped"] = trainer.step(shard_of(nothing, rank)).skipped
    out["hash_after_skip"] = hashes(trainer)

    out["buckets"] = [[(t.name, t.dtype, t.shape) for t in b.tensors] for b in trainer.export("hf_full", bucket_bytes=4096)]
    for name in ("saved", "model"):
        (folder / name).mkdir(exist_ok=True)
    trainer.save(folder / "saved")
    trainer.save_model(folder / "model")

    # F6: rank 1 has no samples at all, or samples without a trainable token.
    whole, empty = support.random_batch(seed=8), TrainBatch(samples=[], token_weights={"policy": []})
    report = trainer.step(whole if rank == 0 else empty)
    out["one_empty"] = (report.loss, report.grad_norm, support.parameters(trainer))

    trainer.load(single)
    out["loaded"] = (hashes(trainer), three_steps(trainer, rank), support.parameters(trainer))
    out["shared"] = shared_critic(make, rank, folder)
    out["temperatures"] = low_precision(make, rank, folder)
    torch.save(out, folder / f"results-{rank}.pt")
    torch.distributed.barrier()  # gloo: a rank that leaves early cuts the other's last collective short
    trainer.close()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(arguments["rank"], Path(arguments["folder"]), Path(arguments["model"]), Path(arguments["single"]))
