"""The weight transport `nccl-sync`: one trainer rank broadcasts each bucket to all engines in a process group."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, hookimpl


class NcclSyncConfig(ComponentConfig):
    """Options of the transport `nccl-sync`."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """"auto" is NCCL where the trainer has GPUs of its own and gloo on the CPU. NCCL refuses two ranks on one GPU: for
    engines that share the trainer's, choose the transport `ipc-sync`."""
    host: str = ""
    """Address of the trainer's first rank at which engines meet it; loopback on one machine, else its host name."""
    join_timeout_s: float = Field(default=60.0, gt=0)
    """How long a process group may take to form; `transport.timeout_s` if that is less."""
    checksum: bool = True
    """Checksum each bucket on its device before it is sent; engines that can compare it with what they received."""


def _build(config: NcclSyncConfig, context: BuildContext) -> Any:
    from miles_nccl_sync.transport import BroadcastTransport

    table = context.run_config.transport
    return BroadcastTransport(
        bucket_bytes=table.bucket_bytes,
        timeout_s=table.timeout_s,
        join_timeout_s=min(config.join_timeout_s, table.timeout_s),
        backend=config.backend,
        host=config.host,
        checksum=config.checksum,
    )


def _build_sender(config: NcclSyncConfig, context: BuildContext) -> Any:
    from miles_nccl_sync.sender import BroadcastSender

    return BroadcastSender()


@hookimpl
def miles_weight_transports() -> list[Component[Any]]:
    return [
        Component(
            name="nccl-sync",
            summary="broadcast in a process group: NCCL between GPUs, gloo between CPUs",
            config=NcclSyncConfig,
            build=_build,
            parts={"sender": _build_sender},
        )
    ]
