"""How a replica takes weights: each message of the core's vocabulary as requests to its server or servers.

The server's own name of its version says what it holds also to those who come later: "3" is version 3, verified, and
"updating-4" a mixture that must not be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.errors import EngineFailed, MilesError, WeightSyncFailed
from miles_core.transport import hash_folder
from miles_core.types import WeightMessage
from miles_sglang_rollout.arguments import LOADER
from miles_sglang_rollout.weights import (
    Mailbox,
    Shapes,
    Update,
    expected_shapes,
    folder_shapes,
    instruction,
    same_hash,
    tied,
)

Control = Callable[..., Awaitable[list[Any]]]
"""`control(method, path, body or function of the server's index, timeout_s=...)` -> the answer of each server."""
UPDATING = "updating-"


class WeightChannel:
    """`version` is what the server holds if it is not `dirty` and no `update` is open."""

    def __init__(
        self,
        name: str,
        control: Control,
        *,
        ranks: tuple[int, ...],
        model: Path | None,
        check_names: bool,
        hash_state: bool,
        loader: bool,
    ) -> None:
        self.name, self.version, self.dirty = name, 0, ""
        self.update: Update | None = None
        self._control, self._ranks, self._hash_state, self._loader = control, ranks, hash_state, loader
        self._expected: Shapes = expected_shapes(model) if model is not None and check_names else {}
        self._tied = model is not None and tied(model)
        self._mailbox = Mailbox()
        self._group = ""

    @property
    def closed(self) -> str:
        """Why no request may be served now, or ""."""
        if self.dirty:
            return f"it holds no whole version: {self.dirty}"
        if self.update is not None:
            return f"the update to version {self.update.version} is open"
        return ""

    _before = 0
    """The version before the open, or last, update."""

    def version_of(self, told: str) -> int:
        """The version of a token, from the server's name of it when the token arrived. One that arrived while an update
        was open was sampled before: nothing is sampled from a mixture."""
        return int(told) if told.isdigit() else self._before

    async def name_version(self, text: str) -> None:
        await self._control("POST", "/update_weight_version", {"new_version": text, "abort_all_requests": False})

    async def receive(self, message: WeightMessage, *, paused: bool, keep_cache: bool) -> dict[str, Any]:
        """Raises WeightSyncFailed, and the replica is then dirty."""
        if message.kind == "begin" and not paused:
            raise WeightSyncFailed(f"{self.name}: requests are running: pause comes before begin")
        if message.kind == "flush":
            return await self._flush(keep_cache)
        try:
            return await self._carry_on(message)
        except asyncio.CancelledError:
            self._fail(f"{message.kind} of version {message.version} was interrupted")
            raise
        except (MilesError, OSError, KeyError) as error:
            self._fail(f"{message.kind} of version {message.version} failed: {error}")
            raise WeightSyncFailed(f"{self.name}: {self.dirty}") from error

    def _fail(self, why: str) -> None:
        self.update, self.dirty = None, why

    async def _flush(self, keep_cache: bool) -> dict[str, Any]:
        """Drops every cached prefix, unless requests that were paused in place are to go on with theirs."""
        if keep_cache:
            return {}
        try:
            await self._control("POST", "/flush_cache")
        except EngineFailed as error:
            self._fail(f"its cache could not be dropped: {error}")
            raise WeightSyncFailed(f"{self.name}: {self.dirty}") from error
        return {}

    async def _carry_on(self, message: WeightMessage) -> dict[str, Any]:
        if message.kind == "begin":
            self._before = self.version
            await self.name_version(f"{UPDATING}{message.version}")
            self.update, self.dirty = Update(message.version, self._expected, tied_head=self._tied), ""
            return {}
        if message.kind == "abort":
            self._fail(f"the update to version {message.version} was given up")
            await self._leave(message.timeout_s)
            return {}
        if message.kind == "join":
            return await self._join(message)
        if self.update is None or self.update.version != message.version:
            raise WeightSyncFailed(f'"{message.kind}" of version {message.version} came without its "begin"')
        handler = {"ipc": self._ipc, "path": self._path, "broadcast": self._broadcast, "commit": self._commit}.get(
            message.kind
        )
        if handler is None:
            raise WeightSyncFailed(f'the engine sglang does not understand "{message.kind}"')
        return await handler(message)

    # --- Data ---

    async def _ipc(self, message: WeightMessage) -> dict[str, Any]:
        """Shared memory or device memory of another process, read by our loader inside the server."""
        self.update.admit((spec.name, spec.shape) for spec in message.tensors)
        order = await asyncio.to_thread(self._mailbox.load_order, message)
        return {"sha": await self._order([order] * len(self._ranks), message.timeout_s)}

    async def _order(self, orders: Sequence[dict[str, Any]], timeout_s: float) -> str:
        """Sends each server its instruction for our loader; one hash of what all ranks answered."""
        result = self._mailbox.address()
        bodies = [
            {
                "serialized_named_tensors": [instruction({**order, "result": result})] * ranks,
                "load_format": LOADER,
                "flush_cache": False,
            }
            for order, ranks in zip(orders, self._ranks, strict=True)
        ]
        await self._control("POST", "/update_weights_from_tensor", lambda i: bodies[i], timeout_s=timeout_s)
        return same_hash(self._mailbox.answers(result, sum(self._ranks)))

    async def _path(self, message: WeightMessage) -> dict[str, Any]:
        """A folder of safetensors. The hash is of the bytes that this machine sees there."""
        folder = Path(message.body["path"])
        shapes = await asyncio.to_thread(folder_shapes, folder)
        if not shapes:
            raise WeightSyncFailed(f"there are no safetensors files in {folder}")
        self.update.admit(shapes.items())
        sha = await asyncio.to_thread(hash_folder, folder) if message.sha else ""
        if sha != message.sha:
            raise WeightSyncFailed(f"{folder} was written as SHA-256 {message.sha[:12]} and reads as {sha[:12]}")
        body = {"model_path": str(folder), "flush_cache": False, "load_format": "safetensors"}
        await self._control("POST", "/update_weights_from_disk", body, timeout_s=message.timeout_s)
        return {"sha": sha}

    async def _join(self, message: WeightMessage) -> dict[str, Any]:
        """Enters a process group; `rank` is that of this replica's first rank, the trainer's source is rank 0."""
        await self._leave(message.timeout_s)
        told = message.body
        first = [told["rank"] + sum(self._ranks[:i]) for i in range(len(self._ranks))]
        if self._loader:
            names = ("group", "host", "port", "world_size", "backend")
            order = {"op": "join", **{name: told[name] for name in names}, "timeout_s": message.timeout_s}
            await self._order([{**order, "rank": rank} for rank in first], message.timeout_s)
        else:
            await self._join_by_sglang(told, first, message.timeout_s)
        self._group = told["group"]
        return {}

    async def _join_by_sglang(self, told: Mapping[str, Any], first: list[int], timeout_s: float) -> None:
        bodies = [
            {
                "master_address": told["host"],
                "master_port": told["port"],
                "rank_offset": rank,
                "world_size": told["world_size"],
                "group_name": told["group"],
                "backend": told["backend"],
            }
            for rank in first
        ]
        await self._control("POST", "/init_weights_update_group", lambda i: bodies[i], timeout_s=timeout_s)

    async def _broadcast(self, message: WeightMessage) -> dict[str, Any]:
        if message.body["group"] != self._group:  # the server would end itself over an unknown group
            raise WeightSyncFailed(f"it is not in the group {message.body['group']}")
        self.update.admit((spec.name, spec.shape) for spec in message.tensors)
        if self._loader:
            order = self._mailbox.received_order(message)
            return {"sha": await self._order([order] * len(self._ranks), message.timeout_s)}
        body = {
            "names": [spec.name for spec in message.tensors],
            "dtypes": [spec.dtype for spec in message.tensors],
            "shapes": [list(spec.shape) for spec in message.tensors],
            "group_name": self._group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._control("POST", "/update_weights_from_distributed", body, timeout_s=message.timeout_s)
        return {}

    async def _commit(self, message: WeightMessage) -> dict[str, Any]:
        self.update.finish()
        orders = [{"op": "hash"}] * len(self._ranks)
        state = await self._order(orders, message.timeout_s) if self._hash_state and self._loader else ""
        await self.name_version(str(message.version))
        self.update, self.version = None, message.version
        return {"version": self.version, "state_hash": state}

    async def _leave(self, timeout_s: float) -> None:
        group, self._group = self._group, ""
        if group and self._loader:
            await self._order([{"op": "leave", "group": group}] * len(self._ranks), timeout_s)
        elif group:
            await self._control("POST", "/destroy_weights_update_group", {"group_name": group}, timeout_s=timeout_s)

    def close(self) -> None:
        self._mailbox.close()
