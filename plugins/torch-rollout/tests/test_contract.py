"""The contract suite of engines, on tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import miles_torch_rollout
from miles_core.testing.contracts import EngineContract

pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")
(TORCH,) = miles_torch_rollout.miles_engines()


class TestTorch(EngineContract):
    component = TORCH
    options = {"num_threads": 1}
    model = "qwen3"
    prompt = (5, 17, 40, 3)
    vocab_size = 96
    long_tokens = 600  # a context of 640

    @pytest.fixture(autouse=True)
    def _models(self, model_folder: Callable[..., Path]) -> None:
        self.folders = [model_folder(self.model, seed) for seed in (0, 1)]
        self.model_path = self.folders[0]

    def weights(self, variant: int) -> Any:
        return safetensors.load_file(self.folders[variant] / "model.safetensors")


class TestTorchGeneric(TestTorch):
    options = {"num_threads": 1, "forward": "generic", "prefix_cache_tokens": 0}
    model = "llama-untied"
