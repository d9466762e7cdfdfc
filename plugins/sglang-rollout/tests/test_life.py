"""Real servers that are started, killed and replaced; a tokenizer in the server; values that SGLang does not know."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_support import CONTEXT, SERVER_ARGS, VOCAB, FolderTrainer, Reference, make_transport, share, trainer_group

from miles_core.engines import EnginePool
from miles_core.errors import EngineFailed
from miles_core.types import GenerateRequest, SamplingParams
from miles_sglang_rollout import SglangEngineConfig

pytestmark = pytest.mark.timeout(600)
PROMPT = np.array([5, 17, 40, 3], np.int32)


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Any]:
    from miles_sglang_rollout.engine import SglangEngine

    def make(folder: Path, index: int = 0, *, args: dict[str, Any] = SERVER_ARGS, **more: Any) -> Any:
        config = SglangEngineConfig(device="cpu", num_threads=1, server_args=args, start_timeout_s=300.0)
        name = f"engine-{index}"
        return SglangEngine(folder, config, run_dir=tmp_path, engine_id=name, index=index, **more)

    return make


def ask(name: str, count: int = 24, seed: int = 1, **params: Any) -> GenerateRequest:
    values = {"max_new_tokens": count, "ignore_eos": True} | params
    return GenerateRequest(id=name, token_ids=PROMPT, params=SamplingParams(**values), seed=seed)


def with_tokenizer(folder: Path, target: Path) -> Path:
    """A copy of a model whose token i is the word "wi"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(folder, target)
    plain = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w1").save_pretrained(target)
    return target


def test_kill_minus_nine_of_one_of_two_engines_loses_and_doubles_nothing(
    served: Callable[..., Any], model_folder: Callable[..., Path], engine: Callable[..., Any], tmp_path: Path
) -> None:
    """The pool requeues what the dead one ran, starts it again, and re-syncs it before it serves. Every sample is that of
    its seed, whoever served it: each (prompt, sample) once."""
    folders = [model_folder("qwen3", seed) for seed in (0, 1)]
    text = with_tokenizer(folders[0], tmp_path / "text")
    first = share(engine(folders[0], 0), served("qwen3", **SERVER_ARGS))
    second = engine(text, 1, needs_text=True)
    new = Reference(folders[1])
    ids = np.array([*PROMPT, 9, 33, 71, 20], np.int32)

    async def work() -> Any:
        transport, make_sender = make_transport("direct", tmp_path)
        group = await trainer_group(FolderTrainer(folders[1]), make_sender)
        pool = EnginePool([first, second], timeout_s=120.0, sync_timeout_s=60.0, replace=lambda old: old.restart())
        try:
            await pool.start()
            greedy = (await second.generate(ask("greedy", 40, temperature=0.0))).token_ids.tolist()
            word = f"w{greedy[7]}"
            stopped = await second.generate(ask("stop", 40, temperature=0.0, stop=(word,)))
            first_at = next(i for i, token in enumerate(greedy) if f"w{token}".startswith(word))
            assert (stopped.finish, stopped.token_ids.tolist()) == ("stop", greedy[: first_at + 1])
            await transport.connect(group, pool)
            report = await pool.sync(transport, 1, [(ids, new.logprobs(ids), 1e-4)])
            alone = [await first.generate(ask(f"alone-{i}", seed=i)) for i in range(4)]
            tasks = [asyncio.ensure_future(pool.generate(ask(f"r{i}", 300 if i < 4 else 24, seed=i))) for i in range(24)]
            while second.requests.running < 4:
                await asyncio.sleep(0.01)
            os.kill(second.life.server.pid, signal.SIGKILL)
            made = await asyncio.gather(*tasks)
            while not any(m.id == "engine-1" and m.state == "dirty" for m in pool.members()):
                assert all(m.state != "dead" for m in pool.members() if m.id == "engine-0")
                await asyncio.sleep(0.2)
            before = [await second.health(), pool.counts.copy()]
            again = await pool.resync()
            scored = await second.score([ids])
            return report, alone, made, before, again, scored, [m.state for m in pool.members()]
        finally:
            await pool.close()
            await transport.close()
            await group.close()

    report, alone, made, (health, counts), again, scored, states = asyncio.run(work())
    assert [sync.ok for sync in report.engines] == [True, True]
    assert len({sync.state_hash for sync in report.engines}) == 1  # both hold the same, as they themselves say
    assert [g.id for g in made] == [f"r{i}" for i in range(24)] and {g.finish for g in made} == {"length"}
    for i in range(4):
        assert made[i].token_ids[:24].tolist() == alone[i].token_ids.tolist()
    assert counts["deaths"] == 1 and counts["requeued"] >= 4 and counts["requests"] == 24
    assert health["version"] == 0  # it holds what it loaded at its start, and does not serve
    assert [sync.ok for sync in again.engines] == [True] and states == ["ready", "ready"]
    np.testing.assert_allclose(scored[0]["logprobs"], new.logprobs(ids), atol=1e-4)


def test_a_value_that_sglang_does_not_know_is_named(
    sglang: None, model_folder: Callable[..., Path], engine: Callable[..., Any]
) -> None:
    made = engine(model_folder("qwen3"), args={"attention_backend": "tritan", "max_running_requests": "many"})
    with pytest.raises(EngineFailed) as caught:
        asyncio.run(made.start())
    said = str(caught.value)
    assert "attention_backend = 'tritan' is none of" in said and "max_running_requests = 'many'" in said


def test_the_context_of_the_model_is_known(
    served: Callable[..., Any], model_folder: Callable[..., Path], engine: Callable[..., Any]
) -> None:
    made = share(engine(model_folder("qwen3")), served("qwen3", **SERVER_ARGS))

    async def work() -> Any:
        await made.start()
        full = GenerateRequest(id="f", token_ids=np.full(CONTEXT, 5, np.int32), params=SamplingParams(), seed=0)
        return await made.generate(full)

    answer = asyncio.run(work())
    assert (answer.finish, len(answer.token_ids)) == ("length", 0) and str(CONTEXT) in answer.reason
