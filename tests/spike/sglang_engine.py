"""An `EngineReplica` that owns one SGLang server and speaks HTTP with it. Token ids go in and out; no tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from miles_core.errors import EngineFailed, WeightSyncFailed
from miles_core.interfaces import EngineReplica
from miles_core.types import GenerateRequest, Generation, Status, VersionSpan, WeightMessage

STANDINS = Path(__file__).parents[2] / "plugins/sglang-rollout/miles_sglang_rollout/serverside/standins"
"""Those of the plugin: one folder for each package that is stood in for."""
CPU_OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.2", "--max-total-tokens", "4096"),
    *("--max-running-requests", "16", "--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "info"),
)
FINISH: dict[str, Status] = {"stop": "stop", "length": "length", "abort": "aborted"}


class SglangEngine(EngineReplica):
    """`start` runs a server in a process group of its own on a free port; `close` ends that group.

    On the CPU SGLang knows no seed per request (its deterministic mode wants a GPU attention backend): siblings differ,
    but a rerun does not give the same, and the capability "seed" is not claimed.
    """

    capabilities = frozenset({"weights/broadcast", "score"})
    max_running = 16

    def __init__(self, engine_id: str, model: Path, log: Path, *, start_timeout_s: float = 240.0) -> None:
        self.control_limit_s = 30.0
        """Limit of one HTTP request that should be answered at once."""
        self.id, self.model, self.log, self.start_timeout_s = engine_id, model, log, start_timeout_s
        self.version: int | None = 0
        """None while an update is under way or has failed: what the server then holds is no version."""
        self.process: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._group = ""
        self._pending = 0

    # --- Life ---

    async def start(self) -> None:
        self.incarnation = uuid.uuid4().hex
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), *CPU_OPTIONS]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sorted(p for p in STANDINS.iterdir() if p.is_dir()))),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        self._http = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        until = time.monotonic() + self.start_timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(EngineFailed):
                await self._call("GET", "/health", limit_s=5.0)
                return
            if self.process.poll() is not None:
                break
            await asyncio.sleep(0.2)
        await self.close()
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        raise EngineFailed(f"{self.id} did not come up within {self.start_timeout_s:g} s", *tail)

    def send_signal(self, number: signal.Signals) -> None:
        """To the server and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.send_signal(signal.SIGKILL)  # SIGTERM is known to hang
            await asyncio.to_thread(self.process.wait, 10)
        if self._http is not None:
            await self._http.close()

    async def health(self) -> dict[str, Any]:
        info = await self._call("GET", "/model_info")
        told = info["weight_version"]
        if self.version is not None and str(self.version) != {"default": "0"}.get(told, told):
            raise EngineFailed(f"{self.id} serves weight version {told} and should serve {self.version}")
        return {"version": self.version, "running": len(self._running), "waiting": 0}

    # --- Requests ---

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.params.stop or request.fields or request.images:
            raise EngineFailed("the spike's engine has no tokenizer, side channels or images")
        task = self._running[request.id] = asyncio.ensure_future(self._generate(request))
        try:
            return await asyncio.shield(task)
        finally:
            task.add_done_callback(lambda _: self._running.pop(request.id, None))

    async def _generate(self, request: GenerateRequest) -> Generation:
        before, params = self.version, request.params
        answer = await self._call(
            "POST",
            "/generate",
            {
                "rid": request.id,
                "input_ids": np.asarray(request.token_ids).tolist(),
                "return_logprob": True,
                "sampling_params": {
                    "max_new_tokens": params.max_new_tokens,
                    "temperature": params.temperature,
                    "top_p": params.top_p,
                    "top_k": params.top_k or -1,
                    "stop_token_ids": list(params.stop_token_ids),
                    "ignore_eos": params.ignore_eos,
                },
            },
            limit_s=None,  # the pool has the limit
        )
        meta = answer["meta_info"]
        if before is None or before != self.version:
            raise EngineFailed(f"{request.id} ran on {self.id} while its weights changed; its tokens have no version")
        pairs = meta["output_token_logprobs"]
        tokens = np.array([token for _, token, *_ in pairs], np.int32)
        return Generation(
            id=request.id,
            token_ids=tokens,
            logprobs=np.array([value for value, *_ in pairs], np.float32),
            finish=FINISH[meta["finish_reason"]["type"]],
            versions=(VersionSpan(start=0, stop=len(tokens), version=before),) if len(tokens) else (),
            incarnation=self.incarnation,
            cached_tokens=meta.get("cached_tokens", 0),
            reason=meta["finish_reason"].get("message") or "",
        )

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        if topk:
            raise NotImplementedError("the spike's engine scores given tokens only")

        async def one(tokens: np.ndarray) -> dict[str, np.ndarray]:
            answer = await self._call(
                "POST",
                "/generate",
                {
                    "input_ids": np.asarray(tokens).tolist(),
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                },
                limit_s=None,
            )
            return {"logprobs": np.array([v or 0.0 for v, *_ in answer["meta_info"]["input_token_logprobs"]], np.float32)}

        return list(await asyncio.gather(*(one(tokens) for tokens in token_ids)))

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """SGLang takes note of an abort and answers at once; the request's own end is the acknowledgement."""
        wanted = {i: self._running[i] for i in (list(self._running) if ids is None else ids) if i in self._running}
        for request_id in wanted:
            await self._call("POST", "/abort_request", {"rid": request_id})
        if wanted:
            await asyncio.wait(wanted.values(), timeout=self.control_limit_s)

    async def pause(self, mode: str = "abort") -> None:
        if mode != "abort":
            raise EngineFailed(f'the spike\'s engine has no pause mode "{mode}": it does not stream, so it could not say')
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    # --- Weights ---

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        if message.incarnation != self.incarnation:
            raise WeightSyncFailed(
                f"{self.id} has been replaced: a message for incarnation {message.incarnation} came late"
            )
        try:
            return await getattr(self, f"_on_{message.kind}")(message)
        except (EngineFailed, AttributeError) as error:
            raise WeightSyncFailed(f"{self.id}, {message.kind}: {error}") from error

    async def _on_begin(self, message: WeightMessage) -> dict[str, Any]:
        self.version, self._pending = None, message.version
        return {}

    async def _on_join(self, message: WeightMessage) -> dict[str, Any]:
        await self._leave()
        body = message.body
        await self._call(
            "POST",
            "/init_weights_update_group",
            {
                "master_address": body["host"],
                "master_port": body["port"],
                "rank_offset": body["rank"],
                "world_size": body["world_size"],
                "group_name": body["group"],
                "backend": "gloo",
            },
            limit_s=message.timeout_s,
        )
        self._group = body["group"]
        return {}

    async def _on_broadcast(self, message: WeightMessage) -> dict[str, Any]:
        if not self._group or message.body["group"] != self._group:  # the server would end itself over an unknown group
            raise WeightSyncFailed(f"{self.id} is not in the group {message.body['group']}")
        await self._call(
            "POST",
            "/update_weights_from_distributed",
            {
                "names": [t.name for t in message.tensors],
                "dtypes": [t.dtype for t in message.tensors],
                "shapes": [list(t.shape) for t in message.tensors],
                "group_name": self._group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            },
            limit_s=message.timeout_s,
        )
        return {}

    async def _on_flush(self, message: WeightMessage) -> dict[str, Any]:
        await self._call("POST", "/flush_cache")
        return {}

    async def _on_commit(self, message: WeightMessage) -> dict[str, Any]:
        if self._pending != message.version:
            raise WeightSyncFailed(f"{self.id} began version {self._pending} and was told to commit {message.version}")
        body = {"new_version": str(message.version), "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body)
        self.version = message.version
        return {"version": self.version}  # no state hash: SGLang's checksum of its weights needs CUDA

    async def _on_abort(self, message: WeightMessage) -> dict[str, Any]:
        self.version = None
        await self._leave()
        return {}

    async def _leave(self) -> None:
        group, self._group = self._group, ""
        if group:
            await self._call("POST", "/destroy_weights_update_group", {"group_name": group})

    # --- HTTP ---

    async def _call(self, method: str, path: str, body: Any = None, *, limit_s: float | None = -1.0) -> Any:
        """The JSON answer, or None. `limit_s` is `control_limit_s` by default, None for no limit.

        Raises EngineFailed with what the server said, also when it is gone."""
        if self.process is None or self.process.poll() is not None:
            raise EngineFailed(f"{self.id}: its server is gone")
        limit = aiohttp.ClientTimeout(total=self.control_limit_s if limit_s == -1.0 else limit_s)
        try:
            async with self._http.request(method, path, json=body, timeout=limit) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{self.id}: {path}: {type(error).__name__} {error}") from error
        if reply.status != 200:
            raise EngineFailed(f"{self.id}: {path} answered {reply.status}: {text[:500]}")
        return json.loads(text) if text.startswith(("{", "[")) else None
