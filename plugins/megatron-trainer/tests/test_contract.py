"""The contract suite of trainers, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles_megatron_trainer
from miles_core.testing.contracts import TrainerContract

(MEGATRON,) = miles_megatron_trainer.miles_trainers()


class TestMegatron(TrainerContract):
    component = MEGATRON
    options = {
        "device": "cpu",
        "args": {"lr": 1e-2, "lr_warmup_iters": 3, "lr_warmup_init": 1e-3, "lr_decay_style": "cosine"},
    }
    model = "qwen3"
    vocab_size = 61
    microbatch_options = {"max_tokens": 16}

    @pytest.fixture(autouse=True)
    def _model(self, tiny: dict[str, Path]) -> None:
        self.model_path = tiny[self.model]


class TestMegatronSmallPieces(TestMegatron):
    options = {
        "device": "cpu",
        "shared_prefix": False,
        "logit_rows": 4,
        "args": {"lr": 1e-2, "use_distributed_optimizer": True},
    }
    model = "llama"
