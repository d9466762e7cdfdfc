"""HTTP with one server. Two connection pools: requests for tokens never hold up a control call. No thread, no proxy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from miles_core.errors import EngineFailed

MAX_ERROR_TEXT = 600


class Refused(EngineFailed):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Lost(EngineFailed):
    """The connection broke, or could not be made. `untouched`: before anything of an answer came."""

    def __init__(self, message: str, *, untouched: bool) -> None:
        super().__init__(message)
        self.untouched = untouched


class Client:
    """`name` and `gone()` (why the server cannot answer, or "") are for messages. `last_answer` is the monotonic time of
    the last sign that the model computes: an answer, or a chunk of one."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        max_in_flight: int,
        control_timeout_s: float,
        api_key: str = "",
        gone: Callable[[], str] = lambda: "",
    ) -> None:
        self.url, self.name, self.control_timeout_s, self._gone = url.rstrip("/"), name, control_timeout_s, gone
        self.last_answer = 0.0
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._data = self._session(max_in_flight, headers)
        self._control = self._session(16, headers)

    def _session(self, limit: int, headers: dict[str, str]) -> aiohttp.ClientSession:
        # a proxy between an engine and its client on one machine is never meant: trust_env=False
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=4.0, ttl_dns_cache=300)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.control_timeout_s)
        return aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        await asyncio.gather(self._data.close(), self._control.close())

    async def control(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The JSON answer, or its text. Never tried again: what it asks for may have been done."""
        limit = aiohttp.ClientTimeout(total=timeout_s or self.control_timeout_s)
        try:
            async with self._control.request(method, self.url + path, json=body, timeout=limit) as reply:
                text = await reply.text()
        except TimeoutError as error:
            raise Lost(f"{self.name}: no answer to {path} within {limit.total:g} s", untouched=False) from error
        except aiohttp.ClientError as error:
            raise self._lost(path, error, untouched=True) from error
        self._judge(path, reply.status, text)
        return json.loads(text) if text[:1] in ("{", "[") else text

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        """A request for tokens and its whole answer; whoever calls has the time limit."""
        touched = False
        try:
            async with self._data.post(self.url + path, json=body) as reply:
                touched = True
                raw = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(path, error, untouched=not touched) from error
        if reply.status != 200:
            self._judge(path, reply.status, raw.decode("utf-8", "replace"))
        self.last_answer = time.monotonic()
        return json.loads(raw)

    async def stream(self, path: str, body: Any) -> AsyncIterator[bytes]:
        """The bytes of an event stream as they come."""
        touched = False
        try:
            async with self._data.post(self.url + path, json=body) as reply:
                touched = True
                if reply.status != 200:
                    self._judge(path, reply.status, await reply.text())
                async for data in reply.content.iter_any():
                    self.last_answer = time.monotonic()
                    yield data
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(path, error, untouched=not touched) from error

    def _judge(self, path: str, status: int, text: str) -> None:
        if status != 200:
            raise Refused(f"{self.name}: {path} answered {status}: {_message(text)}", status)

    def _lost(self, path: str, error: BaseException, *, untouched: bool) -> Lost:
        gone = self._gone()
        return Lost(f"{self.name}: {gone or f'{path}: {type(error).__name__} {error}'.rstrip()}", untouched=untouched)


def _message(text: str) -> str:
    """What an error body says, without its JSON."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        pass
    return str(text)[:MAX_ERROR_TEXT].strip()
