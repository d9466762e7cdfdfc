"""Lets Megatron-Core run on the CPU with gloo: every "cuda" device means the CPU. No kernel is faked.

What a machine with GPUs needs too (packed attention, for example) is in megatron_model.py.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


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


class Adam(torch.optim.Optimizer):
    """AdamW with its step in the parameter group, as Apex has it, which is what Megatron's optimizer expects."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        assert adam_w_mode, "decoupled weight decay only"
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            t = group["step"] = int(group.get("step", 0)) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                scale = (state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
                p.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - beta1**t))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, `x.cuda()` is x, and `x.type()` spells "torch.cuda.*", which Megatron's optimizer asks
    for. A mode holds for the thread that entered it."""

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


def install() -> None:
    """Once, in the thread that will run Megatron, before megatron is imported. Does nothing where there is a GPU."""
    cuda = torch.cuda
    if cuda.is_available():
        return
    stream = _Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1
    )
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    CudaMeansCpu().__enter__()
    import megatron.core.optimizer as optimizer
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    optimizer.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
