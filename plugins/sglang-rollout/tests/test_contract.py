"""The contract suite of engines, against real SGLang servers with tiny random models on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_support import (
    CONTEXT,
    MOE_ARGS,
    SERVER_ARGS,
    VOCAB,
    FolderTrainer,
    Reference,
    make_transport,
    share,
    trainer_group,
)

import miles_sglang_rollout
from miles_core.engines import EnginePool
from miles_core.errors import WeightSyncFailed
from miles_core.fields import check_field
from miles_core.testing.contracts import EngineContract
from miles_sglang_rollout import ROUTED_EXPERTS

(SGLANG,) = miles_sglang_rollout.miles_engines()
pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def pushing(engine: Any, trainer: Any, name: str, folder: Path) -> AsyncIterator[Any]:
    """(pool of the engine, transport to it from the trainer), started and connected."""
    transport, make_sender = make_transport(name, folder)
    group = await trainer_group(trainer, make_sender)
    pool = EnginePool([engine], timeout_s=60.0, sync_timeout_s=60.0)
    try:
        await pool.start()
        await transport.connect(group, pool)
        yield pool, transport
    finally:
        await pool.close()
        await transport.close()
        await group.close()


class TestQwen3(EngineContract):
    component = SGLANG
    options = {"device": "cpu", "num_threads": 1, "server_args": SERVER_ARGS}
    model = "qwen3"
    prompt = (5, 17, 40, 3)
    vocab_size = VOCAB
    long_tokens = CONTEXT // 2
    pause_modes = ("abort", "retract")
    entry_module = "miles_sglang_rollout"

    @pytest.fixture(autouse=True)
    def _server(self, served: Callable[..., Any], model_folder: Callable[..., Path]) -> None:
        self.shared = served(self.model, **self.options["server_args"])
        self.folders = [model_folder(self.model, seed) for seed in (0, 1)]
        self.model_path = self.folders[0]

    def build(self, folder: Path, **fields: Any) -> Any:
        return share(super().build(folder, **fields), self.shared)

    def weights(self, variant: int) -> Any:
        from safetensors.numpy import load_file

        return load_file(self.folders[variant] / "model.safetensors")

    # --- Beyond the contract ---

    def test_logprobs_equal_hugging_face(self, tmp_path: Path) -> None:
        """In fp32, at the sampling temperature, and those of `score` at temperature 1."""

        async def work(engine: Any) -> Any:
            made = [await engine.generate(self.request(f"r{t}", temperature=t, max_new_tokens=40)) for t in (1.0, 0.7)]
            return made, await self.scored(engine, made[0])

        made, scored = self.with_engine(tmp_path, work)
        model = Reference(self.folders[0])
        for answer, temperature in zip(made, (1.0, 0.7), strict=True):
            ids = np.concatenate([self.prompt, answer.token_ids])
            want = model.logprobs(ids, temperature)[len(self.prompt) :]
            np.testing.assert_allclose(answer.logprobs, want, atol=1e-4)
        ids = np.concatenate([self.prompt, made[0].token_ids])
        np.testing.assert_allclose(scored["logprobs"], model.logprobs(ids)[len(self.prompt) :], atol=1e-4)

    @pytest.mark.parametrize("name", ["direct", "ipc-sync", "disk-sync", "nccl-sync"])
    def test_every_channel_brings_the_new_model(self, tmp_path: Path, name: str) -> None:
        """Through a real transport and the pool: the answers become the new model's, and only those."""
        old, new = (Reference(folder) for folder in self.folders)
        ids = np.array([*self.prompt, 9, 33, 71, 20], np.int32)

        async def work() -> Any:
            async with pushing(self.build(tmp_path), FolderTrainer(self.folders[1]), name, tmp_path) as (pool, transport):
                before = await pool.score([ids])
                probes = [(ids, new.logprobs(ids), 1e-4)]
                reports = [await pool.sync(transport, version, probes) for version in (1, 2)]
                answer = await pool.generate(self.request(max_new_tokens=20))
                return before[0]["logprobs"], reports, (await pool.score([ids]))[0]["logprobs"], answer

        before, reports, after, answer = self.run(work())
        for report in reports:  # the second goes through the group, segment or folder of the first
            assert [(sync.ok, sync.error) for sync in report.engines] == [(True, "")]
            assert report.num_buckets > 1 and len(report.hashes) in (1, report.num_buckets)
        np.testing.assert_allclose(before, old.logprobs(ids), atol=1e-4)
        np.testing.assert_allclose(after, new.logprobs(ids), atol=1e-4)
        assert np.abs(after - old.logprobs(ids)).max() > 0.1  # else neither of the two says anything
        whole = np.concatenate([self.prompt, answer.token_ids])
        np.testing.assert_allclose(answer.logprobs, new.logprobs(whole)[len(self.prompt) :], atol=1e-4)
        assert [span.version for span in answer.versions] == [2]


@pytest.mark.parametrize("name", ["disk-sync", "nccl-sync"])
def test_a_server_that_runs_already_takes_folders_and_broadcasts(
    served: Callable[..., Any], model_folder: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """Through SGLang's own endpoints: nothing of ours is assumed inside a server that someone else started."""
    from miles_sglang_rollout.engine import SglangEngine

    shared, folders = served("qwen3", **SERVER_ARGS), [model_folder("qwen3", seed) for seed in (0, 1)]
    config = miles_sglang_rollout.SglangEngineConfig(urls=(shared.url,))
    new, ids = Reference(folders[1]), np.array([5, 17, 40, 3, 9, 33, 71, 20], np.int32)

    async def work() -> Any:
        engine = SglangEngine(folders[0], config, run_dir=tmp_path)
        async with pushing(engine, FolderTrainer(folders[1]), name, tmp_path) as (pool, transport):
            before = (await pool.score([ids]))[0]["logprobs"]
            report = await pool.sync(transport, 1, [(ids, new.logprobs(ids), 1e-4)])
            return before, report.engines[0], (await pool.score([ids]))[0]["logprobs"]

    before, sync, after = asyncio.run(work())
    assert (sync.ok, sync.error) == (True, "")
    np.testing.assert_allclose(before, Reference(folders[0]).logprobs(ids), atol=1e-4)
    np.testing.assert_allclose(after, new.logprobs(ids), atol=1e-4)


class TestQwen3Streamed(TestQwen3):
    options = {**TestQwen3.options, "stream": True}
    pause_modes = ("abort", "retract", "in_place")


class TestLlama(TestQwen3):
    model = "llama"


class TestQwen3Moe(TestQwen3):
    model = "qwen3-moe"
    long_tokens = 120
    options = {**TestQwen3.options, "server_args": MOE_ARGS}

    def test_routed_experts_equal_hugging_faces_router(self, tmp_path: Path) -> None:
        """Row t is where input token t went, at every layer; also across a pause, in two pieces."""

        async def work(engine: Any) -> Any:
            plain = self.request("a", max_new_tokens=30)
            plain.fields = frozenset({"routed_experts"})
            whole = await engine.generate(plain)
            long = self.long("b")
            long.fields = plain.fields
            task = asyncio.ensure_future(engine.generate(long))
            await self.sampling(engine)
            await asyncio.sleep(0.1)
            await engine.pause("retract")
            pieces = engine.requests.live["b"].parts.pieces
            await engine.resume()
            return whole, await task, pieces

        whole, cut, pieces = self.with_engine(tmp_path, work)
        assert pieces == 1  # it was cut after some tokens, and went on
        model = Reference(self.folders[0])
        for answer in (whole, cut):
            ids = np.concatenate([self.prompt, answer.token_ids])
            rows = check_field(ROUTED_EXPERTS, answer.extras["routed_experts"], len(ids), answer.id)
            want = model.experts(ids)[:-1]  # the last token was no input
            assert rows.dtype == np.int16 and rows.shape == want.shape == (len(ids) - 1, 2, 2)
            np.testing.assert_array_equal(np.sort(rows, -1), np.sort(want, -1))

    def test_fused_names_are_caught_though_the_server_takes_them(self, tmp_path: Path) -> None:
        """SGLang answers success to names that it does not know. The comparison with the folder catches them at once; with
        it switched off, the re-scored prompts do."""
        new = Reference(self.folders[1])
        ids = np.array([*self.prompt, 9, 33, 71, 20], np.int32)

        def rename(name: str) -> str:
            return name.replace(".experts.0.gate_proj.weight", ".experts.gate_up_proj")

        async def work(check: bool) -> Any:
            engine = self.build(tmp_path)
            engine.life.config = engine.config.model_copy(update={"check_names": check})
            async with pushing(engine, FolderTrainer(self.folders[1], rename), "direct", tmp_path) as (pool, transport):
                with pytest.raises(WeightSyncFailed) as caught:
                    await pool.sync(transport, 1, [(ids, new.logprobs(ids), 1e-4)])
                return str(caught.value), [member.state for member in pool.members()]

        said, states = self.run(work(True))
        assert states == ["dirty"] and "no tensor" in said and "experts.gate_up_proj" in said
        said, states = self.run(work(False))
        assert states == ["dirty"] and "nats on fixed prompt" in said
