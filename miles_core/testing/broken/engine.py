"""Engines that break a rule of life, sampling or interruption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.errors import EngineFailed
from miles_core.testing import suites, toy_model
from miles_core.testing.broken import Shelf
from miles_core.testing.toy_engine import ToyEngine
from miles_core.types import GenerateRequest, Generation

ENGINE = Shelf(suites.ToyEngine, lambda cls: cls)


def with_params(request: GenerateRequest, **params: Any) -> GenerateRequest:
    return replace(request, params=replace(request.params, **params))


@ENGINE.breaks("test_every_start_is_a_new_incarnation")
class OneIncarnation(ToyEngine):
    async def start(self) -> None:
        await super().start()
        self.incarnation = self.id


@ENGINE.breaks("test_health_tells_what_it_does")
class SaysOnlyThatItLives(ToyEngine):
    async def health(self) -> dict[str, Any]:
        await super().health()
        return {"ok": True}


@ENGINE.breaks("test_it_serves_only_between_start_and_close")
class AlwaysHealthy(ToyEngine):
    async def health(self) -> dict[str, Any]:
        return {"version": self.version, "running": 0, "waiting": 0}


@ENGINE.breaks("test_close_may_be_called_twice")
class ClosesOnce(ToyEngine):
    async def close(self) -> None:
        if self._broken == "closed":
            raise EngineFailed(f"{self.id} is closed already")
        await super().close()


@ENGINE.breaks("test_capabilities_are_announced")
class CanMoreThanItSays(ToyEngine):
    capabilities = ToyEngine.capabilities | {"weights/broadcast"}


# --- Sampling --------------------------------------------------------------------------------------------------------


@ENGINE.breaks("test_an_answer_is_complete")
class DoublePrecision(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        made = await super().generate(request)
        return replace(made, logprobs=made.logprobs.astype(np.float64))


@ENGINE.breaks("test_length_is_respected")
class OneTokenMore(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(with_params(request, max_new_tokens=request.params.max_new_tokens + 1))


@ENGINE.breaks("test_the_context_is_respected")
class EndlessContext(ToyEngine):
    async def start(self) -> None:
        self.max_context = 10**9
        await super().start()


@ENGINE.breaks("test_logprobs_are_those_of_score")
class ShiftedLogprobs(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        made = await super().generate(request)
        return replace(made, logprobs=np.roll(made.logprobs, 1))


@ENGINE.breaks("test_logprobs_are_at_the_sampling_temperature")
class LogprobsAtTemperatureOne(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        made = await super().generate(request)
        (row,) = await self.score([np.concatenate([request.token_ids, made.token_ids])])
        return replace(made, logprobs=row["logprobs"][len(request.token_ids) :])


@ENGINE.breaks("test_logprobs_are_at_the_sampling_temperature")
class LogprobsAfterTopK(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        made = await super().generate(request)
        return replace(made, logprobs=made.logprobs * np.float32(0.5)) if request.params.top_k else made


@ENGINE.breaks("test_score_fits_the_tokens")
class ScoreWithoutFirst(ToyEngine):
    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        rows = await super().score(token_ids, topk)
        return [{name: values[1:] for name, values in row.items()} for row in rows]


@ENGINE.breaks("test_a_seed_gives_the_same_tokens_in_any_company")
class SeedOfTheBatch(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(replace(request, seed=request.seed + len(self._running)))


@ENGINE.breaks("test_siblings_differ")
class OneSeedForAll(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(replace(request, seed=0))


@ENGINE.breaks("test_temperature_zero_is_greedy")
class TinyTemperature(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(with_params(request, temperature=request.params.temperature or 1.0))


@ENGINE.breaks("test_the_stop_token_is_part_of_the_answer")
class CutsTheStopToken(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        made = await super().generate(request)
        cut = len(made.token_ids) - (made.finish == "stop")
        return replace(made, token_ids=made.token_ids[:cut], logprobs=made.logprobs[:cut])


@ENGINE.breaks("test_the_stop_token_is_part_of_the_answer")
class AlwaysStops(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(with_params(request, ignore_eos=False))


# --- Interruptions ---------------------------------------------------------------------------------------------------


@ENGINE.breaks("test_abort_returns_what_there_is")
class CannotAbort(ToyEngine):
    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Lets them run."""


@ENGINE.breaks("test_abort_returns_what_there_is")
class AbortsAll(ToyEngine):
    async def abort(self, ids: Iterable[str] | None = None) -> None:
        await super().abort(None)


@ENGINE.breaks("test_pause_abort_returns_what_there_is")
class PausesInPlace(ToyEngine):
    async def pause(self, mode: str = "abort") -> None:
        await super().pause("in_place")


class PausesByAbort(ToyEngine):
    async def pause(self, mode: str = "abort") -> None:
        await super().pause("abort")


ENGINE.breaks("test_pause_retract_goes_on")(PausesByAbort)
ENGINE.breaks("test_pause_in_place_goes_on")(PausesByAbort)


@ENGINE.breaks("test_a_paused_engine_samples_nothing")
class PauseOnlyAborts(ToyEngine):
    async def pause(self, mode: str = "abort") -> None:
        await self.abort()


@ENGINE.breaks("test_sleep_keeps_the_weights")
class WakesEmpty(ToyEngine):
    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        await super().wake(tags)
        self.params = {name: np.roll(value, 3) for name, value in toy_model.initial_params(8).items()}


@ENGINE.breaks("test_sleep_keeps_the_weights")
class ServesAsleep(ToyEngine):
    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        """Sleeps on its feet."""
