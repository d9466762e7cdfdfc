"""The contract suite of losses: on torch tensors and, without entropy, on the toy trainer's arrays."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import miles_policy_losses
from miles_core.testing.contracts import LossContract

COMPONENTS = {c.name: c for c in miles_policy_losses.miles_losses()}
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@needs_torch
class TestPpoClip(LossContract):
    component = COMPONENTS["ppo-clip"]


@needs_torch
class TestPpoClipDual(LossContract):
    component = COMPONENTS["ppo-clip"]
    options = {"clip_high": 0.28, "dual_clip": 3.0}


class TestPpoClipOnToyArrays(LossContract):
    component = COMPONENTS["ppo-clip"]
    arrays = "toy"


@needs_torch
class TestK1(LossContract):
    component = COMPONENTS["kl"]
    options = {"estimator": "k1"}


@needs_torch
class TestK2(LossContract):
    component = COMPONENTS["kl"]
    options = {"estimator": "k2"}


@needs_torch
class TestK3(LossContract):
    component = COMPONENTS["kl"]


class TestK3OnToyArrays(LossContract):
    component = COMPONENTS["kl"]
    arrays = "toy"


@needs_torch
class TestEntropy(LossContract):
    component = COMPONENTS["entropy"]
