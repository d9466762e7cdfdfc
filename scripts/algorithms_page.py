"""Writes docs/algorithms.md: what docs/algorithms.toml says of each component, and what the components say of themselves.

    python scripts/algorithms_page.py            # write it
    python scripts/algorithms_page.py --check    # exit 1 when it is stale, or a component lacks its entry

Formula, source and metrics are written by hand, in the TOML file; names, options, defaults, needs and plugins come from the
registry. An entry for a component that does not exist is as much an error as a component without an entry.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "docs" / "algorithms.toml", ROOT / "docs" / "algorithms.md"
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts")) if path not in sys.path]

from config_reference import builtin_components, cell, default, plugin_components  # noqa: E402

PLURAL = {
    "advantage": "Advantages",
    "loss": "Losses",
    "correction": "Corrections",
    "filter": "Filters",
    "sampler": "Samplers",
    "reward": "Rewards",
}
KINDS = tuple(PLURAL)
HIDDEN = {"toy"}
"""Components that exist for tests."""


def registered() -> dict[str, dict[str, tuple[str, Any]]]:
    """kind -> name -> (where it comes from, component), of the core and of every plugin in plugins/."""
    found: dict[str, dict[str, tuple[str, Any]]] = {kind: {} for kind in KINDS}
    everything = [("built in", kind, c) for kind, c in builtin_components()] + list(plugin_components())
    for origin, kind, component in everything:
        if kind in found and component.name not in HIDDEN:
            found[kind][component.name] = (origin, component)
    return found


def findings() -> list[str]:
    """What the hand-written file and the registry disagree on."""
    written, found = tomllib.loads(SOURCE.read_text("utf-8")), registered()
    problems = []
    for kind in KINDS:
        entries = written.get(kind, {})
        problems += [
            f'{kind} "{name}" has no entry in docs/algorithms.toml' for name in found[kind].keys() - entries.keys()
        ]
        problems += [f'docs/algorithms.toml: no {kind} is named "{name}"' for name in entries.keys() - found[kind].keys()]
        for name, entry in entries.items():
            lacking = {"formula", "source", "metrics"} - entry.keys()
            problems += [f"docs/algorithms.toml: {kind}.{name} lacks {key}" for key in sorted(lacking)]
    return sorted(problems)


def page() -> str:
    """The whole page; needs a file without `findings`."""
    written, found = tomllib.loads(SOURCE.read_text("utf-8")), registered()
    lines = [written["intro"].strip(), ""]
    for kind in KINDS:
        lines += [f"## {PLURAL[kind]}", "", written["text"][kind].strip(), ""]
        lines += [*table(written[kind], found[kind], reads=kind in ("advantage", "loss", "correction")), ""]
    return "\n".join([*lines, written["outro"].strip(), ""])


def table(entries: dict[str, Any], found: dict[str, tuple[str, Any]], reads: bool) -> list[str]:
    head = ["name", "formula", "source", "defaults", *(["reads"] if reads else []), "metrics", "plugin"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in sorted(entries):
        entry, (origin, component) = entries[name], found[name]
        config = component.config
        needs = sorted(component.needed(config.model_construct())) if reads else []
        columns = [f"`{name}`", cell(entry["formula"]), cell(entry["source"]), ", ".join(defaults(config)) or "-"]
        columns += [", ".join(f"`{n}`" for n in needs) or "-"] if reads else []
        columns += [", ".join(f"`{m}`" for m in entry["metrics"]) or "-", origin.removeprefix("miles-")]
        rows.append("| " + " | ".join(columns) + " |")
    return rows


def defaults(config: Any) -> Iterator[str]:
    for name, info in config.model_fields.items():
        yield f"`{name}` {default(info) or 'off'}"


def main() -> int:
    problems = findings()
    for problem in problems:
        print(problem)
    if problems:
        return 1
    if "--check" in sys.argv[1:]:
        fresh = PAGE.is_file() and PAGE.read_text("utf-8") == page()
        print("up to date" if fresh else "docs/algorithms.md is stale: run python scripts/algorithms_page.py")
        return 0 if fresh else 1
    PAGE.write_text(page(), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
