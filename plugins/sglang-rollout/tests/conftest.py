"""Fixtures: tiny random models, and servers that the tests of a module share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # also for test modules: a shared helper needs a name of its own

from sglang_support import CONFIGS, SERVER_ARGS, SHAPE, Shared, end, missing, start_server


@pytest.fixture(scope="session")
def sglang() -> None:
    """Skips, or fails on the leg of CI that is there for it."""
    if reason := missing():
        if os.environ.get("MILES_LEG") == "sglang":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("models")

    def make(name: str, seed: int = 0) -> Path:
        import torch
        import transformers

        folder = root / f"{name}-{seed}"
        if not folder.exists():
            torch.manual_seed(seed)
            kind, more = CONFIGS[name]
            config = getattr(transformers, kind)(**SHAPE, **more)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():  # norms that start as constants would hide mistakes
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
            model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def served(sglang: None, model_folder: Callable[..., Path], tmp_path_factory: Any) -> Iterator[Callable[..., Shared]]:
    """`served(model, **server_args)`: a running server of a tiny model, one at a time; it ends with the module."""
    running: list[tuple[Any, Shared]] = []

    def serve(name: str, **more: Any) -> Shared:
        key = (name, sorted(more.items()))
        if running and running[0][0] == key:
            return running[0][1]
        end(running)
        model, folder = model_folder(name), tmp_path_factory.mktemp("server")
        running.append((key, start_server(model, folder, {**SERVER_ARGS, **more})))
        return running[0][1]

    yield serve
    end(running)
