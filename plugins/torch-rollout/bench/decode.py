"""Tokens per second of the engine `torch` against Hugging Face generation, side by side on this machine.

    python plugins/torch-rollout/bench/decode.py MODEL_FOLDER [--threads 2] [--prompts 8 --samples 8]

Random prompts of random tokens, sampled at temperature 1, every answer runs to its limit. Both generate the same number
of tokens; the engine is given each sample as a request of its own, as a run does.
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


def make_prompts(count: int, length: int, vocab: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, vocab, length, dtype=np.int32) for _ in range(count)]


async def engine_seconds(engine: TorchEngine, prompts: list[np.ndarray], samples: int, new: int) -> float:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    requests = [
        GenerateRequest(id=f"{p}/{s}", token_ids=ids, params=params, seed=1000 * p + s)
        for p, ids in enumerate(prompts)
        for s in range(samples)
    ]
    start = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(r) for r in requests))
    seconds = time.perf_counter() - start
    assert all(len(a.token_ids) == new for a in answers)
    return seconds


def hf_seconds(model: torch.nn.Module, prompts: list[np.ndarray], samples: int, new: int) -> float:
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).repeat_interleave(samples, 0)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0
        )
    assert out.shape[1] == ids.shape[1] + new
    return time.perf_counter() - start


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
            ours = await engine_seconds(engine, prompts, args.samples, new)
            line = f"{shape}: engine {ours:.2f} s, {tokens / ours:.0f} tokens/s"
            if not args.no_hf:
                theirs = hf_seconds(model, prompts, args.samples, new)
                line += f"; generate {theirs:.2f} s, {tokens / theirs:.0f} tokens/s; {theirs / ours:.1f} times"
            print(line, flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
