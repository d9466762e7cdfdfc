"""TOML files as nested tables that know where each value came from: `extends`, merging, `--set`.

A path is a tuple of keys and indices, `("reward", 0, "use")`, shown as `reward[0].use`.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import ConfigError

Key = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PART = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*""")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')


def show_key(key: Key) -> str:
    """A path as the user would type it: `reward[0].use`."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE.fullmatch(part) else f'"{part}"')
    return text


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value: a file and line, `--set`, another flag, a default, or the default of a plugin's component."""

    kind: Literal["file", "set", "flag", "default", "plugin"]
    source: str = ""
    line: int | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.source}:{self.line}" if self.line else self.source
        return {"set": "--set", "flag": self.source, "default": "default"}.get(self.kind, f"default of {self.source}")


@dataclass(slots=True)
class Tables:
    """Nested tables and the origin of every value and table in them. `source` is the file as the user typed it."""

    data: dict[str, Any]
    origins: dict[Key, Origin] = field(default_factory=dict)
    source: str = ""

    def where(self, key: Key) -> str:
        """The location of a value for an error message, as the user typed it."""
        origin = self.origin(key)
        if origin is None or origin.kind == "default":
            return f"{self.source}: {show_key(key)}" if self.source else show_key(key)
        if origin.kind == "file":
            return f"{origin.source}: {show_key(key)}"
        return f"--set {show_key(key)}" if origin.kind == "set" else f"{origin}: {show_key(key)}"

    def line(self, key: Key) -> int | None:
        origin = self.origin(key)
        return origin.line if origin else None

    def origin(self, key: Key) -> Origin | None:
        """Origin of a value, or of the innermost table around it that was written down."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return None

    def merge(self, other: Tables) -> None:
        """Lays `other` over this: tables are merged, everything else, arrays of tables too, is replaced."""
        self._merge(self.data, other.data, (), other)

    def _merge(self, old: dict[str, Any], new: dict[str, Any], key: Key, other: Tables) -> None:
        for name, value in new.items():
            here = (*key, name)
            if isinstance(value, dict) and isinstance(old.get(name), dict):
                self._merge(old[name], value, here, other)
                self.origins[here] = other.origins.get(here, self.origins.get(here, Origin("default")))
                continue
            self.forget(here)
            old[name] = copy.deepcopy(value)
            self.origins.update({k: o for k, o in other.origins.items() if k[: len(here)] == here})

    def forget(self, key: Key) -> None:
        for stale in [k for k in self.origins if k[: len(key)] == key]:
            del self.origins[stale]

    def set(self, key: Key, value: Any, origin: Origin) -> None:
        """Sets one value. Raises ConfigError when the path leads through something that is not a table."""
        at: Any = self.data
        for depth, part in enumerate(key[:-1]):
            at = self._descend(at, part, key, depth)
            if isinstance(at, dict):
                self.origins.setdefault(key[: depth + 1], origin)
        at = self._check_step(at, key[-1], key, len(key) - 1)
        at[key[-1]] = value
        self.forget(key)
        self.origins.update({k: origin for k in keys_of(value, key)})

    def _descend(self, at: Any, part: str | int, key: Key, depth: int) -> Any:
        self._check_step(at, part, key, depth)
        return at.setdefault(part, {}) if isinstance(at, dict) else at[part]

    def _check_step(self, at: Any, part: str | int, key: Key, depth: int) -> Any:
        typed, name = f"--set {show_key(key)}", show_key(key[:depth])
        if isinstance(part, int):
            if not isinstance(at, list):
                raise ConfigError(f"{typed}: {name} is not an array in this config, so [{part}] leads nowhere")
            if part >= len(at):
                raise ConfigError(f"{typed}: {name} has {len(at)} element(s), the last is [{len(at) - 1}]")
        elif isinstance(at, list):
            fixed = show_key((*key[:depth], 0, *key[depth:]))
            raise ConfigError(f"{typed}: {name} is an array of tables; write, for example, --set {fixed}=...")
        elif not isinstance(at, dict):
            raise ConfigError(f"{typed}: {name} is a single value, not a table")
        return at


def keys_of(value: Any, key: Key = ()) -> Iterator[Key]:
    """Paths of all tables and leaves in `value`; a list is a leaf unless it is an array of tables."""
    if key:
        yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from keys_of(inner, (*key, name))
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for index, inner in enumerate(value):
            yield from keys_of(inner, (*key, index))


def get(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data


# --- Files -----------------------------------------------------------------------------------------------------------


def load_tables(path: Path | str) -> Tables:
    """A config file and everything that it extends. Raises ConfigError: missing, unreadable, malformed, circular."""
    return _load(Path(path), str(path), ())


def _load(path: Path, shown: str, stack: tuple[tuple[Path, str], ...]) -> Tables:
    real = Path(os.path.abspath(path))
    if any(real == seen for seen, _ in stack):
        chain = " -> ".join([name for _, name in stack] + [shown])
        raise ConfigError(f"{stack[-1][1]}: extends: these files extend each other in a circle: {chain}")
    stack = (*stack, (real, shown))
    tables = _parse(path, shown, stack)
    bases = tables.data.pop("extends", ())
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list | tuple) or not all(isinstance(b, str) for b in bases):
        raise ConfigError(f"{shown}: extends: must be a file name or a list of file names, not {bases!r}")
    tables.forget(("extends",))
    merged = Tables({}, {}, shown)
    for base in bases:
        merged.merge(_load(path.parent / base, str(Path(shown).parent / base), stack))
    merged.merge(tables)
    return merged


def _parse(path: Path, shown: str, stack: tuple[tuple[Path, str], ...]) -> Tables:
    text = _read(path, shown, stack)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(*_malformed(text, shown, str(error))) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise ConfigError(f"{shown}: cannot be read: {error}") from None
    lines = scan_lines(text)
    tables = Tables(data, {}, shown)
    for key in keys_of(data):
        line = lines.get(key, tables.line(key))  # what stands inside an inline table has its line
        tables.origins[key] = Origin("file", shown, line)
        if isinstance(get(data, key), datetime.date | datetime.time):
            raise ConfigError(f"{tables.where(key)} (line {line}): dates are not used in configs; put it in quotes")
    return tables


def _read(path: Path, shown: str, stack: tuple[tuple[Path, str], ...]) -> str:
    by = f" (extended by {stack[-2][1]})" if len(stack) > 1 else ""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {shown}{by}", *_nearby(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{shown} is a folder, not a config file{by}", *_nearby(path / "x")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {shown}{by}: {reason[:1].lower()}{reason[1:]}") from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"0x{raw[error.start]:02x}"
        raise ConfigError(f"{shown} is not UTF-8 text: byte {byte} in line {line}; save the file as UTF-8") from None


def _nearby(path: Path) -> list[str]:
    """Config files close to where `path` would be, the most similar names first."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    found = sorted(folder.glob("*.toml")) or sorted(Path("recipes").glob("*.toml"))
    if not found:
        return [f"no .toml file in {folder} either"]
    close = difflib.get_close_matches(path.name, [p.name for p in found], n=len(found), cutoff=0.0)
    found.sort(key=lambda p: close.index(p.name) if p.name in close else len(close))
    rest = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return [f"config files nearby: {', '.join(str(p) for p in found[:8])}{rest}"]


def _malformed(text: str, shown: str, message: str) -> list[str]:
    """Headline, the line's text, and a caret under the column."""
    match = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    lines = text.split("\n")
    if match and match[1]:
        line, column = int(match[1]), int(match[2])
    else:
        line = max((n for n, content in enumerate(lines, 1) if content.strip()), default=1)
        column = len(lines[line - 1]) + 1
    reason = message[: match.start()] if match else message
    content = lines[line - 1] if line <= len(lines) else ""
    shift = max(0, column - 80)
    caret = " " * (column - 1 - shift) + "^"
    headline = f"{shown}: line {line}, column {column}: not valid TOML: {reason[:1].lower()}{reason[1:]}"
    return [headline, content[shift : shift + 120].replace("\t", " "), caret]


def split_key(text: str) -> list[str] | None:
    """Parts of a TOML key such as `a."b.c".d`, or None when it is not one."""
    parts: list[str] = []
    at = 0
    while True:
        match = _PART.match(text, at)
        if not match:
            return None
        parts.append(match[1][1:-1] if match[1][0] in "\"'" else match[1])
        at = match.end()
        if at == len(text):
            return parts
        if text[at] != ".":
            return None
        at += 1


def scan_lines(text: str) -> dict[Key, int]:
    """Line number of each table header and key, as far as a line-wise look can tell (tomllib keeps none)."""
    found: dict[Key, int] = {}
    last: dict[Key, int] = {}  # array of tables -> index of its newest element
    prefix: Key = ()
    quote, depth = "", 0

    def resolve(parts: list[str], base: Key = ()) -> Key:
        key = base
        for part in parts:
            key = (*key, part)
            key = (*key, last[key]) if key in last else key
        return key

    for number, line in enumerate(text.split("\n"), 1):
        if quote:
            quote = "" if quote in line else quote
            continue
        bare = _STRING.sub("''", line).split("#")[0] if '"""' not in line and "'''" not in line else line
        if depth > 0:
            depth += sum(map(bare.count, "[{")) - sum(map(bare.count, "]}"))
            continue
        header = re.match(r"\s*(\[\[?)\s*(.*?)\s*(\]\]?)\s*(#.*)?$", line)
        parts = split_key(header[2]) if header else None
        if header and parts:
            if header[1] == "[[":
                key = (*resolve(parts[:-1]), parts[-1])
                last[key] = last.get(key, -1) + 1
                found.setdefault(key, number)
                prefix = (*key, last[key])
            else:
                prefix = resolve(parts)
            found.setdefault(prefix, number)
            continue
        name, equals, _ = line.partition("=")
        if equals and (parts := split_key(name)):
            found.setdefault(resolve(parts, prefix), number)
        for mark in ('"""', "'''"):
            if line.count(mark) % 2:
                quote = mark
        if not quote:
            depth = sum(map(bare.count, "[{")) - sum(map(bare.count, "]}"))
    return found


# --- --set -----------------------------------------------------------------------------------------------------------

_SET_PART = re.compile(r"""("[^"]+"|'[^']+'|[^.\[\]="'\s]+)((?:\[\d+\])*)""")


def parse_set(text: str) -> tuple[Key, Any]:
    """`reward[0].weight=2` as (path, value). The value is TOML; what is not TOML is taken as text, so that
    `engine.use=sglang` needs no quotes. Raises ConfigError for a malformed path, list, table or quoted text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write --set KEY=VALUE, for example --set engine.use=torch")
    parts: list[str | int] = []
    at, name = 0, name.strip()
    while match := _SET_PART.match(name, at):
        parts.append(match[1].strip("\"'"))
        parts += [int(i) for i in re.findall(r"\d+", match[2])]
        at = match.end()
        if at == len(name):
            return tuple(parts), _set_value(text, value.strip())
        if name[at] != ".":
            break
        at += 1
    raise ConfigError(f"--set {text}: {name!r} is not a path such as engine.use or reward[0].weight")


def _set_value(text: str, value: str) -> Any:
    try:
        parsed = tomllib.loads(f"v = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"--set {text}: the value is not valid TOML: {error}") from None
        return value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {text:.80}: the value cannot be read: {error}") from None
    if len(parsed) != 1 or not isinstance(parsed["v"], str | int | float | bool | list | dict):
        return value  # several lines, or a date: text
    return parsed["v"]
