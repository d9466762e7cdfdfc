"""What the two halves of the engine suite share: settings, a served engine, requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.testing.contracts.base import ComponentContract
from miles_core.types import GenerateRequest, Generation, SamplingParams

Weights = Mapping[str, np.ndarray]


class EngineHelpers(ComponentContract):
    """Settings and helpers of the engine suite."""

    prompt: tuple[int, ...] = (1, 2, 3)
    """A prompt of at least three tokens, after which the model is unsure: several tokens are likely."""
    vocab_size: int = 0
    long_tokens: int = 200
    """Length of an answer that takes long enough to be interrupted."""
    tolerance: float = 1e-3
    """Largest difference of a log-probability between `generate` and `score`, in nats."""
    pause_modes: tuple[str, ...] = ("abort", "retract", "in_place")

    def weights(self, variant: int) -> Weights | None:
        """All tensors of the model under the names that a trainer exports, as float32. Variant 0 is what `start` loads,
        variant 1 other values of the same shapes. None: the rules about updates are skipped."""
        return None

    # --- Helpers ---

    @asynccontextmanager
    async def serving(self, folder: Path, **fields: Any) -> AsyncIterator[Any]:
        """A started engine, closed afterwards; `fields` are those of `make_context`."""
        engine = self.build(folder, **fields)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    def with_engine(self, folder: Path, work: Callable[[Any], Coroutine[Any, Any, Any]], **fields: Any) -> Any:
        async def served() -> Any:
            async with self.serving(folder, **fields) as engine:
                return await work(engine)

        return self.run(served())

    def request(self, name: str = "r", seed: int = 1, **params: Any) -> GenerateRequest:
        """A request that is not stopped by an end token unless `ignore_eos=False`; `params` are of `SamplingParams`."""
        values = {"max_new_tokens": 8, "ignore_eos": True} | params
        ids = np.array(self.prompt, dtype=np.int32)
        return GenerateRequest(id=name, token_ids=ids, params=SamplingParams(**values), seed=seed)

    def long(self, name: str = "long") -> GenerateRequest:
        return self.request(name, max_new_tokens=self.long_tokens)

    async def sampling(self, engine: Any, count: int = 1) -> None:
        """Waits until `count` requests run; then lets the engine sample for a moment."""
        while (await engine.health())["running"] < count:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)

    async def scored(self, engine: Any, made: Generation, topk: int = 0) -> dict[str, np.ndarray]:
        """The answer's own part of what `score` says of prompt and answer."""
        if "score" not in engine.capabilities:
            pytest.skip('this engine cannot score (no capability "score")')
        ids = np.concatenate([np.array(self.prompt, dtype=np.int32), made.token_ids])
        (row,) = await engine.score([ids], topk)
        return {name: values[len(self.prompt) :] for name, values in row.items()}
