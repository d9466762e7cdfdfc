"""`miles plugins list | info | check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miles_cli.quick import QuickCommand, QuickGroup
from miles_core.errors import EXIT_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from miles_core.discovery import PluginInfo

app = typer.Typer(
    cls=QuickGroup,
    help="Installed plugins, what each offers, and what is wrong.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list", cls=QuickCommand)
def list_plugins() -> None:
    """Every installed plugin and its state, from metadata: imports none."""
    raise typer.Exit(list_command())


@app.command("info")
def info(name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin's name; builtin for the core's own.")]) -> None:
    """One plugin: metadata, components and their options. Imports that plugin."""
    raise typer.Exit(info_command(name))


@app.command("check")
def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="All plugins by default.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Per plugin; then it is killed.")] = 60.0,
) -> None:
    """Import each plugin in a process of its own: ok, broken or hangs. Exit code 1 if any is not ok."""
    raise typer.Exit(check_command(names or (), timeout_s))


def list_command(distributions: Sequence[Any] | None = None) -> int:
    from miles_core.discovery import discover
    from miles_core.selection import chosen_plugins, switch

    infos = discover(distributions)
    chosen, origin = chosen_plugins()
    switch(infos, chosen, (), origin)
    if not infos:
        typer.echo("no plugins are installed; the built-in components: miles plugins info builtin")
        return EXIT_OK
    print_table(("plugin", "state", "distribution", "summary"), [(i.name, i.state, i.origin, i.summary) for i in infos])
    print_reasons(infos)
    print_hidden_commands()
    return EXIT_OK


def info_command(name: str, distributions: Sequence[Any] | None = None) -> int:
    from miles_core.discovery import BUILTIN, discover, normalise
    from miles_core.plugins import PluginHost
    from miles_core.selection import switch

    known = list(distributions) if distributions is not None else None
    infos = discover(known)
    refuse_component(name, infos)
    switch(infos, [name], (), "miles plugins info")  # refuses an unknown name with a suggestion
    for found in infos:
        if found.name == normalise(name):
            typer.echo(f"{found.name}: {found.summary}\n  distribution {found.origin}, module {found.module}")
            if found.missing:
                typer.echo(f"  {found.reason}")
    host = PluginHost.create(plugins=[name], distributions=known, origin="miles plugins info")
    if normalise(name) == BUILTIN:
        typer.echo(f"{BUILTIN}: the components of Miles itself")
    loaded = host.builtin if normalise(name) == BUILTIN else next(i for i in host.infos if i.state == "loaded")
    typer.echo(f"  content {loaded.content_hash()}")
    for kind, entry in components_of(host, loaded):
        typer.echo(f"\n{kind}/{entry.name}  {getattr(entry.component, 'summary', '')}".rstrip())
        for option, field in getattr(getattr(entry.component, "config", None), "model_fields", {}).items():
            typer.echo(
                f"  {option}: {type_name(field.annotation)}{default_of(field)}  {one_paragraph(field.description)}".rstrip()
            )
    return EXIT_OK


def refuse_component(name: str, infos: Sequence[PluginInfo]) -> None:
    """Raises ConfigError when `name` is no plugin but a component of some: which ones offer it."""
    offers = [f"{found.name} offers the {c.kind} {c.name}" for found in infos for c in found.components if c.name == name]
    if offers and name not in {found.name for found in infos}:
        raise ConfigError(f'"{name}" is a component, not a plugin (miles plugins info)', *offers)


def check_command(names: Sequence[str], timeout_s: float, distributions: Sequence[Any] | None = None) -> int:
    from miles_core.discovery import discover
    from miles_core.probe import probe
    from miles_core.selection import switch

    infos = discover(distributions)
    if names:
        switch(infos, names, (), "miles plugins check")
    rows, failed = [], []
    for found in infos:
        if found.state == "off":
            continue
        needs = found.reason if found.state == "needs-runtime" else ""
        if found.state not in ("broken", "incompatible"):
            found.state, found.reason = probe(found, timeout_s)
        if found.state != "ok":
            failed.append(found)
        rows.append((found.name, found.state, found.origin, found.reason or needs))
    if not rows:
        typer.echo("no plugins are installed")
    else:
        print_table(("plugin", "state", "distribution", "reason"), rows)
    return EXIT_FAILED if failed else EXIT_OK


def components_of(host: Any, plugin: PluginInfo) -> list[tuple[str, Any]]:
    """(kind, registry entry) of everything that `plugin` offers, sorted."""
    from miles_core.component import KINDS

    return [(kind, entry) for kind in sorted(KINDS) for entry in host.registry.all(kind) if entry.plugin is plugin]


def type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def default_of(field: Any) -> str:
    if field.is_required():
        return " (required)"
    return f" = {toml_value(field.get_default(call_default_factory=True))}"


def toml_value(value: Any) -> str:
    """An option's value as it would stand in a config, on one line; TOML has no None."""
    if value is None:
        return "(not set)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)


def one_paragraph(description: str | None) -> str:
    """Descriptions are broken where the source is; the terminal breaks them anew."""
    return " ".join((description or "").split())


# --- Output ----------------------------------------------------------------------------------------------------------


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns for a person. In a pipe or a file: one line per row, nothing wrapped or cut, no colour."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for place, title in enumerate(titles):
            table.add_column(title, no_wrap=place < 2, overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console(markup=False).print(table)
        return
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    for row in (titles, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_reasons(infos: Sequence[PluginInfo]) -> None:
    """One line per plugin that is not simply ok."""
    if any(i.reason for i in infos):
        typer.echo("")
    for found in infos:
        if found.reason:
            typer.echo(f"{found.label} is {found.state}: {found.reason}")


def print_hidden_commands() -> None:
    """Commands of plugins that cannot be reached, since Miles has one of that name."""
    from miles_cli.commands import installed_commands
    from miles_cli.main import app as miles

    own = {group.name for group in miles.registered_groups}
    own |= {c.name or c.callback.__name__ for c in miles.registered_commands if c.callback}
    for command in installed_commands():
        if command.name in own:
            typer.echo(f'the command "{command.name}" of {command.owners} cannot be reached: Miles has one of that name')
