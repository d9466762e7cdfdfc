"""The launcher `ray`: every long-lived process of a run is a Ray actor, on this machine or on a cluster."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, hookimpl
from miles_core.errors import RuntimeMissing

FORWARDED = ("MILES_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "TORCH_*", "PYTORCH_*", "NCCL_*", "GLOO_*", "OMP_*")


class RayLauncherConfig(ComponentConfig):
    """Options of the launcher `ray`."""

    address: str = ""
    """A running cluster: "host:port", "auto" for the one on this machine, or "ray://host:port". When empty, RAY_ADDRESS
    counts; when that is empty too, a cluster is started on this machine and ended with the run."""
    num_cpus: int = Field(default=0, ge=0)
    """Processors of a cluster that is started here; 0 takes those of the machine."""
    num_gpus: int = Field(default=-1, ge=-1)
    """GPUs of a cluster that is started here; -1 takes those that are visible."""
    object_store_bytes: int = Field(default=256 << 20, ge=75 << 20)
    """Shared memory of a cluster that is started here, in bytes. Weights do not pass through it."""
    placement_timeout_s: float = Field(default=10.0, gt=0)
    """How long to wait for room that another job holds. What no node of the cluster could ever give is refused at once."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """How long an actor may take to start and import its libraries, before it loads a model."""
    grace_s: float = Field(default=10.0, ge=0)
    """How long an actor may take to close what it hosts, before it is killed."""
    rack_label: str = ""
    """Label of nodes that names their rack. Engines are then spread over racks, and the trainer is kept inside one."""
    num_spares: int = Field(default=0, ge=0)
    """Nodes that are held back whole; one of them takes over what was on a node that is lost."""
    forward_env: tuple[str, ...] = FORWARDED
    """Environment variables of the driver that actors get too; "*" stands for any text. Actors otherwise have the
    environment of the node that they run on."""


def _build(config: RayLauncherConfig, context: BuildContext) -> Any:
    _check(config, context)
    from miles_ray_launcher.launcher import RayLauncher

    return RayLauncher(run_dir=context.run_dir, config=config)


def _check(config: RayLauncherConfig, environment: Any) -> None:
    if find_spec("ray") is None:
        raise RuntimeMissing(
            'the launcher "ray" needs Ray, which is not installed',
            'install it: pip install "miles-ray-launcher[runtime]", or choose launcher.use = "local"',
        )


@hookimpl
def miles_launchers() -> list[Component[Any]]:
    return [
        Component(
            name="ray",
            summary="trainer ranks and engine replicas as Ray actors, on this machine or a cluster",
            config=RayLauncherConfig,
            build=_build,
            check=_check,
            traits={"processes": "all"},
        )
    ]
