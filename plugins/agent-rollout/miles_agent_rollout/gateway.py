"""The HTTP server: OpenAI's chat completions on the loopback interface, a key per session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from aiohttp import web

from miles_agent_rollout.chat import ApiError, read_ask
from miles_agent_rollout.session import Session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SWEEP_S = 0.1
"""How often sessions are looked at whose time may be over."""
CLOSED_KEYS = 10_000
"""Closed sessions whose keys are remembered, so that a late request is told why it is refused."""


class Gateway:
    """One server for all sessions of a run. It binds 127.0.0.1 and a free port, and lives until it is closed or its event
    loop ends. `counts`: opened, closed, reaped, unauthorized."""

    def __init__(self, *, max_body_bytes: int, model: str, unsupported: str, log: logging.Logger) -> None:
        self.model, self.unsupported, self.log = model, unsupported, log
        self.counts: Counter[str] = Counter()
        self.base_url = ""
        self.loop = asyncio.get_running_loop()
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[str, tuple[Session, float]] = {}
        self._closed: dict[str, str] = {}
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._keeper: asyncio.Task[None] | None = None

    # --- Life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts serving; further calls wait for the first one."""
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep())
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Closes every session and the server; safe to call twice."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        """Holds the server open and sweeps. The end of the event loop cancels this task, which closes everything."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._errors])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        try:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self.base_url = f"http://127.0.0.1:{port}/v1"
            self._ready.set_result(None)
            while True:
                self._sweep()
                await asyncio.sleep(SWEEP_S)
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise
        finally:
            for session, _ in list(self._sessions.values()):
                session.close("the gateway was closed")
            with contextlib.suppress(asyncio.CancelledError):
                await runner.cleanup()

    # --- Sessions ----------------------------------------------------------------------------------------------------

    def open(self, session: Session, ttl_s: float) -> None:
        """Lets requests in under the session's key; after `ttl_s` it is closed and counted, if nobody closed it."""
        self._sessions[session.key] = (session, time.monotonic() + ttl_s)
        self.counts["opened"] += 1

    def close_session(self, session: Session, reason: str) -> None:
        """Safe to call twice."""
        session.close(reason)
        if self._sessions.pop(session.key, None) is not None:
            self.counts["closed"] += 1
            self._closed[session.key] = session.closed
            while len(self._closed) > CLOSED_KEYS:
                del self._closed[next(iter(self._closed))]

    def _sweep(self) -> None:
        now = time.monotonic()
        for session, until in list(self._sessions.values()):
            if now >= until:
                self.counts["reaped"] += 1
                session.reap("its time is over")
                self.close_session(session, "its time is over")

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (found := self._sessions.get(key)) is not None:
            return found[0]
        if key in self._closed:
            raise ApiError(403, f"this session is closed: {self._closed[key]}", "session_closed")
        self.counts["unauthorized"] += 1
        raise ApiError(401, "this key belongs to no session; use the OPENAI_API_KEY of this run", "invalid_api_key")

    # --- Requests ----------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
        try:
            ask = read_ask(body, session.sampling, self.unsupported)
        except ApiError:
            session.counts["refused"] += 1
            raise
        reply = await session.complete(ask)
        if not ask.stream:
            return web.json_response(reply.body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in reply.events(ask.usage_chunk):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response({"object": "list", "data": [self._card(self.model)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response(self._card(request.match_info["name"]))

    def _card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "miles"}

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Everything that goes wrong becomes an error in OpenAI's form; what is not worth a retry says so."""
        try:
            return await handler(request)
        except ApiError as error:
            return _error(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._max_body_bytes} bytes (max_body_bytes)"
            return _error(ApiError(413, text, "body_too_large"))
        except web.HTTPException as error:
            paths = "/v1/chat/completions, /v1/models"
            return _error(
                ApiError(error.status, f"{error.reason}: {request.method} {request.path}; there is {paths}", "not_found")
            )
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            self.log.exception("the gateway failed on %s %s", request.method, request.path)
            return _error(ApiError(500, f"{type(error).__name__}: {error}", "internal_error"))


def _error(error: ApiError) -> web.Response:
    headers = {"x-should-retry": "true" if error.retry else "false"}
    return web.json_response(error.body, status=error.status, headers=headers)
