"""The engine `sglang`: SGLang servers, started and supervised, or attached to. This process never imports sglang."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from miles_core import BuildContext, Component, ComponentConfig, Environment, FieldSpec, hookimpl

ROUTED_EXPERTS = FieldSpec(
    name="routed_experts", dtype="int16", axes=("layer", "topk"), align="transition", missing="error", consumer="trainer"
)
"""Which experts each input token went to: row t belongs to input token t, which predicts token t + 1."""


class SglangEngineConfig(ComponentConfig):
    """Options of the engine `sglang`."""

    server_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the SGLang server by their own names (`tp_size`, `mem_fraction_static`, ...), checked against the
    installed version. Miles sets model_path, host and port itself, and defaults that these override."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the server computes; "auto" is CUDA where there is a GPU."""
    urls: tuple[str, ...] = ()
    """Running servers to attach to instead of starting some, one for each of `engine.replicas`. They must serve the run's
    model. A router's URL works with `control_urls`."""
    control_urls: tuple[tuple[str, ...], ...] = ()
    """For each of `urls` the servers behind it, where it is a router's: pauses, weights and memory go to each of these."""
    stream: bool = False
    """Receive tokens as they are sampled instead of at the end. Costs time on both sides; needed for the pause mode
    "in_place", where only the stream tells which token came before new weights."""
    max_in_flight: int = Field(default=2048, gt=0)
    """Most requests that one server is given at once, each of which is one connection and no thread."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """How long a server may take to start."""
    control_timeout_s: float = Field(default=60.0, gt=0)
    """Limit of one control request (pause, flush, health, abort) and of opening a connection."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of the server (OMP_NUM_THREADS); 0 leaves what the environment says."""
    check_names: bool = True
    """Compare names and shapes of new weights with those of the folder that the server loaded: SGLang itself answers
    success to names that it does not know. Off only for a folder with other names than the trainer's export."""
    state_hash: Literal["auto", "always", "never"] = "auto"
    """Checksum the server's parameters after each update, so that the pool can compare replicas; "auto" with several."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server."""

    @model_validator(mode="after")
    def _fits(self) -> SglangEngineConfig:
        if self.urls and self.server_args:
            raise ValueError("server_args are for servers that Miles starts; urls name servers that run already")
        if self.control_urls and len(self.control_urls) != len(self.urls):
            raise ValueError(f"control_urls has {len(self.control_urls)} entries and urls {len(self.urls)}; one for each")
        return self


def _capabilities(config: SglangEngineConfig) -> frozenset[str]:
    """Some are switched on by SGLang's own arguments. Servers that run already are asked for what works without any."""
    found = {"score", "weights/path", "weights/broadcast"}
    args = config.server_args
    if not config.urls:
        found |= {"weights/ipc", "weights/ipc-device"}
    for argument, capability in (
        ("enable_memory_saver", "sleep"),
        ("enable_deterministic_inference", "seed"),
        ("enable_return_routed_experts", "fields/routed_experts"),
    ):
        if args.get(argument):
            found.add(capability)
    return frozenset(found)


def _gpus(config: SglangEngineConfig) -> float:
    """GPUs of one replica."""
    from miles_sglang_rollout.arguments import gpus_of

    return gpus_of(config)


def _build(config: SglangEngineConfig, context: BuildContext) -> Any:
    from miles_sglang_rollout.engine import SglangEngine

    return SglangEngine.from_context(config, context)


def _check(config: SglangEngineConfig, environment: Environment) -> None:
    from miles_sglang_rollout.arguments import check_environment

    check_environment(config, environment)


@hookimpl
def miles_engines() -> list[Component[Any]]:
    return [
        Component(
            name="sglang",
            summary="SGLang servers: started and supervised on CPU or GPUs, or attached to by URL.",
            config=SglangEngineConfig,
            build=_build,
            check=_check,
            provides=_capabilities,
            secrets=("SGLANG_API_KEY",),
            traits={"gpus": _gpus, "python": "server"},
        )
    ]


@hookimpl
def miles_sample_fields() -> list[FieldSpec]:
    return [ROUTED_EXPERTS]
