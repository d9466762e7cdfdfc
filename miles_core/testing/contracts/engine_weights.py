"""The part of the engine suite about weight updates."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import EngineFailed, WeightSyncFailed
from miles_core.testing.contracts.base import no_error, refused
from miles_core.testing.contracts.engine_base import EngineHelpers, Weights
from miles_core.transport import publish, release
from miles_core.types import TensorSpec, VersionSpan, WeightMessage


class EngineWeights(EngineHelpers):
    """Rules of `receive`; see `EngineContract`. They are run over the channel `weights/ipc`."""

    # --- Helpers ---

    async def update(self, engine: Any, version: int, weights: Weights, kinds: Sequence[str] = ()) -> dict[str, Any]:
        """begin, data in two buckets, flush, commit (or only `kinds` of them); the answer to the last message."""
        answer: dict[str, Any] = {}
        for kind in kinds or ("begin", "data", "flush", "commit"):
            plain = [WeightMessage(kind=kind, version=version)] if kind != "data" else []
            for message in plain or self.data(engine, version, weights):
                answer = await self.send(engine, message)
        return answer

    async def send(self, engine: Any, message: WeightMessage) -> dict[str, Any]:
        """Delivers one message; bytes in its body are published while it is under way."""
        body = dict(message.body)
        key = publish(body.pop("data")) if "data" in body else ""
        if key:
            body["handle"] = key
        try:
            incarnation = message.incarnation or engine.incarnation
            return await engine.receive(replace(message, incarnation=incarnation, body=body)) or {}
        finally:
            release(key)

    def data(self, engine: Any, version: int, weights: Weights) -> list[WeightMessage]:
        """Two buckets, as `receive` gets them."""
        if "weights/ipc" not in engine.capabilities:
            pytest.skip('this engine has no channel "weights/ipc"')
        names = sorted(weights)
        halves = [names[: len(names) // 2], names[len(names) // 2 :]]
        return [bucket(version, i, {n: weights[n] for n in half}) for i, half in enumerate(halves) if half]

    def _weights(self) -> tuple[Weights, Weights]:
        old, new = self.weights(0), self.weights(1)
        if old is None or new is None:
            pytest.skip("no `weights` were given")
        return old, new

    async def probe(self, engine: Any, name: str) -> Any:
        return await engine.generate(self.request(name, temperature=0.0))

    def _refuses(self, folder: Path, damage: Any) -> None:
        """`damage(messages)` spoils an update: it must be refused at the commit at the latest, the engine must not serve
        until a whole update has come, and must serve then."""
        old, new = self._weights()

        async def work(engine: Any) -> None:
            await engine.pause("abort")
            spoilt = damage([*self.data(engine, 1, new), WeightMessage(kind="commit", version=1)])
            with refused(WeightSyncFailed, "the spoilt update"):
                for message in (WeightMessage(kind="begin", version=1), *spoilt):
                    answer = await self.send(engine, message)
                    if message.sha and answer.get("sha") != message.sha:
                        raise WeightSyncFailed("noticed by whoever compares hashes")
            with refused(WeightSyncFailed, "a commit after the spoilt update"):
                await self.send(engine, WeightMessage(kind="commit", version=1))
            await self._does_not_serve(engine, "a dirty engine")
            await self.update(engine, 2, old)
            await engine.resume()
            await self.probe(engine, "after")

        self.with_engine(folder, work)

    async def _does_not_serve(self, engine: Any, who: str) -> None:
        try:
            await engine.resume()
            made = await asyncio.wait_for(self.probe(engine, "dirty"), 5)
        except EngineFailed:
            return
        raise AssertionError(f"{who} answered, with {made.token_ids.tolist()}")

    # --- Rules ---

    def test_an_update_changes_the_answers(self, tmp_path: Path) -> None:
        """After begin, data, flush and commit it holds the new version and computes with the new weights; with the old
        weights again, the old answers come back."""
        old, new = self._weights()

        async def work(engine: Any) -> None:
            before = await self.probe(engine, "a")
            seen = []
            for version, weights in ((1, new), (2, old)):
                await engine.pause("abort")
                answer = await self.update(engine, version, weights)
                assert answer.get("version") == version, f"commit answered {answer}"
                assert (await engine.health())["version"] == version
                await engine.resume()
                seen.append(await self.probe(engine, f"v{version}"))
            assert not np.allclose(seen[0].logprobs, before.logprobs), "new weights, old answer"
            assert seen[1].token_ids.tolist() == before.token_ids.tolist(), "old weights again, another answer"
            np.testing.assert_allclose(seen[1].logprobs, before.logprobs, atol=1e-6)

        self.with_engine(tmp_path, work)

    def test_flush_drops_the_cache(self, tmp_path: Path) -> None:
        """After an update nothing of an answer comes from a cache: `cached_tokens` is 0."""
        _, new = self._weights()

        async def work(engine: Any) -> list[int]:
            for name in ("a", "b"):
                await self.probe(engine, name)
            await engine.pause("abort")
            await self.update(engine, 1, new)
            await engine.resume()
            return [(await self.probe(engine, "c")).cached_tokens]

        (cached,) = self.with_engine(tmp_path, work)
        assert cached == 0, f"{cached} tokens came from a cache of the old weights"

    def test_data_is_answered_with_its_hash(self, tmp_path: Path) -> None:
        """The answer to data is {"sha": SHA-256 of the bytes as they arrived}."""
        _, new = self._weights()

        async def work(engine: Any) -> list[tuple[str, Any]]:
            await engine.pause("abort")
            await self.send(engine, WeightMessage(kind="begin", version=1))
            return [(m.sha, (await self.send(engine, m)).get("sha")) for m in self.data(engine, 1, new)]

        for sent, answered in self.with_engine(tmp_path, work):
            assert answered == sent

    def test_changed_bytes_are_noticed(self, tmp_path: Path) -> None:
        """Bytes that are not what the sender hashed are refused, or answered with their own hash."""

        def flip(messages: list[WeightMessage]) -> list[WeightMessage]:
            data = messages[0].body["data"].copy()
            data[0] ^= 1
            return [replace(messages[0], body={**messages[0].body, "data": data}), *messages[1:]]

        _, new = self._weights()

        async def work(engine: Any) -> None:
            await engine.pause("abort")
            await self.send(engine, WeightMessage(kind="begin", version=1))
            (message, *_) = flip(self.data(engine, 1, new))
            try:
                answer = await self.send(engine, message)
            except WeightSyncFailed:
                return
            assert answer.get("sha") != message.sha, "it confirmed the hash of bytes that it did not get"

        self.with_engine(tmp_path, work)

    def test_an_unknown_tensor_is_refused(self, tmp_path: Path) -> None:
        """A name that the model does not have; the engine is then dirty until a whole update comes."""
        more = bucket(1, 9, {"no.such.tensor": np.zeros((2, 2), np.float32)})
        self._refuses(tmp_path, lambda messages: [*messages[:-1], more, messages[-1]])

    def test_a_wrong_shape_is_refused(self, tmp_path: Path) -> None:
        """A tensor with another shape than the model's, even with the right number of bytes."""

        def flat(messages: list[WeightMessage]) -> list[WeightMessage]:
            at, place = next((m, i) for m in messages for i, s in enumerate(m.tensors) if len(s.shape) > 1)
            size = int(np.prod(at.tensors[place].shape))
            return [_changed(m, place, shape=(size, 1, 1)) if m is at else m for m in messages]

        self._refuses(tmp_path, flat)

    def test_a_missing_tensor_is_refused(self, tmp_path: Path) -> None:
        """A commit before all tensors have come; the engine is then dirty until a whole update comes."""
        self._refuses(tmp_path, lambda messages: messages[1:])

    def test_data_without_begin_is_refused(self, tmp_path: Path) -> None:
        """The order is begin, data, flush, commit."""
        _, new = self._weights()

        async def work(engine: Any) -> None:
            await engine.pause("abort")
            with refused(WeightSyncFailed, "data without begin"):
                await self.update(engine, 1, new, ("data", "commit"))

        self.with_engine(tmp_path, work)

    def test_nothing_is_served_during_an_update(self, tmp_path: Path) -> None:
        """Between begin and commit the weights are a mixture: `resume` or the next request is refused."""
        _, new = self._weights()

        async def work(engine: Any) -> None:
            await engine.pause("abort")
            await self.send(engine, WeightMessage(kind="begin", version=1))
            await self.send(engine, self.data(engine, 1, new)[0])
            await self._does_not_serve(engine, "an engine in the middle of an update")

        self.with_engine(tmp_path, work)

    def test_an_aborted_update_leaves_it_dirty(self, tmp_path: Path) -> None:
        """The message "abort" gives the update up; nothing is served until a whole update has come."""
        old, new = self._weights()

        async def work(engine: Any) -> None:
            await engine.pause("abort")
            await self.send(engine, WeightMessage(kind="begin", version=1))
            await self.send(engine, self.data(engine, 1, new)[0])
            await self.send(engine, WeightMessage(kind="abort", version=1))
            await self._does_not_serve(engine, "an engine whose update was given up")
            await self.update(engine, 1, old)
            await engine.resume()
            await self.probe(engine, "after")

        self.with_engine(tmp_path, work)

    def test_a_message_for_another_incarnation_is_refused(self, tmp_path: Path) -> None:
        """It is for an engine that is no more: refused, and this one goes on serving."""

        async def work(engine: Any) -> None:
            with refused(WeightSyncFailed, "begin for another incarnation"):
                await self.send(engine, WeightMessage(kind="begin", version=1, incarnation="another"))
            with no_error("a request after a message for another incarnation"):
                await self.probe(engine, "after")

        self.with_engine(tmp_path, work)

    def test_spans_tell_the_version_of_each_token(self, tmp_path: Path) -> None:
        """`versions` cover [0, R) in order and without gaps; an answer that went on under new weights has two spans."""
        _, new = self._weights()
        mode = next((m for m in ("retract", "in_place") if m in self.pause_modes), None)
        if mode is None:
            pytest.skip("no pause of this engine keeps requests")

        async def work(engine: Any) -> tuple[Any, Any]:
            short = await engine.generate(self.request("a"))
            task = asyncio.ensure_future(engine.generate(self.long()))
            await self.sampling(engine)
            await engine.pause(mode)
            await self.update(engine, 1, new)
            await engine.resume()
            return short, await task

        short, long = self.with_engine(tmp_path, work)
        assert short.versions == (VersionSpan(start=0, stop=len(short.token_ids), version=0),)
        edges = [(s.start, s.stop) for s in long.versions]
        assert edges[0][0] == 0 and edges[-1][1] == len(long.token_ids), f"spans {edges} of {len(long.token_ids)} tokens"
        assert all(a[1] == b[0] for a, b in pairwise(edges)), f"spans with gaps: {edges}"
        assert long.versions[-1].version == 1, f"the end was sampled under version 1, and is said to be {long.versions[-1]}"


def bucket(version: int, index: int, tensors: Weights) -> WeightMessage:
    """An "ipc" message whose body still holds the bytes; `EngineWeights.send` publishes them."""
    specs, parts, offset = [], [], 0
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value, dtype=np.float32).reshape(-1).view(np.uint8)
        specs.append(TensorSpec(name=name, dtype="float32", shape=value.shape, offset=offset))
        parts.append(raw)
        offset += raw.nbytes
    data = np.concatenate(parts)
    sha = hashlib.sha256(data).hexdigest()
    body = {"data": data, "nbytes": data.nbytes}
    return WeightMessage(kind="ipc", version=version, bucket=index, tensors=tuple(specs), sha=sha, body=body)


def _changed(message: WeightMessage, place: int, **fields: Any) -> WeightMessage:
    """`message` with other fields in one of its tensor specs."""
    tensors = tuple(replace(s, **fields) if i == place else s for i, s in enumerate(message.tensors))
    return replace(message, tensors=tensors)
