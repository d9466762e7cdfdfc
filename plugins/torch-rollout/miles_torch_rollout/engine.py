"""The engine `torch`: an asyncio front for a batch that one thread computes."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_core.component import BuildContext
from miles_core.errors import EngineFailed, MilesError, WeightSyncFailed
from miles_core.interfaces import EngineReplica
from miles_core.transport import hash_folder
from miles_core.types import GenerateRequest, Generation, RoleSpec, WeightMessage
from miles_torch_rollout import CAPABILITIES, TorchEngineConfig
from miles_torch_rollout import load as loading
from miles_torch_rollout.batch import Batch
from miles_torch_rollout.memory import Parked, kv_budget, park, unpark
from miles_torch_rollout.request import Decode, Running
from miles_torch_rollout.scoring import score_sequences
from miles_torch_rollout.thread import StepThread
from miles_torch_rollout.weights import WeightUpdate, open_data, state_hash

PAUSE_MODES = ("abort", "retract", "in_place")


class TorchEngine(EngineReplica):
    """One replica. `model_path` is read at `start`; `decode(ids) -> text` serves stop strings and may be None."""

    capabilities = CAPABILITIES

    def __init__(
        self,
        model_path: Path | str,
        config: TorchEngineConfig | None = None,
        *,
        engine_id: str = "engine-0",
        max_context: int = 0,
        device: str = "auto",
        make_decode: Callable[[], Decode | None] = lambda: None,
        log: logging.Logger | None = None,
    ) -> None:
        self.id = engine_id
        self.config = config or TorchEngineConfig()
        self.model_path = Path(model_path)
        self.max_context = max_context
        self.version = 0
        self._given_device, self._make_decode = device, make_decode
        self._log = log or logging.getLogger("miles.engine.torch")
        self._live: dict[str, Running] = {}  # every request that awaits its answer
        self._inbox: deque[Running] = deque()  # those that the thread has not seen yet
        self._batch: Batch | None = None
        self._model: Any = None
        self._thread: StepThread | None = None
        self._paused = False
        self._update: WeightUpdate | None = None
        self._asleep: set[str] = set()
        self._parked: Parked | None = None
        self._dirty = ""
        self._broken = "not started"

    @classmethod
    def from_context(cls, config: TorchEngineConfig, context: BuildContext) -> TorchEngine:
        def make_decode() -> Decode | None:
            tokenizer = context.tokenizer
            return None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special=False)

        if context.model_path is None:
            raise EngineFailed("the engine torch needs a model: set model.path")
        return cls(
            context.model_path,
            config,
            engine_id=f"engine-{context.index}",
            max_context=context.run_config.model.max_context,
            device=context.device,
            make_decode=make_decode,
            log=context.logger,
        )

    async def start(self) -> None:
        loading.check_environment(self.config)
        self._thread = StepThread(self.id, self._step, self._ready, self._crashed)
        self._thread.start()
        await asyncio.wrap_future(self._thread.call(self._load))
        self.incarnation = uuid.uuid4().hex
        self.version, self._dirty, self._broken = 0, "", ""

    # --- Sampling ---

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `EngineReplica.generate`. A prompt that leaves no room for one token answers at once, with finish="length"
        and no tokens. Raises EngineFailed when the engine cannot serve or a request with this id is running."""
        self._check()
        params = request.params
        if request.id in self._live:
            raise EngineFailed(f"{self.id} already runs a request {request.id}")
        if params.stop and self._decode is None:
            raise EngineFailed(f"{self.id} was asked to stop at strings, but the run gave it no tokenizer")
        loop = asyncio.get_running_loop()
        run = Running(
            request=request,
            limit=min(params.max_new_tokens, self.max_context - len(request.token_ids)),
            stop_ids=frozenset() if params.ignore_eos else self._eos | frozenset(params.stop_token_ids),
            decode=self._decode if params.stop else None,
            loop=loop,
            future=loop.create_future(),
        )
        if run.limit < 1 or not len(request.token_ids):
            return run.result("length", self.incarnation, f"no room for a new token in a context of {self.max_context}")
        self._live[request.id] = run
        self._inbox.append(run)
        self._thread.arrived()
        if self._broken:  # it went down just now, and nobody will look into the inbox
            self._fail_all(f"{self.id} is {self._broken}")
        try:
            return await run.future
        except asyncio.CancelledError:
            self._thread.call(lambda: self._take([request.id]))
            raise
        finally:
            del self._live[request.id]

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        self._check()
        budget = self._batch.prefill_tokens
        return await self._do(lambda: score_sequences(self._batch.decoder, token_ids, topk, self._device, budget))

    def _step(self) -> None:
        self._collect()
        for run, status in self._batch.step(self.version):
            run.deliver(run.result(status, self.incarnation))

    def _ready(self) -> bool:
        serving = not (self._paused or self._dirty or self._broken or self._asleep)
        return serving and bool(self._inbox or self._batch.busy)

    def _collect(self) -> None:
        while self._inbox:
            self._batch.waiting.append(self._inbox.popleft())

    def _take(self, ids: Iterable[str] | None) -> list[Running]:
        self._collect()
        return self._batch.take(ids)

    # --- Control ---

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        wanted = None if ids is None else list(ids)
        await self._do(lambda: self._abort(wanted, "aborted on request"))

    def _abort(self, ids: list[str] | None, reason: str) -> None:
        for run in self._take(ids):
            run.deliver(run.result("aborted", self.incarnation, reason))

    async def pause(self, mode: str = "abort") -> None:
        if mode not in PAUSE_MODES:
            raise EngineFailed(f'{self.id} has no pause mode "{mode}"; it has {", ".join(PAUSE_MODES)}')
        await self._do(lambda: self._pause(mode))

    def _pause(self, mode: str) -> None:
        self._paused = True
        if mode == "abort":
            self._abort(None, "cut by a pause")
        elif mode == "retract":
            self._batch.retract()

    async def resume(self) -> None:
        """Raises EngineFailed while the weights are incomplete: no mixture is ever served."""
        self._check()
        if self._update is not None:
            raise EngineFailed(f"{self.id} cannot serve: the update to version {self._update.version} is open")
        self._paused = False
        self._thread.arrived()

    async def health(self) -> dict[str, Any]:
        if self._broken:
            raise EngineFailed(f"{self.id} is {self._broken}")
        running, waiting = len(self._batch.running), len(self._batch.waiting) + len(self._inbox)
        return {"version": self.version, "running": running, "waiting": waiting, "dirty": bool(self._dirty)}

    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        """ "cache" drops kept prompts, "weights" moves the weights to host memory; on the CPU there is nowhere to move
        them. Running requests are put back and go on after `wake`."""
        await self._do(lambda: self._sleep(tags))

    def _sleep(self, tags: Sequence[str]) -> None:
        self._asleep |= set(tags)
        self._batch.retract()
        self._batch.cache.clear()
        self._batch.rows.release()
        if "weights" in tags and self._parked is None and self._device.type == "cuda":
            self._parked = park(self._model)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        await self._do(lambda: self._wake(tags))

    def _wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags and self._parked is not None:
            self._parked = unpark(self._parked)
        self._asleep -= set(tags)

    async def close(self) -> None:
        if self._thread is None or self._broken == "closed":
            return
        self._broken = "closed"
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)
        self._fail_all(f"{self.id} was closed")
        self._model = self._batch = self._update = self._parked = None

    def topology(self) -> RoleSpec:
        on_gpu = loading.pick_device(self.config, self._given_device).type == "cuda"
        return RoleSpec(name="engine", component="engine/torch", gpus=1.0 if on_gpu else 0.0)

    # --- Weights ---

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.incarnation and message.incarnation != self.incarnation:
            raise WeightSyncFailed(
                f"{self.id}: a weight message for incarnation {message.incarnation}, not {self.incarnation}"
            )
        return await self._do(lambda: self._receive(message))

    def _receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.kind == "flush":
            self._batch.cache.clear()
            return {}
        if message.kind == "abort":
            self._update, self._dirty = None, f"the update to version {message.version} was given up"
            return {}
        try:
            return self._carry_on(message)
        except (MilesError, OSError, RuntimeError) as error:
            self._update, self._dirty = None, f"{message.kind} of version {message.version} failed: {error}"
            raise WeightSyncFailed(f"{self.id}: {self._dirty}") from error

    def _carry_on(self, message: WeightMessage) -> dict[str, Any]:
        """begin, ipc, path, commit. Kept prompts go at the begin already: none may outlive the weights it came from."""
        if message.kind == "begin":
            if self._batch.busy and not self._paused:
                raise WeightSyncFailed("requests are running: pause comes before begin")
            self._batch.cache.clear()
            self._update, self._dirty = WeightUpdate(self._model, message.version), ""
            return {}
        if self._update is None or self._update.version != message.version:
            raise WeightSyncFailed(f'"{message.kind}" of version {message.version} came without its "begin"')
        if message.kind == "ipc":
            data, sha = open_data(message, self._device)
            for spec in message.tensors:
                self._update.write(spec, data)
            return {"sha": sha}
        if message.kind == "path":
            folder = Path(message.body["path"])
            self._update.read_folder(folder)
            return {"sha": hash_folder(folder) if message.sha else ""}
        if message.kind == "commit":
            self._update.finish()
            self._batch.cache.clear()
            self._update, self.version = None, message.version
            return {"version": self.version, "state_hash": state_hash(self._model) if self.config.state_hash else ""}
        raise WeightSyncFailed(f'the engine torch takes begin, ipc, path, flush, commit and abort, not "{message.kind}"')

    # --- Inside ---

    def _load(self) -> None:
        config = self.config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._device = loading.pick_device(config, self._given_device)
        on_cpu = self._device.type == "cpu"
        self._model = loading.load_model(self.model_path, config, self._device)
        decoder = loading.make_decoder(self._model, config.forward, self._log)
        limit = loading.max_positions(self._model)
        self.max_context = min(self.max_context or limit, limit)
        self._eos = loading.eos_ids(self.model_path)
        self._decode = self._make_decode()
        self._batch = Batch(
            decoder,
            device=self._device,
            dtype=self._model.dtype,
            vocab=self._model.config.vocab_size,
            max_running=config.max_running or (128 if on_cpu else 512),
            max_kv_tokens=config.max_kv_tokens or kv_budget(self._model, self._device),
            prefill_tokens=config.prefill_tokens or (2048 if on_cpu else 16384),
            prefix_cache_tokens=config.prefix_cache_tokens,
        )
        self._log.info("%s: %s on %s, %s pass", self.model_path, self._model.dtype, self._device, type(decoder).__name__)

    async def _do(self, command: Callable[[], Any]) -> Any:
        """Runs a command in the engine's thread. Raises EngineFailed when that has ended."""
        if self._thread is None or (self._broken and self._broken != "not started"):
            raise EngineFailed(f"{self.id} is {self._broken}")
        future = self._thread.call(command)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled() and self._broken:
                raise EngineFailed(f"{self.id} is {self._broken}") from None
            raise

    def _check(self) -> None:
        asleep = f"asleep ({', '.join(sorted(self._asleep))})" if self._asleep else ""
        if problem := self._broken or self._dirty or asleep:
            raise EngineFailed(f"{self.id} cannot serve: {problem}")

    def _crashed(self, error: BaseException) -> None:
        self._log.error("%s stopped", self.id, exc_info=error)
        self._broken = f"broken: {type(error).__name__}: {error}"
        self._fail_all(f"{self.id} is {self._broken}")

    def _fail_all(self, reason: str) -> None:
        """Ends every request with EngineFailed, wherever it is."""
        for run in list(self._live.values()):
            run.deliver(EngineFailed(reason))
