"""What the launcher suite hosts in workers: an object that says who it is, and dies, fails or hangs when asked."""

from __future__ import annotations

import os
import time
from typing import Any

from miles_core.component import BuildContext
from miles_core.errors import RuntimeMissing


class Worker:
    """See the module. Every method is called through `WorkerGroup.call`."""

    def __init__(self, context: BuildContext, fail: int = -1) -> None:
        if context.index == fail:
            raise RuntimeMissing("no such device", "buy one")
        self.context = context
        self.calls = 0

    def who(self, *extra: Any) -> tuple[Any, ...]:
        return (self.context.role, self.context.index, self.context.world_size, *extra)

    def rendezvous(self) -> str:
        return self.context.rendezvous

    def pid(self) -> int:
        return os.getpid()

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def fail(self, rank: int) -> int:
        if rank == self.context.index:
            raise ValueError(f"rank {rank} has bad luck")
        return self.context.index

    def die(self, rank: int) -> int:
        if rank == self.context.index:
            os._exit(9)
        return self.context.index

    def hang(self, rank: int) -> int:
        if rank == self.context.index:
            time.sleep(3600)
        return self.context.index


def make(context: BuildContext, **args: Any) -> Worker:
    """The factory: "miles_core.testing.workers:make"."""
    return Worker(context, **args)
