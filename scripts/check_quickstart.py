"""Checks a finished quickstart run as a sceptical user would: did it learn, and is the saved model what was evaluated?

    python scripts/check_quickstart.py RUNS_FOLDER

Greedy accuracy must be under 10% before and at least 80% after training, and the saved model, loaded by plain
transformers with no Miles code in the loop, must answer the evaluation prompts as the run said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_core.config import load
from miles_core.evaluate import EVAL_SEED
from miles_core.wiring import Wiring


def main() -> int:
    run_dir = sorted(Path(sys.argv[1]).glob("quickstart-*"))[-1]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    accuracy = [(r["step"], r["eval/sums/accuracy"]) for r in rows if "eval/sums/accuracy" in r]
    before, after = accuracy[0][1], accuracy[-1][1]
    plain = plain_accuracy(run_dir)
    seconds = sum(r.get("step/seconds", 0.0) for r in rows)
    print(f"{run_dir.name}: {before:.1%} before, {after:.1%} after {accuracy[-1][0]} steps, {seconds:.0f} s of steps")
    print(f"saved model in plain transformers: {plain:.1%}")
    problems = []
    if not before < 0.10:
        problems.append(f"accuracy before training is {before:.1%}, not under 10%")
    if not after >= 0.80:
        problems.append(f"accuracy after training is {after:.1%}, not at least 80%")
    if abs(plain - after) > 1e-9:
        problems.append(f"the saved model answers {plain:.1%} of the evaluation right, the run said {after:.1%}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def plain_accuracy(run_dir: Path) -> float:
    """Share of the evaluation prompts whose greedy answer's first line is the label."""
    run = load(run_dir / "config.toml")
    context = Wiring(run, run_dir=run_dir).context(run.one("data"))
    context.seed = run.config.seed + EVAL_SEED
    prompts = run.one("data").component.build(run.one("data").options, context).next(run.config.eval[0].num_prompts)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    right = 0
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=run.config.rollout.sampling.max_new_tokens, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        lines = answer.strip().splitlines()
        right += bool(lines) and lines[0].strip() == str(prompt.label)
    return right / len(prompts)


if __name__ == "__main__":
    sys.exit(main())
