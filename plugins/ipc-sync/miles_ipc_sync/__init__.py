"""The weight transport `ipc-sync`: engines on the trainer's own devices read the buckets where they lie."""

from __future__ import annotations

from typing import Any

from miles_core import BuildContext, Component, ComponentConfig, hookimpl


class IpcSyncConfig(ComponentConfig):
    """Options of the transport `ipc-sync`."""

    checksum: bool = True
    """Checksum each bucket on the device before it is sent, and as it arrived."""


def _build(config: IpcSyncConfig, context: BuildContext) -> Any:
    from miles_ipc_sync.transport import IpcTransport

    table = context.run_config.transport
    return IpcTransport(bucket_bytes=table.bucket_bytes, timeout_s=table.timeout_s, checksum=config.checksum)


def _build_sender(config: IpcSyncConfig, context: BuildContext) -> Any:
    from miles_ipc_sync.sender import IpcSender

    return IpcSender()


@hookimpl
def miles_weight_transports() -> list[Component[Any]]:
    return [
        Component(
            name="ipc-sync",
            summary="device memory to engines on the same GPUs without a copy; shared memory on the CPU",
            config=IpcSyncConfig,
            build=_build,
            parts={"sender": _build_sender},
        )
    ]
