"""The requests of one replica: each is driven to its end by one or, across pauses, several HTTP requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_core.engine_members import forget
from miles_core.errors import EngineFailed
from miles_core.types import GenerateRequest, Generation, Status
from miles_sglang_rollout.client import Lost, Refused
from miles_sglang_rollout.life import Life
from miles_sglang_rollout.wire import Events, Parts, Piece, add, generate_body, read_experts

SETTLE_S = 1.0
"""How long a broken connection may wait for the end of the process that explains it."""


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
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it may have one, and when it is to end."""


class Requests:
    """`live` holds every request that awaits its answer, by its id; `gate` is set while they may go to the server, and
    `incarnation` is the replica's. `max_context` 0 takes the server's."""

    def __init__(self, life: Life, *, max_context: int, stream: bool, cut_timeout_s: float) -> None:
        self.life, self.stream, self.cut_timeout_s = life, stream, cut_timeout_s
        self.live: dict[str, Run] = {}
        self.gate = asyncio.Event()
        self.incarnation = ""
        self._max_context = max_context

    def open(self) -> None:
        self.gate.set()
        for run in self.live.values():
            run.go.set()

    def hold(self) -> None:
        """No further HTTP request begins; see `cut` for those that there are."""
        self.gate.clear()
        for run in self.live.values():
            run.go.clear()

    def end(self, runs: Sequence[Run], why: str) -> None:
        """Those without an HTTP request end now; `cut` the others."""
        for run in runs:
            run.ended = run.ended or why
            run.go.set()

    @property
    def running(self) -> int:
        return sum(1 for run in self.live.values() if run.rid)

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `EngineReplica.generate`; the engine has been found to serve. A prompt that leaves no room for one token
        answers at once, with finish="length" and no tokens. Raises EngineFailed when the engine cannot serve, or when a
        request with this id is running."""
        if request.id in self.live:
            raise EngineFailed(f"{self.life.name} already runs a request {request.id}")
        if request.params.stop and not self.life.has_tokenizer:
            raise EngineFailed(
                f"{self.life.name} was asked to stop at strings, but its server has no tokenizer",
                "set engine.sglang.server_args.skip_tokenizer_init = false",
            )
        room = (self._max_context or self.life.context) - len(request.token_ids)
        run = Run(request, min(request.params.max_new_tokens, room))
        if run.limit < 1:
            reason = f"no room for a new token in a context of {self._max_context or self.life.context}"
            return run.parts.generation(request.id, "length", reason, self.incarnation)
        self.live[request.id] = run
        run.idle.set()
        if self.gate.is_set():
            run.go.set()
        try:
            return await self._drive(run)
        finally:
            run.idle.set()
            del self.live[request.id]

    async def _drive(self, run: Run) -> Generation:
        """Attempts until one ends by itself, or the run is told to end."""
        finish: Status = "aborted"
        reason = ""
        while not run.ended:
            await run.go.wait()
            if run.ended:
                break
            self.life.check()
            if self.life.weights.closed:
                raise EngineFailed(f"{self.life.name}: {self.life.weights.closed}")
            piece = await self._attempt(run)
            finish, reason = piece.finish, piece.reason
            if finish != "aborted":
                break
            if run.go.is_set() and not run.ended:
                break  # the server aborted it by itself
        return run.parts.generation(
            run.request.id, finish, run.ended if finish == "aborted" and run.ended else reason, self.incarnation
        )

    async def _attempt(self, run: Run) -> Piece:
        """One HTTP request for what is still to be sampled. A connection that broke before anything came is tried once
        more, after the first request has been taken back: a keep-alive connection may end just as it is used."""
        incarnation = self.incarnation
        before = self.life.weights.version
        run.idle.clear()
        try:
            for last in (False, True):
                run.rid = uuid.uuid4().hex
                try:
                    piece = await self._ask(run)
                    break
                except Lost as error:
                    if last or not error.untouched or self.life.gone() or run.parts.pieces:
                        raise await self._dead_or(error) from error
                    self.life.spawn(self._abort_server(run.rid))
                except asyncio.CancelledError:
                    self.life.spawn(self._abort_server(run.rid))
                    raise
                except Refused as error:
                    if run.ended:  # aborted before it had been accepted
                        return Piece(finish="aborted")
                    return Piece(finish="error", reason=str(error))
        finally:
            run.rid = ""
            run.idle.set()
        if self.incarnation != incarnation:
            raise EngineFailed(f"{self.life.name} was started anew while it ran {run.request.id}")
        if not piece.versions and self.life.weights.version != before:
            raise EngineFailed(
                f"{run.request.id} ran on {self.life.name} while its weights changed; no token has a version"
            )
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
            stream=self.stream,
            experts="routed_experts" in request.fields,
        )
        piece = Piece()
        if not self.stream:
            add(piece, await self.life.client.post("/generate", body), None, fresh=True)
            return piece
        events = Events()
        async for data in self.life.client.stream("/generate", body):
            for event in events.feed(data):
                add(piece, event, self.life.weights.version_of, fresh=self.life.fresh_chunks)
        if piece.finish == "error" and not piece.reason:
            raise EngineFailed(f"{self.life.name}: the stream of {request.id} ended without an end")
        return piece

    async def _dead_or(self, error: EngineFailed) -> EngineFailed:
        """What the server's end says, where it is gone; else `error`. A dying process closes its connections a moment
        before it can be seen to have ended."""
        until = time.monotonic() + (SETTLE_S if isinstance(error, Lost) else 0.0)
        while True:
            try:
                self.life.check()
            except EngineFailed as gone:
                return gone
            if time.monotonic() >= until:
                return error
            await asyncio.sleep(0.02)

    async def cut(self, runs: Sequence[Run]) -> None:
        """Ends the HTTP requests of these; their own end is the acknowledgement. SGLang forgets an abort that overtakes its
        request, so it is said again until it is heard."""
        until = time.monotonic() + self.cut_timeout_s
        pause_s = 0.02
        while busy := [run for run in runs if not run.idle.is_set()]:
            if time.monotonic() > until:
                raise EngineFailed(f"{self.life.name} did not end {len(busy)} requests within {self.cut_timeout_s:g} s")
            if len(busy) == self.running:
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
