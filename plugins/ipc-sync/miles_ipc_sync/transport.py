"""The driver's end: as the transport `direct`, but engines that can open device memory get handles of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles_core.errors import ConfigError
from miles_core.interfaces import EngineReplica
from miles_core.transport import DirectTransport
from miles_core.types import SendPlan

DEVICE = "weights/ipc-device"
"""Capability of engines that open device memory of another process."""


class IpcTransport(DirectTransport):
    """Device handles go out only where every engine takes them; otherwise the bytes pass through shared memory, once for
    all engines of the machine."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float, checksum: bool) -> None:
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s, hash_handles=checksum)
        self.checksum = checksum

    def _plan(self, version: int, ends: Sequence[Any]) -> SendPlan:
        plan = super()._plan(version, list(ends))
        device = bool(ends) and all(DEVICE in end.engine.capabilities and not end.local for end in ends)
        options = {**plan.options, "device": device, "checksum": self.checksum}
        return replace(plan, transport="ipc-sync", options=options)

    def _check(self, engine: EngineReplica) -> None:
        try:
            super()._check(engine)
        except ConfigError as error:
            raise ConfigError(str(error).replace('transport "direct"', 'transport "ipc-sync"')) from None
