"""Groups and prompts as JSON types plus numpy arrays, for checkpoints; the reverse gives equal objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from miles_core.errors import ContractError
from miles_core.fields import FieldRef
from miles_core.types import Prompt, Sample, SampleGroup, Score, VersionSpan


def group_to_state(group: SampleGroup) -> dict[str, Any]:
    """The whole group. Raises ContractError naming the prompt and the place of a value that cannot be kept."""
    return {
        **_plain(group, skip=("prompt", "samples", "baseline")),
        "prompt": prompt_to_state(group.prompt),
        "samples": [_sample_to_state(s) for s in group.samples],
        "baseline": None if group.baseline is None else _sample_to_state(group.baseline),
    }


def group_from_state(state: Mapping[str, Any]) -> SampleGroup:
    prompt = prompt_from_state(state["prompt"])
    baseline = state["baseline"]
    rest = {k: v for k, v in state.items() if k not in ("prompt", "samples", "baseline")}
    return SampleGroup(
        **rest,
        prompt=prompt,
        samples=[_sample_from_state(s, prompt) for s in state["samples"]],
        baseline=None if baseline is None else _sample_from_state(baseline, prompt),
    )


def prompt_to_state(prompt: Prompt) -> dict[str, Any]:
    where = f'prompt "{prompt.id}"'
    return {f.name: pack(getattr(prompt, f.name), f"{where}, {f.name}") for f in fields(prompt)}


def prompt_from_state(state: Mapping[str, Any]) -> Prompt:
    return Prompt(**{k: unpack(v) for k, v in state.items()})


def holds_references(group: SampleGroup) -> bool:
    """True when a sample has side channels that live in another process, which a checkpoint cannot keep."""
    return any(isinstance(v, FieldRef) for s in group.samples for v in s.extras.values())


def pack(value: Any, where: str) -> Any:
    """`value` in JSON types and arrays; what JSON would change (tuples, bytes, NaN, keys that are not text) is marked."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.generic):
        return pack(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    if isinstance(value, bytes):
        return {"$bytes": np.frombuffer(value, dtype=np.uint8)}
    if isinstance(value, list):
        return [pack(v, where) for v in value]
    if isinstance(value, tuple):
        return {"$tuple": [pack(v, where) for v in value]}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: pack(v, f"{where}.{k}") for k, v in value.items()}
        return {"$pairs": [[pack(k, where), pack(v, where)] for k, v in value.items()]}
    raise ContractError(
        f"{where}: a value of type {type(value).__name__} cannot be kept in a checkpoint",
        "use text, numbers, booleans, lists, tuples, dicts, bytes or numpy arrays",
    )


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        match next(iter(value.items())):
            case "$float", text:
                return float(text)
            case "$bytes", data:
                return np.asarray(data, dtype=np.uint8).tobytes()
            case "$tuple", items:
                return tuple(unpack(v) for v in items)
            case "$pairs", pairs:
                return {unpack(k): unpack(v) for k, v in pairs}
    return {k: unpack(v) for k, v in value.items()}


def _plain(thing: Any, skip: tuple[str, ...]) -> dict[str, Any]:
    return {f.name: getattr(thing, f.name) for f in fields(thing) if f.name not in skip}


def _sample_to_state(sample: Sample) -> dict[str, Any]:
    where = f"sample {sample.trajectory_id}"
    rest = _plain(sample, skip=("prompt", "versions", "scores"))
    return {
        **{k: pack(v, f"{where}, {k}") for k, v in rest.items()},
        "versions": [[s.start, s.stop, s.version] for s in sample.versions],
        "scores": {
            name: {**_plain(score, ("parts",)), "parts": pack(score.parts, where)} for name, score in sample.scores.items()
        },
    }


def _sample_from_state(state: Mapping[str, Any], prompt: Prompt) -> Sample:
    rest = {k: unpack(v) for k, v in state.items() if k not in ("versions", "scores")}
    return Sample(
        **rest,
        prompt=prompt,
        versions=tuple(VersionSpan(start=a, stop=b, version=v) for a, b, v in state["versions"]),
        scores={name: Score(**{**score, "parts": unpack(score["parts"])}) for name, score in state["scores"].items()},
    )
