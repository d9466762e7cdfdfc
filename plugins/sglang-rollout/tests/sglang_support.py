"""Tiny random models, and real SGLang servers that several tests share: one takes half a minute to start.

Tests that take the fixture `served` need SGLang; without it they are skipped, and fail where MILES_LEG=sglang says that
it must be there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.interfaces import TrainerRank
from miles_core.launch import InlineWorkerGroup
from miles_core.trainers import RankHost, TrainerGroup
from miles_core.types import Bucket, RankInfo, TensorSpec
from miles_sglang_rollout import SglangEngineConfig
from miles_sglang_rollout.arguments import installed, server_arguments, server_environment
from miles_sglang_rollout.life import Life
from miles_sglang_rollout.server import Server

VOCAB, CONTEXT = 96, 640
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, eos_token_id=1, bos_token_id=0,
)  # fmt: skip
MOE = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "tie_word_embeddings": False}),
}
SERVER_ARGS = {"enable_deterministic_inference": True, "enable_memory_saver": True}
"""Of every server that is started here, so that its capabilities are known."""
MOE_ARGS = {**SERVER_ARGS, "enable_return_routed_experts": True}


def missing() -> str:
    lacking = [n for n in ("torch", "transformers", "aiohttp", "sglang") if importlib.util.find_spec(n) is None]
    return f"needs {', '.join(lacking)}, not installed here (see requirements/sglang.txt)" if lacking else ""


@dataclass
class Shared:
    """A running server in the place of one that an engine would start and end."""

    server: Server
    url: str
    model: Path

    @property
    def dead(self) -> bool:
        return self.server.dead

    @property
    def pid(self) -> int:
        return self.server.pid

    def reason(self) -> list[str]:
        return self.server.reason()

    async def close(self) -> None:
        """It serves the next test."""


class SharedLife(Life):
    """Takes a shared server instead of starting one, and brings it back to the weights of a start."""

    shared: Shared

    async def _launch(self) -> None:
        self.server = self.shared  # type: ignore[assignment]
        self._clients = [self._client(self.shared.url, "")]

    async def start(self, name: str) -> None:
        await super().start(name)
        await self._reset()


def share(engine: Any, shared: Shared) -> Any:
    """`engine` with the shared server in the place of its own."""
    engine.life.__class__ = SharedLife
    engine.life.shared = shared
    return engine


def start_server(model: Path, folder: Path, args: dict[str, Any]) -> Shared:
    config = SglangEngineConfig(device="cpu", num_threads=1, server_args=args)
    server = Server("shared", folder, logging.getLogger("test"))
    values = server_arguments(config, model=model, port=server.port(), cpu=True, seed=0, tokenizer=False)
    values["incremental_streaming_output"] = True
    server.start(sys.executable, values, server_environment(config, installed(sys.executable), True))
    url = f"http://127.0.0.1:{values['port']}"
    until = time.monotonic() + 240
    while time.monotonic() < until and not server.dead:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=30):
                server.bound()
                return Shared(server, url, model)
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    reason = server.reason()
    asyncio.run(server.close())
    raise RuntimeError("\n".join(reason))


def end(running: list[tuple[Any, Shared]]) -> None:
    for _, shared in running:
        asyncio.run(shared.server.close())
    running.clear()


# --- Models and trainers to compare with -----------------------------------------------------------------------------


class Reference:
    """Hugging Face's own forward pass in fp32: one sequence, no cache, no batch."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, ids: Any, temperature: float = 1.0) -> np.ndarray:
        """float32[T] of a sequence, 0 at index 0."""
        import torch

        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        with torch.no_grad():
            rows = torch.log_softmax(self.model(tokens[None]).logits[0] / temperature, dim=-1)
        out = np.zeros(len(tokens), np.float32)
        out[1:] = rows[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        return out

    def experts(self, ids: Any) -> np.ndarray:
        """int[T, layers, topk]: where the model's own router sends each input token, in no order."""
        import torch

        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        with torch.no_grad():
            logits = self.model(tokens[None], output_router_logits=True).router_logits
        topk = self.model.config.num_experts_per_tok
        return np.stack([layer.reshape(len(tokens), -1).topk(topk, -1).indices.numpy() for layer in logits], 1)


class FolderTrainer(TrainerRank):
    """A trainer whose weights are those of a Hugging Face folder."""

    def __init__(self, folder: Path, rename: Callable[[str], str] = str) -> None:
        self.folder, self.rename = folder, rename

    def start(self) -> RankInfo:
        return RankInfo(rank=0, world_size=1)

    def export(self, layout: str, bucket_bytes: int) -> Iterator[Bucket]:
        import torch
        from safetensors.torch import load_file

        held: list[tuple[str, Any]] = []
        tensors = sorted(load_file(self.folder / "model.safetensors").items())
        for index, (name, tensor) in enumerate(tensors):
            held.append((self.rename(name), tensor))
            if sum(t.nbytes for _, t in held) < bucket_bytes and index < len(tensors) - 1:
                continue
            specs, at, parts = [], 0, []
            for name, tensor in held:
                specs.append(TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape), offset=at))
                parts.append(tensor.contiguous().reshape(-1).view(torch.uint8))
                parts.append(torch.zeros(-parts[-1].numel() % 64, dtype=torch.uint8))  # as fsdp-trainer aligns them
                at += parts[-2].numel() + parts[-1].numel()
            data = torch.cat(parts)
            yield Bucket(index=index, tensors=tuple(specs), data=data, nbytes=data.numel())
            held = []

    def forward(self, batch: Any, role: str, outputs: Any) -> Any:
        raise NotImplementedError

    def step(self, batch: Any, role: str = "policy") -> Any:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def make_transport(name: str, folder: Path) -> tuple[Any, Any]:
    """(transport, function that makes its sender)."""
    limits = {"bucket_bytes": 8192, "timeout_s": 60.0}  # the tiny models have some 60 kB: several buckets
    if name == "direct":
        from miles_core.transport import DirectSender, DirectTransport

        return DirectTransport(**limits), DirectSender
    if name == "ipc-sync":
        from miles_ipc_sync.sender import IpcSender
        from miles_ipc_sync.transport import IpcTransport

        return IpcTransport(**limits, checksum=True), IpcSender
    if name == "disk-sync":
        from miles_disk_sync.sender import DiskSender
        from miles_disk_sync.transport import DiskTransport

        return DiskTransport(**limits, folder=folder / "weights", keep=1), lambda: DiskSender(rank=0)
    from miles_nccl_sync.sender import BroadcastSender
    from miles_nccl_sync.transport import BroadcastTransport

    made = BroadcastTransport(**limits, join_timeout_s=30.0, backend="auto", host="", checksum=True)
    return made, BroadcastSender


async def trainer_group(trainer: TrainerRank, make_sender: Any) -> TrainerGroup:
    host = RankHost(trainer, lambda plan: make_sender())
    group = TrainerGroup(await InlineWorkerGroup.create("trainer", [lambda: host]), timeout_s=60.0)
    await group.start()
    return group
