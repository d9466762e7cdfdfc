"""What a plugin's tests are made of: contract suites, fakes, broken fakes, and a toy policy that really learns.

Importing this imports nothing: the toy is built in, and a run must not need pytest. The suites need it
(`pip install "miles-core[testing]"`); their names resolve on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

CONTRACTS = {
    "ComponentContract": "base",
    "DataContract": "data",
    "SamplerContract": "data",
    "TokenizerContract": "tokenizer",
    "EngineContract": "engine",
    "RolloutContract": "rollout",
    "RewardContract": "judging",
    "FilterContract": "judging",
    "AdvantageContract": "advantage",
    "CorrectionContract": "correction",
    "LossContract": "loss",
    "TrainerContract": "trainer",
    "TransportContract": "transport",
    "LauncherContract": "launcher",
    "MetricContract": "observers",
    "TrackerContract": "observers",
    "FieldContract": "field",
    "SourceContract": "models",
    "ModelContract": "models",
    "PrecisionContract": "models",
    "ExtensionContract": "models",
}
"""Suite -> module of `miles_core.testing.contracts` that holds it."""
__all__ = sorted(CONTRACTS)


def __getattr__(name: str) -> Any:
    if name not in CONTRACTS:
        raise AttributeError(f"module 'miles_core.testing' has no attribute {name!r}")
    return getattr(import_module("miles_core.testing.contracts"), name)


if "pytest" in sys.modules:  # their assertions explain themselves, like those of a test
    import pytest

    pytest.register_assert_rewrite("miles_core.testing.contracts")
