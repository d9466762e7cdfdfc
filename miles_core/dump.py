"""Configs as text: TOML with a comment per value, and secrets taken out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import tomli_w

from miles_core.component import KINDS
from miles_core.tables import Key

MASK = "***masked***"
COMMENT_COLUMN, LINE_LENGTH = 48, 100
_SECRET_NAME = re.compile(r"(_KEY|_TOKEN|_SECRET|_PASSWORD|_PASSWD|_CREDENTIALS)$")
_SECRET_OPTION = re.compile(r"(^|_)(api_key|(api|access|auth|hf)_token|secret|password|passwd|credentials)$")
MIN_PART = 8
"""A secret at least this long is also taken out of the middle of a text; a shorter one only where it is the whole."""


def secret_values(host: Any = None) -> frozenset[str]:
    """Values of all environment variables that a component declares as secret or that are named like one."""
    declared = {n for kind in KINDS if host for e in host.registry.all(kind) for n in getattr(e.component, "secrets", ())}
    return frozenset(
        v for n, v in os.environ.items() if v and (n in declared or (_SECRET_NAME.search(n) and len(v) >= MIN_PART))
    )


def mask_values(value: Any, secrets: frozenset[str], name: str = "") -> Any:
    """`value` with every secret replaced, and every text of an option named like one ("api_key", "auth_token")."""
    if isinstance(value, Mapping):
        return {k: mask_values(v, secrets, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [mask_values(v, secrets, name) for v in value]
    if not isinstance(value, str) or not value:
        return value
    return MASK if _SECRET_OPTION.search(name) else mask_text(value, secrets)


def mask_text(text: str, secrets: frozenset[str]) -> str:
    if text in secrets:
        return MASK
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_PART:
            text = text.replace(secret, MASK)
    return text


def write_toml(tables: Mapping[str, Any], comments: Mapping[Key, str]) -> str:
    """TOML of nested tables, single values before subtables, each value with its comment."""
    lines: list[str] = []
    _write_table(tables, (), comments, lines)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(table: Mapping[str, Any], key: Key, comments: Mapping[Key, str], lines: list[str]) -> None:
    below = {name: v for name, v in table.items() if isinstance(v, Mapping) or _is_array_of_tables(v)}
    for name, value in table.items():
        if name not in below:
            lines.append(_with_comment(_assign(name, value), comments.get((*key, name), "")))
    for name, value in below.items():
        header = ".".join(_quoted(part) for part in (*key, name) if isinstance(part, str))
        for index, inner in enumerate(value if isinstance(value, list) else [value]):
            lines += ["", f"[[{header}]]" if isinstance(value, list) else f"[{header}]"]
            _write_table(inner, (*key, name, index) if isinstance(value, list) else (*key, name), comments, lines)


def _quoted(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def _assign(name: str, value: Any) -> str:
    text = tomli_w.dumps({name: value}).rstrip("\n")
    if isinstance(value, list) and not any(isinstance(v, list | Mapping) for v in value):
        elements = (tomli_w.dumps({"v": v}).rstrip("\n").removeprefix("v = ") for v in value)
        short = f"{_quoted(name)} = [{', '.join(elements)}]"
        return short if len(short) <= LINE_LENGTH else text
    return text


def _with_comment(text: str, comment: str) -> str:
    if not comment:
        return text
    *before, last = text.split("\n")
    return "\n".join([*before, f"{last:<{COMMENT_COLUMN}}  # {comment}"])


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
