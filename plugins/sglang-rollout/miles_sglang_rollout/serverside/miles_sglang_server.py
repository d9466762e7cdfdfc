"""Starts an SGLang server from a JSON file of `ServerArgs`. Runs in the server's own environment, which needs SGLang and
nothing of Miles: `python -m miles_sglang_server ARGS.json`.

Arguments go to `ServerArgs` under their own names and with their own types, so that nothing is lost in the spelling of
flags. Values are compared with the choices that SGLang's own parser knows before anything is loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from typing import Any


def die_with_parent() -> None:
    """SIGKILL when whoever started us ends, however hard; SGLang's own children do the same with us."""
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def problems(values: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """Values that the parser's choices or types rule out."""
    found = []
    actions = {action.dest: action for action in parser._actions}
    for name, value in values.items():
        action = actions.get(name)
        if action is None or value is None:
            continue
        if action.choices is not None and action.nargs is None and value not in action.choices:
            found.append(f"{name} = {value!r} is none of {', '.join(map(str, action.choices))}")
        wanted = {int: int, float: (int, float), str: str}.get(action.type)
        if wanted and action.nargs is None and (not isinstance(value, wanted) or isinstance(value, bool)):
            found.append(f"{name} = {value!r} should be of type {action.type.__name__}")
        if action.type is None and action.nargs == 0 and not isinstance(value, bool):
            found.append(f"{name} = {value!r} should be true or false")
    return found


def allow_deterministic_cpu(server_args: Any) -> None:
    """SGLang's list of attention backends whose answers do not depend on the batch has no CPU one. `torch_native` computes
    each sequence by itself, so it belongs there, up to the rounding of matrix products."""
    for kind in ("", "radix_supported_"):
        add = getattr(server_args, f"add_{kind}deterministic_attention_backend_choices", None)
        if add is not None:
            add(["torch_native"])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a function of the two alone (splitmix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def sample_with_seed(logprobs: Any, seed: Any, positions: Any) -> Any:
    """int64[n, 1]: one index of each row of `logprobs` [n, m], by the inverse of its cumulative distribution. In place of
    SGLang's own function, which is a GPU kernel: one random number per token instead of one per token and entry."""
    import torch

    cdf = logprobs.double().exp().cumsum(1)
    at = [uniform(s, p) for s, p in zip(seed.tolist(), positions.tolist(), strict=True)]
    goal = torch.tensor(at, dtype=torch.float64)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, goal, right=True).clamp_(max=logprobs.shape[1] - 1)


class Unpinned:
    """torch for a module that asks for pinned memory, which a machine without an accelerator does not have."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Any:
        import torch

        return torch.zeros(*size, **options)


def run_cpu_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process on a CPU: seeds count without the batch-invariant GPU kernels, which are neither there nor
    needed, and routed experts are kept in plain memory."""
    from sglang.srt.layers import sampler
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.state_capturer import base

    sampler.multinomial_with_seed = sample_with_seed
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
    base.torch = Unpinned()
    return run_scheduler_process(*args, **kwargs)


def serve(server_args: Any) -> None:
    if server_args.device == "cpu":
        from sglang.srt.entrypoints.http_server import launch_server

        import miles_sglang_server  # under this name the child process finds the function

        launch_server(server_args, run_scheduler_process_func=miles_sglang_server.run_cpu_scheduler)
    else:
        from sglang.launch_server import run_server

        run_server(server_args)


def main(path: str) -> None:
    die_with_parent()
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    from sglang.srt import server_args as module
    from sglang.srt.utils import kill_process_tree

    parser = argparse.ArgumentParser()
    module.ServerArgs.add_cli_args(parser)
    wrong = problems(values, parser)
    if wrong:
        raise SystemExit("server_args: " + "; ".join(wrong))
    if values.get("device") == "cpu":
        allow_deterministic_cpu(module)
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    except ImportError:  # older versions have none
        pass
    try:
        serve(module.ServerArgs(**values))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1])
