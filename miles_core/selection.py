"""Which of the installed plugins a run loads, and who said so."""

from __future__ import annotations

import os
from collections.abc import Sequence

from miles_core.discovery import BUILTIN, PluginInfo, normalise
from miles_core.errors import PluginError
from miles_core.registry import suggest

ENVIRONMENT_VARIABLE = "MILES_PLUGINS"


def split_names(text: str) -> tuple[str, ...]:
    """ "a, b" as names; an empty text is an empty list: no plugin but the built-ins."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def chosen_plugins(
    flag: Sequence[str] | None = None, configured: Sequence[str] | None = None
) -> tuple[tuple[str, ...] | None, str]:
    """(names or None for all, who set them): the flag, then MILES_PLUGINS, then the config."""
    if flag is not None:
        return tuple(flag), "--plugins"
    if text := os.environ.get(ENVIRONMENT_VARIABLE):
        return split_names(text), ENVIRONMENT_VARIABLE
    if configured is not None:
        return tuple(configured), '"plugins" in the config'
    return None, "all installed"


def switch(infos: Sequence[PluginInfo], plugins: Sequence[str] | None, adjust: Sequence[str], origin: str) -> set[str]:
    """Sets the state "off" on what is left out and returns the names that were asked for by name.

    `adjust` is applied in order, so the last word about a plugin counts. Raises PluginError for an unknown name: a typo
    must neither load nothing nor leave a plugin in.
    """
    known = {info.name for info in infos}
    named = {_known(name, known, infos, origin) for name in plugins or ()}
    active = set(known) if plugins is None else set(named)
    off_because = dict.fromkeys(known - active, f"left out by {origin}")
    for word in adjust:
        removes = word.startswith("no:")
        name = _known(word.removeprefix("no:"), known, infos, f"-p {word}")
        if removes and name == BUILTIN:
            raise PluginError(f"the built-in components cannot be left out (-p {word})")
        if removes:
            active.discard(name)
            named.discard(name)
            off_because[name] = f"left out by -p {word}"
        else:
            active.add(name)
            named.add(name)
    for info in infos:
        if info.name not in active:
            info.state, info.reason = "off", off_because[info.name]
    return named


def _known(word: str, known: set[str], infos: Sequence[PluginInfo], origin: str) -> str:
    name = normalise(word)
    if name in known or name == BUILTIN:
        return name
    of_dist = next((info.name for info in infos if normalise(info.dist) == name), None)
    close = of_dist or suggest(word, sorted(known))
    hint = f'did you mean "{close}"?  ' if close else ""
    raise PluginError(f'no plugin named "{word}" ({origin})', f"{hint}installed: {', '.join(sorted(known)) or 'none'}")
