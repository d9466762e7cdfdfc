"""The engine `sglang`: requests, interruptions and health of one replica, over HTTP.

A paused replica holds requests back here, in the client. What runs when "retract" pauses it is cut, kept, and goes on
after `resume` where it stopped, in a further request: so every token's version is known without streaming, and the
server is empty while weights arrive. Only "in_place" leaves requests in the server, and only a stream tells then which
token is older than the new weights.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.component import BuildContext
from miles_core.engine_members import forget
from miles_core.errors import ConfigError, EngineFailed, WeightSyncFailed
from miles_core.interfaces import EngineReplica
from miles_core.types import GenerateRequest, Generation, RoleSpec, Status, WeightMessage
from miles_sglang_rollout import SglangEngineConfig, _capabilities
from miles_sglang_rollout.arguments import gpus_of, on_cpu
from miles_sglang_rollout.client import Lost, Refused
from miles_sglang_rollout.life import Life
from miles_sglang_rollout.wire import (
    Events,
    Parts,
    Piece,
    add,
    generate_body,
    read_experts,
    read_scores,
    score_body,
)

PAUSE_MODES = ("abort", "retract", "in_place")
FRESH_S = 5.0
"""An answer this recent proves that the server computes."""
SLEEP_TAGS = {"weights": "weights", "cache": "kv_cache", "graphs": "cuda_graph"}


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way. `rid` names its present HTTP request, "" while there is none; SGLang aborts every request whose
    id begins with the given one, so ids of requests are not used there."""

    request: GenerateRequest
    limit: int
    parts: Parts = field(default_factory=Parts)
    rid: str = ""
    ended: str = ""
    """Why it is to end now, or ""."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no HTTP request."""


class SglangEngine(EngineReplica):
    """`model_path` is what the server loads, and what an attached one must have loaded. `run_dir` takes its log."""

    def __init__(
        self,
        model_path: Path | str,
        config: SglangEngineConfig | None = None,
        *,
        run_dir: Path,
        engine_id: str = "engine-0",
        index: int = 0,
        max_context: int = 0,
        python: str | None = None,
        seed: int = 0,
        device: str = "auto",
        needs_text: bool = False,
        replicas: int = 1,
        api_key: str = "",
        log: logging.Logger | None = None,
    ) -> None:
        self.id, self.config = engine_id, config or SglangEngineConfig()
        self.capabilities = _capabilities(self.config)
        self.max_running = self.config.max_in_flight
        self.max_context = max_context
        self.place: dict[str, Any] = {}
        self._cpu = on_cpu(self.config, device) and not self.config.urls
        hashing = {"always": True, "never": False, "auto": replicas > 1}[self.config.state_hash]
        self.life = Life(
            self.config,
            model=Path(model_path),
            run_dir=run_dir,
            index=index,
            python=python,
            seed=seed,
            cpu=self._cpu,
            needs_text=needs_text,
            hash_state=hashing and not self.config.urls,
            api_key=api_key,
            log=log or logging.getLogger("miles.engine.sglang"),
        )
        self._live: dict[str, Run] = {}
        self._open = asyncio.Event()  # requests may go to the server
        self._mode = ""
        self._asleep: set[str] = set()
        self._restarts = 0

    @classmethod
    def from_context(cls, config: SglangEngineConfig, context: BuildContext) -> SglangEngine:
        run = context.run_config
        if context.model_path is None:
            raise ConfigError("the engine sglang needs a model: set model.path")
        sampling = [run.rollout.sampling, *(table.sampling for table in run.eval)]
        return cls(
            context.model_path,
            config,
            run_dir=context.run_dir,
            engine_id=f"engine-{context.index}",
            index=context.index,
            max_context=run.model.max_context,
            python=run.engine.python,
            seed=context.seed + context.index,
            device=context.device,
            needs_text=run.rollout.use != "single-turn" or any(table.stop for table in sampling),
            replicas=run.engine.replicas,
            api_key=context.secrets.get("SGLANG_API_KEY", "") or "",
            log=context.logger,
        )

    # --- Life --------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.life.weights.version

    async def start(self) -> None:
        allow_sockets(self.config.max_in_flight)
        await self.life.start(self.id)
        self.place = self.life.place()
        self._mode, self._asleep = "", set()
        self._open.set()
        try:
            await self._probe()
        except EngineFailed as error:
            await self.close()
            raise EngineFailed(f"{self.id} came up and cannot generate: {error}") from error
        self.incarnation = uuid.uuid4().hex

    async def restart(self) -> SglangEngine:
        """Makes a dead replica ready for another `start`. Raises EngineFailed when it has died too often."""
        from miles_core.launch import ENGINE_RESTARTS

        if self._restarts >= ENGINE_RESTARTS:
            raise EngineFailed(f"{self.id} is not started again: it has been {ENGINE_RESTARTS} times")
        self._restarts += 1
        await self.close()
        return self

    async def close(self) -> None:
        self._open.clear()
        await self.life.close()
        for run in self._live.values():
            run.ended = run.ended or "the engine was closed"
        self._open.set()  # whoever waits finds out
        self.incarnation = ""

    async def health(self) -> dict[str, Any]:
        """Serving, it has sampled a token lately or samples one now. Paused or asleep, it answers and holds its version."""
        self.life.check()
        await self.life.check_version()
        if self._serving and time.monotonic() - self.life.client.last_answer > FRESH_S:
            if any(run.rid for run in self._live.values()):
                await self.life.client.control("GET", "/health_generate")  # any progress of theirs counts
                self.life.client.last_answer = time.monotonic()
            else:
                await self._probe()
        running = sum(1 for run in self._live.values() if run.rid)
        closed = self.life.weights.closed
        return {
            "version": self.version,
            "running": running,
            "waiting": len(self._live) - running,
            "ranks": self.life.ranks * self.life.num_servers,
            "dirty": closed,
        }

    @property
    def _serving(self) -> bool:
        return not (self._mode or self._asleep or self.life.weights.closed)

    async def _probe(self) -> None:
        body = {"rid": uuid.uuid4().hex, "input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            await asyncio.wait_for(self.life.client.post("/generate", body), self.config.control_timeout_s)
        except TimeoutError as error:
            raise EngineFailed(f"{self.id} sampled no token within {self.config.control_timeout_s:g} s") from error

    def _check(self) -> None:
        self.life.check()
        if self._asleep:
            raise EngineFailed(f"{self.id} is asleep: {', '.join(sorted(self._asleep))} were released")
        if self.life.weights.dirty:
            raise EngineFailed(f"{self.id}: {self.life.weights.closed}")

    def topology(self) -> RoleSpec:
        args = self.config.server_args
        return RoleSpec(name="engine", component="engine/sglang", gpus=gpus_of(self.config), nodes=args.get("nnodes", 1))

    # --- Requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `EngineReplica.generate`. A prompt that leaves no room for one token answers at once, with finish="length"
        and no tokens. Raises EngineFailed when the engine cannot serve or a request with this id is running."""
        self._check()
        if request.id in self._live:
            raise EngineFailed(f"{self.id} already runs a request {request.id}")
        if request.params.stop and not self.life.has_tokenizer:
            raise EngineFailed(
                f"{self.id} was asked to stop at strings, but its server has no tokenizer",
                "set engine.sglang.server_args.skip_tokenizer_init = false",
            )
        room = (self.max_context or self.life.context) - len(request.token_ids)
        run = Run(request, min(request.params.max_new_tokens, room))
        if run.limit < 1:
            reason = f"no room for a new token in a context of {self.max_context or self.life.context}"
            return run.parts.generation(request.id, "length", reason, self.incarnation)
        self._live[request.id] = run
        run.idle.set()
        try:
            return await self._drive(run)
        except asyncio.CancelledError:
            if run.rid:
                self.life.spawn(self._abort_server(run.rid))
            raise
        finally:
            run.idle.set()
            del self._live[request.id]

    async def _drive(self, run: Run) -> Generation:
        """Attempts until one ends by itself, or the run is told to end."""
        finish: Status = "aborted"
        reason = ""
        while not run.ended:
            await self._open.wait()
            if run.ended:
                break
            self._check()
            if self.life.weights.closed:
                raise EngineFailed(f"{self.id}: {self.life.weights.closed}")
            piece = await self._attempt(run)
            finish, reason = piece.finish, piece.reason
            if finish != "aborted":
                break
            if self._open.is_set() and not run.ended:
                break  # the server aborted it by itself
        return run.parts.generation(
            run.request.id, finish, run.ended if finish == "aborted" and run.ended else reason, self.incarnation
        )

    async def _attempt(self, run: Run) -> Piece:
        """One HTTP request for what is still to be sampled. A connection that broke before anything came is tried once
        more, after the first request has been taken back: a keep-alive connection may end just as it is used."""
        incarnation = self.incarnation
        before = self.version
        run.idle.clear()
        try:
            for last in (False, True):
                run.rid = uuid.uuid4().hex
                try:
                    piece = await self._ask(run)
                    break
                except Lost as error:
                    if last or not error.untouched or self.life.gone() or run.parts.pieces:
                        raise self._dead_or(error) from error
                    self.life.spawn(self._abort_server(run.rid))
                except Refused as error:
                    if run.ended:  # aborted before it had been accepted
                        return Piece(finish="aborted")
                    return Piece(finish="error", reason=str(error))
        finally:
            run.rid = ""
            run.idle.set()
        if self.incarnation != incarnation:
            raise EngineFailed(f"{self.id} was started anew while it ran {run.request.id}")
        if not piece.versions and self.version != before:
            raise EngineFailed(f"{run.request.id} ran on {self.id} while its weights changed; its tokens have no version")
        run.parts.take(piece, before)
        if "routed_experts" in run.request.fields and run.parts.tokens:
            total = len(run.request.token_ids) + len(run.parts.tokens)
            run.parts.take_experts(read_experts(piece.experts, total, self.life.experts_per_token))
        return piece

    async def _ask(self, run: Run) -> Piece:
        done, request = run.parts.tokens, run.request
        tokens = np.concatenate([request.token_ids, np.array(done, np.int32)]) if done else request.token_ids
        body = generate_body(
            request,
            run.rid,
            tokens,
            run.limit - len(done),
            stream=self.config.stream,
            experts="routed_experts" in request.fields,
        )
        piece = Piece()
        if not self.config.stream:
            add(piece, await self.life.client.post("/generate", body), None, fresh=True)
            return piece
        events = Events()
        async for data in self.life.client.stream("/generate", body):
            for event in events.feed(data):
                add(piece, event, self.life.weights.version_of, fresh=self.life.fresh_chunks)
        if piece.finish == "error" and not piece.reason:
            raise EngineFailed(f"{self.id}: the stream of {request.id} ended without an end")
        return piece

    def _dead_or(self, error: EngineFailed) -> EngineFailed:
        """What the server's end says, where it is gone; else `error`."""
        try:
            self.life.check()
        except EngineFailed as gone:
            return gone
        return error

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        self._check()
        await self._open.wait()
        self._check()

        async def one(tokens: np.ndarray) -> dict[str, np.ndarray]:
            answer = await self.life.client.post("/generate", score_body(uuid.uuid4().hex, tokens, topk))
            return read_scores(answer["meta_info"], len(tokens), topk)

        return list(await asyncio.gather(*(one(tokens) for tokens in token_ids)))

    # --- Interruptions -----------------------------------------------------------------------------------------------

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        runs = [self._live[i] for i in (list(self._live) if ids is None else ids) if i in self._live]
        for run in runs:
            run.ended = "aborted on request"
        await self._cut(runs)

    async def _cut(self, runs: Sequence[Run]) -> None:
        """Ends the HTTP requests of these; their own end is the acknowledgement. SGLang forgets an abort that overtakes its
        request, so it is said again until it is heard."""
        until = time.monotonic() + self.config.control_timeout_s
        pause_s = 0.02
        while busy := [run for run in runs if not run.idle.is_set()]:
            if time.monotonic() > until:
                raise EngineFailed(f"{self.id} did not end {len(busy)} requests within {self.config.control_timeout_s:g} s")
            if len(busy) == sum(1 for run in self._live.values() if run.rid):
                await self.life.control("POST", "/abort_request", {"abort_all": True})
            else:
                await asyncio.gather(*(self._abort_server(run.rid) for run in busy))
            waits = [asyncio.ensure_future(run.idle.wait()) for run in busy]
            await asyncio.wait(waits, timeout=pause_s)
            for wait in waits:
                forget(wait)
            pause_s = min(2 * pause_s, 1.0)

    async def _abort_server(self, rid: str) -> None:
        await self.life.control("POST", "/abort_request", {"rid": rid})

    async def pause(self, mode: str = "abort") -> None:
        if mode not in PAUSE_MODES:
            raise EngineFailed(f'{self.id} has no pause mode "{mode}"; it has {", ".join(PAUSE_MODES)}')
        if mode == "in_place" and not self.config.stream:
            raise EngineFailed(f'{self.id}: the pause mode "in_place" needs engine.sglang.stream = true')
        self.life.check()
        self._open.clear()
        self._mode = mode
        if mode != "in_place":
            runs = [run for run in self._live.values() if run.rid or mode == "abort"]
            for run in runs if mode == "abort" else ():
                run.ended = "cut by a pause"
            await self._cut(runs)
            if mode == "abort" and any(not run.rid for run in self._live.values()):
                self._open.set()  # those that waited at the gate end now
                await asyncio.sleep(0)
                self._open.clear()
        # nothing runs there unless the mode is in_place; "abort" would wait a second to find that out
        await self.life.control("POST", "/pause_generation", {"mode": "in_place" if mode == "in_place" else "retract"})

    async def resume(self) -> None:
        """Raises EngineFailed while the weights are incomplete: no mixture is ever served."""
        self._check()
        if self.life.weights.closed:
            raise EngineFailed(f"{self.id} cannot serve: {self.life.weights.closed}")
        await self.life.control("POST", "/continue_generation", {})
        self._mode = ""
        self._open.set()

    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        """Running requests are kept and go on after `wake`. On the CPU there is no device memory to give back."""
        if "sleep" not in self.capabilities:
            raise EngineFailed(f"{self.id} cannot sleep: set engine.sglang.server_args.enable_memory_saver = true")
        self.life.check()
        if not self._mode:
            await self.pause("retract")
        await self.life.control("POST", "/flush_cache")
        if not self._cpu:
            await self.life.control("POST", "/release_memory_occupation", {"tags": [SLEEP_TAGS[t] for t in tags]})
        self._asleep |= set(tags)
        if "weights" in tags and not self._cpu and not self.config.server_args.get("enable_weights_cpu_backup"):
            self.life.weights.dirty = "its weights were released while it slept, and new ones have not come"

    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        self.life.check()
        back = [t for t in tags if t in self._asleep]
        if back and not self._cpu:
            await self.life.control("POST", "/resume_memory_occupation", {"tags": [SLEEP_TAGS[t] for t in back]})
        self._asleep -= set(back)
        if not self._asleep and not self.life.weights.closed:
            await self.resume()

    # --- Weights -----------------------------------------------------------------------------------------------------

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.incarnation and message.incarnation != self.incarnation:
            raise WeightSyncFailed(f"{self.id}: a message for incarnation {message.incarnation}, not {self.incarnation}")
        try:
            self.life.check()
        except EngineFailed as error:
            raise WeightSyncFailed(str(error)) from error
        keep = self._mode == "in_place" and bool(self._live)
        return await self.life.weights.receive(message, paused=bool(self._mode), keep_cache=keep)


def allow_sockets(count: int) -> None:
    """Each request in flight is a socket; the system's soft limit of open files is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
