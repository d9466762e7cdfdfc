"""`miles show-config`: every value in force and who set it, as TOML that can be saved and run, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import EXIT_OK

if TYPE_CHECKING:
    from miles_core.config import ResolvedRun


def show_config_command(
    config: Path,
    *,
    plugins: Sequence[str] | None = None,
    adjust: Sequence[str] = (),
    sets: Sequence[str] = (),
    files: Sequence[Path] = (),
    as_json: bool = False,
    changed: bool = False,
) -> int:
    """The body of `miles show-config`. What is printed is valid whether or not it could run; a requirement that nothing
    provides is raised after it, as `miles run` would."""
    from miles_core.config import load
    from miles_core.wiring import check_requirements

    run = load(config, sets=sets, plugins=plugins, adjust=adjust, files=files)
    if as_json:
        print(json.dumps(as_data(run, changed=changed), indent=1, ensure_ascii=False))
    else:
        show(as_text(run, changed=changed))
    check_requirements(run)
    return EXIT_OK


def as_data(run: ResolvedRun, *, changed: bool = False) -> dict[str, Any]:
    """{"source", "plugins", "notes", "tables", "origins"}; origins by path ("reward[0].weight"). Secrets are masked."""
    from miles_core.tables import show_key

    return {
        "source": run.tables.source,
        "plugins": run.plugins(),
        "notes": run.notes,
        "tables": run.effective(masked=True, changed=changed),
        "origins": {show_key(key): str(run.origin(key)) for key in run.leaves(changed=changed)},
    }


def as_text(run: ResolvedRun, *, changed: bool = False) -> str:
    """TOML, one value a line with its origin behind it, under comments that name the plugins and the notes."""
    head = [f"# {run.host.describe()}", *(f"# note: {note}" for note in run.notes)]
    return "\n".join(head) + "\n\n" + run.dump(changed=changed)


def show(text: str) -> None:
    """To a terminal with quiet comments and bold headers; to a file or a pipe as it is."""
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in text.splitlines():
        value, mark, comment = line.partition("  # ") if not line.startswith("#") else ("", line, "")
        styled = Text(value, style="bold" if value.startswith("[") else "")
        origin = "dim" if comment.startswith("default") or not value else "cyan"
        console.print(styled.append(mark + comment, style=origin), soft_wrap=True)
