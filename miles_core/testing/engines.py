"""A scripted engine and a scripted transport: prefix cache, latency, death, hanging phases, wrong bytes.

The "model" of a `StubEngine` is one number, its weight. What it answers to a context is a function of weight, context,
position and seed, so that a test can tell by which weights each token was made. It is deterministic, also across
interruptions, and keeps the whole contract of `EngineReplica` except where a script tells it to break a rule.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.engine_members import bounded
from miles_core.errors import EngineFailed, WeightSyncFailed
from miles_core.interfaces import EngineReplica, WeightTransport
from miles_core.types import EngineSync, GenerateRequest, Generation, SyncReport, VersionSpan, WeightMessage

VOCAB = 1000
ORDER = {"begin": ("",), "ipc": ("begin", "ipc"), "flush": ("ipc",), "commit": ("flush",)}
"""Which message may come before which."""


def stub_answer(weight: int, request: GenerateRequest) -> list[int]:
    """Tokens that depend on weight, context and seed (not on the seed when greedy); as long as was asked for."""
    seed = 0 if request.params.temperature == 0 else request.seed % 997
    first = weight * 100 + int(np.sum(request.token_ids)) + seed
    return [(first + i) % VOCAB for i in range(request.params.max_new_tokens)]


@dataclass(slots=True)
class Script:
    """How a stub departs from perfect behaviour."""

    hang: set[str] = field(default_factory=set)
    """Phases that are never answered: start, generate, abort, pause, resume, health, begin, ipc, flush, commit, score."""
    fail: Counter[str] = field(default_factory=Counter)
    """Phase -> how many of its next calls raise."""
    dies_after: int | None = None
    """Requests that are answered before it dies; every later call raises, and so do the requests in flight."""
    corrupt: bool = False
    """A byte of every bucket changes on the way."""
    keeps_cache: bool = False
    """It says that it flushed its prefix cache and did not."""
    lies_about_version: bool = False
    """It says that it holds the version that it was asked to commit, and computes with the old weight."""


class StubEngine(EngineReplica):
    """One scripted replica. `token_s`: seconds per sampled token. `answer(weight, request) -> token ids`.

    `log` holds what it was asked to do, in order; `served` the ids of the requests that it answered, and `requests`
    every request that reached it.
    """

    capabilities = frozenset({"weights/ipc", "score", "sleep"})

    def __init__(
        self,
        engine_id: str = "engine-0",
        *,
        script: Script | None = None,
        token_s: float = 0.0,
        max_running: int | None = None,
        answer: Callable[[int, GenerateRequest], Sequence[int]] = stub_answer,
    ) -> None:
        self.id, self.script, self.token_s, self.max_running = engine_id, script or Script(), token_s, max_running
        self.answer = answer
        self.weight = self.version = self._loaded = 0
        self.cache: dict[bytes, int] = {}
        self.log: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.served: list[str] = []
        self.made = 0
        """Tokens that it sampled, whatever became of them."""
        self.alive = False
        self._starts = 0
        self._mode = ""
        self._go = asyncio.Event()
        self._stops: dict[str, asyncio.Event] = {}
        self._stopped: set[str] = set()
        self._last_message = ""

    async def start(self) -> None:
        await self._enter("start")
        self._starts += 1
        self.incarnation = f"{self.id}/{self._starts}"
        self.alive, self.weight, self.version = True, 0, 0
        self.cache.clear()
        self._go.set()

    def kill(self) -> None:
        """What `kill -9` does: requests in flight fail, and so does everything after."""
        self.alive = False
        for stop in self._stops.values():
            stop.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        await self._enter("generate")
        self.requests.append(request)
        stop = self._stops[request.id] = asyncio.Event()
        context = np.asarray(request.token_ids, dtype=np.int32).tobytes()
        cached = self.cache.get(context)
        by = self.weight if cached is None else cached
        tokens: list[int] = []
        spans: list[VersionSpan] = []
        finish = "stop"
        try:
            while True:
                while not self._go.is_set() and request.id not in self._stopped and self.alive:
                    await _either(self._go, stop)
                    stop.clear()
                want = list(self.answer(by, request))[: request.params.max_new_tokens]
                made = await self._sample(len(want) - len(tokens), stop)
                if not self.alive:
                    raise EngineFailed(f"{self.id} died")
                self.made += made
                spans.append(VersionSpan(start=len(tokens), stop=len(tokens) + made, version=self.version))
                tokens += want[len(tokens) : len(tokens) + made]
                if len(tokens) == len(want):
                    finish = "length" if len(want) == request.params.max_new_tokens else "stop"
                    break
                if request.id in self._stopped or self._mode == "abort":
                    finish = "aborted"
                    break
                if self._mode == "retract":  # its cache is given up: it goes on under whatever weights come
                    await self._go.wait()
                    by = self.weight
                stop.clear()
        finally:
            self._stops.pop(request.id, None)
            self._stopped.discard(request.id)
        self._count_answer(request)
        self.cache[context] = by
        return Generation(
            id=request.id,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -1.0 - by, dtype=np.float32),
            finish=finish,  # type: ignore[arg-type]
            versions=tuple(spans),
            incarnation=self.incarnation,
            cached_tokens=0 if cached is None else len(request.token_ids),
        )

    def _count_answer(self, request: GenerateRequest) -> None:
        if self.script.dies_after is not None:
            if len(self.served) >= self.script.dies_after:
                self.kill()
                raise EngineFailed(f"{self.id} died")
            if len(self.served) + 1 == self.script.dies_after:
                self.served.append(request.id)
                self.kill()
                return
        self.served.append(request.id)

    async def _sample(self, count: int, stop: asyncio.Event) -> int:
        """Waits as long as `count` tokens take, or until it is stopped; returns how many were made."""
        if self.token_s == 0 or count <= 0:
            await asyncio.sleep(0)
            return count
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(count * self.token_s):
                await stop.wait()
        except TimeoutError:
            return count
        except asyncio.CancelledError:
            self.made += min(count, int((loop.time() - began) / self.token_s + 1e-9))
            raise
        return min(count, int((loop.time() - began) / self.token_s + 1e-9))

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        await self._enter("abort")
        for name in list(self._stops) if ids is None else ids:
            if name in self._stops:
                self._stopped.add(name)
                self._stops[name].set()

    async def pause(self, mode: str = "abort") -> None:
        await self._enter("pause")
        self._mode = mode
        self._go.clear()
        for stop in self._stops.values():
            stop.set()

    async def resume(self) -> None:
        await self._enter("resume")
        self._mode = ""
        self._go.set()

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        kind = message.kind
        if kind in ORDER and self._last_message not in ORDER[kind] and not (kind == "begin"):
            raise WeightSyncFailed(f"{self.id}: {kind} came after {self._last_message or 'nothing'}")
        await self._enter(kind)
        if message.incarnation not in ("", self.incarnation):
            raise WeightSyncFailed(f"{self.id}: message for {message.incarnation}, but this is {self.incarnation}")
        self._last_message = kind
        if kind == "ipc":
            data = bytearray(message.body["data"])
            if self.script.corrupt:
                data[0] ^= 1
            if not self.script.lies_about_version:
                self._loaded = int.from_bytes(data, "big")
            return {"sha": hashlib.sha256(data).hexdigest()}
        if kind == "flush" and not self.script.keeps_cache:
            self.cache.clear()
        if kind == "commit":
            self.weight, self.version, self._last_message = self._loaded, message.version, ""
            return {"version": self.version, "state_hash": hashlib.sha256(str(self.weight).encode()).hexdigest()}
        return {}

    async def health(self) -> dict[str, Any]:
        await self._enter("health")
        return {"version": self.version, "running": len(self._stops), "waiting": 0}

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        await self._enter("score")
        return [{"logprobs": stub_logprobs(self.weight, ids)} for ids in token_ids]

    async def close(self) -> None:
        self.alive = False

    async def _enter(self, phase: str) -> None:
        self.log.append(phase)
        if phase not in ("start", "close") and not self.alive:
            raise EngineFailed(f"{self.id} is dead")
        if phase in self.script.hang:
            await asyncio.Event().wait()
        if self.script.fail[phase] > 0:
            self.script.fail[phase] -= 1
            raise EngineFailed(f"{self.id}: {phase} failed as scripted")


def stub_logprobs(weight: int, token_ids: np.ndarray) -> np.ndarray:
    """What a `StubEngine` of this weight scores: -1 - weight nats per token, 0 at index 0."""
    row = np.full(len(token_ids), -1.0 - weight, dtype=np.float32)
    row[:1] = 0.0
    return row


async def _either(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class StubTransport(WeightTransport):
    """Sends `weights[version]` (the version itself by default) to each engine: begin, one bucket, flush, commit.

    `hang`: it never answers. `silent`: engines that its report leaves out. `pushes`: (version, engine ids) of each push.
    """

    def __init__(
        self,
        weights: Mapping[int, int] | None = None,
        *,
        phase_s: float = 5.0,
        hang: bool = False,
        silent: Iterable[str] = (),
        push_s: float = 0.0,
    ) -> None:
        self.weights, self.phase_s, self.hang, self.silent = dict(weights or {}), phase_s, hang, set(silent)
        self.push_s = push_s
        self.pushes: list[tuple[int, list[str]]] = []

    async def connect(self, trainer: Any, pool: Any) -> None:
        """Nothing to connect."""

    async def push(self, version: int, engines: Sequence[EngineReplica]) -> SyncReport:
        self.pushes.append((version, [engine.id for engine in engines]))
        if self.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(self.push_s)
        data = self.weights.get(version, version).to_bytes(4, "big")
        results = await asyncio.gather(*(self._send(version, data, engine) for engine in engines))
        return SyncReport(
            version=version,
            num_bytes=len(data),
            seconds=self.push_s,
            num_buckets=1,
            engines=[sync for sync in results if sync.engine not in self.silent],
            hashes=(hashlib.sha256(data).hexdigest(),),
        )

    async def _send(self, version: int, data: bytes, engine: EngineReplica) -> EngineSync:
        sha, answer = hashlib.sha256(data).hexdigest(), {}
        for kind in ("begin", "ipc", "flush", "commit"):
            body = {"data": data} if kind == "ipc" else {}
            message = WeightMessage(kind=kind, version=version, incarnation=engine.incarnation, sha=sha, body=body)
            try:
                answer = await bounded(engine.receive(message), self.phase_s)
            except Exception as error:
                return EngineSync(engine=engine.id, ok=False, phase=kind, error=f"{engine.id}: {error}")
            if kind == "ipc" and answer["sha"] != sha:
                return EngineSync(engine=engine.id, ok=False, phase=kind, error=f"{engine.id}: bytes arrived changed")
        return EngineSync(engine=engine.id, ok=True, state_hash=answer.get("state_hash", ""))
