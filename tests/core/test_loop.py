"""What the loop asks of a trainer for one minibatch; whole runs are in test_resume.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.loop import Loop, _over_steps
from miles_core.settings import RoleTable
from miles_core.testing.samples import make_group
from miles_core.types import StepReport, TrainBatch
from miles_core.view import RunView


class Trainer:
    def __init__(self) -> None:
        self.roles: list[str] = []

    async def step(self, batch, role="policy"):
        self.roles.append(role)
        return StepReport(step=1, loss=0.5, grad_norm=1.0, lr=0.1, metrics={"loss/v/error": (2.0, 4.0, "mean")})


def loop_with(**roles: dict) -> tuple[Loop, Trainer]:
    trainer = Trainer()
    session = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(roles={name: RoleTable(**options) for name, options in roles.items()})),
        trainer=trainer,
        view=RunView(),
        host=SimpleNamespace(observe=lambda hook, **kwargs: None),
    )
    return Loop(session, asyncio.Event()), trainer


def batch(trainable: bool = True) -> TrainBatch:
    samples = make_group([1.0, 0.0]).samples
    return TrainBatch(samples=samples, mask=[s.loss_mask & trainable for s in samples])


@pytest.mark.parametrize(
    ("roles", "stepped"),
    [
        ({}, [["policy"]] * 3),
        ({"critic": {}}, [["policy", "critic"]] * 3),
        ({"critic": {"shared": True}}, [["policy"]] * 3),  # its losses are terms of the policy's step
        ({"critic": {"warmup_steps": 2}}, [["critic"], ["critic"], ["policy", "critic"]]),
        ({"critic": {"shared": True, "warmup_steps": 1}}, [["critic"], ["policy"], ["policy"]]),
    ],
)
def test_who_is_trained_on_a_minibatch_of_steps_1_to_3(roles, stepped):
    loop, trainer = loop_with(**roles)
    for step, expected in enumerate(stepped, start=1):
        trainer.roles.clear()
        report = asyncio.run(loop._optimize(step, batch()))
        assert trainer.roles == expected
        assert ("critic/loss" in report.metrics) == ("critic" in expected)
        assert (report.skipped == "critic-warmup") == ("policy" not in expected)
    assert loop.optimizer_steps == sum("policy" in roles for roles in stepped)


def test_numbers_of_several_optimizer_steps_become_one():
    """A mean counts everything: (1 + 5) / (1 + 3); a maximum is the largest; a sum is the mean of the steps' sums."""
    metrics = [
        {"ratio": (1.0, 1.0, "mean"), "worst": (3.0, 1.0, "max"), "loss/x/value": (0.25, 2.0, "sum")},
        {"ratio": (5.0, 3.0, "mean"), "worst": (2.0, 1.0, "max"), "loss/x/value": (0.75, 1.0, "sum")},
    ]
    reports = [StepReport(step=1, loss=0.0, grad_norm=1.0, lr=0.1, metrics=m) for m in metrics]
    assert _over_steps(reports) == {"ratio": 1.5, "worst": 3.0, "loss/x/value": 0.5}


def test_F6_nothing_trainable_calls_no_trainer_and_is_counted():
    loop, trainer = loop_with(critic={})
    report = asyncio.run(loop._optimize(1, batch(trainable=False)))
    assert trainer.roles == [] and report.skipped == "nothing-trainable" and loop.skipped_steps == 1
    assert np.isfinite(report.loss)
