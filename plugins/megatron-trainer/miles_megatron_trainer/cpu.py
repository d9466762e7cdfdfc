"""Lets Megatron run on the CPU with gloo: every "cuda" device means the CPU. No kernel is faked, and nothing that a machine
with GPUs needs too is here. On such a machine all of it does nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import typing
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_state = threading.local()


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, `x.cuda()` is x, and `x.type()` spells "torch.cuda.*", which Megatron's optimizer asks
    for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_FAKES: dict[str, Any] = {
    "current_device": lambda: CPU,
    "set_device": lambda device: None,
    "synchronize": lambda *args, **kwargs: None,
    "empty_cache": lambda: None,
    "get_device_capability": lambda *args: (9, 0),
    "get_device_properties": lambda *args: SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1
    ),
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *args, **kwargs: _Stream(),
    "default_stream": lambda *args, **kwargs: _Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
}


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Everything of Megatron is imported and called inside this. What it changes in `torch.cuda` it changes back, since a
    rank may share its process with an engine."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # without it Megatron refuses tensor parallelism
    if not hasattr(typing, "override"):  # Megatron-Core 0.19 is written for Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    if torch.cuda.is_available() or getattr(_state, "active", False):
        yield
        return
    _state.active = True
    before = {name: getattr(torch.cuda, name) for name in _FAKES}
    random = torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state
    try:
        for name, fake in _FAKES.items():
            setattr(torch.cuda, name, fake)
        torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = (
            _FAKES["get_rng_state"], _FAKES["set_rng_state"],
        )  # fmt: skip
        with CudaMeansCpu():
            _patch_megatron_rng()
            yield
    finally:
        _state.active = False
        for name, real in before.items():
            setattr(torch.cuda, name, real)
        torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = random


def _patch_megatron_rng() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of every optional library that is not there
        import megatron.core.tensor_parallel.random as random
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
