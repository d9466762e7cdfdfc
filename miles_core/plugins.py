"""The plugin host: imports the plugins that a run uses, one by one, and collects what they offer.

A plugin that fails - at import, in a registration hook, by what it returns - is taken out whole, with one line that names
plugin, distribution and reason. It stops a run only when the run needs it: because it was named, or because its component
is selected.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from miles_core import __version__, hookspecs
from miles_core.discovery import BUILTIN, ComponentRef, PluginInfo, discover, normalise
from miles_core.errors import ConfigError, Interrupted, PluginError
from miles_core.registry import Registry, suggest
from miles_core.selection import chosen_plugins, split_names, switch

if TYPE_CHECKING:
    from miles_core.fields import FieldSpec

__all__ = ["PluginError", "PluginHost", "PluginInfo", "chosen_plugins", "discover", "split_names"]

log = logging.getLogger("miles.plugins")

SLOW_IMPORT_S = 10.0
MAX_OBSERVER_FAILURES = 3
LIFECYCLE = tuple(
    name
    for name in vars(hookspecs)
    if name.startswith("miles_") and name not in (*hookspecs.REGISTRATION, "miles_configure")
)
"""Hooks that observe."""


class PluginHost:
    """Loaded plugins, their components, and the lifecycle hooks.

    `infos`: every plugin found, with its state, sorted by name; plugin files follow. `builtin`: the core's own components.
    `registry`: components of what loaded. `fields`: side channels by name.
    """

    def __init__(self, infos: Iterable[PluginInfo] = (), *, origin: str = "", strict: bool = False) -> None:
        self.infos = list(infos)
        self.origin = origin
        self.strict = strict
        self.builtin = PluginInfo(name=BUILTIN, module="miles_core.builtin", dist="miles-core", version=__version__)
        self.registry = Registry(self.infos)
        self.fields: dict[str, FieldSpec] = {}
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._failures: dict[tuple[str, str], int] = {}

    @classmethod
    def create(
        cls,
        *,
        plugins: Sequence[str] | None = None,
        adjust: Sequence[str] = (),
        files: Sequence[Path] = (),
        distributions: Iterable[Any] | None = None,
        strict: bool = False,
        origin: str = "--plugins",
    ) -> PluginHost:
        """Discovers, imports and registers.

        `plugins`: exactly these (None: all that are installed); `adjust`: "NAME" adds one, "no:NAME" removes one;
        `files`: plugin files; `distributions` replaces the environment; `origin` says who set `plugins`, for messages (see
        `chosen_plugins`). A named plugin that does not load raises PluginError; with `strict`, whatever any plugin raised
        is re-raised as it is.
        """
        infos = discover(distributions)
        named = switch(infos, plugins, adjust, origin)
        host = cls(infos, origin=origin if plugins is not None else "all installed", strict=strict)
        host.load(host.builtin, needed=True)
        for info in infos:
            if info.state != "off":
                host.load(info, needed=info.name in named)
        for file in files:
            host._load_file(Path(file))
        return host

    @property
    def loaded(self) -> list[PluginInfo]:
        """The plugins in force, built-ins first."""
        return [info for info in (self.builtin, *self.infos) if info.state == "loaded"]

    def describe(self) -> str:
        """One line: which plugins are in force, who said so, and which are not."""
        by_state = {state: [i.name for i in self.infos if i.state == state] for state in ("loaded", "off")}
        failed = [i.name for i in self.infos if i.state not in by_state]
        parts = [f"plugins ({self.origin}): {', '.join(by_state['loaded']) or 'built-ins only'}"]
        parts += [f"off: {', '.join(by_state['off'])}"] if by_state["off"] else []
        parts += [f"did not load: {', '.join(failed)}"] if failed else []
        return "; ".join(parts)

    # --- Lifecycle ---------------------------------------------------------------------------------------------------

    def observe(self, hook: str, **kwargs: Any) -> None:
        """Calls every implementation of an observing hook by itself. What one raises is logged with its plugin's name;
        after MAX_OBSERVER_FAILURES of the same observer it is switched off. With `strict` it is re-raised instead."""
        assert hook in LIFECYCLE, f"{hook} is not an observing hook"
        for impl in self._implementations(hook):
            key = (impl.plugin_name, hook)
            if self._failures.get(key, 0) >= MAX_OBSERVER_FAILURES:
                continue
            try:
                impl.function(*(kwargs[name] for name in impl.argnames))
            except (KeyboardInterrupt, Interrupted):  # not the observer's doing: the run was asked to stop while it ran
                raise
            except BaseException as error:
                if self.strict:
                    raise
                self._failures[key] = self._failures.get(key, 0) + 1
                log.warning("%s failed in %s: %s", self._owner(impl).label, hook, one_line(error))
                if self._failures[key] >= MAX_OBSERVER_FAILURES:
                    log.warning(
                        "%s: %s is switched off after %d failures", self._owner(impl).label, hook, self._failures[key]
                    )

    def configure(self, config: Any) -> None:
        """Asks every plugin whether it vetoes `config`. Raises ConfigError naming the first one that does."""
        for impl in self._implementations("miles_configure"):
            try:
                impl.function(*(config for _ in impl.argnames))
            except (KeyboardInterrupt, Interrupted):
                raise
            except BaseException as error:
                if self.strict:
                    raise
                text = str(error) or type(error).__name__
                raise ConfigError(f"{self._owner(impl).label} refuses this config: {text}") from error

    def _implementations(self, hook: str) -> list[Any]:
        """In an order that can be told beforehand: tryfirst, the rest by plugin name (built-ins first), trylast."""
        impls = getattr(self._pm.hook, hook).get_hookimpls()
        order = {info.name: place for place, info in enumerate((self.builtin, *self.infos))}
        return sorted(impls, key=lambda i: (bool(i.trylast) - bool(i.tryfirst), order[i.plugin_name]))

    def _owner(self, impl: Any) -> PluginInfo:
        return next(
            info for info in (self.builtin, *self.infos) if info.name == impl.plugin_name and info.state == "loaded"
        )

    # --- Loading -----------------------------------------------------------------------------------------------------

    def _load_file(self, file: Path) -> None:
        name = normalise(file.stem)
        info = PluginInfo(name=name, module=f"miles_plugin_file_{name.replace('-', '_')}", path=file.resolve())
        other = next((i for i in (self.builtin, *self.infos) if i.name == name and i.state != "off"), None)
        if not file.is_file():
            raise PluginError(f"there is no plugin file {file} (--plugin-file)")
        if other is not None:
            raise PluginError(
                f'two plugins are named "{name}": {other.origin} and {info.origin}',
                "rename the file" + (f", or leave the other out with -p no:{name}" if other in self.infos else ""),
            )
        self.infos.append(info)
        self.registry.infos.append(info)
        self.load(info, needed=True)

    def load(self, info: PluginInfo, *, needed: bool) -> None:
        """Imports and registers `info`, or leaves it "broken" with a reason and nothing of it registered."""
        if info.state in ("broken", "incompatible"):
            if needed:
                raise PluginError(f"{info.label} is {info.state}: {info.reason}")
            log.warning("%s is left out: %s", info.label, info.reason)
            return
        try:
            with _announce_slow_import(info):
                module = _import(info)
            offered = self._register(info, module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            info.state, info.reason = "broken", _reason(info, error)
            if self.strict:
                raise
            if needed or info is self.builtin:
                raise PluginError(f"{info.label} does not load: {info.reason}") from error
            log.warning("%s is left out: %s", info.label, info.reason)
            return
        info.state, info.reason = "loaded", ""
        info.components = tuple(ComponentRef(kind, c.name, getattr(c, "summary", "")) for kind, c in offered)
        for kind, component in offered:
            self.registry.add(kind, component, info)
            if kind == "field":
                self.fields[component.name] = component

    def _register(self, info: PluginInfo, module: ModuleType) -> list[tuple[str, Any]]:
        """Everything that `module` offers, as (kind, component). On any error the module is unregistered again."""
        if self._pm.is_registered(module):
            raise PluginError(f'its module "{info.module}" is already loaded as plugin "{self._pm.get_name(module)}"')
        _check_markers(module)
        try:
            self._pm.register(module, name=info.name)
            callers = self._pm.get_hookcallers(module) or []
            self._check_hooks(info, module, callers)
            offered = self._collect(module, callers)
            if not callers and not offered:
                raise PluginError("it offers nothing: no function is marked with @hookimpl, and none is decorated")
            self._check_offer(offered)
        except BaseException:
            self._unregister(info.name)
            raise
        return offered

    def _unregister(self, name: str) -> None:
        # pluggy enters the name before it checks the hooks, so a plugin whose signature is wrong is half in.
        if self._pm.has_plugin(name):
            self._pm.unregister(name=name)

    def _check_hooks(self, info: PluginInfo, module: ModuleType, callers: Sequence[Any]) -> None:
        for caller in callers:
            impls = [impl for impl in caller.get_hookimpls() if impl.plugin is module]
            if not caller.has_spec() and not all(impl.optionalhook for impl in impls):
                close = suggest(caller.name, [*hookspecs.REGISTRATION, *LIFECYCLE, "miles_configure"])
                raise PluginError(f'there is no hook "{caller.name}"' + (f'; did you mean "{close}"?' if close else ""))
            for impl in impls:
                if impl.hookwrapper or impl.wrapper:
                    raise PluginError(
                        f"{caller.name} is a wrapper; each implementation is called by itself, so none can wrap"
                    )
                if _is_async(impl.function):
                    raise PluginError(f"{caller.name} is asynchronous; hooks are plain functions")
        self._pm.check_pending()

    def _collect(self, module: ModuleType, callers: Sequence[Any]) -> list[tuple[str, Any]]:
        """What the registration hooks return, then functions that were made components by a decorator."""
        offered: list[tuple[str, Any]] = []
        by_hook = {impl_caller.name: impl_caller for impl_caller in callers}
        for hook, kind in hookspecs.REGISTRATION.items():
            for impl in by_hook[hook].get_hookimpls() if hook in by_hook else ():
                if impl.plugin is module:
                    offered += [(kind, component) for component in _call_hook(hook, kind, impl.function)]
        returned = {id(component) for _, component in offered}
        return offered + [(c.kind, c) for c in _decorated(module) if id(c) not in returned]

    def _check_offer(self, offered: list[tuple[str, Any]]) -> None:
        seen = set()
        for kind, component in offered:
            if (kind, component.name) in seen:
                raise PluginError(f'it offers two {kind} components named "{component.name}"')
            seen.add((kind, component.name))
            known = self.fields.get(component.name) if kind == "field" else None
            if known is not None and known != component:
                raise PluginError(
                    f'it declares the field "{component.name}" otherwise than a plugin loaded before it: {known}'
                )


# --- One module ------------------------------------------------------------------------------------------------------


def _import(info: PluginInfo) -> ModuleType:
    if info.path is None:
        return import_module(info.module)
    spec = spec_from_file_location(info.module, info.path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{info.path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[info.module] = module  # before it runs: dataclasses and pickles look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[info.module]
        raise
    return module


@contextmanager
def _announce_slow_import(info: PluginInfo) -> Iterator[None]:
    def announce() -> None:
        print(
            f"still importing {info.label} after {SLOW_IMPORT_S:g} s; leave it out with -p no:{info.name}", file=sys.stderr
        )

    timer = threading.Timer(SLOW_IMPORT_S, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_markers(module: ModuleType) -> None:
    """A function with a hook's name and no marker would be ignored without a word."""
    for name, value in vars(module).items():
        if name in (*hookspecs.REGISTRATION, *LIFECYCLE, "miles_configure") and callable(value):
            marked = (getattr(value, f"{hookspecs.PROJECT}_{kind}", None) for kind in ("impl", "spec"))
            if all(mark is None for mark in marked):
                raise PluginError(f"{name} is not marked with @hookimpl")


def _call_hook(hook: str, kind: str, function: Any) -> list[Any]:
    from miles_core.component import Component
    from miles_core.fields import FieldSpec

    wanted = FieldSpec if kind == "field" else Component
    try:
        result = function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise HookFailed(f"{hook} raised {one_line(error)}") from error
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, dict)):
        raise PluginError(f"{hook} returned {type(result).__name__}, not an iterable of {wanted.__name__}s")
    components = list(result)
    for component in components:
        if not isinstance(component, wanted):
            raise PluginError(f"{hook} returned {component!r:.80}, which is no {wanted.__name__}")
        check_component(hook, component)
    return components


def check_component(hook: str, component: Any) -> None:
    """Raises PluginError for a component that no config could select."""
    from miles_core.component import Component, ComponentConfig

    if not isinstance(component, Component):
        return
    name = component.name
    if not isinstance(name, str) or not name or normalise(name) != name or not name.replace("-", "").isalnum():
        raise PluginError(f"{hook} returned a component named {name!r}; names are kebab-case: lower case, digits, hyphens")
    if not (isinstance(component.config, type) and issubclass(component.config, ComponentConfig)):
        raise PluginError(f'the options of "{name}" are {component.config!r}, which is no ComponentConfig class')


def _decorated(module: ModuleType) -> list[Any]:
    """Components that a decorator of `miles_core.functional` made in `module` or its submodules, in source order."""
    functional = sys.modules.get("miles_core.functional")
    if functional is None:
        return []
    values = [value for value in vars(module).values() if isinstance(value, functional.FunctionComponent)]
    home = module.__name__
    own = [v for v in values if v.function.__module__ == home or v.function.__module__.startswith(f"{home}.")]
    return list({id(value): value for value in own}.values())


def _is_async(function: Any) -> bool:
    import inspect

    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


class HookFailed(PluginError):
    """A registration hook raised; the message already names hook and error."""


def one_line(error: BaseException) -> str:
    """Type and message of an error, on one line."""
    if isinstance(error, SystemExit):
        return f"SystemExit({error.code!r})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _reason(info: PluginInfo, error: BaseException) -> str:
    if isinstance(error, PluginError):
        return " ".join(str(error).split())
    if isinstance(error, pluggy.PluginValidationError):
        return " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and (error.name or "") == info.module.partition(".")[0]:
        gone = f'its module "{info.module}" is not there, though {info.origin} is registered as installed'
        return f"{gone}; remove it with: pip uninstall {info.dist}"
    text = f"importing {info.path or info.module} raised {one_line(error)}"
    if isinstance(error, ImportError) and info.install:
        text += f"; it needs {', '.join(info.missing)}: {info.install}"
    return text
