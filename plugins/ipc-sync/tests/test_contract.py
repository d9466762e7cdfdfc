"""The contract suite of transports on toy engines in "another process", and the choice between the ways of a bucket."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import miles_ipc_sync
from miles_core.testing import toy
from miles_core.testing.contracts import TransportContract
from miles_core.testing.contracts.transport import FaultyEngine
from miles_core.types import Bucket, SendPlan, TensorSpec
from miles_core.worker import place
from miles_ipc_sync.sender import IpcSender, checksum
from miles_ipc_sync.transport import IpcTransport

torch = pytest.importorskip("torch")
(IPC,) = miles_ipc_sync.miles_weight_transports()


class TestIpcSync(TransportContract):
    component = IPC

    def engine(self, folder: Path, index: int, at: str = "", what: str = "") -> Any:
        made = FaultyEngine(toy.ToyEngineConfig(), self.make_context(folder, seed=9, index=index), at, what)
        made.place = place() | {"pid": -1}
        return made


class TestIpcSyncInProcess(TransportContract):
    component = IPC


def transport() -> IpcTransport:
    made = IpcTransport(bucket_bytes=1, timeout_s=1, checksum=True)
    made._places = [place()]
    return made


def end(*capabilities: str, local: bool = False) -> Any:
    return SimpleNamespace(engine=SimpleNamespace(capabilities=frozenset(capabilities)), local=local)


@pytest.mark.parametrize(
    ("ends", "device"),
    [
        ([end("weights/ipc", "weights/ipc-device")], True),
        ([end("weights/ipc", "weights/ipc-device"), end("weights/ipc")], False),  # bytes once, for both
        ([end("weights/ipc", "weights/ipc-device", local=True)], False),  # a handle of this very process
        ([], False),
    ],
)
def test_device_handles_only_where_every_engine_takes_them(ends: list[Any], device: bool) -> None:
    assert transport()._plan(1, ends).options["device"] is device


class OnDevice:
    """A tensor that says that it is in device memory."""

    is_cuda = True

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def numel(self) -> int:
        return self.tensor.numel()


def test_a_bucket_on_a_device_is_sent_as_a_handle_and_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(64, dtype=torch.uint8)
    bucket = Bucket(
        index=0, tensors=(TensorSpec(name="a", dtype="uint8", shape=(64,), offset=0),), data=OnDevice(data), nbytes=64
    )
    monkeypatch.setattr("miles_ipc_sync.sender.device_handle", lambda tensor: {"uuid": "GPU-x"})
    monkeypatch.setattr("miles_ipc_sync.sender.checksum", lambda tensor: checksum(tensor.tensor))
    plan = SendPlan(version=1, options={"device": True, "checksum": True})
    (message,) = IpcSender().send(plan, iter([bucket]))
    assert message.body == {"cuda": {"uuid": "GPU-x"}, "nbytes": 64}
    assert message.sha == "sum64:" + checksum(data)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 1000, 4097])
def test_the_checksum_is_that_of_its_definition(count: int) -> None:
    raw = np.random.default_rng(count).integers(0, 256, count).astype(np.uint8)
    words = raw[: count // 4 * 4].view(np.int32).astype(object)  # exact integers
    tail = int.from_bytes(raw[count // 4 * 4 :].tobytes(), "little")
    plain, placed = sum(words, 0), sum((w * (i + 1) for i, w in enumerate(words)), 0)
    assert checksum(torch.from_numpy(raw)) == f"{plain % 2**64:016x}{placed % 2**64:016x}{tail:06x}"


def test_words_that_change_places_are_noticed() -> None:
    one = torch.tensor([1, 2], dtype=torch.int32)
    assert checksum(one) != checksum(one.flip(0))


def test_engines_compute_the_same_checksum() -> None:
    """The copy inside SGLang's process stands alone, without Miles."""
    file = Path(__file__).parents[2] / "sglang-rollout/miles_sglang_rollout/serverside/miles_sglang_weights.py"
    spec = importlib.util.spec_from_file_location("miles_sglang_weights", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    data = torch.randn(1001).to(torch.bfloat16)
    assert module.checksum(data) == checksum(data)
    # unaligned: a view that starts in the middle of a word
    assert module.checksum(data.view(torch.uint8)[1:]) == checksum(data.view(torch.uint8)[1:])
