"""Which plugins are installed, from distribution metadata alone: nothing here imports a plugin.

`miles --help` and `miles plugins list` stand on this file, so it imports neither pydantic nor numpy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles_core.errors import PluginError

GROUP, COMMAND_GROUP = "miles", "miles.commands"
INDEX_FILE = "miles-components.json"
BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class ComponentRef:
    """A component as a plugin's index names it, before the plugin is imported."""

    kind: str
    name: str
    summary: str = ""


@dataclass(slots=True, kw_only=True)
class PluginInfo:
    """One plugin and where it stands.

    `state`, from metadata: "ok"; "off" (left out by the user); "incompatible" (wants another core); "needs-runtime"
    (a library of its extra `runtime` is missing or has another version; it still loads, since entry modules import
    without heavy libraries); "broken" (two distributions claim its name, or its metadata cannot be read). After a load:
    "loaded" or "broken". `reason` is one line.
    """

    name: str
    module: str
    dist: str = ""
    version: str = ""
    state: str = "ok"
    reason: str = ""
    summary: str = ""
    components: tuple[ComponentRef, ...] = ()
    missing: tuple[str, ...] = ()
    """What the extra `runtime` wants and this environment lacks, also after the plugin has been loaded."""
    install: str = ""
    """The command that installs what is missing; works in the environment where it is printed."""
    path: Path | None = None
    """The file of a `--plugin-file`."""
    distribution: Any = field(default=None, repr=False, compare=False)
    _hash: str = field(default="", repr=False, compare=False)

    @property
    def origin(self) -> str:
        """Where it comes from, for people: "built in", a file, or distribution and version."""
        if self.name == BUILTIN:
            return "built in"
        return str(self.path) if self.path else f"{self.dist} {self.version}".strip()

    @property
    def label(self) -> str:
        return f'plugin "{self.name}" ({self.origin})'

    def content_hash(self) -> str:
        """SHA-256 over the names and bytes of the plugin's files, without importing it. An editable install and a wheel
        of the same files have the same hash. Raises PluginError when there are no files (uninstalled, path gone)."""
        if not self._hash:
            import hashlib  # loads OpenSSL, which listing plugins does not need

            digest = hashlib.sha256()
            files = sorted(plugin_files(self))
            if not files:
                raise PluginError(f"{self.label} has no files: its module {self.module!r} is not where its metadata says")
            for name, path in files:
                content = path.read_bytes()
                digest.update(f"{name}\0{len(content)}\0".encode())
                digest.update(content)
            self._hash = digest.hexdigest()
        return self._hash


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandInfo:
    """A command of the entry-point group `miles.commands`: name -> a Typer app."""

    name: str
    dist: str
    version: str
    entry_point: Any


def normalise(name: str) -> str:
    """`my_plugin`, `My.Plugin` and `my-plugin` are one name."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def discover(distributions: Iterable[Any] | None = None) -> list[PluginInfo]:
    """Every installed plugin, sorted by name; imports none. `distributions` replaces the environment (for tests).

    A distribution that is seen twice counts once. When two distributions claim one plugin name, both rows say so and
    neither loads; metadata that cannot be read makes a broken row, never an exception.
    """
    explicit = list(distributions) if distributions is not None else None
    versions = _Versions(explicit)
    infos: list[PluginInfo] = []
    for dist, points in _with_group(GROUP, explicit):
        if isinstance(points, Exception):
            reason = f"its metadata cannot be read: {type(points).__name__}: {points}"
            infos.append(
                PluginInfo(name=normalise(_name(dist)), module="", dist=_name(dist), state="broken", reason=reason)
            )
            continue
        infos += [_describe(dist, point, versions) for point in sorted(points, key=lambda p: (p.name, p.value))]
    infos.sort(key=lambda info: (info.name, normalise(info.dist)))
    _mark_clashes(infos)
    return infos


def discover_commands(distributions: Iterable[Any] | None = None) -> list[CommandInfo]:
    """Commands that plugins add, sorted by name; two of one name are both returned, for the caller to refuse."""
    explicit = list(distributions) if distributions is not None else None
    commands = [
        CommandInfo(name=normalise(point.name), dist=_name(dist), version=_version(dist), entry_point=point)
        for dist, points in _with_group(COMMAND_GROUP, explicit)
        if not isinstance(points, Exception)
        for point in points
    ]
    return sorted(commands, key=lambda c: (c.name, normalise(c.dist)))


# --- Distributions ---------------------------------------------------------------------------------------------------


def _with_group(group: str, explicit: Sequence[Any] | None) -> Iterator[tuple[Any, Any]]:
    """(distribution, its entry points in `group`, or the exception that reading them raised), each distribution once.

    The first on the path wins, as it does for imports; but of two copies of one version, the one that knows where it was
    installed from (an editable install leaves a second, poorer copy beside the source).
    """
    found: dict[str, tuple[Any, Any]] = {}
    for dist in metadata.distributions() if explicit is None else explicit:
        try:
            text = dist.read_text("entry_points.txt") or ""
            points: Any = [p for p in dist.entry_points if p.group == group] if f"[{group}]" in text else []
        except Exception as error:
            # Only ours to report; a foreign distribution with unreadable metadata is none of our business.
            if not normalise(_name(dist)).startswith("miles-"):
                continue
            points = error
        if not points:
            continue
        key = normalise(_name(dist))
        old = found.get(key)
        richer = old and _version(old[0]) == _version(dist) and not _direct_url(old[0]) and _direct_url(dist)
        if old is None or richer:
            found[key] = (dist, points)
    yield from found.values()


def _name(dist: Any) -> str:
    try:
        name = dist.metadata["Name"]
    except Exception:  # METADATA missing or undecodable: the folder's name still says which distribution it is
        name = None
    return name or Path(str(getattr(dist, "_path", "unknown"))).name.partition("-")[0].removesuffix(".dist")


def _version(dist: Any) -> str:
    try:
        return dist.metadata["Version"] or ""
    except Exception:  # see _name
        return ""


def _direct_url(dist: Any) -> dict[str, Any]:
    try:
        data = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _editable_path(dist: Any) -> Path | None:
    """The source folder of an editable install (PEP 610), else None."""
    url = _direct_url(dist)
    if not (url.get("dir_info") or {}).get("editable"):
        return None
    from urllib.parse import unquote, urlparse

    return Path(unquote(urlparse(url["url"]).path))


class _Versions:
    """Installed versions by distribution name, of the environment or of an explicit list."""

    def __init__(self, explicit: Sequence[Any] | None) -> None:
        self._known = None if explicit is None else {normalise(_name(d)): _version(d) for d in explicit}

    def get(self, name: str) -> str | None:
        if self._known is not None:
            return self._known.get(normalise(name))
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None


# --- One plugin ------------------------------------------------------------------------------------------------------


def _describe(dist: Any, point: Any, versions: _Versions) -> PluginInfo:
    info = PluginInfo(
        name=normalise(point.name), module=point.value.strip(), dist=_name(dist), version=_version(dist), distribution=dist
    )
    try:
        info.summary = dist.metadata["Summary"] or ""
        _check_requirements(info, versions)
        _read_index(info)
    except Exception as error:
        info.state, info.reason = "broken", f"its metadata cannot be read: {type(error).__name__}: {error}"
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", info.module):
        info.state, info.reason = "broken", f'entry point "{point.name} = {point.value}" does not name a module'
    if info.name == BUILTIN:
        info.state, info.reason = "broken", f'the name "{BUILTIN}" belongs to the components of miles-core itself'
    return info


def _check_requirements(info: PluginInfo, versions: _Versions) -> None:
    from packaging.requirements import Requirement

    from miles_core import __version__

    missing = []
    for text in info.distribution.requires or ():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": "runtime"}):
            continue
        wanted = f"{need.name}{need.specifier}"
        if normalise(need.name) == "miles-core":
            if not need.specifier.contains(__version__, prereleases=True):
                info.state, info.reason = "incompatible", f"wants {wanted}, and this is miles-core {__version__}"
            continue
        have = versions.get(need.name)
        if have is None:
            missing.append(f"{wanted} (not installed)")
        elif not need.specifier.contains(have, prereleases=True):
            missing.append(f"{wanted} (installed: {have})")
    if not missing:
        return
    info.missing = tuple(missing)
    source = _editable_path(info.distribution)
    target = f"{source if source else info.dist}[runtime]"
    info.install = f"pip install {'-e ' if source else ''}{shlex.quote(target)}"
    if info.state == "ok":
        info.state, info.reason = "needs-runtime", f"needs {', '.join(missing)}: {info.install}"


def _read_index(info: PluginInfo) -> None:
    """Components from the plugin's generated index. A plugin without one is fine; its components are not known early."""
    from miles_core.hookspecs import HOOK_API

    path = next((path for name, path in plugin_files(info) if name.rpartition("/")[2] == INDEX_FILE), None)
    if path is None:
        return
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        info.components = tuple(ComponentRef(c["kind"], c["name"], c.get("summary", "")) for c in index["components"])
        hook_api = int(index["hook_api"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        info.reason = info.reason or f"its {INDEX_FILE} cannot be read: {error!r}"
        return
    if hook_api not in (HOOK_API, HOOK_API - 1):
        info.state = "incompatible"
        info.reason = f"written for hook API {hook_api}, and this core supports {HOOK_API} and {HOOK_API - 1}"


def _mark_clashes(infos: list[PluginInfo]) -> None:
    groups: dict[str, list[PluginInfo]] = {}
    for info in infos:
        groups.setdefault(info.name, []).append(info)
    for name, group in groups.items():
        if len(group) > 1:
            owners = " and ".join(info.origin for info in group)
            reason = f'two distributions offer a plugin named "{name}": {owners}; uninstall one of them'
            if len({info.dist for info in group}) == 1:
                reason = f'{group[0].origin} offers two plugins named "{name}": {group[0].module} and {group[1].module}'
            for info in group:
                info.state, info.reason = "broken", reason


# --- Files -----------------------------------------------------------------------------------------------------------


def plugin_files(info: PluginInfo) -> list[tuple[str, Path]]:
    """(name relative to the import root, path) of the plugin's files: what its RECORD lists, or for an editable install
    the folder of its top package. Empty when nothing is there."""
    if info.path is not None:
        return [(info.path.name, info.path)]
    if info.distribution is not None and not _editable_path(info.distribution):
        files = _recorded(info.distribution)
        top = info.module.partition(".")[0]
        if any(name.startswith((f"{top}/", f"{top}.")) for name, _ in files):
            return files
    return _located(info.module)


def _recorded(dist: Any) -> list[tuple[str, Path]]:
    if not dist.read_text("RECORD"):
        return []  # an egg-info lists the sources of its last build, which may be long gone
    listed = [(str(file).replace("\\", "/"), Path(str(dist.locate_file(file)))) for file in dist.files or ()]
    own = [(n, p) for n, p in listed if ".dist-info/" not in n and not n.startswith(("..", "__editable__")) and _counts(n)]
    return [(name, path) for name, path in own if path.is_file()]


def _located(module: str) -> list[tuple[str, Path]]:
    top, _, rest = module.partition(".")
    try:
        spec = find_spec(top)  # of a top-level name: looks for it, and runs none of it
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [(Path(spec.origin).name, Path(spec.origin))] if spec.origin and Path(spec.origin).is_file() else []
    roots = [Path(folder) for folder in spec.submodule_search_locations]
    if spec.origin is None and rest:  # a namespace package belongs to many distributions; only this plugin's part counts
        roots = [root.joinpath(*rest.split(".")) for root in roots]
    found = []
    for root in roots:
        base = root.parents[module.count(".") if spec.origin is None else 0]
        found += [(p.relative_to(base).as_posix(), p) for p in root.rglob("*") if p.is_file()]
    return [(name, path) for name, path in found if _counts(name)]


def _counts(name: str) -> bool:
    """Caches are not content: their presence depends on what ran here."""
    return not name.endswith((".pyc", ".pyo")) and not any(p == "__pycache__" or p.startswith(".") for p in name.split("/"))
