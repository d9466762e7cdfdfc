"""The weight transport `disk-sync`: each version is a folder of safetensors that trainer and engines both see."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from miles_core import BuildContext, Component, ComponentConfig, hookimpl


class DiskSyncConfig(ComponentConfig):
    """Options of the transport `disk-sync`."""

    folder: str = ""
    """Where versions are written; the run folder's `weights` when empty. On several machines, a path that all see."""
    keep: int = Field(default=1, gt=0)
    """Versions that stay on disk; older ones are removed after a push."""


def _build(config: DiskSyncConfig, context: BuildContext) -> Any:
    from miles_disk_sync.transport import DiskTransport

    table = context.run_config.transport
    return DiskTransport(
        bucket_bytes=table.bucket_bytes,
        timeout_s=table.timeout_s,
        folder=config.folder or context.run_dir / "weights",
        keep=config.keep,
    )


def _build_sender(config: DiskSyncConfig, context: BuildContext) -> Any:
    from miles_disk_sync.sender import DiskSender

    return DiskSender(rank=context.index)


@hookimpl
def miles_weight_transports() -> list[Component[Any]]:
    return [
        Component(
            name="disk-sync",
            summary="safetensors in a folder that trainer and engines share, staged and hashed",
            config=DiskSyncConfig,
            build=_build,
            parts={"sender": _build_sender},
        )
    ]
