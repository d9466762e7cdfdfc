"""Writes docs/configuration.md from the settings models and the components of the core and of every plugin in plugins/.

    python scripts/config_reference.py           # write it
    python scripts/config_reference.py --check   # exit 1 when it is stale

Plugins are imported from their folders; none has to be installed, and their heavy libraries are not needed.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from miles_core.component import KINDS, Component, ComponentConfig  # noqa: E402
from miles_core.explain import show, type_words  # noqa: E402
from miles_core.hookspecs import REGISTRATION  # noqa: E402
from miles_core.resolve import core_tables, option_kinds, table_class  # noqa: E402
from miles_core.settings import RunConfig  # noqa: E402

COMPONENTS = "## Components"
INTRO = """\
# Configuration

*Written by `scripts/config_reference.py` from the models themselves; change those, not this page.*

A run is one TOML file. `extends = "base.toml"` (or a list of files, relative to the file that names them) lays it over
another: tables are merged, and everything else, arrays of tables too, is replaced. `--set engine.use=torch` and
`--set "reward[0].weight=2"` change single values from the command line; a value that is not TOML is taken as text.

A table with `use` selects a component. The component's own options stand in a subtable under its name - `[engine.torch]`,
`[reward.math]` after its `[[reward]]` - and only those of the selected component are read, so that changing `use` alone
leaves a valid file valid. Where two plugins offer one name, `use = "plugin:name"` picks one.

Nothing is converted silently: numbers are not written in quotes, and NaN and infinity are refused. An unknown key is an
error that says where the key belongs. `miles show-config FILE` prints every value in force and who set it.
"""


def page() -> str:
    """The whole page."""
    return core_page() + "\n".join([COMPONENTS, "", *component_part()]).rstrip("\n") + "\n"


def core_page() -> str:
    """The page up to the components; needs no plugin."""
    return "\n".join([INTRO, *core_part(), ""])


def core_part() -> Iterator[str]:
    """Every table of the core, the top level first."""
    yield from ["## Tables of a run", "", "### Top level", "", "Keys before the first `[table]`.", ""]
    yield from rows(RunConfig, skip_tables=True)
    for table in core_tables():
        yield from [f"### `{table.header}`", "", paragraph(table.cls.__doc__), ""]
        kinds = option_kinds(table.cls)
        if kinds:
            links = " and ".join(f"[{kind}](#{kind})" for kind in kinds)
            yield from [f"Subtables: options of the selected component ({links}).", ""]
        yield from rows(table.cls, skip_tables=True)


def component_part() -> Iterator[str]:
    """The components of the core and of the plugins in this repository, by kind."""
    offered = [("built in", name, c) for name, c in builtin_components()] + list(plugin_components())
    homes = {kind: table for table in core_tables() if len(table.path) == 1 for kind in option_kinds(table.cls)}
    for kind in KINDS:
        found = sorted((c.name, origin, c) for origin, k, c in offered if k == kind and isinstance(c, Component))
        if not found:
            continue
        yield from [f"### {kind}", ""]
        for name, origin, component in found:
            at = f"{homes[kind].path[0]}.{name}" if kind in homes else name
            summary = component.summary.rstrip(".")
            yield from [f"#### `[{at}]`", "", f"{summary}. ({origin})", ""]
            yield from rows(component.config) if component.config.model_fields else ["No options.", ""]


def rows(cls: type[ComponentConfig], *, skip_tables: bool = False) -> Iterator[str]:
    """A Markdown table of a model's options."""
    fields = [
        (name, info)
        for name, info in cls.model_fields.items()
        if not (skip_tables and table_class(info.annotation)[1] is not None)
    ]
    if fields:
        yield from ["| key | value | default | meaning |", "|---|---|---|---|"]
        for name, info in fields:
            words, meaning = type_words(info.annotation, info.metadata), paragraph(description(cls, name))
            yield f"| `{name}` | {cell(words)} | {default(info)} | {cell(meaning)} |"
        yield ""


def description(cls: type[ComponentConfig], name: str) -> str:
    """The docstring of an option, also of a parent that declared it."""
    found = (c.model_fields[name].description for c in cls.__mro__ if name in getattr(c, "model_fields", {}))
    return next((text for text in found if text), "")


def default(info: Any) -> str:
    if info.is_required():
        return "*required*"
    value = info.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, dict):
        return "" if not value else "a table"
    return f"`{cell(shown(value))}`"


def shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(shown(v) for v in value) + "]"
    return "a table" if isinstance(value, ComponentConfig) else show(value)


def paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def builtin_components() -> Iterator[tuple[str, Any]]:
    from miles_core import builtin

    for hook, kind in REGISTRATION.items():
        yield from ((kind, component) for component in builtin.collect(hook))


def plugin_components() -> Iterator[tuple[str, str, Any]]:
    """(distribution, kind, component) of every plugin folder with a pyproject, in the order of the folders."""
    for project in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        data = tomllib.loads(project.read_text("utf-8"))["project"]
        if str(project.parent) not in sys.path:
            sys.path.insert(0, str(project.parent))
        for module_name in sorted(data.get("entry-points", {}).get("miles", {}).values()):
            yield from ((data["name"], kind, c) for kind, c in offered_by(importlib.import_module(module_name)))


def offered_by(module: Any) -> Iterator[tuple[str, Any]]:
    functional = sys.modules.get("miles_core.functional")
    for hook, kind in REGISTRATION.items():
        yield from ((kind, c) for c in (getattr(module, hook)() if hasattr(module, hook) else ()))
    if functional is not None:
        yield from ((c.kind, c) for c in vars(module).values() if isinstance(c, functional.FunctionComponent))


def main() -> int:
    if "--check" in sys.argv[1:]:
        fresh = PAGE.is_file() and PAGE.read_text("utf-8") == page()
        print("up to date" if fresh else "docs/configuration.md is stale: run python scripts/config_reference.py")
        return 0 if fresh else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
