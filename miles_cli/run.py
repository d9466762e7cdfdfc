"""`miles run`: load and check the config, make or find the run folder, drive the run, show it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from miles_cli.plugins import one_paragraph, print_table, toml_value
from miles_cli.view import ConsoleView, make_view
from miles_core.config import ResolvedRun, load
from miles_core.driver import (
    check_same_run,
    check_writable,
    drive,
    find_resumable,
    locked,
    new_run_dir,
    write_run_files,
)
from miles_core.errors import EXIT_OK, ConfigError
from miles_core.wiring import check_requirements

LATEST = "latest"


def run_command(
    config: Path,
    *,
    plugins: Sequence[str] | None = None,
    adjust: Sequence[str] = (),
    sets: Sequence[str] = (),
    files: Sequence[Path] = (),
    out: Path = Path("runs"),
    resume: str | None = None,
    dry_run: bool = False,
    strict: bool = False,
    accept_changes: bool = False,
) -> int:
    """The body of `miles run`; returns the exit code or raises a MilesError that carries one."""
    run = load(config, sets=sets, plugins=plugins, adjust=adjust, files=files, strict=strict)
    check_requirements(run)
    # Engine and trainer may share this process: an idle OpenMP pool of one must not spin on the other's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    view = make_view()
    if dry_run:
        show_plan(run, view.console)
        return EXIT_OK
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    for note in run.notes:
        view.note(note, "warning")
    found = None
    if resume is None:
        run_dir = new_run_dir(out, run.config.name)
    else:
        warn = partial(view.note, level="warning")
        run_dir = latest_run_dir(out, run.config.name, warn) if resume == LATEST else Path(resume)
    with locked(run_dir):
        if resume is not None:
            found = find_resumable(run_dir, view)
            check_writable(run_dir)
            refuse_changes(check_same_run(run, run_dir), run_dir, accept_changes, view)
        write_run_files(run, run_dir)
        asyncio.run(drive(run, run_dir.resolve(), view, found))
    return EXIT_OK


def latest_run_dir(out: Path, name: str, note: Callable[[str], None] = lambda text: None) -> Path:
    """The newest run folder of this name, or the newest with a checkpoint where a later one has none: a start that failed
    leaves a folder too. Raises ConfigError saying what there is instead."""
    dated = {p: re.fullmatch(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?", p.name) for p in out.glob(f"{name}-*")}
    found = {p: (match[1], int(match[2] or 0)) for p, match in dated.items() if match and p.is_dir()}
    folders = sorted(found, key=found.__getitem__)
    saved = [p for p in folders if any((p / "checkpoints").glob("step-*"))]
    if saved and saved[-1] != folders[-1]:
        note(f"{folders[-1].name} has no checkpoint; going on with {saved[-1].name} (--resume FOLDER takes another)")
    if folders:
        return (saved or folders)[-1]
    others = sorted(p.name for p in out.glob("*") if p.is_dir()) if out.is_dir() else []
    raise ConfigError(
        f'there is no run named "{name}" under {out} to resume',
        f"run folders there: {', '.join(others) or 'none'}; name one after --resume, or its parent with --out",
    )


def refuse_changes(differences: list[str], run_dir: Path, accepted: bool, view: ConsoleView) -> None:
    """A resumed run must be the same run: differences stop it unless --accept-changes was given."""
    if not differences:
        return
    if not accepted:
        raise ConfigError(
            f"this config is not the one that {run_dir} was started with:",
            *differences,
            f"resume with `miles run {run_dir / 'config.toml'} --resume {run_dir}`, or add --accept-changes",
        )
    for line in differences:
        view.note(f"changed since the run was started: {line}", "warning")


def show_plan(run: ResolvedRun, console: Console) -> None:
    """What a run would use: one line per selected component. Nothing is built."""
    rows = [
        (kind, s.name, f"{s.plugin.name} {s.plugin.version}".strip(), s.component.summary)
        for kind, selections in run.selections.items()
        for s in selections
    ]
    print_table(("kind", "component", "plugin", "summary"), rows)
    size = f"{run.config.rollout.groups_per_step} x {run.config.rollout.samples_per_group}"
    console.print(f"{run.config.steps} steps of {size} samples; the config is valid")
    for note in run.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def help_command(
    config: Path,
    *,
    plugins: Sequence[str] | None = None,
    adjust: Sequence[str] = (),
    sets: Sequence[str] = (),
    files: Sequence[Path] = (),
) -> int:
    """`miles run CONFIG --help`: the options of the components that CONFIG selects."""
    run = load(config, sets=sets, plugins=plugins, adjust=adjust, files=files)
    console = make_view().console
    for kind, selections in run.selections.items():
        for selection in selections:
            console.print(f"\n[bold]{kind}.{selection.name}[/bold]  {selection.component.summary}", soft_wrap=True)
            fields = type(selection.options).model_fields
            if not fields:
                console.print("  no options")
            for name, info in fields.items():
                value = toml_value(getattr(selection.options, name))
                console.print(
                    f"  {name} = {value}  {one_paragraph(info.description)}".rstrip(), soft_wrap=True, markup=False
                )
    return EXIT_OK
