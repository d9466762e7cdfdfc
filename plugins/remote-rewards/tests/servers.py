"""A server that does what a test tells it: plain threads and sockets, nothing pretended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", Any], None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((dict(self.headers), body))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        answers = self.server.answers
        try:
            answers[min(number, len(answers) - 1)](self, body)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def reply(self, text: str | bytes, status: int = 200, **headers: str) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """`answers[i]` answers request i, the last one all further ones. `requests` are (headers, body) as they came."""

    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.lock, self.running, self.most = threading.Lock(), 0, 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None: ...


def says(text: str) -> Answer:
    """A chat completion with this text."""
    return lambda handler, body: handler.reply(json.dumps({"choices": [{"message": {"content": text}}]}))


def gives(value: Any) -> Answer:
    return lambda handler, body: handler.reply(json.dumps(value))


def fails(status: int, text: str = "no", **headers: str) -> Answer:
    return lambda handler, body: handler.reply(text, status, **headers)


def sends(text: str | bytes) -> Answer:
    return lambda handler, body: handler.reply(text)


def hangs_up(handler: Handler, body: Any) -> None:
    """Closes the connection without a word."""
    handler.close_connection = True


def breaks_off(handler: Handler, body: Any) -> None:
    """Announces more than it sends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [')
    handler.close_connection = True


def waits(seconds: float, then: Answer) -> Answer:
    def answer(handler: Handler, body: Any) -> None:
        time.sleep(seconds)
        then(handler, body)

    return answer


def drips(handler: Handler, body: Any) -> None:
    """A byte now and then: never late by the clock of a single read."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(50):
        try:
            handler.wfile.write(b" ")
        except OSError:
            return
        time.sleep(0.05)
