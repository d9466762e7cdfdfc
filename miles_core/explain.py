"""Plain sentences for what is wrong with a config: what a value must be, which name was probably meant."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError

from miles_core.tables import Key

_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_BOUNDS = ((annotated_types.Gt, "gt", "greater than"), (annotated_types.Ge, "ge", "at least"),
           (annotated_types.Lt, "lt", "less than"), (annotated_types.Le, "le", "at most"))  # fmt: skip


def type_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a value of this type is, for a person: "a whole number greater than 0", 'one of "a", "b"'."""
    options = [a for a in alternatives(annotation) if a is not type(None)]
    if len(options) > 1:
        return " or ".join(dict.fromkeys(type_words(a) for a in options))
    kind = options[0]
    if get_origin(kind) is Annotated:
        return type_words(get_args(kind)[0], get_args(kind)[1:])
    bounds = [f"{words} {show(getattr(m, name))}" for m in metadata for cls, name, words in _BOUNDS if isinstance(m, cls)]
    return _kind_words(kind) + (" " + " and ".join(bounds) if bounds else "")


def _kind_words(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(show, args))}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(show(e.value) for e in kind)}"
    if (origin or kind) in (tuple, list, set, frozenset):
        inner = {type_words(a) for a in args if a is not Ellipsis}
        return f"a list of {_plural(inner.pop())}" if len(inner) == 1 else "a list"
    if (origin or kind) in (dict, Mapping) or (isinstance(kind, type) and issubclass(kind, BaseModel | Mapping)):
        return "a table"
    return _PLAIN.get(kind, "any value" if kind is Any else str(getattr(kind, "__name__", kind)))


def _plural(words: str) -> str:
    """ "a number above 0" -> "numbers above 0"; "text" has no plural."""
    head, space, rest = words.removeprefix("a ").partition(" number") if "number" in words else (words, "", "")
    if words.startswith("a number"):
        return "numbers" + words.removeprefix("a number")
    if space:
        return f"{head} numbers{rest}"
    return "tables" if words == "a table" else words.removeprefix("a ")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def show(value: Any) -> str:
    """A value as it would stand in TOML, short enough for a message."""
    if isinstance(value, str):
        text = '"' + value.replace("\n", "\\n") + '"'
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        return "a table"
    else:
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that was probably meant; dashes, underscores and case count as equal."""
    known = list(known)
    folded = {k.lower().replace("-", "_"): k for k in sorted(known, reverse=True)}
    wanted = name.lower().replace("-", "_")
    if wanted in folded:
        return folded[wanted]
    close = difflib.get_close_matches(wanted, folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def explain(
    error: ValidationError, model: type[BaseModel], raw: Any, unknown: Callable[[Key, type[BaseModel]], str]
) -> list[tuple[Key, str]]:
    """(path below `raw`, sentence) for each thing that pydantic refused, one per path. `unknown(key, model)` finds the
    sentence for a key that `model`, the table around it, does not have."""
    found: dict[Key, str] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # elements that are refused themselves, each with a sentence of its own
        key = _path(item, raw)
        if item["type"] == "extra_forbidden":
            found.setdefault(key, unknown(key, _model_at(model, key[:-1])))
            continue
        annotation, metadata = _field_at(model, key)
        found.setdefault(key, _sentence(item, annotation, metadata))
    return list(found.items())


def _model_at(model: type[BaseModel], key: Key) -> type[BaseModel]:
    options = alternatives(_field_at(model, key)[0])
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)


def _path(item: Mapping[str, Any], raw: Any) -> Key:
    """The part of pydantic's location that exists in the input; tags of unions and validators are left out."""
    loc, key = item["loc"], ()
    for part in loc:
        if (isinstance(raw, Mapping) and part in raw) or (isinstance(raw, list) and isinstance(part, int)):
            key, raw = (*key, part), raw[part]
    return (*key, loc[-1]) if item["type"] == "missing" else key


def _field_at(model: type[BaseModel], key: Key) -> tuple[Any, Iterable[Any]]:
    annotation, metadata = model, ()
    for part in key:
        options = [a for a in alternatives(annotation) if a is not type(None)]
        annotation, metadata = Any, ()
        for option in options:
            args = get_args(option)
            if isinstance(option, type) and issubclass(option, BaseModel) and part in option.model_fields:
                info = option.model_fields[part]
                annotation, metadata = info.annotation, info.metadata
            elif isinstance(part, int) and args:
                annotation = args[0] if Ellipsis in args or part >= len(args) else args[part]
            elif len(args) == 2:
                annotation = args[1]
    return annotation, metadata


def _sentence(item: Mapping[str, Any], annotation: Any, metadata: Iterable[Any]) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "missing":
        return f"is missing; it must be {type_words(annotation, metadata)}"
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if item["loc"] and item["loc"][-1] == "[key]":
        names = re.findall(r"'([^']*)'", context.get("expected", ""))
        close = nearest(str(value), names)
        hint = f'; did you mean "{close}"?' if close else ""
        return f"is no name that can stand here{hint} (names: {', '.join(names)})"
    if kind == "too_short":
        return f"needs at least {context['min_length']} element(s)"
    if kind.endswith(("_type", "_parsing", "_from_float")) or kind in ("literal_error", "enum", "is_instance_of"):
        return f"must be {type_words(annotation, metadata)}, not {_typed(value)}{_hint(annotation, value)}"
    message = item["msg"].replace("Input should", "must").replace("should", "must")
    return f"{message[:1].lower()}{message[1:]}, not {_typed(value)}"


def _typed(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {show(value)}"
    return "a list" if isinstance(value, list) else show(value)


def _hint(annotation: Any, value: Any) -> str:
    """How to write what was probably meant."""
    options = set(alternatives(annotation))
    if isinstance(value, str):
        choices = [a for o in options if get_origin(o) is Literal for a in get_args(o)]
        if close := nearest(value, [c for c in choices if isinstance(c, str)]):
            return f'; did you mean "{close}"?'
        if options & {int, float} and _is_number(value):
            return f"; write it without quotes: {value.strip()}"
        if bool in options and value.lower() in ("true", "false"):
            return f"; write it without quotes: {value.lower()}"
        if any(isinstance(o, type) and "use" in getattr(o, "model_fields", {}) for o in options):
            return f"; did you mean use = {show(value)} in that table?"
    if any(get_origin(o) is tuple for o in options) and isinstance(value, str | int | float):
        return f"; write [{show(value)}]"
    if str in options and isinstance(value, int | float):
        return f'; put it in quotes: "{show(value)}"'
    if int in options and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
