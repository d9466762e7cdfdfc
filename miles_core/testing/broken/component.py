"""Components that break a rule of every kind."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from miles_core.component import ComponentConfig
from miles_core.testing import suites
from miles_core.testing.broken import Shelf
from miles_core.types import Sample

COMPONENT = Shelf(suites.ExactMatch)


class Loose(BaseModel):
    pattern: str = ""
    """A pydantic model of its own: it takes unknown keys and turns 1 into "1"."""


class Undescribed(ComponentConfig):
    pattern: str = ""


class Listed(ComponentConfig):
    words: dict[str, list[str]] = Field(default_factory=dict)
    """A list, which can be changed under a frozen config's feet."""


class WrongDefault(ComponentConfig):
    limit: int = "3"  # type: ignore[assignment]
    """A number that is a text."""


def mistaken(config: Any) -> Any:
    return config.no_such_option


COMPONENT.component("test_name_is_kebab_case", "camel-case", name="ExactMatch")
COMPONENT.component("test_name_is_kebab_case", "underscore", name="exact_match")
COMPONENT.component("test_summary_is_one_line", "two-lines", summary="1 when equal\nelse 0")
COMPONENT.component("test_summary_is_one_line", "empty", summary=" ")
COMPONENT.component("test_config_refuses_what_it_does_not_know", "plain-model", config=Loose)
COMPONENT.component("test_every_option_is_described", "undescribed", config=Undescribed)
COMPONENT.component("test_sequences_are_tuples", "list-in-dict", config=Listed)
COMPONENT.component("test_default_options_are_valid", "default-of-another-type", config=WrongDefault)
COMPONENT.add("test_imports_without_heavy_libraries", "torch", entry_module="miles_core.testing.broken.heavy")
COMPONENT.component("test_capabilities_are_names", "set-instead-of-frozenset", provides=lambda config: {"x/y"})
COMPONENT.component("test_capabilities_are_names", "raises", provides=mistaken)
COMPONENT.component("test_secrets_are_names", "value", secrets=("sk-12345",))
COMPONENT.component("test_traits_are_known", "misspelt", traits={"inlin": True})
COMPONENT.component("test_traits_are_known", "wrong-value", traits={"inline": "yes"})


class Stateful:
    """A reward with a memory."""

    seen: Any = 0

    def score(self, sample: Sample) -> float:
        return 1.0


@COMPONENT.breaks("test_state_restores")
class StateIsASet(Stateful):
    def state(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state


@COMPONENT.breaks("test_state_restores")
class ForgetsOnRestore(Stateful):
    made = 0

    def __init__(self) -> None:
        ForgetsOnRestore.made += 1
        self.seen = ForgetsOnRestore.made

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        """Forgets what it was given."""
