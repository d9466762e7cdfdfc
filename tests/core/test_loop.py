"""What the loop asks of a trainer for one minibatch; whole runs are in test_resume.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.loop import Loop
from miles_core.testing.samples import make_group
from miles_core.types import StepReport, TrainBatch
from miles_core.view import RunView


class Trainer:
    def __init__(self) -> None:
        self.roles: list[str] = []

    async def step(self, batch, role="policy"):
        self.roles.append(role)
        return StepReport(step=1, loss=0.5, grad_norm=1.0, lr=0.1, metrics={"loss/v/error": (2.0, 4.0, "mean")})


def loop_with(*roles: str) -> tuple[Loop, Trainer]:
    trainer = Trainer()
    session = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(roles=dict.fromkeys(roles))),
        trainer=trainer,
        view=RunView(),
        host=SimpleNamespace(observe=lambda hook, **kwargs: None),
    )
    return Loop(session, asyncio.Event()), trainer


def batch(trainable: bool = True) -> TrainBatch:
    samples = make_group([1.0, 0.0]).samples
    return TrainBatch(samples=samples, mask=[s.loss_mask & trainable for s in samples])


@pytest.mark.parametrize(("roles", "stepped"), [((), ["policy"]), (("critic",), ["policy", "critic"])])
def test_a_critic_is_trained_on_the_same_minibatch(roles, stepped):
    loop, trainer = loop_with(*roles)
    report = asyncio.run(loop._optimize(1, batch()))
    assert trainer.roles == stepped
    assert ("critic/loss" in report.metrics) == ("critic" in stepped)


def test_F6_nothing_trainable_calls_no_trainer_and_is_counted():
    loop, trainer = loop_with("critic")
    report = asyncio.run(loop._optimize(1, batch(trainable=False)))
    assert trainer.roles == [] and report.skipped == "nothing-trainable" and loop.skipped_steps == 1
    assert np.isfinite(report.loss)
