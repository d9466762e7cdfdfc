"""From selected components to objects: is everything provided that somebody needs, and what is each one given."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.component import KINDS, BuildContext, Component, Environment
from miles_core.config import ResolvedRun
from miles_core.errors import ConfigError, MilesError, PluginError, RunFailed, RuntimeMissing
from miles_core.registry import a
from miles_core.resolve import Selection, label
from miles_core.roles import check_roles

NEEDING_KINDS = ("advantage", "correction", "loss")
"""Kinds whose `needs` name columns that the loop has to compute."""


# --- Provided and required -------------------------------------------------------------------------------------------


def check_requirements(run: ResolvedRun) -> None:
    """Raises one ConfigError with every capability that a selected component requires and none provides: who needs it,
    and which installed components or tables would provide it; then what `check_roles` finds."""
    provided = provided_by(run)
    _check_used(run)
    missing = [
        (selection, item)
        for selection in run.chosen()
        for item in _call(selection, "requires", selection.component.required)
        if not _satisfied(item, provided)
    ]
    if not missing:
        check_roles(run)
        return
    lines = []
    for selection, item in missing:
        lines.append(f"{selection.where}: {selection.label} needs {_words(item)}, and nothing selected provides it")
        lines += [f"  {hint}" for hint in _remedies(run, item)]
    raise ConfigError(*lines)


def _check_used(run: ResolvedRun) -> None:
    """Some kinds act only through a trainer or engine that asks for them, which it says in its trait "uses". Raises
    ConfigError when one is selected and nothing selected would ever build it: no choice is accepted and ignored."""
    users = [s for kind in ("trainer", "engine") for s in run.all(kind)]
    used = frozenset().union(*(s.component.traits.get("uses", ()) for s in users))
    for kind in ("extension", "precision", "model"):
        if kind in used:
            continue
        for selection in run.all(kind):
            raise ConfigError(
                f"{selection.where}: {selection.label} would never be used: neither {' nor '.join(u.label for u in users)} "
                f'takes a component of kind "{kind}"',
                "remove it, or choose a trainer or engine that does",
            )


def provided_by(run: ResolvedRun) -> set[str]:
    """Every capability in force: "<kind>/<name>" and "kind/<kind>" of what is selected, "role/<name>" of each role, and
    what the components declare."""
    provided = {f"role/{name}" for name in run.config.roles} | {"role/policy"}
    for selection in run.chosen():
        provided |= {selection.id, f"kind/{selection.kind}"}
        provided |= _call(selection, "provides", selection.component.provided)
    return provided


def _call(selection: Selection, what: str, function: Callable[[Any], Any]) -> Any:
    try:
        return function(selection.options)
    except MilesError:
        raise
    except Exception as error:
        raise PluginError(f"{what} of {selection.label} raised {type(error).__name__}: {error}") from error


def _satisfied(item: Any, provided: set[str], choice: bool = True) -> bool:
    """A tuple inside the requirements is a choice; a tuple inside a choice wants all of its members; and so on."""
    if isinstance(item, str):
        return item in provided
    return (any if choice else all)(_satisfied(inner, provided, not choice) for inner in item)


def _words(item: Any, choice: bool = True) -> str:
    if isinstance(item, str):
        return item
    inner = (_words(i, not choice) if isinstance(i, str) else f"({_words(i, not choice)})" for i in item)
    return (" or " if choice else " and ").join(inner)


def _atoms(item: Any) -> Iterator[str]:
    if isinstance(item, str):
        yield item
    else:
        for inner in item:
            yield from _atoms(inner)


def _remedies(run: ResolvedRun, item: Any) -> list[str]:
    """One line for each capability in `item`: what would provide it."""
    lines = []
    for wanted in dict.fromkeys(_atoms(item)):
        prefix, _, name = wanted.partition("/")
        if prefix == "role":
            lines.append(f"{wanted}: add a table [roles.{name}]")
            continue
        found = [label(kind, e.name, e.plugin) for kind, e in _providers(run, wanted)]
        off = [
            f"{c.kind} {c.name!r} of {i.label}, which is not loaded".replace("'", '"')
            for i in run.host.infos
            for c in i.components
            if i.state == "off" and wanted in (f"{c.kind}/{c.name}", f"kind/{c.kind}")
        ]
        if found or off:
            lines.append(f"{wanted} is provided by {', '.join(found + off)}")
        else:
            lines.append(f"{wanted}: no installed component provides it")
    return lines


def _providers(run: ResolvedRun, wanted: str) -> Iterator[tuple[str, Any]]:
    for kind in KINDS:
        for entry in run.host.registry.all(kind):
            if wanted in (f"{kind}/{entry.name}", f"kind/{kind}") or wanted in _offers(entry.component):
                yield kind, entry


def _offers(component: Component[Any]) -> frozenset[str]:
    """What a component that is not selected would provide with default options, as far as that can be told."""
    if not isinstance(component, Component):
        return frozenset()
    if not callable(component.provides):
        return component.provides
    try:
        return component.provides(component.config())
    except Exception:  # options without defaults, or a rule that wants other ones: only a hint would come of it
        return frozenset()


# --- Checks ----------------------------------------------------------------------------------------------------------


def run_checks(run: ResolvedRun, env: Environment, kinds: Iterable[str] | None = None) -> None:
    """Calls `Component.check` of every selected component (of `kinds`), before any model loads. All refusals are
    reported together; what is not a MilesError is named with the component and its plugin."""
    wanted = None if kinds is None else set(kinds)
    errors: list[MilesError] = []
    for selection in run.chosen():
        if selection.component.check is None or (wanted is not None and selection.kind not in wanted):
            continue
        own = replace(env, where=selection.where, run_config=run.config, python=env.python or sys.executable)
        try:
            selection.component.check(selection.options, own)
        except Exception as error:
            errors.append(explained(error, selection, "the check of"))
            errors[-1].__cause__ = error if errors[-1] is not error else error.__cause__
    if len(errors) == 1:
        raise errors[0]
    if errors:
        worst = RuntimeMissing if all(isinstance(e, RuntimeMissing) for e in errors) else ConfigError
        raise worst(f"{len(errors)} components refuse this run:", *(str(e).replace("\n", "\n  ") for e in errors))


def explained(error: Exception, selection: Selection, doing: str) -> MilesError:
    """An error of a plugin's code as one that names component and plugin; errors made for users keep their class."""
    if isinstance(error, MilesError):
        if selection.label not in str(error):
            where = "" if selection.where in str(error) else f", {selection.where}"
            error.args = (f"{error}\n  in {doing} {selection.label}{where}",)
        return error
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        info = selection.plugin
        how = info.install or (f'pip install "{info.dist}[runtime]"' if info.dist else "")
        hint = (f"install what it needs: {how}",) if how else ()
        return RuntimeMissing(f"{doing} {selection.label} failed: {said} ({selection.where})", *hint)
    kind = RunFailed if doing == "building" else PluginError
    return kind(f"{doing} {selection.label} failed: {said} ({selection.where})")


# --- Building --------------------------------------------------------------------------------------------------------


class Secrets(Mapping[str, str]):
    """The environment variables that one component declared. A missing one raises RuntimeMissing that names it and who
    needs it; `get` and `in` ask without raising."""

    def __init__(self, selection: Selection) -> None:
        self._names, self._owner = selection.component.secrets, selection.label

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            raise PluginError(f"{self._owner} asks for the secret {name} without declaring it in Component.secrets")
        if not os.environ.get(name):
            raise RuntimeMissing(f"the environment variable {name} is not set, and {self._owner} needs it")
        return os.environ[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is `get`

    def __contains__(self, name: object) -> bool:
        return name in self._names and bool(os.environ.get(str(name)))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self)})"


class _Later:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class _Context(BuildContext):
    """A BuildContext whose tokenizer is built when it is first read: most components never ask for one."""

    __slots__ = ("_tokenizer",)

    @property
    def tokenizer(self) -> Any:
        if isinstance(self._tokenizer, _Later):
            self._tokenizer = self._tokenizer.make()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value


class Wiring:
    """Builds the components that a run selected, in this process, each once. The arguments say where this process
    stands: `role` is "driver", "engine", "policy", ..., `index` its rank, `rendezvous` where the ranks meet."""

    def __init__(
        self,
        run: ResolvedRun,
        *,
        run_dir: Path,
        model_path: Path | None = None,
        role: str = "driver",
        index: int = 0,
        world_size: int = 1,
        rendezvous: str = "",
        device: str = "auto",
    ) -> None:
        self.run = run
        self._place = {
            "run_dir": Path(run_dir),
            "model_path": model_path,
            "role": role,
            "index": index,
            "world_size": world_size,
            "rendezvous": rendezvous,
            "device": device,
        }
        self._built: dict[tuple[Any, ...], Any] = {}

    @property
    def model_path(self) -> Path | None:
        return self._place["model_path"]

    @model_path.setter
    def model_path(self, path: Path | None) -> None:
        """The driver learns it only after the model's source has been built with this same wiring."""
        self._place["model_path"] = path

    @property
    def needs(self) -> frozenset[str]:
        """Union of the columns that the selected advantages, corrections and losses read."""
        return self._needs_of(NEEDING_KINDS)

    def _needs_of(self, kinds: Iterable[str]) -> frozenset[str]:
        chosen = [s for kind in kinds for s in self.run.all(kind)]
        return frozenset().union(*(_call(s, "needs", s.component.needed) for s in chosen))

    @property
    def tokenizer(self) -> Any:
        """Built when first asked for; None when no tokenizer is selected."""
        return self.build("tokenizer") if self.run.all("tokenizer") else None

    def context(self, selection: Selection) -> BuildContext:
        """What `selection` is built with. The tokenizer in it is built when first read."""
        return _Context(
            component=selection.id,
            seed=self.run.config.seed,
            run_config=self.run.config,
            tokenizer=None if selection.kind == "tokenizer" else _Later(lambda: self.tokenizer),
            secrets=Secrets(selection),
            needs=self.needs,
            loss_needs=self._needs_of(("loss",)),
            fields=self.run.host.fields,
            select=self.build_all,
            **self._place,
        )

    def build(self, kind: str) -> Any:
        """The object of the only selected component of `kind`. Raises ConfigError when there is not exactly one."""
        return self.build_selection(self.run.one(kind))

    def build_all(self, kind: str) -> list[tuple[str, Any]]:
        """(name, object) of every selected component of `kind`, in the order of the config. Rewards go by the name of
        their score. With `[model] spec = "auto"`, "model" is the installed spec for the model's architecture."""
        chosen = self.run.all(kind)
        if kind == "model" and not chosen and self.run.config.model.spec == "auto":
            chosen = self._specs_by_architecture()
        return [(getattr(s.table, "name", None) or s.name, self.build_selection(s)) for s in chosen]

    def build_selection(self, selection: Selection) -> Any:
        """The object of one selection, built once; also for those in `run.nested`."""
        return self._once(selection, "", selection.component.build)

    def build_part(self, kind: str, part: str) -> Any:
        """A further piece of the only selected component of `kind` (`Component.parts`), or None when it has none."""
        selection = self.run.one(kind)
        build = selection.component.parts.get(part)
        return self._once(selection, part, build) if build is not None else None

    def _once(self, selection: Selection, part: str, build: Callable[[Any, BuildContext], Any]) -> Any:
        key = (selection.kind, selection.path, selection.name, part)
        if key not in self._built:
            context = self.context(selection)
            try:
                self._built[key] = build(selection.options, context)
            except Exception as error:
                wrapped = explained(error, selection, "building")
                if wrapped is error:
                    raise
                raise wrapped from error
        return self._built[key]

    def _specs_by_architecture(self) -> list[Selection]:
        """The installed model spec whose trait "architectures" names the model's, if there is one."""
        config_file = self.model_path / "config.json" if self.model_path else None
        if config_file is None or not config_file.is_file():
            return []
        wanted = set(json.loads(config_file.read_text("utf-8")).get("architectures") or ())
        found = [
            e for e in self.run.host.registry.all("model") if wanted & set(e.component.traits.get("architectures", ()))
        ]
        if len(found) > 1:
            listed = ", ".join(label("model", e.name, e.plugin) for e in found)
            raise ConfigError(
                f"{len(found)} model specs serve {', '.join(sorted(wanted))}: {listed}", "choose one with [model] spec"
            )
        where = self.run.tables.where(("model", "spec"))
        return [
            Selection(
                kind="model",
                name=e.name,
                component=e.component,
                plugin=e.plugin,
                options=_default_options(e, where),
                table=self.run.config.model,
                where=where,
                path=("model",),
                key=e.name,
            )
            for e in found
        ]


def _default_options(entry: Any, where: str) -> Any:
    try:
        return entry.component.config()
    except ValidationError as error:
        raise ConfigError(
            f"{where}: {label('model', entry.name, entry.plugin)} has options without a default",
            f'choose {a("model")} with spec = "{entry.name}" and set them under [model.{entry.name}]',
        ) from error
