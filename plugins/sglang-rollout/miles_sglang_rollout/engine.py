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
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.component import BuildContext
from miles_core.errors import ConfigError, EngineFailed, WeightSyncFailed
from miles_core.interfaces import EngineReplica
from miles_core.types import GenerateRequest, Generation, RoleSpec, WeightMessage
from miles_sglang_rollout import SglangEngineConfig, _capabilities
from miles_sglang_rollout.arguments import gpus_of, on_cpu
from miles_sglang_rollout.life import Life
from miles_sglang_rollout.requests import Requests
from miles_sglang_rollout.wire import read_scores, score_body

PAUSE_MODES = ("abort", "retract", "in_place")
FRESH_S = 5.0
"""An answer this recent proves that the server computes."""
SLEEP_TAGS = {"weights": "weights", "cache": "kv_cache", "graphs": "cuda_graph"}


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
        self.requests = Requests(
            self.life,
            max_context=max_context,
            stream=self.config.stream,
            cut_timeout_s=self.config.control_timeout_s,
        )
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
            log=_speaking(context.logger),
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
        self.requests.open()
        try:
            await self._probe()
        except EngineFailed as error:
            await self.close()
            raise EngineFailed(f"{self.id} came up and cannot generate: {error}") from error
        self.incarnation = self.requests.incarnation = uuid.uuid4().hex

    async def restart(self) -> SglangEngine:
        """Makes a dead replica ready for another `start`. Raises EngineFailed when it has died too often."""
        from miles_core.launch import ENGINE_RESTARTS

        if self._restarts >= ENGINE_RESTARTS:
            raise EngineFailed(f"{self.id} is not started again: it has been {ENGINE_RESTARTS} times")
        self._restarts += 1
        await self.close()
        return self

    async def close(self) -> None:
        self.requests.hold()
        await self.life.close()
        self.requests.open()  # whoever waits finds out that it is closed
        self.incarnation = self.requests.incarnation = ""

    async def health(self) -> dict[str, Any]:
        """Serving, it has sampled a token lately or samples one now. Paused or asleep, it answers and holds its version."""
        self.life.check()
        await self.life.check_version()
        if self._serving and time.monotonic() - self.life.client.last_answer > FRESH_S:
            if self.requests.running:
                await self.life.client.control("GET", "/health_generate")  # any progress of theirs counts
                self.life.client.last_answer = time.monotonic()
            else:
                await self._probe()
        running = self.requests.running
        closed = self.life.weights.closed
        return {
            "version": self.version,
            "running": running,
            "waiting": len(self.requests.live) - running,
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
        return await self.requests.generate(request)

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        self._check()
        await self.requests.gate.wait()
        self._check()

        async def one(tokens: np.ndarray) -> dict[str, np.ndarray]:
            answer = await self.life.client.post("/generate", score_body(uuid.uuid4().hex, tokens, topk))
            return read_scores(answer["meta_info"], len(tokens), topk)

        return list(await asyncio.gather(*(one(tokens) for tokens in token_ids)))

    # --- Interruptions -----------------------------------------------------------------------------------------------

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        live = self.requests.live
        runs = list(live.values()) if ids is None else [live[i] for i in ids if i in live]
        self.requests.end(runs, "aborted on request")
        await self.requests.cut(runs)

    async def pause(self, mode: str = "abort") -> None:
        if mode not in PAUSE_MODES:
            raise EngineFailed(f'{self.id} has no pause mode "{mode}"; it has {", ".join(PAUSE_MODES)}')
        if mode == "in_place" and not self.config.stream:
            raise EngineFailed(f'{self.id}: the pause mode "in_place" needs engine.sglang.stream = true')
        self.life.check()
        self.requests.hold()
        self._mode = mode
        if mode != "in_place":
            runs = list(self.requests.live.values())
            if mode == "abort":
                self.requests.end(runs, "cut by a pause")
            await self.requests.cut(runs)
        # nothing runs there unless the mode is in_place; "abort" would wait a second to find that out
        await self.life.control("POST", "/pause_generation", {"mode": "in_place" if mode == "in_place" else "retract"})

    async def resume(self) -> None:
        """Raises EngineFailed while the weights are incomplete: no mixture is ever served. What still sleeps is woken."""
        self.life.check()
        if self._asleep:
            await self._wake(sorted(self._asleep))
        if self.life.weights.closed:
            raise EngineFailed(f"{self.id} cannot serve: {self.life.weights.closed}")
        await self.life.control("POST", "/continue_generation", {})
        self._mode = ""
        self.requests.open()

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
        await self._wake(tags)
        if not self._asleep and not self.life.weights.closed:
            await self.resume()

    async def _wake(self, tags: Sequence[str]) -> None:
        back = [t for t in tags if t in self._asleep]
        if back and not self._cpu:
            await self.life.control("POST", "/resume_memory_occupation", {"tags": [SLEEP_TAGS[t] for t in back]})
        self._asleep -= set(back)

    # --- Weights -----------------------------------------------------------------------------------------------------

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.incarnation and message.incarnation != self.incarnation:
            raise WeightSyncFailed(f"{self.id}: a message for incarnation {message.incarnation}, not {self.incarnation}")
        try:
            self.life.check()
        except EngineFailed as error:
            raise WeightSyncFailed(str(error)) from error
        keep = self._mode == "in_place" and bool(self.requests.live)
        return await self.life.weights.receive(message, paused=bool(self._mode), keep_cache=keep)


def allow_sockets(count: int) -> None:
    """Each request in flight is a socket; the system's soft limit of open files is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _speaking(log: logging.Logger) -> logging.Logger:
    """A server's start takes minutes: its progress is shown unless someone has chosen another level."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    return log
