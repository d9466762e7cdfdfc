"""An inference engine on plain PyTorch: continuous batching, shared prompts, weights written in place."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, Environment, hookimpl

CAPABILITIES = frozenset({"score", "sleep", "weights/ipc", "weights/path"})


class TorchEngineConfig(ComponentConfig):
    """Options of the engine `torch`."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """"cpu", "cuda" or "cuda:N"; "auto" is the device that the launcher gave, else CUDA when there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights; "auto" is float32 on the CPU and bfloat16 on CUDA."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of this engine; 0 leaves what PyTorch chose."""
    max_running: int = Field(default=0, ge=0)
    """Most sequences in one batch; 0 is 128 on the CPU and 512 on CUDA."""
    max_kv_tokens: int = Field(default=0, ge=0)
    """Most tokens of running sequences whose keys and values are kept; 0 allows 2 GB on the CPU and half of the free
    memory on CUDA. At least one sequence of full length always fits."""
    prefill_tokens: int = Field(default=0, ge=0)
    """Most prompt tokens computed at once (one prompt may be longer); 0 is 2048 on the CPU and 16384 on CUDA."""
    prefix_cache_tokens: int = Field(default=8192, ge=0)
    """Prompt tokens whose keys and values are kept for later prompts that are equal or begin alike; 0 keeps none."""
    forward: Literal["auto", "fused", "generic"] = "auto"
    """"fused" is a lean forward pass for Llama, Qwen2 and Qwen3, checked against the model's own at start; "generic" calls
    the model's own for every step. "auto" takes the fused one where it serves the architecture and agrees."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention of the model's own forward pass."""
    state_hash: bool = False
    """Hash all weights at every commit, so that the pool can compare replicas."""


def _build(config: TorchEngineConfig, context: BuildContext) -> Any:
    from miles_torch_rollout.engine import TorchEngine

    return TorchEngine.from_context(config, context)


def _check(config: TorchEngineConfig, environment: Environment) -> None:
    from miles_torch_rollout.load import check_environment

    check_environment(config, environment.where)


@hookimpl
def miles_engines() -> list[Component[Any]]:
    return [
        Component(
            name="torch",
            summary="Plain PyTorch on CPU or one GPU, in the driver's process or its own.",
            config=TorchEngineConfig,
            build=_build,
            check=_check,
            provides=CAPABILITIES,
        )
    ]
