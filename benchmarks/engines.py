"""Engines on the same prompts: `torch`, `sglang`, and a plain SGLang server driven by SGLang's own benchmark client.

    python benchmarks/engines.py --model FOLDER --json benchmarks/results/engines.json
    python benchmarks/engines.py --model FOLDER --device cpu --prompts 8 --new-tokens 32

Random prompts of a fixed length, each sampled several times at temperature 1, all requests at once. `sglang` and `plain`
share one server, started by Miles; its prefix cache is flushed before every round, and the ways to ask it take turns.
tokens/s counts sampled tokens over the time from the first request to the last answer. `plain` streams, as its client
does by default; `plain-like` asks for what Miles asks: log-probabilities, and no stream.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.engines import EnginePool
from miles_core.errors import RunFailed
from miles_core.types import GenerateRequest, SamplingParams

HERE = Path(__file__).resolve().parent
WAYS = ("torch", "sglang", "plain", "plain-like")


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """`samples` copies of each prompt, next to each other, as a rollout asks for them."""
    config = json.loads((options.model / "config.json").read_text("utf-8"))
    rng = np.random.default_rng(options.seed)
    rows = rng.integers(3, config["vocab_size"], (options.prompts, options.prompt_tokens)).tolist()
    return [row for row in rows for _ in range(options.samples)]


def requests(prompts: Sequence[Sequence[int]], options: argparse.Namespace, label: str) -> list[GenerateRequest]:
    params = SamplingParams(max_new_tokens=options.new_tokens, temperature=1.0, ignore_eos=True)
    return [
        GenerateRequest(id=f"{label}-{i}", token_ids=np.array(ids, np.int32), params=params, seed=i)
        for i, ids in enumerate(prompts)
    ]


async def ask_pool(pool: EnginePool, prompts: Any, options: argparse.Namespace, label: str) -> float:
    """Sampled tokens per second through the pool, as a rollout would see them."""
    asked = requests(prompts, options, label)
    began = time.perf_counter()
    answers = await asyncio.gather(*(pool.generate(request) for request in asked))
    seconds = time.perf_counter() - began
    bad = [answer.reason for answer in answers if answer.finish != "length"]
    if bad:
        raise RunFailed(f"{len(bad)} of {len(answers)} requests failed: {bad[0]}")
    return sum(len(answer.token_ids) for answer in answers) / seconds


def ask_plain(url: str, prompts: Any, options: argparse.Namespace, folder: Path, like: bool) -> float:
    """The same by SGLang's client."""
    from miles_sglang_rollout import SglangEngineConfig
    from miles_sglang_rollout.arguments import installed, on_cpu, server_environment

    config = SglangEngineConfig(device=options.device)
    data, result = folder / "prompts.json", folder / f"plain-{time.monotonic_ns()}.jsonl"
    data.write_text(json.dumps({"prompts": prompts, "new_tokens": options.new_tokens}))
    more = ["--return-logprob", "--disable-stream"] if like else []
    command = [options.python, str(HERE / "engines_plain.py"), str(data), str(result), "--base-url", url, *more]
    env = server_environment(config, installed(options.python), on_cpu(config))
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode or not result.exists():
        raise RunFailed(f"SGLang's client failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    row = json.loads(result.read_text("utf-8").splitlines()[-1])
    return len(prompts) * options.new_tokens / row["duration"]


async def measure_sglang(options: argparse.Namespace, prompts: Any, folder: Path) -> dict[str, Any]:
    from miles_sglang_rollout import SglangEngineConfig
    from miles_sglang_rollout.engine import SglangEngine

    config = SglangEngineConfig(device=options.device, server_args=options.server_args)
    engine = SglangEngine(options.model, config, run_dir=folder, python=options.python)
    pool = EnginePool([engine], timeout_s=3600.0)
    began = time.monotonic()
    await pool.start()
    found: dict[str, Any] = {"start_s": time.monotonic() - began}
    ways = [way for way in options.ways if way != "torch"]
    try:
        for round_ in range(options.rounds + 1):  # the first warms up
            for way in ways:
                await engine.life.control("POST", "/flush_cache")
                if way == "sglang":
                    speed = await ask_pool(pool, prompts, options, f"s{round_}")
                else:
                    url = engine.life.client.url
                    speed = await asyncio.to_thread(ask_plain, url, prompts, options, folder, way == "plain-like")
                if round_:
                    found.setdefault(way, []).append(speed)
                print(f"{way:11s} round {round_}{'' if round_ else ' (warm-up)'}: {speed:9.0f} tokens/s", flush=True)
    finally:
        await pool.close()
    return found


async def measure_torch(options: argparse.Namespace, prompts: Any) -> dict[str, Any]:
    from miles_torch_rollout import TorchEngineConfig
    from miles_torch_rollout.engine import TorchEngine

    pool = EnginePool([TorchEngine(options.model, TorchEngineConfig(device=options.device))], timeout_s=3600.0)
    await pool.start()
    found: dict[str, Any] = {}
    try:
        for round_ in range(options.rounds + 1):
            speed = await ask_pool(pool, prompts, options, f"t{round_}")
            if round_:
                found.setdefault("torch", []).append(speed)
            print(f"torch       round {round_}{'' if round_ else ' (warm-up)'}: {speed:9.0f} tokens/s", flush=True)
    finally:
        await pool.close()
    return found


def machine() -> dict[str, Any]:
    import torch

    names = ("torch", "transformers", "sglang", "miles-core")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"cpus": os.cpu_count(), "gpu": gpu, "python": platform.python_version(), "versions": versions}


def value(text: str) -> tuple[str, Any]:
    name, _, raw = text.partition("=")
    try:
        return name, json.loads(raw)
    except ValueError:
        return name, raw


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--python", default=sys.executable, help="interpreter of SGLang's environment")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--server-arg", action="append", default=[], type=value, metavar="NAME=JSON", dest="server_args")
    for name, default in (("prompts", 64), ("samples", 8), ("prompt-tokens", 128), ("new-tokens", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args(argv)
    options.server_args = dict(options.server_args)
    return options


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    prompts = make_prompts(options)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if {"sglang", "plain", "plain-like"} & set(options.ways):
            found |= asyncio.run(measure_sglang(options, prompts, Path(folder)))
        if "torch" in options.ways:
            found |= asyncio.run(measure_torch(options, prompts))
    medians = {way: statistics.median(found[way]) for way in options.ways}
    for way, speed in medians.items():
        share = f"  {speed / medians['plain']:.2f} of plain" if "plain" in medians else ""
        print(f"{way:11s} median {speed:9.0f} tokens/s{share}")
    if options.json is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "json"}
        result = {"settings": settings, "machine": machine(), "tokens_per_s": found, "median": medians}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
