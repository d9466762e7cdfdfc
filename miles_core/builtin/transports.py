"""The weight transport `direct`: handles within a process, shared memory within a machine."""

from __future__ import annotations

from miles_core.component import BuildContext, Component, ComponentConfig
from miles_core.interfaces import WeightSender, WeightTransport


class DirectConfig(ComponentConfig):
    """Weights to engines on the same machine."""

    hash_handles: bool = False
    """Hash buckets also where engine and trainer share a process, and only a handle is passed."""


def _build(config: DirectConfig, context: BuildContext) -> WeightTransport:
    from miles_core.transport import DirectTransport

    table = context.run_config.transport
    return DirectTransport(bucket_bytes=table.bucket_bytes, timeout_s=table.timeout_s, hash_handles=config.hash_handles)


def _build_sender(config: DirectConfig, context: BuildContext) -> WeightSender:
    from miles_core.transport import DirectSender

    return DirectSender()


COMPONENTS = {
    "miles_weight_transports": [
        Component(
            name="direct",
            summary="to engines on the same machine: handles in process, else shared memory",
            config=DirectConfig,
            build=_build,
            parts={"sender": _build_sender},
        )
    ]
}
