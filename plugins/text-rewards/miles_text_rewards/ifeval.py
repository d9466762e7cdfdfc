"""The reward `ifeval`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from miles_core.answers import spoken
from miles_core.types import Sample, Score
from miles_text_rewards import IFEvalConfig
from miles_text_rewards.instructions import Unavailable, follows


class IFEvalReward:
    """1 when every instruction is followed, or the fraction that is. Parts: 1 or 0 for each instruction, by its name (and
    its place, where a name comes twice), and `fraction`.

    The label is {"instructions": [{"id": ..., "kwargs": {...}}, ...]}, that list alone, or IFEval's own
    {"instruction_id_list": [...], "kwargs": [...]}, or a text of JSON.
    """

    def __init__(self, config: IFEvalConfig) -> None:
        self.config = config

    def score(self, sample: Sample) -> Score:
        """Raises ValueError for a label without instructions, or with one that is unknown or lacks an argument."""
        wanted = instructions_of(sample.prompt.label if sample.prompt is not None else None)
        text = spoken(sample.response) or ""
        texts = [text, *loosened(text)] if self.config.loose else [text]
        parts: dict[str, float] = {}
        try:
            for place, (name, kwargs) in enumerate(wanted):
                key = name if name not in parts else f"{name}#{place}"
                parts[key] = float(any([follows(name, kwargs, one) for one in texts]))
        except Unavailable as error:
            return Score(value=None, reason=f"{name} {error}")
        fraction = sum(parts.values()) / len(parts)
        missed = [name for name, part in parts.items() if not part]
        value = fraction if self.config.score == "fraction" else float(not missed)
        reason = f"not followed: {', '.join(missed)}" if missed else ""
        return Score(value=value, parts={**parts, "fraction": fraction}, reason=reason)


def instructions_of(label: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each instruction."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError:
            raise ValueError(f"ifeval needs instructions as the label, and this text is not JSON: {label[:80]!r}") from None
    if isinstance(label, Mapping) and "instruction_id_list" in label:
        names, kwargs = label["instruction_id_list"], label.get("kwargs") or [{}] * len(label["instruction_id_list"])
        if len(names) != len(kwargs):
            raise ValueError(f"the label has {len(names)} instructions and {len(kwargs)} sets of kwargs")
        label = [{"id": name, "kwargs": one} for name, one in zip(names, kwargs, strict=True)]
    rows = label.get("instructions") if isinstance(label, Mapping) else label
    if not isinstance(rows, (list, tuple)) or not rows:
        raise ValueError(f"ifeval needs instructions as the label, and the prompt's is {label!r:.80}")
    try:
        return [(str(row["id"]), dict(row.get("kwargs") or {})) for row in rows]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f'an instruction of a label is {{"id": ..., "kwargs": {{...}}}}, not {rows!r:.80}') from None


def loosened(text: str) -> list[str]:
    """Without the first line (an introduction), the last (a closing), both; and each without asterisks."""
    lines = text.split("\n")
    cut = ["\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    return [part.strip() for part in (*cut, *(one.replace("*", "") for one in (text, *cut)))]
