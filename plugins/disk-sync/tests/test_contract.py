"""The contract suite of transports on toy engines that load a folder, and what only a folder does."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miles_disk_sync
from miles_core.errors import RuntimeMissing
from miles_core.testing import toy
from miles_core.testing.contracts import TransportContract
from miles_core.testing.contracts.transport import FaultyEngine
from miles_core.transport import hash_folder
from miles_core.types import TensorSpec, WeightMessage
from miles_disk_sync.sender import write_safetensors
from miles_disk_sync.transport import DiskTransport

(DISK,) = miles_disk_sync.miles_weight_transports()


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """fp32 tensors of all safetensors files in a folder, read by the format's own definition: 8 bytes with the header's
    length, the header as JSON, the tensors."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = np.frombuffer(data[start:stop], np.float32).reshape(entry["shape"]).copy()
    return found


class FolderEngine(FaultyEngine):
    """A toy engine whose data comes as a folder; a fault "at" a bucket is one at the folder."""

    def __init__(self, config: Any, context: Any, at: str = "", what: str = "") -> None:
        super().__init__(config, context, "path" if at == "ipc" else at, what)

    def _update(self, message: WeightMessage) -> dict[str, Any]:
        if message.kind != "path":
            return super()._update(message)
        folder = Path(message.body["path"])
        for name, value in read_tensors(folder).items():
            self.params[name][...] = value
            self._received.add(name)
        return {"sha": hash_folder(folder)}


class TestDiskSync(TransportContract):
    component = DISK

    def engine(self, folder: Path, index: int, at: str = "", what: str = "") -> Any:
        return FolderEngine(toy.ToyEngineConfig(), self.make_context(folder, seed=9, index=index), at, what)

    def test_only_the_newest_versions_stay(self, tmp_path: Path) -> None:
        async def work() -> list[str]:
            async with self.connected(tmp_path, ("", "")) as session:
                session.transport.keep = 2
                for version in (1, 2, 3):
                    await self.push(session, version)
                return sorted(path.name for path in (tmp_path / "weights").iterdir())

        assert self.run(work()) == ["version-000002", "version-000003"]

    def test_a_rank_that_cannot_write_leaves_the_engines_alone(self, tmp_path: Path) -> None:
        """The old version is staged beside the new one: an interrupted send costs its unfinished folder."""

        async def work() -> Any:
            async with self.connected(tmp_path, ("", "")) as session:
                await self.push(session, 1)
                (engine,) = session.engines
                export, seen = session.rank.export, len(engine.seen)

                def broken(layout: str, bucket_bytes: int) -> Any:
                    yield next(iter(export(layout, bucket_bytes)))
                    raise OSError("no space left on device")

                session.rank.export = broken
                with pytest.raises(OSError, match="no space left"):
                    await session.transport.push(2, session.engines)
                return [m.kind for m in engine.seen[seen:]], sorted(p.name for p in (tmp_path / "weights").iterdir())

        told, folders = self.run(work())
        assert (told, folders) == ([], ["version-000001"])

    def test_files_that_change_on_their_way_are_noticed(self, tmp_path: Path) -> None:
        class Swapped(FolderEngine):
            def _update(self, message: WeightMessage) -> dict[str, Any]:
                if message.kind == "path":
                    other = tmp_path / "other"
                    shutil.copytree(message.body["path"], other)
                    file = next(other.glob("*.safetensors"))
                    file.write_bytes(file.read_bytes()[:-1] + b"\1")
                    message = replace(message, body={"path": str(other)})
                return super()._update(message)

        async def work() -> Any:
            async with self.connected(tmp_path, ("", "")) as session:
                context = self.make_context(tmp_path, seed=9, index=1)
                session.engines = [Swapped(toy.ToyEngineConfig(), context)]
                await session.engines[0].start()
                return (await self.push(session, 1)).engines[0]

        sync = self.run(work())
        assert (sync.ok, sync.phase) == (False, "path") and "was written as SHA-256" in sync.error


def test_gaps_between_tensors_are_not_written(tmp_path: Path) -> None:
    data = np.zeros(192, np.uint8)
    first, second = np.arange(3, dtype=np.float32), np.full((2, 2), 7, np.float32)
    data[:12], data[64:80] = first.view(np.uint8), second.reshape(-1).view(np.uint8)
    specs = (
        TensorSpec(name="a", dtype="float32", shape=(3,), offset=0),
        TensorSpec(name="b", dtype="float32", shape=(2, 2), offset=64),
    )
    write_safetensors(tmp_path / "x.safetensors", specs, data)
    found = read_tensors(tmp_path)
    np.testing.assert_array_equal(found["a"], first)
    np.testing.assert_array_equal(found["b"], second)
    header = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    assert (tmp_path / "x.safetensors").stat().st_size == 8 + header + 12 + 16  # two tensors of fp32: 3 and 4 numbers
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    transport = DiskTransport(bucket_bytes=1, timeout_s=1, folder=tmp_path / "file" / "weights", keep=1)

    class Pool:
        replicas = ()

    with pytest.raises(RuntimeMissing, match=r"cannot be written to .*file/weights"):
        asyncio.run(transport.connect(None, Pool()))
