"""Throughput and age of samples for every `on_stale` and `max_lag`, under long-tailed answer lengths.

The engine is simulated on a virtual clock (so hours take seconds); pool, buffer and rollout are the real ones. An engine
runs a fixed number of requests at once, at one speed each; lengths are log-normal, drawn per (prompt, sample), so that
every rule meets the same answers. Training a batch and pushing weights take fixed times. "requests go on" are variants
in which a push leaves running requests in the engine ("retract"), so that a sample may hold several versions.

    python benchmarks/buffer_rules.py [--steps N] [--json FILE]

Columns: trained tokens per second; the same relative to `max_lag = 0`; age of trained tokens in pushes (mean and max, the
max must not exceed max_lag); share of sampled tokens that were thrown away (aborted, cut, or too old); groups sent back;
requests cut by a push; seconds per step that the trainer waited for its batch, and for the push; and the mean length of
trained answers relative to that of all answers, which is below 1 where a rule prefers short answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from miles_core.buffer import GroupBuffer
from miles_core.builtin.rollouts import SingleTurn
from miles_core.engines import PUSH_MODES, EnginePool
from miles_core.interfaces import Tokenizer
from miles_core.staleness import mask_stale
from miles_core.testing.clock import run_virtual
from miles_core.testing.engines import StubEngine, StubTransport
from miles_core.types import GenerateRequest, Prompt, PromptTokens, RolloutContext, SampleGroup, SamplingParams, Verdict

GROUPS, SAMPLES, LIMIT = 8, 4, 4096
MEDIAN, SIGMA = 200.0, 1.0  # of log-normal lengths: mean 330, 99th percentile 2,050 tokens
ENGINES, RUNNING, TOKEN_S = 2, 32, 0.02  # 64 requests at once, 50 tokens/s each
TRAIN_S, PUSH_S = 12.0, 0.5
RULES = {
    "wait": ("wait", PUSH_MODES["wait"], False),
    "wait, requests go on": ("wait", "retract", True),
    "abort_requeue": ("abort_requeue", PUSH_MODES["abort_requeue"], False),
    "abort_requeue, requests go on": ("abort_requeue", "retract", True),
    "continue": ("continue", PUSH_MODES["continue"], True),
}
"""Name -> (on_stale, mode of the push, partial)."""


class NoTokenizer(Tokenizer):
    stop_token_ids, vocab_size, template_hash = (), 1000, ""

    def encode(self, text: str) -> PromptTokens:
        return PromptTokens(token_ids=np.frombuffer(text.encode(), np.uint8).astype(np.int32), text=text)

    def render(self, messages: Any, tools: Any = (), images: Any = ()) -> PromptTokens:
        raise NotImplementedError

    def decode(self, token_ids: Any, *, skip_special: bool = True) -> str:
        return ""


def answer_length(request: GenerateRequest) -> int:
    """The whole answer's length: a function of prompt and sample, whichever attempt asks for it."""
    group, index = request.id.split("#")[0].rsplit("/", 1)
    rng = np.random.default_rng([int(group.split("@")[0]), int(index)])
    return int(np.clip(rng.lognormal(np.log(MEDIAN), SIGMA), 1, LIMIT))


def answer(weight: int, request: GenerateRequest) -> np.ndarray:
    done = LIMIT - request.params.max_new_tokens  # sampled by an earlier attempt
    return np.ones(max(answer_length(request) - done, 1), dtype=np.int32)


async def simulate(rule: str, max_lag: int, steps: int) -> dict[str, Any]:
    on_stale, mode, partial = RULES[rule]
    engines = [StubEngine(f"engine-{i}", token_s=TOKEN_S, max_running=RUNNING, answer=answer) for i in range(ENGINES)]
    pool = EnginePool(engines, timeout_s=1e6, partial=partial)
    await pool.start()
    tokenizer, rollout, taken, loop = NoTokenizer(), SingleTurn(), 0, asyncio.get_running_loop()

    def take(n: int) -> list[Prompt]:
        nonlocal taken
        taken += n
        return [Prompt(id=str(i), text=str(i)) for i in range(taken - n, taken)]

    async def run(prompt: Prompt, order: int, partial_group: SampleGroup | None) -> SampleGroup:
        context = RolloutContext(
            prompt=prompt, num_samples=SAMPLES, sampling=SamplingParams(max_new_tokens=LIMIT), pool=pool,
            tokenizer=tokenizer, seed=0, max_context=0, order=order, partial=partial_group,
        )  # fmt: skip
        return await rollout.run_group(context)

    buffer = GroupBuffer(
        take_prompts=take, run=run, verdict=lambda g: Verdict(keep=True), groups_per_step=GROUPS, max_lag=max_lag,
        on_stale=on_stale,  # type: ignore[arg-type]
    )  # fmt: skip
    transport, trained, ages, waited, pushing, seen, lengths = StubTransport(push_s=PUSH_S), 0, [], 0.0, 0.0, set(), []
    for step in range(steps):
        began = loop.time()
        batch = await buffer.next_batch()
        waited += loop.time() - began
        for sample in (s for g in batch for s in g.samples):
            fresh = mask_stale(sample, step, max_lag)
            ages += [(step - span.version, int(fresh[span.start : span.stop].sum())) for span in sample.versions]
            trained += int(fresh.sum())
            lengths.append(sample.num_response_tokens)
            assert sample.trajectory_id not in seen, "trained twice"
            seen.add(sample.trajectory_id)
        await asyncio.sleep(TRAIN_S)
        began = loop.time()
        await buffer.before_push(step + 1)
        await pool.sync(transport, step + 1, mode=mode)  # type: ignore[arg-type]
        pushing += loop.time() - began
        buffer.advance(step + 1)
    seconds, counts = loop.time(), buffer.metrics()
    left = await leftover(buffer)
    made = sum(engine.made for engine in engines)
    await pool.close()
    everything = [answer_length(GenerateRequest(id=f"{p}@0/{i}", token_ids=np.ones(1), params=SamplingParams(), seed=0))
                  for p in range(steps * GROUPS) for i in range(SAMPLES)]  # fmt: skip
    kept = [(age, n) for age, n in ages if n]
    return {
        "on_stale": rule, "max_lag": max_lag, "steps": steps, "tokens_per_s": trained / seconds,
        "mean_age": sum(a * n for a, n in kept) / trained, "max_age": max(a for a, _ in kept),
        "sampled_tokens": made, "trained_tokens": trained, "left_tokens": left, "lost": 1 - (trained + left) / made,
        "requeued": int(counts["buffer/requeued"]), "cut": pool.counts["cut"],
        "wait_s_per_step": waited / steps, "push_s_per_step": pushing / steps, "seconds_per_step": seconds / steps,
        "length_ratio": float(np.mean(lengths) / np.mean(everything)),
    }  # fmt: skip


async def leftover(buffer: GroupBuffer) -> int:
    """Tokens of what was under way at the end: it is neither trained nor lost."""
    buffer.take_prompts = lambda n: []
    while buffer._running or buffer._again:
        buffer._fill()
        await asyncio.sleep(1.0)
    return sum(s.num_response_tokens for e in buffer._complete if e.group for s in e.group.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    console = Console(width=130)
    began, rows = time.perf_counter(), []
    for rule in RULES:
        for max_lag in (0, 1, 2, 4):
            rows.append(run_virtual(simulate(rule, max_lag, options.steps)))
            console.print(f"{rule}, max_lag {max_lag}: {rows[-1]['tokens_per_s']:.0f} tokens/s", style="dim")
    base = rows[0]["tokens_per_s"]
    table = Table(title=f"{options.steps} steps of {GROUPS} x {SAMPLES}, simulated in {time.perf_counter() - began:.0f} s")
    columns = (
        "max_lag",
        "tokens/s",
        "ratio",
        "mean age",
        "max age",
        "lost",
        "sent back",
        "cut",
        "wait s",
        "push s",
        "length",
    )
    table.add_column("on_stale", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            r["on_stale"], str(r["max_lag"]), f"{r['tokens_per_s']:.0f}", f"{r['tokens_per_s'] / base:.2f}",
            f"{r['mean_age']:.2f}", str(r["max_age"]), f"{r['lost']:.1%}", str(r["requeued"]), str(r["cut"]),
            f"{r['wait_s_per_step']:.1f}", f"{r['push_s_per_step']:.1f}", f"{r['length_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    else:
        console.print_json(json.dumps(rows), indent=None)


if __name__ == "__main__":
    main()
