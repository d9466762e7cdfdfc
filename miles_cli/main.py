"""The `miles` command. Exit codes: 0 done, 1 the run failed, 2 bad usage or config, 3 environment, 130 interrupted.

Nothing heavy is imported here: `miles --help` must stay quick and must work whatever state the plugins are in, so each
command imports its body when it is invoked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from miles_cli.plugins import app as plugins_app
from miles_cli.quick import QuickCommand, QuickGroup
from miles_core.errors import EXIT_FAILED, EXIT_INTERRUPTED, MilesError

LATEST = "latest"
TRACEBACK_VARIABLE = "MILES_TRACEBACK"

_wants = {"traceback": False}


class MilesGroup(QuickGroup):
    """The built-in commands, and those of plugins: listed from metadata, imported when invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        from miles_cli.commands import plugin_commands

        return [*super().list_commands(ctx), *plugin_commands(self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from miles_cli.commands import plugin_commands

        command = super().get_command(ctx, cmd_name)
        if command is not None or cmd_name not in (found := plugin_commands(self.commands)):
            return command
        return TyperCommand(cmd_name, help=found[cmd_name].help, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from miles_cli.commands import load_command, plugin_commands

        if args and args[0] not in self.commands and args[0] in (found := plugin_commands(self.commands)):
            return args[0], load_command(found[args[0]]), args[1:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # here, since Typer would make a plain exit code 1 of it
            typer.echo("interrupted", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None


class RunCommand(QuickCommand):
    """Two things that options alone cannot do: `--resume` with or without a value, and `CONFIG --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = optional_resume_value(args)
        if "--help" not in args:
            return super().parse_args(ctx, args)
        typer.echo(ctx.get_help())
        ctx.resilient_parsing = True  # a missing CONFIG is no error when help is all that was asked for
        super().parse_args(ctx, [a for a in args if a != "--help"])
        given = ctx.params
        if given.get("config"):
            from miles_cli.run import help_command

            ctx.exit(
                help_command(
                    given["config"],
                    plugins=names(given.get("plugins")),
                    adjust=tuple(given.get("adjust") or ()),
                    sets=tuple(given.get("sets") or ()),
                    files=tuple(given.get("files") or ()),
                )
            )
        ctx.exit(0)
        return []


def optional_resume_value(args: Sequence[str]) -> list[str]:
    """`--resume` alone means the newest run. A word after it is the RUN, unless it is an option or a config file."""
    result: list[str] = []
    for place, arg in enumerate(args):
        result.append(arg)
        following = args[place + 1] if place + 1 < len(args) else "-"
        if arg == "--resume" and (following.startswith("-") or following.endswith(".toml")):
            result[-1] = f"--resume={LATEST}"
    return result


def names(text: str | None) -> tuple[str, ...] | None:
    """The value of --plugins: None when it was not given, and no names when it was given empty."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


app = typer.Typer(
    name="miles",
    cls=MilesGroup,
    help="Reinforcement learning for language models, made of plugins.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(plugins_app, name="plugins")


def _version(value: bool) -> None:
    if value:
        from miles_core import __version__

        typer.echo(f"miles {__version__}")
        raise typer.Exit


def _traceback(value: bool) -> bool:
    _wants["traceback"] = _wants["traceback"] or value
    return value


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")]
Plugins = Annotated[
    str | None,
    typer.Option("--plugins", metavar="A,B", help="Exactly these plugins and the built-ins (also: MILES_PLUGINS)."),
]
Adjust = Annotated[list[str] | None, typer.Option("-p", metavar="NAME|no:NAME", help="Add or leave out one plugin.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="K=V", help="Set one key, for example engine.replicas=2.")]
Files = Annotated[list[Path] | None, typer.Option("--plugin-file", metavar="F.PY", help="A Python file as a plugin.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Raise whatever a plugin raises, with its traceback.", callback=_traceback)
]
Traceback = Annotated[
    bool, typer.Option("--traceback", help=f"Show tracebacks (also: {TRACEBACK_VARIABLE}=1).", callback=_traceback)
]


@app.command(cls=RunCommand)
def run(
    config: Config,
    plugins: Plugins = None,
    adjust: Adjust = None,
    sets: Sets = None,
    files: Files = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where run folders are made.")] = Path("runs"),
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="[RUN]", help="Go on with a run folder; the newest one without RUN.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although config or plugins have changed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config and say what would run.")] = False,
    strict: Strict = False,
    traceback: Traceback = False,
) -> None:
    """Train as CONFIG says. `miles run CONFIG --help` shows the options of its components."""
    from miles_cli.run import run_command

    raise typer.Exit(
        run_command(
            config,
            plugins=names(plugins),
            adjust=tuple(adjust or ()),
            sets=tuple(sets or ()),
            files=tuple(files or ()),
            out=out,
            resume=resume,
            dry_run=dry_run,
            strict=strict,
            accept_changes=accept_changes,
        )
    )


@app.command("show-config")
def show_config(
    config: Config,
    plugins: Plugins = None,
    adjust: Adjust = None,
    sets: Sets = None,
    files: Files = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not a default.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
    traceback: Traceback = False,
) -> None:
    """The resolved config: every value, and where it comes from."""
    from miles_cli.show_config import show_config_command

    raise typer.Exit(
        show_config_command(
            config,
            plugins=names(plugins),
            adjust=tuple(adjust or ()),
            sets=tuple(sets or ()),
            files=tuple(files or ()),
            changed=changed,
            as_json=as_json,
        )
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits. A MilesError is one message on stderr; a traceback only when asked for."""
    _wants["traceback"] = os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")
    try:
        app(args=list(argv) if argv is not None else None, prog_name="miles")
    except MilesError as error:
        report(error, f"error: {error}")
        sys.exit(error.exit_code)
    except Exception as error:
        text = " ".join(str(error).split())
        report(
            error,
            f"error: unexpected {type(error).__name__}: {text}\n  see where with --traceback or {TRACEBACK_VARIABLE}=1",
        )
        sys.exit(EXIT_FAILED)


def report(error: BaseException, message: str) -> None:
    if _wants["traceback"]:
        import traceback

        traceback.print_exception(error)
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
