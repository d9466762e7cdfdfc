"""Suite of the kind rollout. It runs on the toy engine, or on yours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.interfaces import EngineReplica, Tokenizer
from miles_core.testing import toy
from miles_core.testing.contracts.base import ComponentContract, no_error
from miles_core.testing.toy_engine import ToyEngine
from miles_core.types import GenerateRequest, Generation, Prompt, RolloutContext, Sample, SampleGroup, SamplingParams

UNTRAINABLE = ("error", "timeout", "aborted")


class Pool:
    """One engine as an `EnginePool`: it keeps what was asked and answered. `answer` stands in for the engine's own."""

    version = 0

    def __init__(self, engine: EngineReplica, answer: Callable[[GenerateRequest], Generation] | None = None) -> None:
        self.engine, self.answer = engine, answer
        self.requests: list[GenerateRequest] = []
        self.answers: list[Generation] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        made = self.answer(request) if self.answer else await self.engine.generate(request)
        self.answers.append(made)
        return made

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        await self.engine.abort(ids)

    async def score(self, token_ids: Any, topk: int = 0) -> Any:
        return await self.engine.score(token_ids, topk)


class RolloutContract(ComponentContract):
    """A `Rollout`."""

    num_samples: int = 3
    max_context: int = 200
    cancel_s: float = 5.0
    """It ends within this time after `cancelled` was set."""
    resumes: bool = True
    """Whether it goes on with the partial groups that it is given."""
    samples: bool = True
    """False for a rollout that asks no engine: its answers come from the data, and rules about requests do not apply."""

    # --- Helpers ---

    def prompt(self) -> Prompt:
        return Prompt(id="p", draw=2, messages=[{"role": "user", "content": "3,4="}], label="3")

    def tokenizer(self) -> Tokenizer:
        return toy.ToyTokenizer()

    def engine(self, folder: Path) -> EngineReplica:
        return ToyEngine(toy.ToyEngineConfig(), self.make_context(folder))

    def group(self, folder: Path, answer: Any = None, **fields: Any) -> tuple[SampleGroup, Pool]:
        """One group and the pool that served it; `fields` are of `RolloutContext`."""

        async def work() -> tuple[SampleGroup, Pool]:
            engine = self.engine(folder)
            await engine.start()
            pool = Pool(engine, answer)
            sampling = SamplingParams(max_new_tokens=24, stop_token_ids=self.tokenizer().stop_token_ids)
            values = {
                "prompt": self.prompt(),
                "num_samples": self.num_samples,
                "sampling": sampling,
                "pool": pool,
                "tokenizer": self.tokenizer(),
                "seed": 11,
                "max_context": self.max_context,
                "order": 4,
            }
            with no_error("run_group"):
                made = await self.build(folder).run_group(RolloutContext(**(values | fields)))
            await engine.close()
            return made, pool

        return self.run(work())

    def _only_if_it_samples(self) -> None:
        if not self.samples:
            pytest.skip("samples = False: it asks no engine")

    # --- Rules ---

    def test_a_group_is_complete(self, tmp_path: Path) -> None:
        """Id "{prompt.id}@{draw}", every index once and in order, each with a trajectory of its own, `order` as it came."""
        group, _ = self.group(tmp_path)
        assert (group.id, group.num_samples, group.order) == ("p@2", self.num_samples, 4)
        assert group.prompt.id == "p"
        first = [s for s in group.samples if s.segment == 0]
        assert [s.index for s in first] == list(range(self.num_samples))
        assert len({s.trajectory_id for s in first}) == self.num_samples
        assert {s.group_id for s in group.samples} == {group.id}

    def test_arrays_have_full_length(self, tmp_path: Path) -> None:
        """int32, bool and float32 of T; nothing of the prompt is trained; log-probabilities are 0 where not sampled."""
        for sample in self.group(tmp_path)[0].samples:
            arrays = (sample.tokens, sample.loss_mask, sample.logprobs)
            assert [a.dtype for a in arrays] == [np.int32, np.bool_, np.float32]
            assert {a.shape for a in arrays} == {(sample.num_tokens,)}
            assert not sample.loss_mask[: max(sample.prompt_len, 1)].any(), "a token of the prompt is trained"
            assert not sample.logprobs[~sample.loss_mask].any(), "a log-probability of what was not sampled"

    def test_sampled_tokens_are_the_engines(self, tmp_path: Path) -> None:
        """What is trained is what an engine returned, id by id, with its log-probability; text is never encoded again."""
        self._only_if_it_samples()
        group, pool = self.group(tmp_path)
        answers = {(tuple(a.token_ids.tolist()), tuple(a.logprobs.tolist())) for a in pool.answers}
        for sample in group.samples:
            runs = sampled_runs(sample)
            assert runs, f"{sample.trajectory_id} holds no sampled token"
            for tokens, logprobs in runs:
                assert (tokens, logprobs) in answers, f"{sample.trajectory_id} trains {tokens}, which no engine sampled"

    def test_spans_cover_what_was_sampled(self, tmp_path: Path) -> None:
        """Each trained token lies in exactly one span of `versions`, counted from the first token of the sample."""
        for sample in self.group(tmp_path)[0].samples:
            covered = np.zeros(sample.num_tokens, dtype=int)
            for span in sample.versions:
                covered[span.start : span.stop] += 1
            assert (covered[sample.loss_mask] == 1).all(), f"spans {sample.versions} for mask {sample.loss_mask}"

    def test_siblings_differ_and_a_rerun_agrees(self, tmp_path: Path) -> None:
        """Every request has a seed of its own, and the same group gets the same seeds again."""
        self._only_if_it_samples()
        first, again = (self.group(tmp_path)[1].requests for _ in range(2))
        seeds = [r.seed for r in first]
        assert len(set(seeds)) == len(seeds), f"two requests share a seed: {seeds}"
        assert sorted(seeds) == sorted(r.seed for r in again), "a rerun has other seeds"

    def test_a_failure_is_data(self, tmp_path: Path) -> None:
        """A request that failed gives a sample that says so and trains nothing; its siblings are whole."""
        self._only_if_it_samples()
        empty = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32), "versions": ()}
        group, _ = self.group(tmp_path, lambda r: Generation(id=r.id, finish="error", reason="the engine is gone", **empty))
        assert len(group.samples) >= self.num_samples
        for sample in group.samples:
            assert sample.status in UNTRAINABLE and sample.reason, f"status {sample.status}, reason {sample.reason!r}"
            assert not sample.loss_mask.any(), "a failed sample is trained"

    def test_a_prompt_without_room_is_data(self, tmp_path: Path) -> None:
        """A prompt as long as the context gives samples that say so, not an exception, and trains nothing."""
        group, _ = self.group(tmp_path, max_context=3)
        for sample in group.samples:
            assert sample.status not in ("running", "stop") and not sample.loss_mask.any(), f"status {sample.status}"

    def test_the_context_is_respected(self, tmp_path: Path) -> None:
        """No sample is longer than `max_context`, and no request asks for more."""
        room = len(self.tokenizer().render(self.prompt().messages or ()).token_ids) + 1
        group, pool = self.group(tmp_path, max_context=room)
        assert max(s.num_tokens for s in group.samples) <= room
        for request in pool.requests:
            asked = len(request.token_ids) + request.params.max_new_tokens
            assert asked <= room, f"a request for up to {asked} tokens in a context of {room}"

    def test_cancelling_ends_it(self, tmp_path: Path) -> None:
        """When `cancelled` is set, it ends at once, and samples that had not ended are "aborted"."""
        self._only_if_it_samples()

        async def slow() -> SampleGroup:
            engine = ToyEngine(toy.ToyEngineConfig(token_seconds=0.05), self.make_context(tmp_path))
            await engine.start()
            cancelled = asyncio.Event()
            asyncio.get_running_loop().call_later(0.02, cancelled.set)
            sampling = SamplingParams(max_new_tokens=150, ignore_eos=True)
            context = RolloutContext(
                prompt=self.prompt(), num_samples=2, sampling=sampling, pool=Pool(engine), tokenizer=self.tokenizer(),
                seed=1, max_context=self.max_context, cancelled=cancelled,
            )  # fmt: skip
            return await asyncio.wait_for(self.build(tmp_path).run_group(context), self.cancel_s)

        try:
            group = self.run(slow())
        except TimeoutError:
            raise AssertionError(f"it went on for {self.cancel_s:g} s after it was cancelled") from None
        assert {s.status for s in group.samples} == {"aborted"}, [s.status for s in group.samples]

    def test_a_partial_group_goes_on(self, tmp_path: Path) -> None:
        """Of a partial group, samples that ended are kept as they are, and an aborted one goes on after its last token."""
        if not self.resumes:
            pytest.skip("resumes = False: it starts partial groups again")
        whole, _ = self.group(tmp_path)
        cut = whole.samples[0]
        stop = cut.prompt_len + 1
        spans = tuple(replace(s, stop=min(s.stop, stop)) for s in cut.versions)
        arrays = {name: getattr(cut, name)[:stop] for name in ("tokens", "loss_mask", "logprobs")}
        partial = replace(cut, **arrays, versions=spans, status="aborted")
        group, pool = self.group(tmp_path, partial=replace(whole, samples=[partial, *whole.samples[1:]]))
        assert len(pool.requests) == 1, f"{len(pool.requests)} requests for one sample that had not ended"
        assert group.samples[0].tokens[:stop].tolist() == partial.tokens.tolist(), "what was sampled before is lost"
        assert [s.tokens.tolist() for s in group.samples[1:]] == [s.tokens.tolist() for s in whole.samples[1:]]


def sampled_runs(sample: Sample) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Ids and log-probabilities of every unbroken run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]]).astype(int)))
    return [
        (tuple(sample.tokens[a:b].tolist()), tuple(sample.logprobs[a:b].tolist()))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]
