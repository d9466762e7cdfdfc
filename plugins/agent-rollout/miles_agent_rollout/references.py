"""Functions of the user by name: "module:function", "path/to/file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError


def load(reference: str, what: str, hint: str = "") -> Callable[..., Any]:
    """The function behind a reference. Raises ConfigError that says what is missing; `hint` is its last line."""
    place, colon, name = reference.rpartition(":")
    hints = (hint,) if hint else ()
    if not colon:
        raise ConfigError(f'no {what} "{reference}": write "module:function" or "file.py:function"', *hints)
    module = _from_file(place, what) if place.endswith(".py") else _from_name(place, what, reference)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f'no function "{name}" in {place} (the {what} "{reference}")', *hints)
    return found


def reference_to(function: Callable[..., Any]) -> str:
    """How another process finds `function`. Raises ConfigError for one that has no name of its own there."""
    name, module = function.__qualname__, sys.modules.get(function.__module__)
    if "<" in name or getattr(module, "__file__", None) is None:
        raise ConfigError(f"{name} of {function.__module__} cannot run in another process: it is no function of a module")
    spec = getattr(module, "__spec__", None)
    by_name = spec is not None and importlib.util.find_spec(spec.name) is not None if spec else False
    importable = by_name and function.__module__ != "__main__" and not spec.name.startswith("miles_plugin_file_")
    return f"{function.__module__ if importable else inspect.getsourcefile(function)}:{name}"


def _from_name(name: str, what: str, reference: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'the {what} "{reference}" does not import: {error}') from error


def _from_file(path: str, what: str) -> Any:
    file = Path(path).expanduser().resolve()
    name = f"miles_agent_file_{file.stem}_{zlib.crc32(str(file).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    loaded = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(file)), None)
    if loaded is not None:
        return loaded  # a plugin file, or a module: its state exists once
    if not file.is_file():
        raise ConfigError(f"there is no file {path} (of the {what})")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} (of the {what}) raised {type(error).__name__} on import: {error}") from error
    return module
