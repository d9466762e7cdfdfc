"""The contract suite of trainers, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles_fsdp_trainer
from miles_core.testing.contracts import TrainerContract

(FSDP,) = miles_fsdp_trainer.miles_trainers()


class TestFsdp(TrainerContract):
    component = FSDP
    options = {"device": "cpu", "lr": 1e-2, "warmup_steps": 3, "schedule": "cosine"}
    model = "qwen3"
    vocab_size = 61
    microbatch_options = {"max_tokens": 16}

    @pytest.fixture(autouse=True)
    def _model(self, tiny: dict[str, Path]) -> None:
        self.model_path = tiny[self.model]


class TestFsdpPadded(TestFsdp):
    options = {"device": "cpu", "lr": 1e-2, "packing": False, "logit_rows": 4}
    model = "llama"
