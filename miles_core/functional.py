"""One decorated function is a component. Its keyword-only parameters are the component's options.

    @miles_core.reward("acme")
    def acme(sample, *, bonus: float = 1.0):
        return bonus if sample.prompt.label in sample.response else 0.0

The name then stands for a component that can still be called like the function, for example in a test. A module of an
installed plugin or a `--plugin-file` needs no hook for it: the host collects what was decorated.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import Field, PydanticUserError, create_model

from miles_core.component import BuildContext, Component, ComponentConfig, NoOptions, Requires
from miles_core.errors import ContractError, PluginError
from miles_core.types import Verdict

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "reward": ("sample",),
    "filter": ("group",),
    "sampler": ("prompts", "history"),
    "correction": ("inputs",),
    "advantage": ("inputs",),
    "loss": ("x",),
    "metric": ("groups", "batch", "reports"),
}
"""What a decorated function of each kind is called with, by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionComponent(Component[Any]):
    """A component made from one function; calling it calls the function."""

    kind: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


Decorator = Callable[[Callable[..., Any]], FunctionComponent]


def reward(
    name: str, *, group: bool = False, summary: str = "", secrets: Iterable[str] = (), requires: Requires = ()
) -> Decorator:
    """`f(sample, *, ...) -> float | Score | None`, plain or async. With `group`, `f(group, *, ...)` returns one verdict per
    sample, in order."""

    def adapt(function: Callable[..., Any]) -> Any:
        return SimpleNamespace(**{"score_group" if group else "score": function})

    return _decorator("reward", name, adapt, ("group",) if group else ARGUMENTS["reward"], summary, secrets, requires)


def filter(name: str, *, summary: str = "", requires: Requires = ()) -> Decorator:
    """`f(group, *, ...) -> Verdict | bool`; a plain False is counted under the filter's own name."""

    def adapt(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def check(group: Any) -> Verdict:
            verdict = function(group)
            if isinstance(verdict, Verdict):
                return verdict
            if type(verdict).__name__ not in ("bool", "bool_"):  # numpy's too
                raise ContractError(
                    f'filter "{name}" ({_place(function)}) returned {verdict!r:.80}, not a Verdict or a bool'
                )
            return Verdict(keep=bool(verdict), reason="" if verdict else name)

        return SimpleNamespace(check=check)

    return _decorator("filter", name, adapt, ARGUMENTS["filter"], summary, (), requires)


def sampler(name: str, *, summary: str = "", requires: Requires = ()) -> Decorator:
    """`f(prompts, history, *, ...) -> list[Prompt]`."""

    def adapt(function: Callable[..., Any]) -> Any:
        return SimpleNamespace(pick=function)

    return _decorator("sampler", name, adapt, ARGUMENTS["sampler"], summary, (), requires)


def correction(
    name: str, *, denominator: str = "keep", needs: Iterable[str] = (), summary: str = "", requires: Requires = ()
) -> Decorator:
    """`f(inputs: CorrectionInputs, *, ...) -> CorrectionOutput`. `denominator`: whether a masked token stays in the
    denominator of the loss ("keep") or leaves it ("shrink"). `needs`: the columns that it reads."""
    if denominator not in ("keep", "shrink"):
        raise PluginError(f'correction "{name}": denominator is "keep" or "shrink", not {denominator!r}')
    traits = {"denominator": denominator}
    return _decorator("correction", name, _as_is, ARGUMENTS["correction"], summary, (), requires, needs, traits)


def advantage(
    name: str,
    *,
    needs: Iterable[str] = (),
    provides: Iterable[str] = (),
    summary: str = "",
    requires: Requires = (),
) -> Decorator:
    """`f(inputs: AdvantageInputs, *, ...) -> AdvantageOutput`. `needs`: the columns that it reads; `provides`:
    "column/returns" where it gives the returns that a loss of a critic learns."""
    return _decorator(
        "advantage", name, _as_is, ARGUMENTS["advantage"], summary, (), requires, needs, provides=frozenset(provides)
    )


def loss(
    name: str,
    *,
    needs: Iterable[str],
    scope: str = "policy",
    ratio: str = "token",
    zero_advantage: str | None = None,
    summary: str = "",
    requires: Requires = (),
) -> Decorator:
    """`f(x: LossInputs, *, ...) -> LossOutput`, inside trainer ranks. `needs`: what it may ask of `x.get`; `scope`: which
    token weights apply; `ratio`: "sequence" when it weighs whole sequences by their probability; `zero_advantage`:
    "no-gradient" when a token without advantage has no gradient."""
    for option, value, known in (
        ("scope", scope, ("policy", "value", "pair")),
        ("ratio", ratio, ("token", "sequence")),
        ("zero_advantage", zero_advantage, (None, "no-gradient")),
    ):
        if value not in known:
            raise PluginError(f'loss "{name}": {option} is one of {", ".join(map(repr, known))}, not {value!r}')
    traits = {"scope": scope, "ratio": ratio} | ({"zero_advantage": zero_advantage} if zero_advantage else {})
    return _decorator("loss", name, _as_is, ARGUMENTS["loss"], summary, (), requires, needs, traits)


def metric(name: str, *, summary: str = "") -> Decorator:
    """`f(groups, batch, reports, *, ...) -> mapping of numbers`, logged under `<name>/`."""
    return _decorator("metric", name, _as_is, ARGUMENTS["metric"], summary)


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _decorator(
    kind: str,
    name: str,
    adapt: Callable[[Callable[..., Any]], Any],
    arguments: tuple[str, ...],
    summary: str,
    secrets: Iterable[str] = (),
    requires: Requires = (),
    needs: Iterable[str] = (),
    traits: dict[str, Any] | None = None,
    provides: frozenset[str] = frozenset(),
) -> Decorator:
    if not isinstance(name, str):
        raise PluginError(f'@{kind} needs a name: @miles_core.{kind}("my-{kind}")')
    needed = frozenset(needs)

    def decorate(function: Callable[..., Any]) -> FunctionComponent:
        config = options_of(function, kind, name, arguments)

        def build(options: ComponentConfig, context: BuildContext) -> Any:
            # Validated values as they are: model_dump would turn nested options into dicts.
            chosen = {field: getattr(options, field) for field in type(options).model_fields}
            return adapt(functools.wraps(function)(functools.partial(function, **chosen)) if chosen else function)

        return FunctionComponent(
            kind=kind,
            function=function,
            name=name,
            summary=summary or _first_line(function) or f"{kind} from {_place(function)}",
            config=config,
            build=build,
            requires=requires,
            needs=(lambda _: needed) if needed else None,
            secrets=tuple(secrets),
            traits=traits or {},
            provides=provides,
        )

    return decorate


def options_of(function: Callable[..., Any], kind: str, name: str, arguments: tuple[str, ...]) -> type[ComponentConfig]:
    """A config class from the keyword-only parameters of `function`. Raises PluginError when it cannot be called with
    `arguments`, or when a parameter's type cannot be told."""
    at = f'{kind} "{name}" ({_place(function)})'
    parameters = inspect.signature(function).parameters.values()
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys((p.name for p in options), None))
    except TypeError as error:
        raise PluginError(f"{at} must accept ({', '.join(arguments)}): {error}") from None
    extra = [
        p.name for p in parameters if p.kind is p.VAR_KEYWORD or (p.kind is not p.KEYWORD_ONLY and p.default is not p.empty)
    ]
    if extra:
        raise PluginError(
            f"{at}: {', '.join(extra)} would never be set; write options after a *, as keyword-only parameters"
        )
    if not options:
        return NoOptions
    types = _annotations(function, options, at)
    fields = {p.name: (types[p.name], _field(function, p, name)) for p in options}
    title = "".join(part.capitalize() for part in re.split(r"\W", name)) + kind.capitalize() + "Config"
    with warnings.catch_warnings():  # an option may be called "json" or "copy"; configs are only ever read by field
        warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")
        try:
            config = create_model(title, __base__=ComponentConfig, __module__=function.__module__, **fields)
            if not any(field.is_required() for field in config.model_fields.values()):
                config()  # a default of the wrong type is the author's error, not that of whoever selects it
            return config
        except (PydanticUserError, TypeError, NameError, ValueError) as error:
            raise PluginError(f"{at}: {' '.join(str(error).split())}") from error


def _annotations(function: Callable[..., Any], options: list[inspect.Parameter], at: str) -> dict[str, Any]:
    written = {p.name: p.annotation for p in options if p.annotation is not p.empty}
    try:
        # Only those of options: the first argument's type is often imported for type checkers alone.
        holder = SimpleNamespace(__annotations__=written)
        types = typing.get_type_hints(holder, globalns=getattr(function, "__globals__", {}), include_extras=True)
    except Exception as error:
        raise PluginError(f"{at}: the type of an option cannot be resolved: {error}") from error
    for parameter in options:
        if parameter.name in types:
            continue
        if parameter.default is parameter.empty or parameter.default is None:
            raise PluginError(f"{at}: annotate the option {parameter.name}; its default does not tell its type")
        types[parameter.name] = type(parameter.default)
    return types


def _field(function: Callable[..., Any], parameter: inspect.Parameter, name: str) -> Any:
    """Described by a line "parameter: text" of the function's docstring, if there is one."""
    match = re.search(rf"^\s*`*{re.escape(parameter.name)}`*\s*:\s*(.+)$", function.__doc__ or "", re.MULTILINE)
    described = match.group(1).strip() if match else f"Option of {name}; see {_place(function)}."
    return Field(... if parameter.default is parameter.empty else parameter.default, description=described)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].strip()


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
