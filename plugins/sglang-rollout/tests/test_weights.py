"""What may come as weights and what the server is told, against a fake server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")
from fake_sglang import FakeSglang, attached

from miles_core.errors import EngineFailed, WeightSyncFailed
from miles_core.transport import hash_folder
from miles_core.types import TensorSpec, WeightMessage
from miles_sglang_rollout.weights import Update, expected_shapes, instruction

pytestmark = pytest.mark.timeout(60)
SHAPES = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}


def write(folder: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, **config: Any) -> Path:
    """A model folder, by the definition of the safetensors format."""
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {}, b""
    for name, shape in shapes.items():
        raw = np.full(shape, len(data), np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Fake"], **config}))
    return folder


def update(tied: bool = False) -> Update:
    return Update(1, SHAPES if not tied else {k: v for k, v in SHAPES.items() if k != "lm_head.weight"}, tied_head=tied)


def test_names_shapes_and_completeness_are_compared_with_the_folder() -> None:
    whole = update()
    whole.admit(SHAPES.items())
    whole.finish()
    with pytest.raises(WeightSyncFailed, match=r'no tensor "model\.layers\.0\.mlp\.experts\.gate_up_proj"'):
        update().admit([("model.layers.0.mlp.experts.gate_up_proj", (1,))])  # transformers' fused name
    with pytest.raises(WeightSyncFailed, match=r"came with shape \(4, 8\), and the model has \(8, 4\)"):
        update().admit([("model.embed_tokens.weight", (4, 8))])
    part = update()
    part.admit([("model.norm.weight", (4,))])
    with pytest.raises(WeightSyncFailed, match=r"2 of 3 tensors did not come: lm_head\.weight, model"):
        part.finish()
    with pytest.raises(WeightSyncFailed, match="came twice"):
        part.admit([("model.norm.weight", (4,))])


def test_a_tied_head_may_come_or_not(tmp_path: Path) -> None:
    folder = write(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in expected_shapes(folder)
    for names in (["model.embed_tokens.weight", "model.norm.weight"], list(SHAPES)):
        one = update(tied=True)
        one.admit((name, SHAPES[name]) for name in names)
        one.finish()


def test_the_instruction_is_a_pickle_that_sglang_allows() -> None:
    torch = pytest.importorskip("torch")
    import base64
    import io
    import pickle

    seen = []

    class Strict(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.append((module, name))
            return super().find_class(module, name)

    order = {"op": "load", "file": "/dev/shm/x", "name": "é\n"}
    ((name, tensor),) = Strict(io.BytesIO(base64.b64decode(instruction(order)))).load()
    assert json.loads(name) == order and isinstance(tensor, torch.Tensor) and tensor.numel() == 0
    assert seen == [("torch", "empty")]


# --- Messages --------------------------------------------------------------------------------------------------------


def run(work: Callable[[FakeSglang, Any], Coroutine[Any, Any, Any]], folder: Path, **options: Any) -> Any:
    async def whole() -> Any:
        async with FakeSglang().served() as fake, attached(fake, write(folder), **options) as engine:
            return await work(fake, engine)

    return asyncio.run(whole())


async def send(engine: Any, kind: str, version: int = 1, **fields: Any) -> Any:
    message = WeightMessage(kind=kind, version=version, incarnation=engine.incarnation, **fields)
    return await engine.receive(message)


async def send_path(engine: Any, folder: Path, version: int = 1, sha: str | None = None) -> Any:
    sha = hash_folder(folder) if sha is None else sha
    return await send(engine, "path", version, sha=sha, body={"path": str(folder)})


def test_a_folder_is_loaded_between_marks_of_the_server_itself(tmp_path: Path) -> None:
    """Whoever comes later sees at the server that it holds a mixture."""

    async def work(fake: FakeSglang, engine: Any) -> Any:
        await engine.pause("abort")
        await send(engine, "begin")
        await send_path(engine, write(tmp_path / "new"))
        during = fake.info["weight_version"]
        await send(engine, "flush")
        answer = await send(engine, "commit")
        await engine.resume()
        return during, answer, await engine.health(), [name for name, _ in fake.calls]

    during, answer, health, calls = run(work, tmp_path / "model")
    assert during == "updating-1" and answer["version"] == health["version"] == 1
    order = ["pause_generation", "update_weight_version", "update_weights_from_disk", "flush_cache"]
    assert calls[:6] == [*order, "update_weight_version", "continue_generation"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("update_weights_from_disk", 400, "out of room"),
        ("flush_cache", 400, "requests are running"),
        ("update_weight_version", 500, "bad day"),
    ],
)
def test_a_failed_phase_leaves_it_dirty_until_a_whole_update_has_come(
    tmp_path: Path, path: str, status: int, says: str
) -> None:
    async def work(fake: FakeSglang, engine: Any) -> None:
        new = write(tmp_path / "new")
        await engine.pause("abort")
        await send(engine, "begin")
        fake.refuse[path] = (status, says)
        with pytest.raises(WeightSyncFailed, match=says):
            await send_path(engine, new)
            await send(engine, "flush")
            await send(engine, "commit")
        with pytest.raises(EngineFailed, match="no whole version"):
            await engine.resume()
        fake.refuse.clear()
        for kind in ("begin", "path", "flush", "commit"):
            await (send_path(engine, new, 2) if kind == "path" else send(engine, kind, 2))
        await engine.resume()

    run(work, tmp_path / "model")


def test_a_control_call_is_never_repeated(tmp_path: Path) -> None:
    """The server may have done what it was asked before the connection broke."""

    async def work(fake: FakeSglang, engine: Any) -> int:
        await engine.pause("abort")
        await send(engine, "begin")
        fake.drop = ["update_weights_from_disk"]
        with pytest.raises(WeightSyncFailed):
            await send_path(engine, write(tmp_path / "new"))
        return fake.count("update_weights_from_disk")

    assert run(work, tmp_path / "model") == 1


def test_files_with_other_bytes_or_names_are_refused_before_the_server_hears_of_them(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> int:
        await engine.pause("abort")
        await send(engine, "begin")
        with pytest.raises(WeightSyncFailed, match="reads as"):
            await send_path(engine, write(tmp_path / "new"), sha="0" * 64)
        await send(engine, "begin")
        with pytest.raises(WeightSyncFailed, match=r'no tensor "model\.other"'):
            await send_path(engine, write(tmp_path / "other", {"model.other": (2,)}))
        return fake.count("update_weights_from_disk")

    assert run(work, tmp_path / "model") == 0


def test_running_requests_must_be_paused_first(tmp_path: Path) -> None:
    async def work(fake: FakeSglang, engine: Any) -> None:
        with pytest.raises(WeightSyncFailed, match="pause comes before begin"):
            await send(engine, "begin")

    run(work, tmp_path / "model")


def test_a_broadcast_of_another_group_does_not_reach_the_server(tmp_path: Path) -> None:
    """It would end itself over an unknown group."""

    async def work(fake: FakeSglang, engine: Any) -> Any:
        body = {"host": "h", "port": 1, "group": "g", "rank": 1, "world_size": 2, "backend": "gloo"}
        await engine.pause("abort")
        await send(engine, "join", body=body)
        await send(engine, "begin")
        spec = TensorSpec(name="model.norm.weight", dtype="float32", shape=(4,), offset=0)
        await send(engine, "broadcast", tensors=(spec,), body={"group": "g", "nbytes": 16})
        with pytest.raises(WeightSyncFailed, match="not in the group x"):
            await send(engine, "broadcast", tensors=(spec,), body={"group": "x", "nbytes": 16})
        await send(engine, "abort")
        return dict(fake.calls), fake.count("update_weights_from_distributed")

    calls, count = run(work, tmp_path / "model")
    assert count == 1 and calls["update_weights_from_distributed"]["load_format"] == "flattened_bucket"
    assert calls["init_weights_update_group"]["rank_offset"] == 1
    assert calls["destroy_weights_update_group"] == {"group_name": "g"}


def test_a_server_that_another_run_has_used_is_brought_back(tmp_path: Path) -> None:
    async def work() -> Any:
        fake = FakeSglang(info={"weight_version": "updating-7"})
        async with fake.served():
            engine_of = attached(fake, write(tmp_path))
            async with engine_of as engine:
                return fake.info["weight_version"], engine.version

    assert asyncio.run(work()) == ("0", 0)


def test_a_server_of_another_model_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        fake = FakeSglang(info={"architectures": ["Qwen3ForCausalLM"], "model_path": "/m/qwen"})
        async with fake.served(), attached(fake, write(tmp_path)):
            pass

    with pytest.raises(EngineFailed, match=r"serves /m/qwen \(Qwen3ForCausalLM\), and the model of the run is"):
        asyncio.run(work())


def test_nobody_at_the_url(tmp_path: Path) -> None:
    fake = FakeSglang()
    fake.url = "http://127.0.0.1:9"

    async def work() -> None:
        async with attached(fake, write(tmp_path), start_timeout_s=0.3):
            pass

    with pytest.raises(EngineFailed, match=r"no SGLang server answers at http://127\.0\.0\.1:9"):
        asyncio.run(work())


def test_a_token_that_arrives_late_keeps_the_version_that_the_server_gave_it(tmp_path: Path) -> None:
    """It is on its way when the version changes, and was sampled before."""

    async def work(fake: FakeSglang, engine: Any) -> Any:
        weights, new = engine.life.weights, write(tmp_path / "new")
        await engine.pause("abort")
        for version in (1, 2):
            for kind in ("begin", "path", "flush", "commit"):
                await (send_path(engine, new, version) if kind == "path" else send(engine, kind, version))
        return [weights.version_of(told) for told in ("1", "updating-2", "2")]

    assert run(work, tmp_path / "model") == [1, 1, 2]
