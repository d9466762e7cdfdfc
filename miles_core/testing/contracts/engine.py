"""Suite of the kind engine: life, sampling, interruptions; rules of weight updates are in `engine_weights`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import EngineFailed
from miles_core.interfaces import EngineReplica
from miles_core.testing.contracts.base import no_error, refused
from miles_core.testing.contracts.engine_weights import EngineWeights
from miles_core.types import Generation

STATUSES = ("stop", "length", "aborted")


class EngineContract(EngineWeights):
    """An `EngineReplica`. Set `prompt`, `vocab_size` and `weights`; `model_path` where it loads a model."""

    # --- Life ---

    def test_every_start_is_a_new_incarnation(self, tmp_path: Path) -> None:
        """`start` sets `incarnation`, another one each time: for another replica, and for the same after `close`."""

        async def work() -> list[str]:
            seen = []
            first, second = self.build(tmp_path), self.build(tmp_path)
            for engine in (first, second, first):
                await engine.start()
                seen.append(engine.incarnation)
                await engine.close()
            return seen

        seen = self.run(work())
        assert all(seen) and len(set(seen)) == 3, f"incarnations {seen}"

    def test_health_tells_what_it_does(self, tmp_path: Path) -> None:
        """After `start`, `health` gives version 0 and the numbers of running and waiting requests."""
        health = self.with_engine(tmp_path, lambda engine: engine.health())
        numbers = {name: health.get(name) for name in ("version", "running", "waiting")}
        assert numbers == {"version": 0, "running": 0, "waiting": 0}, health

    def test_it_serves_only_between_start_and_close(self, tmp_path: Path) -> None:
        """`health` and `generate` raise EngineFailed before `start` and after `close`."""

        async def work() -> None:
            engine = self.build(tmp_path)
            for when in ("before start", "after close"):
                with refused(EngineFailed, f"health {when}"):
                    await engine.health()
                with refused(EngineFailed, f"generate {when}"):
                    await engine.generate(self.request())
                if when == "before start":
                    await engine.start()
                    await engine.close()

        self.run(work())

    def test_close_may_be_called_twice(self, tmp_path: Path) -> None:
        """`close` is safe to call again, and on an engine that never started."""

        async def work() -> None:
            engine = self.build(tmp_path)
            with no_error("close"):
                await engine.close()
            await engine.start()
            for _ in range(2):
                with no_error("close"):
                    await engine.close()

        self.run(work())

    def test_capabilities_are_announced(self, tmp_path: Path) -> None:
        """What the replica can do is what its component provides: a run is checked before any engine starts."""
        engine: EngineReplica = self.build(tmp_path)
        assert set(engine.capabilities) == set(self.component.provided(self.config))

    # --- Sampling ---

    def test_an_answer_is_complete(self, tmp_path: Path) -> None:
        """int32[R] ids of the vocabulary, float32[R] finite log-probabilities <= 0, the request's id, the incarnation."""

        async def work(engine: Any) -> tuple[Generation, str]:
            return await engine.generate(self.request("my-id")), engine.incarnation

        made, incarnation = self.with_engine(tmp_path, work)
        assert (made.id, made.incarnation) == ("my-id", incarnation)
        assert made.finish in STATUSES, f'finish "{made.finish}"'
        assert made.token_ids.dtype == np.int32 and made.logprobs.dtype == np.float32
        assert made.token_ids.shape == made.logprobs.shape
        assert ((made.token_ids >= 0) & (made.token_ids < self.vocab_size)).all(), made.token_ids
        assert np.isfinite(made.logprobs).all() and (made.logprobs <= 0).all(), made.logprobs

    def test_length_is_respected(self, tmp_path: Path) -> None:
        """Never more than `max_new_tokens`; an answer of just that many ends with "length"."""
        for limit in (1, 5):
            made = self.with_engine(tmp_path, lambda e, n=limit: e.generate(self.request(max_new_tokens=n)))
            assert (len(made.token_ids), made.finish) == (limit, "length")

    def test_the_context_is_respected(self, tmp_path: Path) -> None:
        """Prompt and answer together never exceed `[model] max_context`, and the answer then ends with "length"."""
        run = self.run_config()
        limit = len(self.prompt) + 3
        run = run.model_copy(update={"model": run.model.model_copy(update={"max_context": limit})})
        made = self.with_engine(tmp_path, lambda e: e.generate(self.request()), run_config=run)
        assert (len(made.token_ids), made.finish) == (3, "length"), f"a context of {limit}"

    def test_logprobs_are_those_of_score(self, tmp_path: Path) -> None:
        """At temperature 1 the log-probabilities are what `score` gives to the same tokens."""

        async def work(engine: Any) -> tuple[Any, Any]:
            made = await engine.generate(self.request())
            return made, await self.scored(engine, made)

        made, scored = self.with_engine(tmp_path, work)
        np.testing.assert_allclose(made.logprobs, scored["logprobs"], atol=self.tolerance)

    def test_logprobs_are_at_the_sampling_temperature(self, tmp_path: Path) -> None:
        """At temperature 0.5 they are those of softmax(logits / 0.5) over the whole vocabulary, before top-k and top-p."""
        if self.vocab_size > 4096:
            pytest.skip("a vocabulary of more than 4096 tokens is not compared")

        async def work(engine: Any) -> tuple[Any, Any]:
            made = await engine.generate(self.request(temperature=0.5, top_k=3, top_p=0.9))
            return made, await self.scored(engine, made, topk=self.vocab_size)

        made, scored = self.with_engine(tmp_path, work)
        rows = scored["topk_logprobs"].astype(np.float64) / 0.5
        wanted = scored["logprobs"] / 0.5 - np.log(np.exp(rows).sum(axis=1))
        np.testing.assert_allclose(made.logprobs, wanted, atol=self.tolerance)

    def test_score_fits_the_tokens(self, tmp_path: Path) -> None:
        """`score` gives float32[T] with 0 at index 0, and with `topk` the K most likely tokens, best first."""

        async def work(engine: Any) -> tuple[Any, list[Any]]:
            made = await engine.generate(self.request())
            await self.scored(engine, made)
            ids = [np.concatenate([self.prompt, made.token_ids[:n]]).astype(np.int32) for n in (2, 5)]
            return ids, await engine.score(ids, 3)

        for ids, row in zip(*self.with_engine(tmp_path, work), strict=True):
            assert row["logprobs"].shape == ids.shape and row["logprobs"].dtype == np.float32
            assert row["logprobs"][0] == 0, f"index 0 holds {row['logprobs'][0]}"
            best = row["topk_logprobs"]
            assert best.shape == row["topk_ids"].shape == (len(ids), 3)
            assert (np.diff(best[1:], axis=1) <= 1e-6).all(), "not sorted, best first"
            assert (row["logprobs"][1:] <= best[1:, 0] + 1e-5).all(), "a token is likelier than the likeliest"

    def test_a_seed_gives_the_same_tokens_in_any_company(self, tmp_path: Path) -> None:
        """A request's tokens depend on its seed, and not on what else is in the batch, or on when it came."""

        async def work(engine: Any) -> tuple[Any, Any, Any]:
            alone = await engine.generate(self.request("a", seed=7))
            crowd = [self.request(f"c{i}", seed=50 + i, max_new_tokens=4 + i) for i in range(5)]
            others = [asyncio.ensure_future(engine.generate(r)) for r in crowd]
            await asyncio.sleep(0)
            among = await engine.generate(self.request("b", seed=7))
            await asyncio.gather(*others)
            return alone, among, await engine.generate(self.request("c", seed=7))

        rows = [made.token_ids.tolist() for made in self.with_engine(tmp_path, work)]
        assert rows[0] == rows[1] == rows[2], rows

    def test_siblings_differ(self, tmp_path: Path) -> None:
        """Requests that differ in their seed alone get different answers."""

        async def work(engine: Any) -> list[Any]:
            return await asyncio.gather(*(engine.generate(self.request(f"r{s}", seed=s)) for s in range(8)))

        made = {tuple(g.token_ids.tolist()) for g in self.with_engine(tmp_path, work)}
        assert len(made) > 1, "eight seeds, one answer"

    def test_temperature_zero_is_greedy(self, tmp_path: Path) -> None:
        """At temperature 0 the seed does not matter, and each token is the likeliest; top_k = 1 gives the same tokens."""

        async def work(engine: Any) -> tuple[list[Any], Any]:
            cuts = ({"temperature": 0.0}, {"temperature": 0.0}, {"top_k": 1})
            made = [await engine.generate(self.request(f"r{i}", seed=i, **cut)) for i, cut in enumerate(cuts)]
            return made, await self.scored(engine, made[0], topk=1) if "score" in engine.capabilities else None

        made, scored = self.with_engine(tmp_path, work)
        rows = [g.token_ids.tolist() for g in made]
        assert rows[0] == rows[1] == rows[2], f"greedy answers differ: {rows}"
        if scored is not None:
            assert scored["topk_ids"][:, 0].tolist() == rows[0], "not the likeliest tokens"
            np.testing.assert_allclose(made[0].logprobs, scored["logprobs"], atol=self.tolerance)

    def test_the_stop_token_is_part_of_the_answer(self, tmp_path: Path) -> None:
        """A stop token ends the answer with "stop" and stands at its end; with `ignore_eos` it does not."""

        async def work(engine: Any) -> list[Any]:
            greedy = await engine.generate(self.request("a", temperature=0.0))
            stop = {"stop_token_ids": (int(greedy.token_ids[0]),), "temperature": 0.0}
            names = ("b", False), ("c", True)
            return [await engine.generate(self.request(n, ignore_eos=ignore, **stop)) for n, ignore in names]

        stopped, ignored = self.with_engine(tmp_path, work)
        assert (stopped.finish, len(stopped.token_ids), len(stopped.logprobs)) == ("stop", 1, 1)
        assert (ignored.finish, len(ignored.token_ids)) == ("length", 8), "ignore_eos was ignored"

    # --- Interruptions ---

    def test_abort_returns_what_there_is(self, tmp_path: Path) -> None:
        """`abort(ids)` ends these requests with "aborted" and the tokens sampled so far; others go on to their end."""

        async def work(engine: Any) -> tuple[Any, Any]:
            tasks = [asyncio.ensure_future(engine.generate(self.long(name))) for name in ("a", "b")]
            await self.sampling(engine, 2)
            await engine.abort(["a", "unknown"])
            return await asyncio.gather(*tasks)

        cut, whole = self.with_engine(tmp_path, work)
        assert cut.finish == "aborted" and len(cut.token_ids) < self.long_tokens, f"{cut.finish}: {len(cut.token_ids)}"
        assert len(cut.logprobs) == len(cut.token_ids)
        assert whole.finish == "length", f"the other request ended with {whole.finish}"
        assert cut.token_ids.tolist() == whole.token_ids[: len(cut.token_ids)].tolist(), "not what was sampled so far"

    def test_pause_abort_returns_what_there_is(self, tmp_path: Path) -> None:
        """`pause("abort")` ends running requests with "aborted"."""
        made = self._paused(tmp_path, "abort")
        assert made.finish == "aborted" and len(made.token_ids) < self.long_tokens, f"{made.finish}"

    def test_pause_retract_goes_on(self, tmp_path: Path) -> None:
        """`pause("retract")` holds running requests; after `resume` they end as if nothing had been."""
        self._goes_on(tmp_path, "retract")

    def test_pause_in_place_goes_on(self, tmp_path: Path) -> None:
        """`pause("in_place")` holds running requests with their cache; after `resume` they end as if nothing had been."""
        self._goes_on(tmp_path, "in_place")

    def test_a_paused_engine_samples_nothing(self, tmp_path: Path) -> None:
        """A request that comes while it is paused waits for `resume`."""

        async def work(engine: Any) -> tuple[bool, Any]:
            await engine.pause("abort")
            task = asyncio.ensure_future(engine.generate(self.request()))
            await asyncio.sleep(0.05)
            early = task.done()
            await engine.resume()
            return early, await task

        early, made = self.with_engine(tmp_path, work)
        assert not early, "a paused engine answered"
        assert made.finish == "length", f"after resume it ended with {made.finish}"

    def _paused(self, folder: Path, mode: str) -> Generation:
        if mode not in self.pause_modes:
            pytest.skip(f'this engine has no pause mode "{mode}"')

        async def work(engine: Any) -> Generation:
            task = asyncio.ensure_future(engine.generate(self.long()))
            await self.sampling(engine)
            await engine.pause(mode)
            await asyncio.sleep(0.02)
            assert mode == "abort" or not task.done(), f"it went on through a pause of mode {mode}"
            await engine.resume()
            return await task

        return self.with_engine(folder, work)

    def _goes_on(self, folder: Path, mode: str) -> None:
        made = self._paused(folder, mode)
        whole = self.with_engine(folder, lambda engine: engine.generate(self.long()))
        assert made.finish == "length" and made.token_ids.tolist() == whole.token_ids.tolist()

    def test_sleep_keeps_the_weights(self, tmp_path: Path) -> None:
        """After `sleep` and `wake` the answers are as before; asleep, it refuses requests with EngineFailed."""

        async def work(engine: Any) -> tuple[Any, Any]:
            if "sleep" not in engine.capabilities:
                pytest.skip('this engine does not sleep (no capability "sleep")')
            before = await engine.generate(self.request("a", temperature=0.0))
            await engine.sleep()
            with refused(EngineFailed, "generate while asleep"):
                await engine.generate(self.request("b"))
            await engine.wake()
            return before, await engine.generate(self.request("c", temperature=0.0))

        before, after = self.with_engine(tmp_path, work)
        assert before.token_ids.tolist() == after.token_ids.tolist()
