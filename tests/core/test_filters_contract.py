"""The contract suites of the core's filters and of `overlong`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from miles_core.builtin import filters, overlong
from miles_core.testing.contracts import FilterContract, RewardContract

FILTERS = {c.name: c for c in filters.COMPONENTS["miles_filters"]}
(OVERLONG,) = overlong.COMPONENTS["miles_rewards"]


class TestLength(FilterContract):
    component = FILTERS["length"]
    options: ClassVar[Mapping[str, Any]] = {"max_tokens": 10}


class TestTruncation(FilterContract):
    component = FILTERS["truncation"]


class TestStaleness(FilterContract):
    component = FILTERS["staleness"]


class TestAllVerdicts(FilterContract):
    component = FILTERS["all-verdicts"]


class TestNonzeroStdOfAScore(FilterContract):
    component = FILTERS["nonzero-std"]
    options: ClassVar[Mapping[str, Any]] = {"score": "math"}


class TestOverlong(RewardContract):
    component = OVERLONG
    options: ClassVar[Mapping[str, Any]] = {"cache_tokens": 4, "max_tokens": 8}
    right, wrong = "short", "x" * 9  # 5 tokens, 9 tokens
