"""For each rule of each suite a component that breaks it, and otherwise behaves: a suite that cannot fail tests nothing.

Each module holds the broken fakes of some kinds; a fake stands under the name of the rule that it breaks.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A suite (its class), the rule that must fail, and the attributes that break it."""

    suite: type
    rule: str
    name: str
    attributes: Mapping[str, Any]

    @property
    def contract(self) -> str:
        """The suite's own name, or "ComponentContract" for a rule of every kind."""
        from miles_core.testing.contracts import ComponentContract

        if self.rule in vars(ComponentContract):
            return "ComponentContract"
        return next(c.__name__ for c in self.suite.__mro__ if c.__name__.endswith("Contract"))

    def run(self, folder: Path) -> None:
        """Runs the rule on the broken fake; it should raise AssertionError or pytest's Failed. A skip is a mistake."""
        suite = type(f"Broken{self.suite.__name__}", (self.suite,), dict(self.attributes))()
        method = getattr(suite, self.rule)
        try:
            method(**({"tmp_path": folder} if "tmp_path" in inspect.signature(method).parameters else {}))
        except pytest.skip.Exception as skipped:
            raise RuntimeError(f"{self.rule} was skipped: {skipped}") from None

    def __str__(self) -> str:
        return f"{self.contract}-{self.rule.removeprefix('test_')}-{self.name}"


@dataclass(slots=True)
class Shelf:
    """The broken fakes of one kind: variants of `suite`, whose component is good. `shelves` gathers all of them."""

    suite: type
    make: Callable[[Any], Callable[[Any, Any], Any]] = lambda cls: lambda config, context: cls()
    """From a broken class (or function) to the `build` of its component."""
    cases: list[Broken] = field(default_factory=list)

    def breaks(self, rule: str, /, **attributes: Any) -> Callable[[T], T]:
        """Decorates a class whose objects break `rule`; `attributes` are further ones of the suite."""

        def add(cls: T) -> T:
            component = attributes.pop("component", self.suite.component)
            self.add(rule, cls.__name__, component=replace(component, build=self.make(cls)), **attributes)
            return cls

        return add

    def add(self, rule: str, name: str, /, **attributes: Any) -> None:
        self.cases.append(Broken(suite=self.suite, rule=rule, name=name, attributes=attributes))

    def component(self, rule: str, case: str, /, **fields: Any) -> None:
        """A component that is broken itself: `fields` replace some of its own."""
        self.add(rule, case, component=replace(self.suite.component, **fields))


def cases() -> list[Broken]:
    """Every broken fake."""
    found: list[Broken] = []
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "heavy"):
        for shelf in vars(import_module(f"{__name__}.{module}")).values():
            if isinstance(shelf, Shelf):
                found += shelf.cases
    return found
