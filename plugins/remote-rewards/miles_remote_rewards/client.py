"""Posting JSON to a server that may be slow, overloaded, broken or gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from miles_core import BuildContext
from miles_remote_rewards import ServerConfig

T = TypeVar("T")
MAX_REPLY_BYTES = 16 << 20
LOCAL = ("localhost", "127.0.0.1", "::1")
AGAIN = frozenset({408, 425, 429, *range(500, 600)})
"""Status codes after which the same request may succeed."""


class ServerRefused(RuntimeError):
    """The server said that this request is wrong: trying again would not help."""


class NoAnswer(RuntimeError):
    """No usable answer after all tries."""


class Client:
    """Posts to one address. No proxy or netrc of the environment is used, and no redirect followed: what is sent goes to
    that address alone. The secret never stands in an error.

    It may be used from several event loops, one after the other: each gets connections of its own.
    """

    def __init__(self, url: str, config: ServerConfig, context: BuildContext, secret: str = "") -> None:
        self.url, self.config, self.context = url, config, context
        self._secret, self._rng = secret, context.rng
        parts = urlsplit(url)
        if secret and parts.scheme == "http" and parts.hostname not in LOCAL:
            context.logger.warning("the key goes to %s unencrypted: its address is http, not https", parts.hostname)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None

    def mask(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text

    async def post(self, body: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of the JSON that came back. A ValueError of `read` means that the answer is none, and there is
        another try. Raises ServerRefused, or NoAnswer with the last cause."""
        http, slots = self._connected()
        cause = ""
        for attempt in range(self.config.tries):
            async with slots:
                cause, asked_s, value = await self._once(http, body, read)
            if not cause:
                return value
            if attempt + 1 < self.config.tries:
                self.context.metric("retries", 1.0, "sum")
                await asyncio.sleep(self._wait_s(attempt, asked_s))
        tries = f"{self.config.tries} tries" if self.config.tries > 1 else "1 try"
        raise NoAnswer(self.mask(f"no answer from {self.url} after {tries}: {cause}"))

    async def _once(self, http: httpx.AsyncClient, body: Any, read: Callable[[Any], T]) -> tuple[str, float, T | Any]:
        """(why there is no answer or "", seconds that the server asks to wait, the answer)."""
        self.context.metric("requests", 1.0, "sum")
        start = time.monotonic()
        try:
            # httpx limits each read; this also ends a server that sends one byte a second.
            async with asyncio.timeout(self.config.request_s):
                status, headers, data = await self._exchange(http, body)
        except TimeoutError:
            return f"it took longer than {self.config.request_s:g} s", 0.0, None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}", 0.0, None
        self.context.metric("seconds", time.monotonic() - start)
        if status in AGAIN:
            return f"status {status}: {_excerpt(data)}", _retry_after(headers), None
        if status != 200:
            raise ServerRefused(self.mask(f"{self.url} answered with status {status}: {_excerpt(data)}"))
        if len(data) > MAX_REPLY_BYTES:
            return f"its answer is longer than {MAX_REPLY_BYTES} bytes", 0.0, None
        try:
            return "", 0.0, read(json.loads(data))
        except (ValueError, RecursionError) as error:
            return f"its answer is not what was expected: {error}", 0.0, None

    async def _exchange(self, http: httpx.AsyncClient, body: Any) -> tuple[int, httpx.Headers, bytes]:
        data = b""
        async with http.stream("POST", self.url, content=json.dumps(body).encode()) as reply:
            async for piece in reply.aiter_bytes():
                data += piece
                if len(data) > MAX_REPLY_BYTES:
                    break
        return reply.status_code, reply.headers, data

    def _wait_s(self, attempt: int, asked_s: float) -> float:
        own_s = self.config.backoff_s * 2**attempt * (1 + 0.5 * float(self._rng.random()))
        return min(max(own_s, asked_s), self.config.max_wait_s)

    def _connected(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._http is None or self._slots is None:
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            if self._secret:
                headers["Authorization"] = f"Bearer {self._secret}"
            most = self.config.concurrency
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=self.config.request_s,
                trust_env=False,
                follow_redirects=False,
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            )
            self._loop, self._slots = loop, asyncio.Semaphore(most)
        return self._http, self._slots


def _excerpt(data: bytes) -> str:
    return " ".join(data[:300].decode("utf-8", "replace").split()) or "(empty)"


def _retry_after(headers: httpx.Headers) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", "0")))
    except ValueError:  # a date: our own wait will do
        return 0.0
