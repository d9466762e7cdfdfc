"""Tiny random models, and real SGLang servers that several tests share: one takes half a minute to start.

Tests that take the fixture `served` need SGLang; without it they are skipped, and fail where MILES_LEG=sglang says that
it must be there.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    raise RuntimeError("\n".join(server.reason()))


def end(running: list[tuple[Any, Shared]]) -> None:
    import asyncio

    for _, shared in running:
        asyncio.run(shared.server.close())
    running.clear()
