"""Engines that break a rule of weight updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.testing import suites, toy_model
from miles_core.testing.broken import Shelf
from miles_core.testing.toy_engine import ToyEngine
from miles_core.transport import hash_bytes, resolve
from miles_core.types import GenerateRequest, Generation, VersionSpan, WeightMessage

WEIGHTS = Shelf(suites.ToyEngine, lambda cls: cls)


@WEIGHTS.breaks("test_an_update_changes_the_answers")
class OnlyCountsVersions(ToyEngine):
    def _write(self, message: WeightMessage, data: np.ndarray) -> None:
        self._received |= {spec.name for spec in message.tensors}


@WEIGHTS.breaks("test_an_update_changes_the_answers")
class AddsUp(ToyEngine):
    """Reads a bucket as a difference."""

    def _write(self, message: WeightMessage, data: np.ndarray) -> None:
        before = {spec.name: self.params[spec.name].copy() for spec in message.tensors}
        super()._write(message, data)
        for name, value in before.items():
            self.params[name] += value


@WEIGHTS.breaks("test_flush_drops_the_cache")
class KeepsItsCache(ToyEngine):
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        return {} if message.kind == "flush" else await super().receive(message)


@WEIGHTS.breaks("test_data_is_answered_with_its_hash")
class SaysNothing(ToyEngine):
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        answer = await super().receive(message)
        return {} if message.kind == "ipc" else answer


@WEIGHTS.breaks("test_changed_bytes_are_noticed")
class EchoesTheHash(ToyEngine):
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.kind != "ipc":
            return await super().receive(message)
        await super().receive(replace(message, sha=hash_bytes(resolve(message.body))))
        return {"sha": message.sha}


@WEIGHTS.breaks("test_an_unknown_tensor_is_refused")
class SkipsUnknown(ToyEngine):
    def _write(self, message: WeightMessage, data: np.ndarray) -> None:
        known = tuple(spec for spec in message.tensors if spec.name in toy_model.SHAPES)
        super()._write(replace(message, tensors=known), data)


@WEIGHTS.breaks("test_a_wrong_shape_is_refused")
class Reshapes(ToyEngine):
    def _write(self, message: WeightMessage, data: np.ndarray) -> None:
        own = tuple(replace(s, shape=toy_model.SHAPES.get(s.name, s.shape)) for s in message.tensors)
        super()._write(replace(message, tensors=own), data)


@WEIGHTS.breaks("test_a_missing_tensor_is_refused")
class CommitsAnything(ToyEngine):
    def _commit(self, version: int) -> dict[str, Any]:
        self._received = set(toy_model.SHAPES)
        return super()._commit(version)


@WEIGHTS.breaks("test_a_missing_tensor_is_refused")
class ForgetsThatItIsDirty(ToyEngine):
    async def resume(self) -> None:
        self._dirty, self._received = "", None
        await super().resume()


@WEIGHTS.breaks("test_data_without_begin_is_refused")
class BeginsByItself(ToyEngine):
    def _update(self, message: WeightMessage) -> dict[str, Any]:
        if self._received is None:
            self._received = set()
        return super()._update(message)


@WEIGHTS.breaks("test_nothing_is_served_during_an_update")
class ServesMixtures(ToyEngine):
    async def resume(self) -> None:
        self._paused = False
        await self._notify()


@WEIGHTS.breaks("test_an_aborted_update_leaves_it_dirty")
class IgnoresAbort(ToyEngine):
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        answer = await super().receive(message)
        if message.kind == "abort":
            self._dirty = ""
        return answer


@WEIGHTS.breaks("test_a_message_for_another_incarnation_is_refused")
class AnyIncarnation(ToyEngine):
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        return await super().receive(replace(message, incarnation=""))


@WEIGHTS.breaks("test_a_message_for_another_incarnation_is_refused")
class DirtyForAnother(ToyEngine):
    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.incarnation != self.incarnation:
            self._dirty = "a message for another incarnation came"
        return await super().receive(message)


@WEIGHTS.breaks("test_spans_tell_the_version_of_each_token")
class OneSpan(ToyEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        version = self.version
        made = await super().generate(request)
        return replace(made, versions=(VersionSpan(start=0, stop=len(made.token_ids), version=version),))
