"""The contract suite of transports over real gloo groups, with toy engines that receive broadcasts in a thread."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miles_nccl_sync
from miles_core.errors import WeightSyncFailed
from miles_core.testing import toy
from miles_core.testing.contracts import TransportContract
from miles_core.testing.contracts.transport import FaultyEngine
from miles_core.testing.toy_engine import ToyEngine
from miles_core.types import Bucket, SendPlan, TensorSpec, WeightMessage
from miles_nccl_sync.sender import BroadcastSender, checksum, flatten

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

(NCCL,) = miles_nccl_sync.miles_weight_transports()
pytestmark = pytest.mark.timeout(120)


class Receiver(ToyEngine):
    """A toy engine with the channel weights/broadcast. Collectives wait in a thread, as in a real engine's process."""

    capabilities = frozenset({"weights/broadcast"})
    _group: Any = None
    _name = ""

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.kind == "join":
            self._group = await asyncio.to_thread(self._join, message.body)
            self._name = message.body["group"]
            return {}
        if message.kind == "broadcast":
            if message.body["group"] != self._name or self._received is None:
                raise WeightSyncFailed(f"{self.id} is not in {message.body['group']}")
            data = await asyncio.to_thread(self._take, message.body["nbytes"])
            self._write(message, data.numpy())
            return {"sha": f"sum64:{checksum(data)}"}
        if message.kind == "abort":
            self._group, self._name = None, ""
        return await super().receive(message)

    def _join(self, body: Any) -> Any:
        limit = datetime.timedelta(seconds=5)
        store: Any = dist.TCPStore(body["host"], body["port"], body["world_size"], is_master=False, timeout=limit)
        for prefix in (body["group"], f"{body['group']}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(store, body["rank"], body["world_size"], limit)

    def _take(self, nbytes: int) -> Any:
        flat = torch.empty(nbytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([flat], options).wait()
        return flat


class GroupEngine(FaultyEngine, Receiver):
    """A fault "at" a bucket is one at a broadcast."""

    def __init__(self, config: Any, context: Any, at: str = "", what: str = "") -> None:
        super().__init__(config, context, "broadcast" if at == "ipc" else at, what)


class TestNcclSync(TransportContract):
    component = NCCL
    collective = True
    phase_s = 3.0
    push_s = 40.0

    def engine(self, folder: Path, index: int, at: str = "", what: str = "") -> Any:
        return GroupEngine(toy.ToyEngineConfig(), self.make_context(folder, seed=9, index=index), at, what)

    def test_a_group_serves_several_pushes(self, tmp_path: Path) -> None:
        async def work() -> list[int]:
            async with self.connected(tmp_path, ("", ""), ("", "")) as session:
                for version in (1, 2):
                    assert all(sync.ok for sync in (await self.push(session, version)).engines)
                return [sum(m.kind == "join" for m in engine.seen) for engine in session.engines]

        assert self.run(work()) == [1, 1]

    def test_an_engine_that_starts_anew_gets_a_new_group(self, tmp_path: Path) -> None:
        async def work() -> list[int]:
            async with self.connected(tmp_path, ("", ""), ("", "")) as session:
                await self.push(session, 1)
                await session.engines[1].start()
                assert all(sync.ok for sync in (await self.push(session, 2)).engines)
                return [sum(m.kind == "join" for m in engine.seen) for engine in session.engines]

        assert self.run(work()) == [2, 2]


def test_tensors_are_laid_out_as_receivers_expect_them() -> None:
    """Without gaps, the widest type first: a bf16 tensor of one number before an fp32 one would leave it unaligned."""
    data = torch.zeros(160, dtype=torch.uint8)
    data[:2] = torch.tensor([1.5], dtype=torch.bfloat16).view(torch.uint8)
    data[64:76] = torch.arange(3, dtype=torch.float32).view(torch.uint8)
    specs = (
        TensorSpec(name="narrow", dtype="bfloat16", shape=(1,), offset=0),
        TensorSpec(name="wide", dtype="float32", shape=(3,), offset=64),
    )
    tensors, flat = flatten(Bucket(index=0, tensors=specs, data=data))
    assert [(t.name, t.offset) for t in tensors] == [("wide", 0), ("narrow", 12)]
    assert flat[:12].view(torch.float32).tolist() == [0, 1, 2]
    assert flat[12:].view(torch.bfloat16).tolist() == [1.5]


def test_a_bucket_without_gaps_is_sent_as_it_is() -> None:
    data = torch.arange(8, dtype=torch.uint8)
    _, flat = flatten(Bucket(index=0, tensors=(TensorSpec(name="a", dtype="float32", shape=(2,), offset=0),), data=data))
    assert flat.data_ptr() == data.data_ptr()


def test_two_sources_are_refused() -> None:
    options = {"group": "g", "fresh": False, "timeout_s": 1, "checksum": False}
    spec = TensorSpec(name="a", dtype="uint8", shape=(1,), offset=0)
    buckets = [Bucket(index=0, tensors=(), data=None), Bucket(index=1, tensors=(spec,), data=np.zeros(1, np.uint8))]
    stream = BroadcastSender().send(SendPlan(version=1, options=options), iter(buckets))
    assert next(stream) is None
    with pytest.raises(WeightSyncFailed, match="bucket 1 comes from another rank"):
        next(stream)
