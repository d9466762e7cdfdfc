"""From tables to a validated config: which components are selected, and whose options are whose.

Under `[engine]` every key that is a table and not a setting of the kind is the option table of a component. Only the
selected component's is validated and applied; the others must belong to a component that some installed plugin offers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from miles_core.component import Component, ComponentConfig
from miles_core.discovery import PluginInfo
from miles_core.errors import ConfigError, MilesError
from miles_core.explain import alternatives, explain, nearest
from miles_core.registry import a
from miles_core.settings import ModelTable, RunConfig, UseTable
from miles_core.tables import Key, Tables, show_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One selected component with its validated options. `table` is the kind's own settings table at `path`, and
    `key` the name of the option table under it; `where` is the location of the choice as the user typed it."""

    kind: str
    name: str
    component: Component[Any]
    plugin: PluginInfo
    options: ComponentConfig
    table: Any
    where: str
    path: Key
    key: str

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def label(self) -> str:
        return label(self.kind, self.name, self.plugin)


def label(kind: str, name: str, plugin: PluginInfo) -> str:
    return f'{kind} "{name}" ({plugin.origin})'


@dataclass(slots=True)
class Slot:
    """A table of the config that selects a component."""

    cls: type[ComponentConfig]
    path: Key
    raw: dict[str, Any]
    options: dict[str, dict[str, Any]]


@dataclass(slots=True)
class Resolved:
    config: RunConfig
    selections: dict[str, list[Selection]] = field(default_factory=dict)
    nested: dict[str, Selection] = field(default_factory=dict)
    """Selections of tables inside other tables, by path: "eval[0].data"."""


def resolve(tables: Tables, host: Any, kinds: frozenset[str] | None = None) -> Resolved:
    """Validates everything and reports all problems at once. `kinds` leaves the components of other kinds out, in
    workers that need only some plugins. Raises ConfigError, or the registry's own error when it is the only problem."""
    return _Resolver(tables, host, kinds).run()


def table_class(annotation: Any) -> tuple[str, type[ComponentConfig] | None]:
    """("one" | "many" | "map", table class) of a field's annotation; the class is None when it holds no table."""
    for option in alternatives(annotation):
        origin, args = get_origin(option), get_args(option)
        shape, inner = {tuple: ("many", args[:1]), dict: ("map", args[1:])}.get(origin, ("one", (option,)))
        if inner and isinstance(inner[0], type) and issubclass(inner[0], ComponentConfig):
            return shape, inner[0]
    return "one", None


def option_kinds(cls: type[ComponentConfig]) -> tuple[str, ...]:
    """Kinds whose option tables may stand under a table of this class."""
    if issubclass(cls, ModelTable):
        return cls.kinds
    return (cls.kind,) if issubclass(cls, UseTable) else ()


@dataclass(frozen=True, slots=True)
class CoreTable:
    """A table of the schema. `path` has "NAME" for names that the user chooses; `many`: an array of tables."""

    path: tuple[str, ...]
    cls: type[ComponentConfig]
    many: bool = False

    @property
    def header(self) -> str:
        name = ".".join(self.path)
        return f"[[{name}]]" if self.many else f"[{name}]" if name else ""


def core_tables(cls: type[ComponentConfig] = RunConfig, path: tuple[str, ...] = ()) -> Iterator[CoreTable]:
    """Every table below `cls` in the order of the schema; of RunConfig, all that a file may hold."""
    for name, info in cls.model_fields.items():
        shape, inner = table_class(info.annotation)
        if inner is not None:
            below = (*path, name, "NAME") if shape == "map" else (*path, name)
            yield CoreTable(below, inner, shape == "many")
            yield from core_tables(inner, below)


class _Resolver:
    def __init__(self, tables: Tables, host: Any, kinds: frozenset[str] | None) -> None:
        self.tables, self.host, self.kinds = tables, host, kinds
        self.slots: list[Slot] = []
        self.unknown: list[tuple[Key, type[ComponentConfig]]] = []
        self.problems: list[tuple[int, str | MilesError]] = []
        self.selected: list[tuple[Slot, str, Any, ComponentConfig, str]] = []
        self.config: RunConfig | None = None

    def run(self) -> Resolved:
        core = self._walk(RunConfig, self.tables.data, ())
        self._validate_core(core)
        for slot in self.slots:
            self._select(slot)
        for key, cls in self.unknown:
            self._problem(key, self._unknown_sentence(key, cls))
        self._raise()
        assert self.config is not None
        return self._result(self.config)

    # --- Splitting ---------------------------------------------------------------------------------------------------

    def _walk(self, cls: type[ComponentConfig], raw: dict[str, Any], path: Key) -> dict[str, Any]:
        """`raw` with the settings of `cls` alone; option tables go to slots, keys that nobody knows to `unknown`."""
        core: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        for name, value in raw.items():
            if name in cls.model_fields:
                core[name] = self._child(cls.model_fields[name].annotation, value, (*path, name))
            elif option_kinds(cls) and isinstance(value, dict):
                options[name] = value
            else:
                self.unknown.append(((*path, name), cls))
        if option_kinds(cls):
            self.slots.append(Slot(cls, path, core, options))
        if cls is RunConfig and "model" not in core:
            self.slots.append(Slot(ModelTable, ("model",), {}, {}))
        for name, info in cls.model_fields.items():  # defaults select components too
            _, inner = table_class(info.annotation)
            if name not in core and inner and issubclass(inner, UseTable) and isinstance(info.default, inner):
                self.slots.append(Slot(inner, (*path, name), {}, {}))
        return core

    def _child(self, annotation: Any, value: Any, path: Key) -> Any:
        shape, cls = table_class(annotation)
        if cls is None:
            return value
        if shape == "one":
            return self._walk(cls, value, path) if isinstance(value, dict) else value
        if shape == "map":
            items = value.items() if isinstance(value, dict) else ()
            return {k: self._child(cls, v, (*path, k)) for k, v in items} if isinstance(value, dict) else value
        if isinstance(value, dict):
            name = show_key(path)
            self._problem(path, f"is an array of tables: write [[{name}]] instead of [{name}]")
            return [self._child(cls, value, path)]  # once reported, the rest is checked as if it had been written so
        return [self._child(cls, v, (*path, i)) for i, v in enumerate(value)] if isinstance(value, list) else value

    def _validate_core(self, core: dict[str, Any]) -> None:
        try:
            self.config = RunConfig.model_validate_json(json.dumps(core))
        except ValidationError as error:
            for key, sentence in explain(error, RunConfig, core, self._unknown_sentence):
                self._problem(key, sentence + self._offers(key))

    def _offers(self, key: Key) -> str:
        """For a table or `use` that is missing or of the wrong type: what there is to choose from."""
        name = key[-2] if len(key) > 1 and key[-1] == "use" else key[-1] if key else ""
        info = RunConfig.model_fields.get(str(name))
        cls = table_class(info.annotation)[1] if info else None
        if cls is None or not issubclass(cls, UseTable) or (len(key) > 1 and key[-1] != "use"):
            return ""
        offered = sorted({e.name for e in self.host.registry.all(cls.kind)})
        return f" (installed: {', '.join(offered)})" if offered else f" (no {cls.kind} is installed)"

    # --- Choosing ----------------------------------------------------------------------------------------------------

    def _select(self, slot: Slot) -> None:
        chosen: set[str] = set()
        for kind, use, at in self._choices(slot):
            chosen.add(use)
            chosen.add(use.rpartition(":")[2])
            if self.kinds is None or kind in self.kinds:
                self._select_one(slot, kind, use, at)
        for name in slot.options.keys() - chosen:
            self._check_other(slot, name)

    def _choices(self, slot: Slot) -> list[tuple[str, str, Key]]:
        """(kind, name, key of the choice) for the components that a table selects."""
        if slot.cls is ModelTable:
            found = []
            path, spec = slot.raw.get("path", ""), slot.raw.get("spec", "auto")
            if isinstance(path, str) and (source := source_name(path)):
                found.append(("source", source, (*slot.path, "path")))
            if isinstance(spec, str) and spec != "auto":
                found.append(("model", spec, (*slot.path, "spec")))
            return found
        use = slot.raw.get("use", slot.cls.model_fields["use"].default)
        return [(slot.cls.kind, use, (*slot.path, "use"))] if isinstance(use, str) else []

    def _select_one(self, slot: Slot, kind: str, use: str, at: Key) -> None:
        try:
            entry = self.host.registry.find(kind, use, self.tables.where(at))
        except MilesError as error:
            self._add(at, error)
            return
        keys = [k for k in dict.fromkeys((use, entry.name)) if k in slot.options]
        if len(keys) > 1:
            self._problem((*slot.path, keys[0]), f"and [{show_key((*slot.path, keys[1]))}] are one table; keep one")
        key = keys[0] if keys else entry.name
        raw, base = slot.options.get(key, {}), (*slot.path, key)
        owner = label(kind, entry.name, entry.plugin)
        try:
            options = entry.component.config.model_validate_json(json.dumps(raw))
        except ValidationError as error:
            for below, sentence in explain(
                error, entry.component.config, raw, lambda k, cls: self._unknown_sentence((*base, *k), cls, owner)
            ):
                said = sentence if owner in sentence else f"{sentence} [{owner}]"
                self._problem((*base, *below), said)
            return
        self.selected.append((slot, kind, entry, options, key))

    def _check_other(self, slot: Slot, name: str) -> None:
        """An option table of a component that is not selected: allowed if anybody installed offers that component."""
        if self.kinds is not None:
            return
        kinds = option_kinds(slot.cls)
        offered = {n for kind in kinds for n in self._offered(kind)}
        if name.rpartition(":")[2] in offered:
            return
        sentence = f'no installed plugin offers {" or ".join(map(a, kinds))} named "{name}"'
        close = nearest(name, [*offered, *slot.cls.model_fields])
        if close:
            sentence += f"; did you mean [{show_key((*slot.path, close))}]?"
        elif elsewhere := self._home_of_component(name):
            sentence += f"; {elsewhere}"
        elif offered:
            sentence += f"; there are {', '.join(sorted(offered))}"
        self._problem((*slot.path, name), sentence)

    def _offered(self, kind: str) -> set[str]:
        """Names of a kind's components in all installed plugins, loaded or not."""
        names = {e.name for e in self.host.registry.all(kind)}
        return names | {c.name for i in self.host.infos for c in i.components if c.kind == kind}

    # --- Sentences ---------------------------------------------------------------------------------------------------

    def _unknown_sentence(self, key: Key, cls: type[Any], owner: str = "") -> str:
        name = str(key[-1])
        here = list(cls.model_fields)
        same = nearest(name, here, cutoff=0.6)
        alike = same is not None and fold(same) == fold(name)
        said = f"is no option of {owner}" if owner else "is not an option here"
        home = "" if alike else self._home(name, key[:-1])
        if home:
            return f"{said}; {home}"
        if same:
            return f'{said}; did you mean "{same}"?'
        close = nearest(name, {n for n, *_ in self._everything()}, cutoff=0.75)
        if close and (home := self._home(close, key[:-1])):
            return f'{said}; did you mean "{close}"? {home}'
        return f"{said}; {'options: ' + ', '.join(here) if here else 'it has no options'}"

    def _everything(self) -> Iterator[tuple[str, str, str]]:
        """(key, header of its table, owner) of everything that could be written, the selected components' first."""
        for slot, kind, entry, _, key in self.selected:
            header = "[" + show_key(tuple(p for p in (*slot.path, key) if isinstance(p, str))) + "]"
            yield from ((f, header, label(kind, entry.name, entry.plugin)) for f in entry.component.config.model_fields)
        yield from ((f, "", "") for f in RunConfig.model_fields)
        for table in core_tables():
            yield from ((f, table.header, "") for f in table.cls.model_fields)
        for kind, home in self._homes():
            for entry in self.host.registry.all(kind):
                owner, header = label(kind, entry.name, entry.plugin), f"[{home}.{entry.name}]"
                yield from ((f, header, owner) for f in entry.component.config.model_fields)

    def _homes(self) -> Iterator[tuple[str, str]]:
        """(kind, top-level table under which its components' options stand)."""
        for table in core_tables():
            if len(table.path) == 1:
                yield from ((kind, table.path[0]) for kind in option_kinds(table.cls))

    def _home(self, name: str, table: Key) -> str:
        """Where a key that is misplaced belongs, or ""."""
        here = show_key(tuple(p for p in table if isinstance(p, str)))
        top = here.partition(".")[0]
        found = [(h.strip("[]"), h, owner) for field_name, h, owner in self._everything() if field_name == name]
        found.sort(key=lambda item: item[0].partition(".")[0] != top)  # a neighbour first
        for path, header, owner in found:
            if path != here:
                if not header:
                    return f'"{name}" belongs at the top of the file, before the first [table]'
                return f'"{name}" belongs under {header}' + (f", {owner}" if owner else "")
        return self._home_of_component(name)

    def _home_of_component(self, name: str) -> str:
        for kind, home in self._homes():
            if name in self._offered(kind):
                return f'"{name}" is {a(kind)}; its options belong under [{home}.{name}]'
        return ""

    # --- Results -----------------------------------------------------------------------------------------------------

    def _problem(self, key: Key, sentence: str) -> None:
        line = self.tables.line(key)
        self._add(key, f"{self.tables.where(key)}{f' (line {line})' if line else ''}: {sentence}")

    def _add(self, key: Key, problem: str | MilesError) -> None:
        order = list(RunConfig.model_fields)
        self.problems.append((order.index(key[0]) if key and key[0] in order else -1, problem))

    def _raise(self) -> None:
        problems = [p for _, p in sorted(self.problems, key=lambda item: item[0])]
        if not problems:
            return
        if len(problems) == 1:
            raise problems[0] if isinstance(problems[0], MilesError) else ConfigError(problems[0])
        texts = [str(p).replace("\n", "\n  ") for p in problems]
        raise ConfigError(f"{self.tables.source or 'the config'} has {len(texts)} problems:", *texts)

    def _result(self, config: RunConfig) -> Resolved:
        result = Resolved(config)
        order = list(RunConfig.model_fields)
        for slot, kind, entry, options, key in sorted(self.selected, key=lambda item: order.index(str(item[0].path[0]))):
            at = {"source": "path", "model": "spec"}.get(kind, "use")
            selection = Selection(
                kind=kind,
                name=entry.name,
                component=entry.component,
                plugin=entry.plugin,
                options=options,
                table=table_at(config, slot.path),
                where=self.tables.where((*slot.path, at)),
                path=slot.path,
                key=key,
            )
            top = table_class(RunConfig.model_fields[str(slot.path[0])].annotation)[1]
            if top is slot.cls:
                result.selections.setdefault(kind, []).append(selection)
            else:
                result.nested[show_key(slot.path)] = selection
        return result


def table_at(config: Any, path: Key) -> Any:
    for part in path:
        config = config[part] if isinstance(part, int) or isinstance(config, dict) else getattr(config, part)
    return config


def fold(name: str) -> str:
    return name.lower().replace("-", "_")


def source_name(path: str) -> str:
    """The model source in "<source>:<reference>", or "" for a folder (which may have a colon in its name, or a drive)."""
    match = re.match(r"([a-z][a-z0-9-]+):(?!//)", path)
    return match[1] if match and not Path(path).exists() else ""
