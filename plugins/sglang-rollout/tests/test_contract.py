"""The contract suite of engines, against real SGLang servers with tiny random models on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_support import CONTEXT, MOE_ARGS, SERVER_ARGS, VOCAB, share

import miles_sglang_rollout
from miles_core.testing.contracts import EngineContract

(SGLANG,) = miles_sglang_rollout.miles_engines()
pytestmark = pytest.mark.timeout(300)


class TestQwen3(EngineContract):
    component = SGLANG
    options = {"device": "cpu", "num_threads": 1, "server_args": SERVER_ARGS}
    model = "qwen3"
    prompt = (5, 17, 40, 3)
    vocab_size = VOCAB
    long_tokens = CONTEXT // 2
    pause_modes = ("abort", "retract")
    entry_module = "miles_sglang_rollout"

    @pytest.fixture(autouse=True)
    def _server(self, served: Callable[..., Any], model_folder: Callable[..., Path]) -> None:
        self.shared = served(self.model, **self.options["server_args"])
        self.folders = [model_folder(self.model, seed) for seed in (0, 1)]
        self.model_path = self.folders[0]

    def build(self, folder: Path, **fields: Any) -> Any:
        return share(super().build(folder, **fields), self.shared)

    def weights(self, variant: int) -> Any:
        from safetensors.numpy import load_file

        return load_file(self.folders[variant] / "model.safetensors")


class TestQwen3Streamed(TestQwen3):
    options = {**TestQwen3.options, "stream": True}
    pause_modes = ("abort", "retract", "in_place")


class TestLlama(TestQwen3):
    model = "llama"


class TestQwen3Moe(TestQwen3):
    model = "qwen3-moe"
    long_tokens = 120
    options = {**TestQwen3.options, "server_args": MOE_ARGS}
