"""A run's config, from files and flags to something that can be built, sent to workers, written down and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core import __version__
from miles_core.compatible import clashes, doubts
from miles_core.discovery import BUILTIN, PluginInfo
from miles_core.dump import MASK, mask_values, secret_values, write_toml
from miles_core.errors import ConfigError, MilesError, PluginError
from miles_core.hookspecs import HOOK_API
from miles_core.plugins import PluginHost, chosen_plugins
from miles_core.resolve import Selection, resolve, table_at
from miles_core.settings import EvalTable, RunConfig
from miles_core.tables import Key, Origin, Tables, get, keys_of, load_tables, parse_set, show_key

PAYLOAD_FORMAT = 1
HEADER = "miles"
"""The table that `dump` adds and `load` ignores: versions and hashes of what made the file."""
INHERITED_SAMPLING = ("max_new_tokens", "stop", "stop_token_ids")


@dataclass(slots=True)
class ResolvedRun:
    """A valid config with its components chosen.

    `selections`: kind -> selected components in the order of the config. `nested`: those of tables inside other tables,
    by path ("eval[0].data"). `notes`: what is allowed and probably not meant. `tables`: what was written, with origins.
    """

    config: RunConfig
    selections: dict[str, list[Selection]]
    host: Any
    tables: Tables
    nested: dict[str, Selection] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def one(self, kind: str) -> Selection:
        """The only selection of `kind`. Raises ConfigError when there is none or more than one."""
        found = self.all(kind)
        if len(found) != 1:
            raise ConfigError(
                f"{self.tables.source or 'the config'}: exactly one {kind} is needed, and {len(found)} are selected"
            )
        return found[0]

    def all(self, kind: str) -> list[Selection]:
        return list(self.selections.get(kind, ()))

    def data_for(self, table: EvalTable) -> Selection:
        """Where an evaluation's prompts come from: its own `[eval.data]`, or training's source."""
        index = next(i for i, t in enumerate(self.config.eval) if t is table)
        return self.nested.get(f"eval[{index}].data") or self.one("data")

    def chosen(self) -> list[Selection]:
        """Every selected component, wherever it was selected."""
        return [s for found in self.selections.values() for s in found] + list(self.nested.values())

    def effective(self, *, masked: bool = False, changed: bool = False) -> dict[str, Any]:
        """Every value in force, as nested JSON-compatible tables; the options of each selected component stand under
        its name. What is None is left out, and so are the tables of components that are not selected. `changed`: only
        what is not a default."""
        data = self.config.model_dump(mode="json", exclude_none=True)
        for selection in self.chosen():
            if selection.component.config.model_fields:
                get(data, selection.path)[selection.key] = selection.options.model_dump(mode="json", exclude_none=True)
        if not data["roles"]:
            del data["roles"]
        if changed:
            data = self._without_defaults(data, ())
        return mask_values(data, secret_values(self.host)) if masked else data

    def _without_defaults(self, value: Any, key: Key) -> Any:
        if isinstance(value, dict):
            inner = {n: self._without_defaults(v, (*key, n)) for n, v in value.items()}
            return {n: v for n, v in inner.items() if v not in (None, {}) and not (_holds_tables(v) and not any(v))}
        if isinstance(value, list) and any(isinstance(v, dict) for v in value):
            return [self._without_defaults(v, (*key, i)) for i, v in enumerate(value)]
        return None if self.origin(key).kind in ("default", "plugin") else value

    def leaves(self, *, changed: bool = False) -> list[Key]:
        """Paths of all values in force that are not tables."""
        return list(_leaves(self.effective(changed=changed)))

    def origin(self, key: Key) -> Origin:
        """Who set the value at `key`: a file, `--set`, a flag, the core's default or that of a plugin's component."""
        origin = self.tables.origins.get(key)
        if origin is not None:
            return origin
        for selection in self.chosen():
            if key[: len(selection.path) + 1] == (*selection.path, selection.key) and selection.plugin.name != BUILTIN:
                return Origin("plugin", selection.plugin.origin)
        return Origin("default")

    def dump(self, *, changed: bool = False) -> str:
        """The resolved config as TOML that loads again to an equal run: every effective value, with its origin as a
        comment, then a table of versions and content hashes. Values of secrets are masked."""
        comments = {key: str(self.origin(key)) for key in self.leaves()}
        body = write_toml(self.effective(masked=True, changed=changed), comments)
        if changed:
            return body
        header = {"version": __version__, "hook_api": HOOK_API, "config": self.tables.source, "plugins": self.plugins()}
        return body + "\n" + write_toml({HEADER: header}, {})

    def plugins(self) -> list[dict[str, Any]]:
        """The core and every plugin that takes part: name, distribution, version, content hash, plugin file, and the
        kinds that it was selected for ("field" when it declares side channels)."""
        rows = []
        for info in self.host.loaded:
            kinds = sorted({s.kind for s in self.chosen() if s.plugin.name == info.name} | self._standing_kinds(info))
            row = {"name": info.name, "dist": info.dist, "version": info.version, "hash": info.content_hash()}
            rows.append(row | {"file": str(info.path) if info.path else "", "kinds": kinds})
        return rows

    def _standing_kinds(self, info: PluginInfo) -> set[str]:
        """Kinds that a plugin serves without being selected by name: side channels, and model specs found by "auto"."""
        offered = {c.kind for c in info.components}
        return offered & ({"field", "model"} if self.config.model.spec == "auto" else {"field"})

    def payload(self, *, masked: bool = False) -> dict[str, Any]:
        """All that a worker needs to build the same run, JSON-compatible. `masked`: without the values of secrets, for
        what is written to disk; such a payload can be compared and not be built from."""
        return {
            "format": PAYLOAD_FORMAT,
            "miles": __version__,
            "source": self.tables.source,
            "tables": self.effective(masked=masked),
            "plugins": self.plugins(),
        }

    @classmethod
    def from_payload(
        cls,
        payload: Mapping[str, Any],
        *,
        kinds: Iterable[str] | None = None,
        distributions: Iterable[Any] | None = None,
        strict: bool = False,
    ) -> ResolvedRun:
        """The run in a worker, on a plugin host of the worker's own.

        `kinds` narrows it to the components of these kinds and the plugins that offer them, for an environment that
        lacks the others. Raises PluginError when a plugin or the core here is not the driver's.
        """
        wanted = frozenset(kinds) if kinds is not None else None
        rows = [r for r in payload["plugins"] if r["name"] != BUILTIN and _needed(r, wanted)]
        host = PluginHost.create(
            plugins=[r["name"] for r in rows if not r["file"]],
            files=[Path(r["file"]) for r in rows if r["file"]],
            distributions=distributions,
            origin="the driver",
            strict=strict,
        )
        check_same_plugins([r for r in payload["plugins"] if r["name"] == BUILTIN] + rows, host)
        tables = Tables(payload["tables"], {}, payload["source"])
        resolved = resolve(tables, host, wanted)
        return cls(resolved.config, resolved.selections, host, tables, resolved.nested)


def load(
    path: Path | str,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[str] | None = None,
    adjust: Sequence[str] = (),
    files: Sequence[Path] = (),
    distributions: Iterable[Any] | None = None,
    strict: bool = False,
) -> ResolvedRun:
    """The run that a config file and flags describe.

    `sets`: "KEY=VALUE" each, over the file; `plugins`, `adjust`, `files`, `distributions`, `strict`: see
    `PluginHost.create`. Raises ConfigError listing every problem, or PluginError when a named plugin does not load.
    """
    tables = load_tables(path)
    header = tables.data.pop(HEADER, None)
    tables.forget((HEADER,))
    _refuse_masked(tables)
    _fill_arrays(tables)
    for text in sets:
        key, value = parse_set(text)
        tables.set(key, value, Origin("set"))
    _inherit_sampling(tables)
    host = _make_host(tables, plugins, adjust, files, distributions, strict)
    try:
        resolved = resolve(tables, host)
    except MilesError as error:
        error.args = ("\n  ".join([str(error), *_files_once_given(header, host)]),)
        raise
    run = ResolvedRun(resolved.config, resolved.selections, host, tables, resolved.nested)
    run.notes += check_values(run)
    return run


def _files_once_given(header: Any, host: Any) -> list[str]:
    """A written config remembers its plugin files and does not load them by itself: code is named by who runs it."""
    rows = header.get("plugins", ()) if isinstance(header, dict) else ()
    files = {row.get("file") for row in rows if isinstance(row, dict)} - {str(info.path) for info in host.infos}
    return [f"this config was written by a run with --plugin-file {file}" for file in sorted(filter(None, files))]


def _make_host(
    tables: Tables,
    plugins: Sequence[str] | None,
    adjust: Sequence[str],
    files: Sequence[Path],
    distributions: Iterable[Any] | None,
    strict: bool,
) -> PluginHost:
    configured = tables.data.get("plugins")
    well_formed = isinstance(configured, list) and all(isinstance(p, str) for p in configured)  # else reported later
    names, origin = chosen_plugins(plugins, configured if well_formed else None)
    host = PluginHost.create(
        plugins=names, adjust=adjust, files=files, distributions=distributions, strict=strict, origin=origin
    )
    if adjust or (names is not None and (plugins is not None or not well_formed or list(names) != configured)):
        active = [i.name for i in host.infos if i.path is None and i.state != "off"]
        tables.data["plugins"] = active
        tables.forget(("plugins",))
        tables.origins[("plugins",)] = Origin("flag", "-p" if adjust else origin)
    return host


def _refuse_masked(tables: Tables) -> None:
    for key in keys_of(tables.data):
        if isinstance(value := get(tables.data, key), str) and MASK in value:
            raise ConfigError(
                f"{tables.where(key)}: this value was a secret and is masked in what Miles writes",
                "put it back, or take it out so that the component reads its environment variable",
            )


def _fill_arrays(tables: Tables) -> None:
    """Writes defaults of arrays of tables out, so that `--set advantage[0].use=...` finds something to change."""
    for name, info in RunConfig.model_fields.items():
        if name not in tables.data and isinstance(info.default, tuple) and info.default:
            tables.data[name] = [element.model_dump(mode="json", exclude_none=True) for element in info.default]


def _inherit_sampling(tables: Tables) -> None:
    """Evaluations answer at the same length and stop at the same places as training unless they say otherwise."""
    training = tables.data.get("rollout")
    training = training.get("sampling") if isinstance(training, dict) else None
    evals = tables.data.get("eval")
    if not isinstance(training, dict) or not isinstance(evals, list):
        return
    for index, table in enumerate(evals):
        own = table.setdefault("sampling", {}) if isinstance(table, dict) else None
        if isinstance(own, dict):
            for name in INHERITED_SAMPLING:
                if name in training and name not in own:
                    own[name] = training[name]
                    origin = tables.origin(("rollout", "sampling", name))
                    tables.origins[("eval", index, "sampling", name)] = origin or Origin("default")


# --- What single values cannot show ----------------------------------------------------------------------------------


def check_values(run: ResolvedRun) -> list[str]:
    """Notes about combinations that are allowed and probably not meant. Raises ConfigError listing those that cannot be."""
    config, where = run.config, run.tables.where
    problems: list[str] = []
    notes: list[str] = []
    sampling, train = config.rollout.sampling, config.train
    if sampling.temperature == 0:
        problems.append(
            f"{where(('rollout', 'sampling', 'temperature'))}: temperature 0 is greedy: all samples of a group would be "
            "equal and there is no sampling distribution to train; use a value above 0 (evaluation may be greedy)"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        notes.append(
            "rollout.sampling.top_p and top_k cut the sampling distribution, and log-probabilities are those of the whole "
            "one: importance ratios are biased by the mass that was cut, once per token"
        )
    if train.minibatches > config.rollout.groups_per_step:
        problems.append(
            f"{where(('train', 'minibatches'))}: {train.minibatches} minibatches cannot be made of "
            f"{config.rollout.groups_per_step} groups (rollout.groups_per_step); groups are not split"
        )
    elif config.rollout.groups_per_step % train.minibatches:
        notes.append(
            f"rollout.groups_per_step = {config.rollout.groups_per_step} is no multiple of train.minibatches = "
            f"{train.minibatches}: minibatches will differ in size"
        )
    if train.constant_length and train.aggregation != "constant-length":
        problems.append(
            f"{where(('train', 'constant_length'))}: has a meaning only with train.aggregation = "
            f'"constant-length", and that is "{train.aggregation}"'
        )
    if not config.reward and all(s.component.traits.get("zero_advantage") == "no-gradient" for s in run.all("loss")):
        notes.append(
            "there is no [[reward]]: every answer gets the reward 0, and the loss learns nothing unless an advantage has "
            "another teacher"
        )
    notes += doubts(run)
    problems += [*_duplicates(run), *clashes(run)]
    if problems:
        raise (
            ConfigError(problems[0])
            if len(problems) == 1
            else ConfigError(f"{run.tables.source} has {len(problems)} problems:", *problems)
        )
    return notes


def _duplicates(run: ResolvedRun) -> list[str]:
    named = [(s.path, s.table.name or s.name, "reward") for s in run.all("reward")]
    named += [(("eval", i), table.name, "evaluation") for i, table in enumerate(run.config.eval)]
    problems, seen = [], {}
    for path, name, noun in named:
        first = seen.setdefault((noun, name), path)
        if first != path:
            problems.append(
                f'{run.tables.where((*path, "name"))}: {show_key(first)} is a {noun} named "{name}" already; '
                f"give one of them another name"
            )
    return problems


# --- Comparing -------------------------------------------------------------------------------------------------------


def _needed(row: Mapping[str, Any], kinds: frozenset[str] | None) -> bool:
    return kinds is None or "field" in row["kinds"] or bool(kinds & set(row["kinds"]))


def check_same_plugins(rows: Sequence[Mapping[str, Any]], host: Any) -> None:
    """Raises PluginError naming every plugin that is missing here, or is not the one that the driver has."""
    import platform

    here = {info.name: info for info in host.loaded}
    problems = []
    for row in rows:
        name = "miles-core" if row["name"] == BUILTIN else row["dist"] or row["name"]
        info = here.get(row["name"])
        if info is None:
            problems.append(f"{platform.node()} does not have {name} {row['version']}, which the driver uses")
        elif (info.version, info.content_hash()) != (row["version"], row["hash"]):
            own = f"{info.version} {info.content_hash()[:12]}".strip()
            problems.append(
                f"{platform.node()} has another {name} ({own}) than the driver ({row['version']} {row['hash'][:12]})"
            )
    if problems:
        raise PluginError(*problems, "install the same versions in both environments")


def compare_payloads(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two payloads, one line each: plugins first, then values. Masked values equal anything."""
    lines = []
    before, after = ({r["name"]: r for r in p["plugins"]} for p in (old, new))
    for name in sorted(before.keys() | after.keys()):
        a, b = before.get(name), after.get(name)
        name = "miles-core" if name == BUILTIN else name
        if a is None or b is None:
            lines.append(f"plugin {name}: {'added' if a is None else 'no longer loaded'}")
        elif a["version"] != b["version"]:
            lines.append(f"plugin {name}: version {a['version']} before, {b['version']} now")
        elif a["hash"] != b["hash"]:
            lines.append(f"plugin {name} {b['version']}: other files ({a['hash'][:12]} before, {b['hash'][:12]} now)")
    old_values, new_values = (_leaves(p["tables"]) for p in (old, new))
    absent = object()
    for key in dict.fromkeys([*old_values, *new_values]):
        was, now = old_values.get(key, absent), new_values.get(key, absent)
        if was != now and not any(isinstance(v, str) and MASK in v for v in (was, now)):
            shown = ["absent" if v is absent else repr(v) for v in (was, now)]
            lines.append(f"{show_key(key)}: {shown[0]} before, {shown[1]} now")
    return lines


def _leaves(tables: dict[str, Any]) -> dict[Key, Any]:
    values = {key: get(tables, key) for key in keys_of(tables)}
    return {k: v for k, v in values.items() if not isinstance(v, dict) and not _holds_tables(v)}


def _holds_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(v, dict) for v in value)


__all__ = ["ResolvedRun", "Selection", "compare_payloads", "load", "table_at"]
