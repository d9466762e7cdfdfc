"""All plugins of this repository agree on license, Python range and entry-point form, and their indexes are fresh.

    python scripts/check_plugins.py            exit code 1 and one line per finding
    python scripts/check_plugins.py --write    also regenerates each plugin's miles-components.json

The index is what `miles plugins list` and error messages know of a plugin without importing it.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from miles_core.component import KINDS
from miles_core.discovery import GROUP, INDEX_FILE, PluginInfo
from miles_core.hookspecs import HOOK_API
from miles_core.plugins import PluginHost

ROOT = Path(__file__).resolve().parent.parent
LICENSE, PYTHON, CORE = "Apache-2.0", ">=3.11", "miles-core>=0.1,<0.3"


def check_form(folder: Path) -> list[str]:
    """What is wrong with a plugin's pyproject.toml, by our own rules."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return ["has no pyproject.toml"]
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    project = data.get("project", {})
    module = f"miles_{folder.name.replace('-', '_')}"
    findings = []
    wanted = {"name": f"miles-{folder.name}", "license": LICENSE, "requires-python": PYTHON}
    for key, value in wanted.items():
        if project.get(key) != value:
            findings.append(f"{key} is {project.get(key)!r}, and all plugins have {value!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", str(project.get("version"))):
        findings.append(f"version is {project.get('version')!r}, not of the form 0.1.0")
    points = project.get("entry-points", {}).get(GROUP)
    if points != {folder.name: module}:
        findings.append(f'entry points of group "{GROUP}" are {points!r}, and should be {{{folder.name!r}: {module!r}}}')
    if CORE not in project.get("dependencies", []):
        findings.append(f"dependencies lack {CORE!r}")
    if not project.get("description"):
        findings.append("has no description")
    if INDEX_FILE not in json.dumps(data.get("tool", {}).get("setuptools", {}).get("package-data", {})):
        findings.append(f"package-data lacks {INDEX_FILE}")
    findings += [f"has no {name}" for name in ("README.md", f"{module}/__init__.py") if not (folder / name).is_file()]
    return findings


def index_of(folder: Path) -> str:
    """The text of the plugin's index, from what it registers. Raises PluginError when it does not load."""
    module = f"miles_{folder.name.replace('-', '_')}"
    sys.path.insert(0, str(folder))
    try:
        info = PluginInfo(name=folder.name, module=module, dist=f"miles-{folder.name}")
        host = PluginHost([info])
        host.load(info, needed=True)
    finally:
        sys.path.remove(str(folder))
    components = [
        {"kind": kind, "name": entry.name, "summary": getattr(entry.component, "summary", "")}
        for kind in sorted(KINDS)
        for entry in host.registry.all(kind)
    ]
    lines = ",\n".join(f"    {json.dumps(component, ensure_ascii=False)}" for component in components)
    return f'{{\n  "hook_api": {HOOK_API},\n  "components": [\n{lines}\n  ]\n}}\n'


def same(old: str, new: str) -> bool:
    """Whether two indexes say the same, however they are laid out."""

    def content(text: str) -> tuple[int, list[tuple[str, str, str]]]:
        index = json.loads(text)
        return index["hook_api"], sorted((c["kind"], c["name"], c["summary"]) for c in index["components"])

    try:
        return content(old) == content(new)
    except (ValueError, KeyError, TypeError):
        return False


def check(folder: Path, write: bool) -> list[str]:
    """Findings about one plugin; with `write`, a stale index is replaced instead of reported."""
    findings = check_form(folder)
    try:
        fresh = index_of(folder)
    except Exception as error:
        return [*findings, " ".join(str(error).split())]
    file = folder / f"miles_{folder.name.replace('-', '_')}" / INDEX_FILE
    if file.is_file() and same(file.read_text(encoding="utf-8"), fresh):
        return findings
    if not write:
        return [*findings, f"{file.name} is stale; run: python scripts/check_plugins.py --write"]
    file.write_text(fresh, encoding="utf-8")
    print(f"{folder.name}: wrote {file.name}")
    return findings


def main(arguments: list[str], root: Path = ROOT) -> int:
    if unknown := set(arguments) - {"--write"}:
        print(f"unknown arguments: {' '.join(sorted(unknown))}; there is only --write", file=sys.stderr)
        return 2
    folders = sorted(p for p in (root / "plugins").iterdir() if p.is_dir() and not p.name.startswith("."))
    found = [f"{folder.name}: {text}" for folder in folders for text in check(folder, "--write" in arguments)]
    print(*found, f"{len(folders)} plugins, {len(found)} findings", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
