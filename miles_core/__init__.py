"""The core of Miles: interfaces, plugin host, config and the loop. Importing it is cheap; names resolve on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "hookimpl": "hookspecs",
    "HOOK_API": "hookspecs",
    "Component": "component",
    "ComponentConfig": "component",
    "BuildContext": "component",
    "Environment": "component",
    "NoOptions": "component",
    "FieldSpec": "fields",
    "FieldRef": "fields",
    **dict.fromkeys(
        ("reward", "filter", "sampler", "correction", "advantage", "loss", "metric"), "functional"
    ),
    **dict.fromkeys(
        ("Prompt", "Sample", "SampleGroup", "Score", "Verdict", "TrainBatch", "LossInputs", "LossOutput", "SamplingParams",
         "AdvantageInputs", "AdvantageOutput", "CorrectionInputs", "CorrectionOutput", "GenerateRequest", "Generation",
         "StepReport", "WeightMessage", "Bucket", "TensorSpec"), "types"
    ),
}  # fmt: skip
__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from miles_core.component import BuildContext, Component, ComponentConfig, Environment, NoOptions
    from miles_core.fields import FieldRef, FieldSpec
    from miles_core.functional import advantage, correction, filter, loss, metric, reward, sampler
    from miles_core.hookspecs import HOOK_API, hookimpl
    from miles_core.types import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'miles_core' has no attribute {name!r}")
    return getattr(import_module(f"miles_core.{_HOMES[name]}"), name)
