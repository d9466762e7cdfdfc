"""(kind, name) -> component. Clashes are an error only when selected; every error says what exists and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from miles_core.discovery import PluginInfo, normalise
from miles_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from miles_core.component import Component

UNAVAILABLE = ("off", "incompatible", "broken")


@dataclass(frozen=True, slots=True)
class Entry:
    """A component and the plugin that it came from. For kind "field", `component` is a FieldSpec."""

    component: Component[Any] | Any
    plugin: PluginInfo

    @property
    def name(self) -> str:
        return self.component.name

    @property
    def qualified(self) -> str:
        return f"{self.plugin.name}:{self.component.name}"


def suggest(word: str, options: Sequence[str]) -> str | None:
    """The option that `word` probably meant; underscores and case do not count."""
    by_key = {normalise(option): option for option in options}
    close = get_close_matches(normalise(word), list(by_key), n=1, cutoff=0.5)
    return by_key[close[0]] if close else None


class Registry:
    """All components of the loaded plugins. `infos` are all plugins, loaded or not, for error messages."""

    def __init__(self, infos: Sequence[PluginInfo] = ()) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self.infos = list(infos)

    def add(self, kind: str, component: Any, plugin: PluginInfo) -> None:
        self._entries.setdefault(kind, []).append(Entry(component, plugin))

    def all(self, kind: str) -> list[Entry]:
        """Entries of a kind, sorted by component and plugin name, whatever the order of loading was."""
        return sorted(self._entries.get(kind, ()), key=lambda e: (e.name, e.plugin.name))

    def find(self, kind: str, name: str, where: str = "") -> Entry:
        """The component that `use = name` selects; `name` may be "plugin:name". `where` is the user's location, for example
        "run.toml: reward[0].use".

        Raises ConfigError when nobody or more than one plugin offers it, PluginError when the plugin that offers it did
        not load.
        """
        owner, _, short = name.rpartition(":")
        at = f" ({where})" if where else ""
        if owner:
            self._check_owner(owner, kind, short, at)
        found = [e for e in self.all(kind) if e.name == short and (not owner or e.plugin.name == normalise(owner))]
        failed = [] if owner else self._offered(kind, short, ("broken", "incompatible"))
        if len(found) == 1 and not failed:
            return found[0]
        if found:
            raise self._clash(kind, short, at, [e.plugin for e in found] + failed)
        if failed:
            raise PluginError(
                f'{a(kind)} named "{short}" is offered by {failed[0].label}, which did not load{at}', failed[0].reason
            )
        raise ConfigError(f'no {kind} named "{name}"{at}', *self._hints(kind, short, normalise(owner) if owner else ""))

    # --- Errors ------------------------------------------------------------------------------------------------------

    def _check_owner(self, owner: str, kind: str, short: str, at: str) -> None:
        """Refuses "owner:name" whose owner is unknown or not loaded."""
        key = normalise(owner)
        loaded = {e.plugin.name for entries in self._entries.values() for e in entries}
        loaded |= {i.name for i in self.infos if i.state == "loaded"}
        if key in loaded:
            return
        info = next((i for i in self.infos if i.name == key), None)
        if info is None:
            names = sorted(loaded | {i.name for i in self.infos})
            close = suggest(owner, names)
            hint = f'did you mean "{close}:{short}"?  ' if close else ""
            raise ConfigError(f'no plugin named "{owner}"{at}', f"{hint}installed: {', '.join(names) or 'none'}")
        remedy = [f"add it with -p {info.name}"] if info.state == "off" else []
        raise PluginError(f'{info.label} was asked for its {kind} "{short}" and is not loaded{at}', info.reason, *remedy)

    def _offered(self, kind: str, name: str, states: Sequence[str]) -> list[PluginInfo]:
        return [i for i in self.infos if i.state in states and any((c.kind, c.name) == (kind, name) for c in i.components)]

    def _clash(self, kind: str, name: str, at: str, plugins: list[PluginInfo]) -> ConfigError:
        listed = [f"{p.name} ({p.origin}{'' if p.state == 'loaded' else ', did not load'})" for p in plugins]
        choices = " or ".join(f'"{p.name}:{name}"' for p in plugins if p.state == "loaded")
        return ConfigError(
            f'{len(plugins)} plugins offer a {kind} named "{name}"{at}', ", ".join(listed), f"write {choices}"
        )

    def _hints(self, kind: str, name: str, owner: str) -> list[str]:
        entries = [e for e in self.all(kind) if not owner or e.plugin.name == owner]
        hints = [] if owner else self._confusions(kind, name)
        close = suggest(name, [e.name for e in entries]) if not hints else None
        listed = ", ".join(f"{e.name} ({e.plugin.origin})" for e in entries) or "none"
        prefix = f'did you mean "{close}"?  ' if close else ""
        hints.append(f"{prefix}{f'in {owner}' if owner else 'installed'}: {listed}")
        if owner:
            return hints
        for info in self._offered(kind, name, ("off",)):
            hints.append(f"{info.label} offers it and is {info.reason}; add it with -p {info.name}")
        by_reason: dict[str, list[str]] = {}
        for info in self.infos:
            if info.state == "off":
                by_reason.setdefault(f"not loaded because of {info.reason.removeprefix('left out by ')}", []).append(
                    info.name
                )
            elif info.state in ("broken", "incompatible"):
                by_reason.setdefault("did not load", []).append(f"{info.name} ({info.reason})")
        return hints + [f"{reason}: {', '.join(names)}" for reason, names in by_reason.items()]

    def _confusions(self, kind: str, name: str) -> list[str]:
        """A plugin's or another kind's name where a component's was wanted."""
        hints = []
        info = next((i for i in self.infos if normalise(name) in (i.name, normalise(i.dist))), None)
        if info is not None:
            own = sorted(
                {e.name for e in self.all(kind) if e.plugin is info} | {c.name for c in info.components if c.kind == kind}
            )
            if own:
                named = " and ".join(f'"{n}"' for n in own)
                text = f"its {kind} is named {named}" if len(own) == 1 else f"its {kind} components are named {named}"
            else:
                others = ", ".join(sorted({f'{c.kind} "{c.name}"' for c in info.components}))
                text = f"it offers no {kind}" + (f", but {others}" if others else "")
            hints.append(f'"{name}" is a plugin; {text}')
        for other in sorted(self._entries):
            if other != kind and any(e.name == name for e in self._entries[other]):
                hints.append(f'there is {a(other)} named "{name}"')
        return hints


def a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"
