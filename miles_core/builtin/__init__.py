"""The core's own components. Each submodule offers `COMPONENTS`: hook name -> list of components."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from miles_core.hookspecs import REGISTRATION, hookimpl

SUBMODULES = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def collect(hook: str) -> list[Any]:
    """The built-in components of one hook, in the order of submodules and of their lists."""
    found: list[Any] = []
    for name in SUBMODULES:
        offered = getattr(import_module(f"{__name__}.{name}"), "COMPONENTS", {})
        assert not (unknown := set(offered) - set(REGISTRATION)), f"{__name__}.{name}: no such hooks: {sorted(unknown)}"
        found += offered.get(hook, [])
    return found


def _implementation(hook: str) -> Any:
    def implementation() -> list[Any]:
        return collect(hook)

    implementation.__name__ = hook
    return hookimpl(implementation)


globals().update({hook: _implementation(hook) for hook in REGISTRATION})
