"""Messages between a driver and its worker: framed pickles over a private socket, and exceptions that travel.

Both ends trust each other, since the socket is a pair that one inherited from the other; never use this on a network.
"""

from __future__ import annotations

import asyncio
import importlib
import pickle
import socket
import struct
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from miles_core.errors import MilesError, RunFailed

OUT_OF_BAND_BYTES = 64 << 10
"""Arrays from this size on travel beside the pickle, which saves two copies; smaller ones are cheaper inside it."""
_HEADER = struct.Struct("!QI")


class Channel:
    """Framed messages over a private stream socket. `send` never blocks and never leaves half a frame behind when its
    caller is cancelled: one task does all the writing."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._writer = self._loop.create_task(self._write())

    def send(self, message: Any) -> None:
        """Queues one message. Raises what pickle raises, before anything is sent."""
        buffers: list[memoryview] = []

        def take(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < OUT_OF_BAND_BYTES:
                return True
            buffers.append(view)
            return False

        body = pickle.dumps(message, protocol=5, buffer_callback=take)
        sizes = struct.pack(f"!{len(buffers)}Q", *(b.nbytes for b in buffers))
        self._outbox.put_nowait([_HEADER.pack(len(body), len(buffers)) + sizes + body, *buffers])

    async def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is gone."""
        length, num_buffers = _HEADER.unpack(await self._read(_HEADER.size))
        sizes = struct.unpack(f"!{num_buffers}Q", await self._read(8 * num_buffers)) if num_buffers else ()
        body = await self._read(length)
        return pickle.loads(body, buffers=[await self._read(size) for size in sizes])

    async def flush(self) -> None:
        """Returns once everything queued has been written, or the other end is gone."""
        joined = self._loop.create_task(self._outbox.join())
        await asyncio.wait({joined, self._writer}, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()

    def close(self) -> None:
        self._writer.cancel()
        self._sock.close()

    async def _read(self, size: int) -> memoryview:
        view = memoryview(np.empty(size, np.uint8))
        at = 0
        while at < size:
            try:
                count = await self._loop.sock_recv_into(self._sock, view[at:])
            except OSError as error:
                raise EOFError(str(error)) from error
            if count == 0:
                raise EOFError("the other end closed the channel")
            at += count
        return view

    async def _write(self) -> None:
        while True:
            frame = await self._outbox.get()
            try:
                for part in frame:
                    await self._loop.sock_sendall(self._sock, part)
            except OSError:
                return  # the reader sees the end of the stream and reports it
            finally:
                self._outbox.task_done()


# --- Errors across processes -----------------------------------------------------------------------------------------


class RemoteError(RunFailed):
    """Something other than a MilesError was raised in a worker; `__cause__` is a copy of it where it could travel."""


def encode_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: class, text and traceback always, the object itself when it survives pickling."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = None  # text and class still travel
    return {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "pickle": data,
    }


def decode_error(data: Mapping[str, Any], who: str, method: str = "") -> MilesError:
    """The error to raise on the driver: of the same class for MilesErrors, else a RemoteError. Names `who` (role and
    index); the remote traceback is attached as a note."""
    original = _restore(data)
    if isinstance(original, MilesError):
        original.args = (f"{who}: {data['text']}",)
        error = original
    else:
        what = f'raised in "{method}"' if method else "raised"
        error = RemoteError(f"{who} {what}: {data['name']}: {data['text']}")
        error.__cause__ = original
    for seen in (error, original):
        if seen is not None and not getattr(seen, "__notes__", None):
            seen.add_note(f"Traceback of {who}:\n{data['traceback']}")
    return error


def _restore(data: Mapping[str, Any]) -> BaseException | None:
    if data["pickle"] is not None:
        try:
            return pickle.loads(data["pickle"])
        except Exception:
            pass  # a class that exists in the worker alone
    try:
        cls = getattr(importlib.import_module(data["module"]), data["name"])
    except (ImportError, AttributeError):
        return None
    if not (isinstance(cls, type) and issubclass(cls, MilesError)):
        return None
    error = cls.__new__(cls)
    error.args = (data["text"],)
    return error
