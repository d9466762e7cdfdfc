"""Throw-away distributions for tests: a module and its dist-info in a temporary folder, handed to the code under test as an
explicit list, so that what happens to be installed never matters."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from textwrap import dedent

REWARD = """
    from miles_core import Component, hookimpl

    @hookimpl
    def miles_rewards():
        return [Component(name="{component}", summary="from {name}", build=lambda config, context: len)]
"""
"""Source of a plugin that offers one reward; `name` and `component` are filled in by `Dists.add`."""


class Dists:
    """`add` makes a distribution and appends it to `all`, in the order of the calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[PathDistribution] = []
        self.modules: set[str] = set()

    def add(
        self,
        name: str,
        source: str | None = None,
        *,
        dist: str = "",
        version: str = "1.0",
        component: str = "",
        requires: tuple[str, ...] = (),
        index: dict | None = None,
        editable: bool = False,
        group: str = "miles",
        value: str = "",
        site: str = "site",
    ) -> PathDistribution:
        """A plugin `name` of distribution `dist`, whose module runs `source` (by default it offers one reward named
        `component`, or `name`). `editable`: the module lies in a source folder of its own, `src/<dist>`."""
        dist = dist or f"miles-{name}"
        module = dist.replace("-", "_").replace(".", "_")
        folder = self.root / site
        home = self.root / "src" / dist if editable else folder
        package = home / module
        package.mkdir(parents=True, exist_ok=True)
        text = (REWARD if source is None else source).replace("{component}", component or name).replace("{name}", name)
        package.joinpath("__init__.py").write_text(dedent(text))
        if index is not None:
            package.joinpath("miles-components.json").write_text(json.dumps(index))
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}", f"Summary: the {name} plugin"]
        lines += ["Provides-Extra: runtime", *(f"Requires-Dist: {r}" for r in requires)]
        info.joinpath("METADATA").write_text("\n".join(lines) + "\n")
        info.joinpath("entry_points.txt").write_text(f"[{group}]\n{name} = {value or module}\n")
        files = [] if editable else [f"{module}/{p.name}" for p in package.iterdir() if p.is_file()]
        info.joinpath("RECORD").write_text(
            "".join(f"{f},,\n" for f in [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"])
        )
        if editable:
            url = {"url": home.as_uri(), "dir_info": {"editable": True}}
            info.joinpath("direct_url.json").write_text(json.dumps(url))
        importlib.invalidate_caches()  # finders trust a folder's time stamp, and two writes may share one
        for entry in (folder, home):
            if str(entry) not in sys.path:
                sys.path.insert(0, str(entry))
        self.modules.add(module)
        self.all.append(PathDistribution(info))
        return self.all[-1]

    def forget(self) -> None:
        """Undoes what imports left behind."""
        for name in [n for n in sys.modules if n.partition(".")[0] in self.modules or n.startswith("miles_plugin_file_")]:
            del sys.modules[name]
