"""Command classes that keep `miles plugins list` free of pydantic."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _QuickHelp:
    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        # Newer Typers load pydantic to convert any flag that is not yet a bool, and --help starts out as None.
        if option is not None and not isinstance(option.default, bool):
            option.default = False
        return option


class QuickCommand(_QuickHelp, TyperCommand):
    """A command whose parsing imports nothing heavy, as long as it has no parameters but flags."""


class QuickGroup(_QuickHelp, TyperGroup):
    """The same for a group."""
