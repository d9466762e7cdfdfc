"""Commands that plugins add (entry-point group `miles.commands`): found in metadata, imported when invoked."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from typing import Any

from miles_core.discovery import CommandInfo, discover_commands
from miles_core.errors import PluginError


@dataclass(frozen=True, slots=True)
class PluginCommand:
    """All claims on one command name; more than one is an error when the command is invoked."""

    name: str
    claims: tuple[CommandInfo, ...]

    @property
    def owners(self) -> str:
        return " and ".join(f"{c.dist} {c.version}".strip() for c in self.claims)

    @property
    def help(self) -> str:
        return f"From {self.owners}." if len(self.claims) == 1 else f"Claimed by {self.owners}; uninstall one of them."


@cache
def installed_commands() -> tuple[PluginCommand, ...]:
    by_name: dict[str, list[CommandInfo]] = {}
    for command in discover_commands():
        by_name.setdefault(command.name, []).append(command)
    return tuple(PluginCommand(name, tuple(claims)) for name, claims in sorted(by_name.items()))


def plugin_commands(taken: Container[str]) -> dict[str, PluginCommand]:
    """Commands of plugins by name, without those whose name is `taken`: a command of Miles itself is never replaced
    (`miles plugins list` says which are hidden)."""
    return {command.name: command for command in installed_commands() if command.name not in taken}


def load_command(command: PluginCommand) -> Any:
    """Imports a plugin's command. Raises PluginError naming the distribution when that fails or two claim the name."""
    if len(command.claims) > 1:
        raise PluginError(f'two distributions offer a command "{command.name}": {command.owners}; uninstall one of them')
    import typer

    try:
        target = command.claims[0].entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        from miles_core.plugins import one_line

        raise PluginError(f'the command "{command.name}" of {command.owners} does not load: {one_line(error)}') from error
    if not isinstance(target, typer.Typer):
        raise PluginError(
            f'the command "{command.name}" of {command.owners} is a {type(target).__name__}, and must be a typer.Typer'
        )
    return typer.main.get_command(target)
