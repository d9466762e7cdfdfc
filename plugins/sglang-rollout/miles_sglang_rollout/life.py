"""Starting a server or attaching to one, and knowing at any time whether it is there and what it holds."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from miles_core.errors import EngineFailed
from miles_core.launch import EngineDied
from miles_core.placement import visible_gpus
from miles_core.worker import place
from miles_sglang_rollout import SglangEngineConfig
from miles_sglang_rollout.arguments import first_gpu, gpus_of, installed, server_arguments, server_environment
from miles_sglang_rollout.channels import WeightChannel
from miles_sglang_rollout.client import Client
from miles_sglang_rollout.server import Server

POLL_S = 0.25
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INITIAL = ("default", "0")
"""Names of the version that a server has loaded at its start."""


class Life:
    """The server of one replica (`server`, where it is ours), the clients that speak with it, and its weights."""

    def __init__(
        self,
        config: SglangEngineConfig,
        *,
        model: Path,
        run_dir: Path,
        index: int,
        python: str | None,
        seed: int,
        cpu: bool,
        needs_text: bool,
        hash_state: bool,
        api_key: str,
        log: logging.Logger,
    ) -> None:
        self.config, self.model, self.log = config, model, log
        self.name = f"engine-{index}"
        self._run_dir, self._index, self._python, self._seed = run_dir, index, python or sys.executable, seed
        self._cpu, self._needs_text, self._hash_state, self._api_key = cpu, needs_text, hash_state, api_key
        self.server: Server | None = None
        self._clients: list[Client] = []
        self._broken = "not started"
        self._info: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.weights = self._channel((1,))

    # --- Starting ---

    async def start(self, name: str) -> None:
        """Raises RuntimeMissing or EngineFailed with the reason; nothing is left behind then."""
        self.name = name
        await self.close()
        try:
            if self.config.urls:
                await self._attach()
            else:
                await self._launch()
            self._info = (await self.control("GET", "/server_info"))[0]
        except BaseException:
            await self.close()
            raise
        self.weights.close()
        self.weights = self._channel(tuple([self.ranks] * len(self._control_clients)))
        self._broken = ""
        if self.config.urls:
            await self._reset()

    async def _launch(self) -> None:
        found = await asyncio.to_thread(installed, self._python)
        self.server = server = Server(self.name, self._run_dir, self.log)
        args = server_arguments(
            self.config,
            model=self.model,
            port=server.port(),
            cpu=self._cpu,
            seed=self._seed,
            tokenizer=self._needs_text,
        )
        if not self._cpu:
            visible = len(visible_gpus(os.environ, Path("/dev")))
            args.setdefault("base_gpu_id", first_gpu(self._index, int(gpus_of(self.config)), visible))
        host = args["host"]
        key = str(args.get("api_key") or "")
        if host not in LOOPBACK and not key:
            key = args["api_key"] = secrets.token_hex(16)
        address = "127.0.0.1" if host in (*LOOPBACK, "0.0.0.0", "::") else host
        env = server_environment(self.config, found, self._cpu)
        self.log.info("%s: starting SGLang %s, log in %s", self.name, found.version, server.log_file)
        server.start(found.python, args, env)
        self._clients = [self._client(f"http://{address}:{args['port']}", key)]
        await self._until_up(server)
        server.bound()

    async def _until_up(self, server: Server) -> None:
        until = time.monotonic() + self.config.start_timeout_s
        while time.monotonic() < until:
            server.progress()
            if server.dead:
                raise EngineFailed(f"{self.name}: the SGLang server did not start", *server.reason())
            try:
                await self.client.control("GET", "/model_info", timeout_s=5.0)
                await self.client.control("GET", "/health", timeout_s=30.0)
                server.progress()
                return
            except EngineFailed:
                await asyncio.sleep(POLL_S)
        raise EngineFailed(f"{self.name}: no SGLang server after {self.config.start_timeout_s:g} s", *server.reason())

    async def _attach(self) -> None:
        own = self.config.urls[self._index]
        behind = self.config.control_urls[self._index] if self.config.control_urls else ()
        self._clients = [self._client(url, self._api_key) for url in (own, *behind)]
        until = time.monotonic() + self.config.start_timeout_s
        while True:
            try:
                answers = await self.control("GET", "/model_info", timeout_s=5.0)
                break
            except EngineFailed as error:
                if time.monotonic() > until:
                    raise EngineFailed(f"{self.name}: no SGLang server answers at {own}: {error}") from error
                await asyncio.sleep(POLL_S)
        mine, theirs = _architectures(self.model), answers[0].get("architectures")
        if mine and theirs and mine != theirs:
            raise EngineFailed(
                f"{self.name}: the server at {own} serves {answers[0].get('model_path')} ({', '.join(theirs)}), and the "
                f"model of the run is {self.model} ({', '.join(mine)})"
            )

    async def _reset(self) -> None:
        """Brings a server that another run may have used to the weights of the model's folder, as after a start."""
        told = {str(answer.get("weight_version")) for answer in await self.control("GET", "/model_info")}
        if not told <= set(INITIAL):
            body = {"model_path": str(self.model), "flush_cache": False}
            await self.control("POST", "/pause_generation", {"mode": "abort"})
            await self.control("POST", "/update_weights_from_disk", body, timeout_s=self.config.start_timeout_s)
            await self.control("POST", "/flush_cache")
        await self.weights.name_version("0")
        await self.control("POST", "/continue_generation", {})

    def _client(self, url: str, key: str) -> Client:
        return Client(
            url,
            name=self.name,
            max_in_flight=self.config.max_in_flight,
            control_timeout_s=self.config.control_timeout_s,
            api_key=key,
            gone=self.gone,
        )

    def _channel(self, ranks: tuple[int, ...]) -> WeightChannel:
        return WeightChannel(
            self.name,
            self.control,
            ranks=ranks,
            model=self.model if self.model.is_dir() else None,
            check_names=self.config.check_names,
            hash_state=self._hash_state,
            loader=not self.config.urls,
        )

    # --- Present state ---

    @property
    def client(self) -> Client:
        """For requests: the server, or the router before several."""
        if not self._clients:
            raise EngineFailed(f"{self.name} is {self._broken}")
        return self._clients[0]

    @property
    def _control_clients(self) -> list[Client]:
        return self._clients[1:] or self._clients

    async def control(
        self, method: str, path: str, body: Any | Callable[[int], Any] = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """Asks every server behind this replica; the first error is raised when all have answered."""
        calls: list[Awaitable[Any]] = [
            client.control(method, path, body(i) if inspect.isfunction(body) else body, timeout_s=timeout_s)
            for i, client in enumerate(self._control_clients)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return list(answers)

    def gone(self) -> str:
        """Why the server cannot answer, in one line, or ""."""
        if self._broken:
            return f"it is {self._broken}"
        if self.server is not None and self.server.dead:
            return "; ".join(["its server is gone", *self.server.reason()])
        return ""

    def check(self) -> None:
        """Raises EngineDied when the server is gone, EngineFailed before `start` and after `close`."""
        if self._broken:
            raise EngineFailed(f"{self.name} is {self._broken}")
        if self.server is not None and self.server.dead:
            raise EngineDied(f"{self.name}: its SGLang server is gone", *self.server.reason())

    async def check_version(self) -> None:
        """Raises EngineFailed when the server holds another version than it should: it has been started anew, or changed
        by someone else."""
        if self.weights.closed:
            return
        for answer in await self.control("GET", "/model_info"):
            told = str(answer.get("weight_version"))
            if told != str(self.weights.version) and not (self.weights.version == 0 and told in INITIAL):
                raise EngineFailed(f"{self.name} serves weight version {told} and should serve {self.weights.version}")

    def place(self) -> dict[str, Any]:
        """Where its memory is: a process of its own, so that nobody passes it a handle of this one."""
        own = place()
        if self.server is not None:
            return own | {"pid": self.server.pid}
        host = self.client.url.split("//")[-1].rsplit(":", 1)[0]
        return own | {"pid": -1} if host in LOOPBACK else own | {"pid": -1, "node": host, "host": host}

    @property
    def ranks(self) -> int:
        """Processes of one server that each hold a part of the model."""
        return int(self._info.get("tp_size", 1)) * int(self._info.get("pp_size", 1))

    @property
    def num_servers(self) -> int:
        return len(self._control_clients)

    @property
    def has_tokenizer(self) -> bool:
        return not self._info.get("skip_tokenizer_init", False)

    @property
    def fresh_chunks(self) -> bool:
        """Whether chunks of its streams hold only what is new."""
        return bool(self._info.get("incremental_streaming_output", False))

    @property
    def context(self) -> int:
        """The longest prompt and answer together that the server takes."""
        own = self._info.get("context_length") or _config(self.model).get("max_position_embeddings") or 1 << 30
        return int(own)

    @property
    def experts_per_token(self) -> int:
        return int(_config(self.model).get("num_experts_per_tok") or 1)

    def spawn(self, work: Any) -> None:
        """Runs on the side; what it raises concerns nobody."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Safe to call twice, and before `start`."""
        if self._broken != "not started" or self._clients:
            self._broken = "closed"
        for task in list(self._tasks):
            task.cancel()
        server, self.server = self.server, None
        clients, self._clients = self._clients, []
        if server is not None:
            await server.close()
        for client in clients:
            await client.close()
        self.weights.close()


def _config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _architectures(model: Path) -> list[str]:
    return list(_config(model).get("architectures") or [])
