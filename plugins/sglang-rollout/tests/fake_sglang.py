"""A small HTTP server with the endpoints of SGLang that the engine uses, and their quirks. No model: an answer's tokens are
10, 11, 12, ... and its log-probabilities -0.5."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from miles_sglang_rollout import SglangEngineConfig
from miles_sglang_rollout.engine import SglangEngine


class FakeSglang:
    """`step_s` is the time that a token takes; `calls` are all requests but /generate, `bodies` those of /generate."""

    def __init__(self, *, step_s: float = 0.0, info: dict[str, Any] | None = None) -> None:
        self.step_s = step_s
        self.info = {"weight_version": "default", "architectures": ["Fake"], "model_path": "fake"} | (info or {})
        self.server_info = {
            "tp_size": 1,
            "context_length": 100,
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            **(info or {}),
        }
        self.calls: list[tuple[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.aborted: set[str] = set()
        self.running: dict[str, int] = {}
        self.most = 0
        self.drop: list[str] = []
        """Paths whose next request is answered by closing the connection; "half" closes it in the middle of an answer."""
        self.refuse: dict[str, tuple[int, str]] = {}
        self.meta: dict[str, Any] = {}
        self.finish: dict[str, Any] = {"type": "length"}
        self.tokens: int | None = None
        self.frozen = False
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        rid = body["rid"]
        self.running[rid] = 0
        self.most = max(self.most, len(self.running))
        try:
            if self.drop and self.drop[0] in ("generate", "half"):
                return await self._broken(request, self.drop.pop(0))
            if "generate" in self.refuse:
                status, text = self.refuse["generate"]
                return web.json_response({"error": {"message": text}}, status=status)
            if body.get("stream"):
                return await self._stream(request, body)
            return web.json_response(await self._whole(body))
        finally:
            self.running.pop(rid, None)

    async def _broken(self, request: web.Request, how: str) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        if how == "half":
            await answer.prepare(request)
            await answer.write(b'{"meta_info"')
        request.transport.close()
        return answer

    async def _sample(self, body: dict[str, Any]) -> AsyncIterator[tuple[int, bool]]:
        """(tokens so far, whether it was aborted) after each."""
        rid, limit = body["rid"], body["sampling_params"]["max_new_tokens"]
        count = limit if self.tokens is None else min(self.tokens, limit)
        for done in range(1, count + 1):
            while self.frozen:
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.step_s)
            if any(rid.startswith(prefix) for prefix in self.aborted):  # as SGLang does it
                yield done - 1, True
                return
            self.running[rid] = done
            yield done, False

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        done, cut = 0, False
        async for done, cut in self._sample(body):  # noqa: B007
            pass
        return self._answer(body, 0, done, {"type": "abort", "message": "Aborted"} if cut else self.finish)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        sent, cut = 0, False
        limit = body["sampling_params"]["max_new_tokens"]
        async for done, cut in self._sample(body):
            reason = {"type": "abort", "message": "Aborted"} if cut else self.finish if done == limit else None
            await answer.write(b"data: " + json.dumps(self._answer(body, sent, done, reason)).encode() + b"\n\n")
            sent = done
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _answer(self, body: dict[str, Any], start: int, stop: int, reason: Any) -> dict[str, Any]:
        known = len(body["input_ids"]) - 4 if len(body["input_ids"]) > 4 else 0
        meta = {
            "finish_reason": reason,
            "weight_version": self.info["weight_version"],
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            **self.meta,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, 10 + known + i, None] for i in range(start, stop)]
            if "logprob_start_len" in body:
                ids = body["input_ids"]
                meta["input_token_logprobs"] = [[None if i == 0 else -1.0, t, None] for i, t in enumerate(ids)]
        return {"output_ids": [], "meta_info": meta}

    async def control(self, request: web.Request) -> web.StreamResponse:
        path = request.path.lstrip("/")
        text = await request.text()
        body = json.loads(text) if text else None
        self.calls.append((path, body))
        if path in self.drop:
            self.drop.remove(path)
            request.transport.close()
            return web.Response()
        if path in self.refuse:
            status, said = self.refuse[path]
            return web.json_response({"success": False, "message": said}, status=status)
        if path == "abort_request":
            self.aborted |= set(self.running) if body.get("abort_all") else {body["rid"]}
        if path == "update_weight_version":
            self.info["weight_version"] = body["new_version"]
        if path == "pause_generation" and body["mode"] == "in_place":
            self.frozen = True
        if path == "continue_generation":
            self.frozen = False
        answers = {"model_info": self.info, "server_info": self.server_info}
        return web.json_response(answers.get(path, {"success": True}))

    def count(self, path: str) -> int:
        return sum(1 for name, _ in self.calls if name == path)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[FakeSglang]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path}", self.control)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runner.cleanup(), 2)


@asynccontextmanager
async def attached(fake: FakeSglang, folder: Any, **options: Any) -> AsyncIterator[SglangEngine]:
    """An engine attached to a fake server. `folder` takes what a run folder would, and is the model's."""
    more = {name: options.pop(name) for name in ("max_context", "engine_id") if name in options}
    config = SglangEngineConfig(urls=(fake.url,), **{"control_timeout_s": 5.0, "start_timeout_s": 5.0, **options})
    engine = SglangEngine(folder, config, run_dir=folder, **more)
    await engine.start()
    fake.calls.clear()
    fake.bodies.clear()
    try:
        yield engine
    finally:
        await engine.close()
