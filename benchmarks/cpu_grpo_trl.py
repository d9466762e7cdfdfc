"""The TRL side of `cpu_grpo.py`: its settings, those that were tried, and one run in this process.

python benchmarks/cpu_grpo_trl.py OUT.json --seed 0 --steps 4 [--variant NAME]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpu_clock import Step, peak_bytes

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml"
MICROBATCHES = 4
"""Of TRL's chosen settings: of 24 samples each, with the recipe's 96."""


@dataclass(slots=True)
class Variant:
    """One set of settings for TRL, as differences from the chosen ones."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    attention: str = "sdpa"
    patched: bool = False
    """Head on completion tokens only: TRL does that where Triton runs and scores prompt tokens too on a CPU. No setting
    of TRL, so never chosen."""


CHOSEN = Variant("chosen")
VARIANTS = [
    CHOSEN,
    Variant("optim=adamw_torch (for-each instead of fused)", {"optim": "adamw_torch"}),
    Variant("attn_implementation=eager", attention="eager"),
    Variant("1 microbatch of 96", {"per_device_train_batch_size": 96, "gradient_accumulation_steps": 1}),
    Variant("2 microbatches of 48", {"per_device_train_batch_size": 48, "gradient_accumulation_steps": 2}),
    Variant("12 microbatches of 8", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 12}),
    Variant("gradient_checkpointing=True (TRL's default)", {"gradient_checkpointing": True}),
    Variant("bf16=True (TRL's default)", {"bf16": True}),
    Variant("use_transformers_continuous_batching=True", {"use_transformers_continuous_batching": True}),
    Variant("cache_implementation=static", {"cache_implementation": "static"}),
    Variant("logging_steps=1", {"logging_strategy": "steps", "logging_steps": 1}),
    Variant("OMP_WAIT_POLICY=ACTIVE", env={"OMP_WAIT_POLICY": "ACTIVE"}),
    Variant("huge pages (THP_MEM_ALLOC_ENABLE=1)", env={"THP_MEM_ALLOC_ENABLE": "1"}),
    Variant("patched: head on completion tokens only (not a setting)", patched=True),
]
"""What is tried by `cpu_grpo.py --tune`; the chosen settings are in `trl_arguments`, and have to win there."""


def trl_arguments(run: Any, folder: Path, variant: Variant) -> Any:
    """TRL's settings: the recipe's numbers, and for everything else those that `VARIANTS` are measured against."""
    from trl import GRPOConfig

    rollout, options = run.config.rollout, run.one("trainer").options
    batch = rollout.groups_per_step * rollout.samples_per_group
    settings = {
        "per_device_train_batch_size": batch // MICROBATCHES,
        "gradient_accumulation_steps": MICROBATCHES,
        "num_generations": rollout.samples_per_group,
        "generation_batch_size": batch,
        "max_completion_length": rollout.sampling.max_new_tokens,
        "temperature": rollout.sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over the tokens of the whole batch
        "scale_rewards": "group",
        "learning_rate": options.lr,
        "adam_beta1": options.betas[0],
        "adam_beta2": options.betas[1],
        "adam_epsilon": options.eps,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.grad_clip,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": False,
        "shuffle_dataset": False,
        "max_steps": run.config.steps,
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "log_completions": False,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": run.config.seed,
    }
    return GRPOConfig(output_dir=str(folder), **(settings | variant.args))


class Questions:
    """The recipe's prompts in the order in which Miles takes them, and its reward, for TRL."""

    def __init__(self, run: Any, run_dir: Path) -> None:
        from miles_core.builtin.rollouts import prompt_tokens
        from miles_core.prompts import PromptFeed
        from miles_core.wiring import Wiring

        wiring = Wiring(run, run_dir=run_dir)
        reference = run.config.model.path.partition(":")[2]
        self.model_path = wiring.build("source").fetch(reference, run.config.model.revision, lambda *_, **__: None)
        wiring.model_path = self.model_path
        self.tokenizer = wiring.tokenizer
        context = run.config.model.max_context
        feed = PromptFeed(wiring.build("data"), self.tokenizer, context, refuse_long=False, note=print)
        self.prompts = feed.take(run.config.steps * run.config.rollout.groups_per_step)
        self.ids = {p.draw: prompt_tokens(p, self.tokenizer).token_ids.tolist() for p in self.prompts}
        ((_, self.judge),) = wiring.build_all("reward")
        self.reward = 0.0

    def dataset(self) -> Any:
        from datasets import Dataset

        return Dataset.from_list([{"prompt": p.messages, "place": i} for i, p in enumerate(self.prompts)])

    def reward_function(self, prompts: Any, completions: Any, completion_ids: Any, place: Any, **_: Any) -> list[float]:
        """Scores of one batch by the recipe's own reward object."""
        import numpy as np

        from miles_core.types import Sample

        scores = []
        for where, ids in zip(place, completion_ids, strict=True):
            prompt = self.prompts[where]
            tokens = np.array([*self.ids[prompt.draw], *ids], np.int32)
            size, mask = len(self.ids[prompt.draw]), np.zeros(len(tokens), bool)
            sample = Sample(
                group_id=prompt.id,
                trajectory_id=prompt.id,
                index=0,
                tokens=tokens,
                prompt_len=size,
                loss_mask=mask,
                logprobs=np.zeros(len(tokens), np.float32),
                prompt=prompt,
                response=self.tokenizer.decode(ids),
            )
            scores.append(self.judge.score(sample))
        self.reward = statistics.fmean(scores)
        return scores


def timed_trainer(questions: Questions, warmup_steps: int) -> type:
    """GRPOTrainer with a clock around its rollout, the recipe's warm-up, and a check of the token ids it was given."""
    from torch.optim.lr_scheduler import LambdaLR
    from trl import GRPOTrainer

    class Timed(GRPOTrainer):
        rollout_s, batch = 0.0, (0, 0, 0)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            self.rollout_s += time.perf_counter() - began
            completion, prompt = int(made["completion_mask"].sum()), int(made["prompt_mask"].sum())
            self.batch = (len(inputs), completion, prompt + completion)
            return made

        def _tokenize_prompts(self, prompts: Any) -> Any:
            ids, *rest = super()._tokenize_prompts(prompts)
            names = {json.dumps(p.messages): p.draw for p in questions.prompts}
            for messages, own in zip(prompts, ids, strict=True):
                if list(own) != questions.ids[names[json.dumps(messages)]]:
                    raise SystemExit(f"TRL and Miles give {messages} different token ids")
            return (ids, *rest)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            """transformers' own warm-up starts with a step at rate 0."""
            rate = LambdaLR(optimizer or self.optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps)))
            self.lr_scheduler = rate
            return rate

    return Timed


def trl_worker(out: Path, seed: int, steps: int, variant: Variant) -> None:
    """Trains with TRL in this process and writes its steps to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, TrainerCallback

    from miles_core.config import load

    if variant.patched:
        import trl.trainer.utils

        trl.trainer.utils._use_triton = lambda device: True
    run = load(RECIPE, sets=[f"seed={seed}", f"steps={steps}"])
    questions = Questions(run, out.parent)
    model = AutoModelForCausalLM.from_pretrained(
        questions.model_path, dtype=torch.float32, attn_implementation=variant.attention, local_files_only=True
    )
    rows: list[Step] = []
    trainer = timed_trainer(questions, run.one("trainer").options.warmup_steps)(
        model=model,
        reward_funcs=questions.reward_function,
        args=trl_arguments(run, out.parent, variant),
        train_dataset=questions.dataset(),
        processing_class=questions.tokenizer.hf,
    )

    class Clock(TrainerCallback):
        wall = cpu = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.wall = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wall, cpu = time.perf_counter(), time.process_time()
            spent = {"step_s": wall - self.wall, "cpu_s": cpu - self.cpu, "rollout_s": trainer.rollout_s}
            counts = dict(zip(("samples", "completion_tokens", "trained_tokens"), trainer.batch, strict=True))
            rows.append(Step(step=len(rows) + 1, reward=questions.reward, peak_bytes=peak_bytes(), **spent, **counts))
            self.wall, self.cpu, trainer.rollout_s = wall, cpu, 0.0

    trainer.add_callback(Clock())
    trainer.train()
    size = run.config.rollout.groups_per_step
    names = [p.id for p in questions.prompts]
    prompts = [names[i : i + size] for i in range(0, len(names), size)]
    out.write_text(json.dumps({"steps": [asdict(r) for r in rows], "prompts": prompts}), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--variant", default=CHOSEN.name, choices=[v.name for v in VARIANTS])
    options = parser.parse_args()
    trl_worker(options.out, options.seed, options.steps, next(v for v in VARIANTS if v.name == options.variant))


if __name__ == "__main__":
    main()
