"""Seconds and memory of one training step of the trainer `fsdp`: shared prefixes, packed without sharing, padded rows.

    python benchmarks/packing.py MODEL_FOLDER [--groups 8 --samples 8 --prompt 55 --common 43 --answer 5 --steps 4]

Every mode runs in a process of its own, so that its peak memory is its own. Token ids are random, with beginnings shared
as in a real batch: `--common` tokens by all prompts (system message, shots), the rest of a prompt by its group, and
`--kinds` different answers per group (0: all differ, the worst case; a trained model repeats itself). The first step is
left out: it allocates the optimizer's state. CPU seconds are the figure to compare on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "shared prefix": {},
    "packed": {"shared_prefix": False},
    "padded rows": {"packing": False},
}
PHASES = ("pack", "forward", "backward", "optimizer")


def make_batch(args: argparse.Namespace) -> Any:
    import numpy as np

    from miles_core import Sample, TrainBatch

    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(100, 30_000, n).astype(np.int32)  # noqa: E731
    common, samples = draw(args.common), []
    for g in range(args.groups):
        prompt = np.concatenate([common, draw(args.prompt - args.common)])
        kinds = [draw(args.answer) for _ in range(args.kinds or args.samples)]
        for i in range(args.samples):
            tokens = np.concatenate([prompt, kinds[i % len(kinds)]])
            mask = np.arange(len(tokens)) >= args.prompt
            samples.append(
                Sample(
                    group_id=f"g{g}", trajectory_id=f"g{g}/{i}", index=i, tokens=tokens, prompt_len=args.prompt,
                    loss_mask=mask, logprobs=np.zeros(len(tokens), np.float32),
                )
            )  # fmt: skip
    masks = [s.loss_mask for s in samples]
    total = sum(int(m.sum()) for m in masks)
    return TrainBatch(
        samples=samples,
        columns={"advantages": [np.where(m, rng.normal(), 0).astype(np.float32) for m in masks]},
        token_weights={"policy": [np.full(len(m), 1 / total, np.float32) for m in masks]},
        mask=masks,
        old_is_current=True,
    )


def measure(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs in the child process."""
    import torch

    import miles_policy_losses
    from miles_core import BuildContext
    from miles_fsdp_trainer import FsdpConfig, miles_trainers

    torch.set_num_threads(args.threads)
    loss = next(c for c in miles_policy_losses.miles_losses() if c.name == "ppo-clip")
    run = SimpleNamespace(
        steps=100, train=SimpleNamespace(minibatches=1, epochs=1), roles={}, loss=[SimpleNamespace(weight=1.0)]
    )
    context = BuildContext(
        component="trainer/fsdp", run_dir=Path(), seed=0, run_config=run, model_path=Path(args.model), device=args.device,
        select=lambda kind: [("ppo-clip", loss.build(loss.config(), None))] if kind == "loss" else [],
    )  # fmt: skip
    (component,) = miles_trainers()
    rank = component.build(FsdpConfig(lr=1e-6, **MODES[mode], **json.loads(args.options)), context)
    rank.start()
    batch, rows = make_batch(args), []
    for _ in range(args.steps + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        report = rank.step(batch)
        rows.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, **report.seconds})
    best = min(rows[1:], key=lambda row: row["wall"])
    return {
        "mode": mode,
        "computed": report.metrics["packing/computed_tokens"][0],
        "best": best,
        "median": statistics.median(row["wall"] for row in rows[1:]),
        "peak": report.peak_bytes,
        "loss": report.loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    for name, value in dict(groups=8, samples=8, prompt=55, common=43, answer=5, kinds=0, steps=4, threads=2).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--options", default="{}", help="further options of the trainer, as JSON")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(measure(args.child, args)))
        return
    print(
        f"{args.groups} x {args.samples} samples, prompts of {args.prompt} ({args.common} common), answers of {args.answer}"
    )
    print(
        f"{'':14}{'tokens':>8}{'best s':>8}{'median':>8}{'CPU s':>8}"
        + "".join(f"{p:>10}" for p in PHASES)
        + f"{'peak GB':>9}"
    )
    for mode in args.modes:
        out = subprocess.run([sys.executable, *sys.argv, "--child", mode], capture_output=True, text=True)
        lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"{mode} failed:\n{out.stderr[-2000:]}")
        r = json.loads(lines[0].removeprefix("RESULT "))
        phases = "".join(f"{r['best'][p]:>10.3f}" for p in PHASES)
        print(
            f"{mode:14}{r['computed']:>8.0f}{r['best']['wall']:>8.2f}{r['median']:>8.2f}{r['best']['cpu']:>8.2f}{phases}"
            f"{r['peak'] / 1e9:>9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
