"""The toy engine: samples the toy policy in numpy, with everything that a real engine has and that can go wrong with it: a
prefix cache, pauses, weights that are written in place, and a start from an incarnation of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.component import BuildContext
from miles_core.errors import EngineFailed, MilesError, WeightSyncFailed
from miles_core.interfaces import EngineReplica
from miles_core.testing import toy_model as model
from miles_core.testing.toy import ENGINE_CAPABILITIES, ToyEngineConfig
from miles_core.transport import as_bytes, open_bucket
from miles_core.types import GenerateRequest, Generation, Status, VersionSpan, WeightMessage


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    rng: np.random.Generator
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False
    waiting: bool = False
    cached_tokens: int = 0


class ToyEngine(EngineReplica):
    """One replica. It is single-threaded: between two awaits nothing else samples, so a pause is exact."""

    capabilities = ENGINE_CAPABILITIES

    def __init__(self, config: ToyEngineConfig, context: BuildContext) -> None:
        self.config, self.context = config, context
        self.id = f"engine-{context.index}"
        asked = getattr(getattr(context.run_config, "model", None), "max_context", 0)
        self.max_context = asked or model.CONTEXT
        self.version = 0
        self.params: model.Params = {}
        self._cache: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Condition()
        self._paused = False
        self._asleep: set[str] = set()
        self._received: set[str] | None = None
        """Names of tensors since "begin"; None while no update is open."""
        self._dirty = ""
        self._broken = "not started"

    async def start(self) -> None:
        self.params = model.load_params(self.context.seed, self.context.model_path)
        self.incarnation = uuid.uuid4().hex
        self.version, self._dirty, self._broken = 0, "", ""

    # --- Sampling ---

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check()
        if request.id in self._running:
            raise EngineFailed(f"{self.id} already runs a request {request.id}")
        tokens = [int(t) for t in request.token_ids]
        run = _Running(request=request, rng=np.random.default_rng(request.seed), tokens=tokens)
        self._running[request.id] = run
        try:
            return self._generation(run, await self._sample(run))
        finally:
            del self._running[request.id]
            await self._notify()

    async def _sample(self, run: _Running) -> Status:
        params = run.request.params
        room = min(params.max_new_tokens, self.max_context - len(run.tokens))
        while len(run.versions) < room:
            await self._turn(run)
            if run.aborted:
                return "aborted"
            token = self._next_token(run)
            if token in params.stop_token_ids and not params.ignore_eos:
                return "stop"
            if params.stop and any(text in self._text(run) for text in params.stop):
                return "stop"
        return "length"

    async def _turn(self, run: _Running) -> None:
        """Waits as long as a token takes, and while the engine is paused. Raises EngineFailed when it went down."""
        await asyncio.sleep(self.config.token_seconds)
        run.waiting = True
        if self._paused and not run.aborted:
            async with self._changed:
                await self._changed.wait_for(lambda: run.aborted or not self._paused or self._broken)
        run.waiting = False
        if not run.aborted:
            self._check()

    def _next_token(self, run: _Running) -> int:
        params = run.request.params
        first = not run.versions
        values = self._next_logits(run.tokens, run if first else None)
        logp = model.log_softmax(values / (params.temperature or 1.0))
        token = int(np.argmax(logp)) if params.temperature == 0 else _draw(logp, params.top_k, params.top_p, run.rng)
        run.tokens.append(token)
        run.logprobs.append(float(logp[token]))
        run.versions.append(self.version)
        return token

    def _next_logits(self, tokens: Sequence[int], run: _Running | None) -> np.ndarray:
        """float64[V], from the prefix cache where it has these tokens; `run` is told how many of its prompt it had."""
        ids = np.asarray(tokens, dtype=np.int32)
        key = ids.tobytes()
        if (found := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            if run is not None:
                run.cached_tokens = len(ids)
            return found
        values = model.logits(self.params, model.windows(ids, np.array([len(ids)])))[0]
        if self.config.cache_entries:
            self._cache[key] = values
            while len(self._cache) > self.config.cache_entries:
                self._cache.popitem(last=False)
        return values

    def _text(self, run: _Running) -> str:
        tokenizer = self.context.tokenizer
        if tokenizer is None:
            raise EngineFailed(f"{self.id} was asked to stop at strings, but the run gave it no tokenizer")
        return tokenizer.decode(run.tokens[len(run.request.token_ids) :])

    def _generation(self, run: _Running, finish: Status) -> Generation:
        return Generation(
            id=run.request.id,
            token_ids=np.array(run.tokens[len(run.request.token_ids) :], dtype=np.int32),
            logprobs=np.array(run.logprobs, dtype=np.float32),
            finish=finish,
            versions=_spans(run.versions),
            incarnation=self.incarnation,
            cached_tokens=run.cached_tokens,
            reason="aborted on request" if finish == "aborted" else "",
        )

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        self._check()
        rows = []
        for ids in token_ids:
            positions = np.arange(1, len(ids))
            logp = model.log_softmax(model.logits(self.params, model.windows(ids, positions)))
            row = {"logprobs": np.zeros(len(ids), dtype=np.float32)}
            row["logprobs"][1:] = logp[np.arange(len(positions)), ids[1:]]
            if topk:
                best = np.argsort(-logp, axis=1, kind="stable")[:, :topk]
                row["topk_ids"] = np.zeros((len(ids), topk), dtype=np.int32)
                row["topk_logprobs"] = np.zeros((len(ids), topk), dtype=np.float32)
                row["topk_ids"][1:], row["topk_logprobs"][1:] = best, np.take_along_axis(logp, best, axis=1)
            rows.append(row)
        return rows

    # --- Control ---

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        chosen = [self._running[i] for i in (list(self._running) if ids is None else ids) if i in self._running]
        for run in chosen:
            run.aborted = True
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(lambda: not any(self._running.get(r.request.id) is r for r in chosen))

    async def pause(self, mode: str = "abort") -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise EngineFailed(f'{self.id} has no pause mode "{mode}"; it has abort, retract and in_place')
        self._paused = True
        if mode == "abort":
            await self.abort()
        elif mode == "retract":
            self._cache.clear()

    async def resume(self) -> None:
        if self._dirty or self._received is not None:
            raise EngineFailed(f"{self.id} cannot serve: {self._dirty or 'a weight update is open'}")
        self._paused = False
        await self._notify()

    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        self._asleep |= set(tags)
        self._cache.clear()

    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        self._asleep -= set(tags)

    async def health(self) -> dict[str, Any]:
        if self._broken:
            raise EngineFailed(f"{self.id} is {self._broken}")
        waiting = sum(run.waiting for run in self._running.values())
        running = len(self._running) - waiting
        return {"version": self.version, "running": running, "waiting": waiting, "dirty": bool(self._dirty)}

    async def close(self) -> None:
        self._broken = "closed"
        await self._notify()
        self._cache.clear()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _check(self) -> None:
        problem = self._broken or self._dirty or ("asleep" if self._asleep else "")
        if problem:
            raise EngineFailed(f"{self.id} cannot serve: {problem}")

    # --- Weights ---

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.incarnation and message.incarnation != self.incarnation:
            raise WeightSyncFailed(
                f"{self.id} is incarnation {self.incarnation}, and the message is for {message.incarnation}"
            )
        if message.kind == "flush":
            self._cache.clear()
            return {}
        if message.kind == "abort":
            self._received, self._dirty = None, f"the update to version {message.version} was given up"
            return {}
        try:
            return self._update(message)
        except (MilesError, OSError) as error:
            self._received, self._dirty = None, f"{message.kind} of version {message.version} failed: {error}"
            raise WeightSyncFailed(f"{self.id}: {self._dirty}") from error

    def _update(self, message: WeightMessage) -> dict[str, Any]:
        if message.kind == "begin":
            self._received, self._dirty = set(), ""
            return {}
        if self._received is None:
            raise WeightSyncFailed(f'"{message.kind}" came before "begin"')
        if message.kind == "ipc":
            data, sha = open_bucket(message)
            if sha != message.sha:
                raise WeightSyncFailed(f"bucket {message.bucket} arrived with hash {sha[:12]}, not {message.sha[:12]}")
            self._write(message, as_bytes(data))
            return {"sha": sha}
        if message.kind == "path":
            self.params = model.read_model(Path(message.body["path"]))
            self._received |= set(self.params)
            return {"sha": ""}
        if message.kind == "commit":
            return self._commit(message.version)
        raise WeightSyncFailed(
            f'engine toy does not understand "{message.kind}"; it has begin, ipc, path, flush, commit, abort'
        )

    def _write(self, message: WeightMessage, data: np.ndarray) -> None:
        """Copies each tensor into place, as a real engine does: until "commit" this is a mixture of two versions."""
        for spec in message.tensors:
            own = self.params.get(spec.name)
            if own is None or own.shape != tuple(spec.shape) or spec.dtype != "float32":
                raise WeightSyncFailed(
                    f"bucket {message.bucket} holds {spec.name} {spec.dtype}{list(spec.shape)}, unknown here"
                )
            own[...] = data[spec.offset : spec.offset + own.nbytes].view(np.float32).reshape(own.shape)
            self._received.add(spec.name)

    def _commit(self, version: int) -> dict[str, Any]:
        if missing := sorted(set(model.SHAPES) - self._received):
            raise WeightSyncFailed(f"these tensors never came: {', '.join(missing)}")
        self._received, self.version = None, version
        return {"version": version, "state_hash": model.state_hash(self.params)}


def _draw(logp: np.ndarray, top_k: int, top_p: float, rng: np.random.Generator) -> int:
    """One token from the distribution cut to the k most likely and to the smallest set of mass top_p."""
    probs = np.exp(logp)
    order = np.argsort(-probs, kind="stable")
    keep = np.ones(len(order), dtype=bool)
    if top_k:
        keep[top_k:] = False
    if top_p < 1:
        keep &= np.cumsum(probs[order]) - probs[order] < top_p
    chosen = order[keep]
    cumulative = np.cumsum(probs[chosen])
    return int(chosen[np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right").clip(max=len(chosen) - 1)])


def _spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    """Runs of equal versions, counted from the first sampled token."""
    cuts = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return tuple(VersionSpan(start=a, stop=b, version=versions[a]) for a, b in pairwise(cuts) if b > a)
