"""Pieces of toy runs without a config: an engine, a trainer, requests, pushes, batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.batch import apply_advantages, make_batches, prepare
from miles_core.builtin.losses import policy_gradient
from miles_core.component import BuildContext
from miles_core.settings import TrainTable
from miles_core.testing import toy, toy_model
from miles_core.testing.toy_engine import ToyEngine
from miles_core.testing.toy_trainer import ToyTrainer
from miles_core.transport import publish, release
from miles_core.types import (
    AdvantageOutput,
    GenerateRequest,
    SampleGroup,
    SamplingParams,
    TrainBatch,
    WeightMessage,
)

TOKENIZER = toy.ToyTokenizer()


def context(*losses: Any, seed: int = 0, **fields: Any) -> BuildContext:
    """What a worker would be given; `losses` are the built losses of a trainer, by default `policy-gradient`."""
    built = [(f"loss-{i}", loss) for i, loss in enumerate(losses or (policy_gradient,))]
    values = {"component": "x/toy", "run_dir": Path("."), "seed": seed, "run_config": None, "tokenizer": TOKENIZER}
    return BuildContext(**(values | {"select": lambda kind: built} | fields))


def trainer(*losses: Any, config: toy.ToyTrainerConfig | None = None, **fields: Any) -> ToyTrainer:
    """A started trainer; `fields` go to `context`."""
    made = ToyTrainer(config or toy.ToyTrainerConfig(), context(*losses, **fields))
    made.start()
    return made


async def engine(config: toy.ToyEngineConfig | None = None, **fields: Any) -> ToyEngine:
    """A started engine; with the same seed it holds the weights of `trainer`."""
    made = ToyEngine(config or toy.ToyEngineConfig(), context(**fields))
    await made.start()
    return made


def request(name: str = "r", prompt: str = "3,4=", seed: int = 1, **params: Any) -> GenerateRequest:
    """A chat request; `params` are fields of `SamplingParams`."""
    values = {"max_new_tokens": 4, "stop_token_ids": TOKENIZER.stop_token_ids} | params
    ids = TOKENIZER.render([{"role": "user", "content": prompt}]).token_ids
    return GenerateRequest(id=name, token_ids=ids, params=SamplingParams(**values), seed=seed)


def buckets_as_messages(
    source: ToyTrainer, version: int, bucket_bytes: int = 1 << 14
) -> Iterator[tuple[WeightMessage, str]]:
    """(message, key to release) for each bucket of a trainer's export."""
    for bucket in source.export("hf_full", bucket_bytes):
        key = publish(bucket.data)
        body = {"handle": key, "nbytes": bucket.nbytes}
        tensors, sha = bucket.tensors, bucket.sha
        yield WeightMessage(kind="ipc", version=version, bucket=bucket.index, tensors=tensors, sha=sha, body=body), key


async def push(
    target: ToyEngine,
    source: ToyTrainer,
    version: int,
    kinds: Sequence[str] = ("begin", "data", "flush", "commit"),
) -> dict[str, Any]:
    """The messages of one update, in order; returns the answer to the last."""
    answer: dict[str, Any] = {}
    for kind in kinds:
        if kind == "data":
            for message, key in buckets_as_messages(source, version):
                answer = await target.receive(message)
                release(key)
        else:
            answer = await target.receive(WeightMessage(kind=kind, version=version))
    return answer


def moved(source: ToyTrainer, token: str = "7", by: float = 40.0) -> ToyTrainer:
    """Makes the policy of `source` answer `token` to everything."""
    source.params["bigram"][toy_model.ASSISTANT, toy_model.token_id(token)] += by
    return source


def batch_of(groups: Sequence[SampleGroup], advantage: float = 1.0, **options: Any) -> TrainBatch:
    """The first optimizer step on `groups`, with one advantage for every token; `options` go to `make_batches`."""

    def constant(inputs: Any) -> AdvantageOutput:
        return AdvantageOutput(advantages=[m * np.float32(advantage) for m in inputs.mask])

    batch = prepare(groups)
    apply_advantages(batch, [("constant", constant)])
    return make_batches(batch, options.pop("train", TrainTable()), **options)[0]
