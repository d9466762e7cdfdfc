"""Tokens per second of the engine `torch` against Hugging Face generation, side by side on this machine.

    python plugins/torch-rollout/bench/decode.py MODEL_FOLDER [--threads 2] [--prompts 8 --samples 8]

Random prompts of random tokens, sampled at temperature 1, every answer runs to its limit. Both generate the same number
of tokens; the engine is given each sample as a request of its own, as a run does. Processor seconds are printed beside
the seconds of the clock: on a machine that others use as well, only their ratio means something.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np
import torch

from miles_core.types import GenerateRequest, SamplingParams
from miles_torch_rollout import TorchEngineConfig
from miles_torch_rollout.engine import TorchEngine

Seconds = tuple[float, float]
"""By the clock, and of processor time over all threads."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def make_prompts(count: int, length: int, vocab: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, vocab, length, dtype=np.int32) for _ in range(count)]


async def time_engine(engine: TorchEngine, prompts: list[np.ndarray], samples: int, new: int) -> Seconds:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    requests = [
        GenerateRequest(id=f"{p}/{s}", token_ids=ids, params=params, seed=1000 * p + s)
        for p, ids in enumerate(prompts)
        for s in range(samples)
    ]
    start = now()
    answers = await asyncio.gather(*(engine.generate(r) for r in requests))
    end = now()
    assert all(len(a.token_ids) == new for a in answers)
    return end[0] - start[0], end[1] - start[1]


def time_generate(model: torch.nn.Module, prompts: list[np.ndarray], samples: int, new: int) -> Seconds:
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).repeat_interleave(samples, 0)
    start = now()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0
        )
    end = now()
    assert out.shape[1] == ids.shape[1] + new
    return end[0] - start[0], end[1] - start[1]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shapes", default="60x6,60x64,300x32", help="prompt x new tokens")
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--forward", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = TorchEngineConfig(device="cpu", forward=args.forward, num_threads=args.threads, prefix_cache_tokens=0)
    engine = TorchEngine(args.model, config)
    await engine.start()
    model = engine._model
    for shape in args.shapes.split(","):
        length, new = (int(n) for n in shape.split("x"))
        tokens = args.prompts * args.samples * new
        for repeat in range(args.repeats):
            prompts = make_prompts(args.prompts, length, model.config.vocab_size, repeat)
            wall, busy = await time_engine(engine, prompts, args.samples, new)
            line = f"{shape}: engine {wall:.2f} s ({busy:.2f} processor s), {tokens / wall:.0f} tokens/s"
            if not args.no_hf:
                hf_wall, hf_busy = time_generate(model, prompts, args.samples, new)
                line += f"; generate {hf_wall:.2f} s ({hf_busy:.2f}), {tokens / hf_wall:.0f} tokens/s"
                line += f"; {hf_wall / wall:.1f} times by the clock, {hf_busy / busy:.1f} by processor time"
            print(line, flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
