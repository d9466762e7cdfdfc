"""One suite per kind of component: a class that a plugin's tests subclass. See docs/testing-plugins.md."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from miles_core.testing import CONTRACTS

pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in set(CONTRACTS.values())))
__all__ = sorted(CONTRACTS)


def __getattr__(name: str) -> Any:
    if name not in CONTRACTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{CONTRACTS[name]}"), name)


def rules(name: str) -> dict[str, str]:
    """Rule (a test method) -> its docstring, of one suite without what it inherits from `ComponentContract`."""
    suite = __getattr__(name)
    methods = {n: m for cls in reversed(suite.__mro__[:-1]) for n, m in vars(cls).items() if n.startswith("test_")}
    if name != "ComponentContract":
        base = __getattr__("ComponentContract")
        methods = {n: m for n, m in methods.items() if getattr(base, n, None) is not m}
    return {n: " ".join((m.__doc__ or "").split()) for n, m in methods.items()}
