"""What holds for a component of any kind, and what all suites share."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from miles_core.component import BuildContext, Component, NoOptions
from miles_core.settings import RunConfig

T = TypeVar("T")

HEAVY = ("torch", "ray", "transformers", "sglang", "vllm", "megatron", "jax")
"""What a plugin's entry module must do without: it is imported to list components and to validate options."""
TRAITS: dict[str, dict[str, Any]] = {
    "advantage": {"baseline": ("group",)},
    "correction": {"denominator": ("keep", "shrink"), "ratio": ("token", "sequence")},
    "engine": {"gpus": float, "uses": frozenset, "python": ("server",)},
    "launcher": {"processes": ("all",)},
    "loss": {
        "scope": ("policy", "value", "pair"),
        "zero_advantage": ("no-gradient",),
        "ratio": ("token", "sequence"),
    },
    "model": {"architectures": tuple},
    "reward": {"inline": bool},
    "rollout": {"logprobs": ("none",)},
    "trainer": {"gpus": float, "outputs": frozenset, "uses": frozenset},
}
"""What the core reads, by kind; a trait may also be a function of the options."""
_PROGRAM = """
import importlib, importlib.abc, importlib.machinery, importlib.util, json, sys
name, file, path, heavy = json.loads(sys.argv[1])
sys.path[:] = path
class Blocker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in heavy else None
    def create_module(self, spec):
        raise ImportError("imports " + spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Blocker())
try:
    found = importlib.util.find_spec(name) is not None
except ModuleNotFoundError:
    found = False
if found:
    importlib.import_module(name)
else:
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


class ComponentContract:
    """Subclass the suite of your kind, name the class Test..., and set `component`. Everything else has a default.

    Test methods take `self` and at most `tmp_path`. What needs a fixture of your own goes into an autouse fixture
    that sets attributes of `self`.
    """

    component: ClassVar[Any] = None
    """The component under test."""
    options: Mapping[str, Any] = {}
    """Options of the component, as keyword arguments of its config class."""
    model_path: Path | None = None
    """Folder of a (tiny) model, where the component needs one."""
    entry_module: str = ""
    """Module that is imported without heavy libraries; by default the one that defines the options, or the builder."""
    own_traits: frozenset[str] = frozenset()
    """Traits that only your own plugins read."""
    timeout_s: float = 120.0
    """Limit of each thing that the suite waits for."""

    # --- For the suites ---

    @property
    def config(self) -> Any:
        """The validated options."""
        assert isinstance(self.component, Component), f"set `component` in {type(self).__name__}"
        return self.component.config(**self.options)

    def run_config(self) -> RunConfig:
        """The run that the component believes to be part of."""
        tables = {name: {"use": "toy"} for name in ("tokenizer", "data", "engine", "trainer")}
        rollout = {"groups_per_step": 2, "samples_per_group": 2}
        return RunConfig.model_validate({**tables, "steps": 10, "rollout": rollout, "loss": ({"use": "contract"},)})

    def make_context(self, folder: Path, **fields: Any) -> BuildContext:
        """What the component is built with; `fields` replace some of it."""
        from miles_core.testing.toy import ToyTokenizer

        values = {
            "component": f"contract/{self.component.name}",
            "run_dir": folder,
            "seed": 0,
            "run_config": self.run_config(),
            "model_path": self.model_path,
            "tokenizer": ToyTokenizer(),
            "device": "cpu",
            "needs": self.component.needed(self.config),
        }
        return BuildContext(**(values | fields))

    def build(self, folder: Path, **fields: Any) -> Any:
        """The object under test, new each time; `fields` are those of `make_context`."""
        return self.component.build(self.config, self.make_context(folder, **fields))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; a hang is a failure."""
        return run_within(work, self.timeout_s)

    # --- The rules ---

    def test_name_is_kebab_case(self) -> None:
        """`name` is lower case, in words joined by hyphens."""
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.component.name), f'"{self.component.name}" is not kebab-case'

    def test_summary_is_one_line(self) -> None:
        """`summary` is one line that says something."""
        summary = self.component.summary
        assert summary.strip(), "the summary is empty"
        assert "\n" not in summary and len(summary) <= 120, f"not one line of at most 120 characters: {summary!r}"

    def test_config_refuses_what_it_does_not_know(self) -> None:
        """The config class is frozen and strict and forbids extra keys, NaN and infinity; so are models inside it."""
        for model in models_in(self.component.config):
            wanted = {"extra": "forbid", "frozen": True, "strict": True, "allow_inf_nan": False, "validate_default": True}
            other = {k: model.model_config.get(k) for k, v in wanted.items() if model.model_config.get(k) != v}
            assert not other, f"{model.__name__} has {other}; derive it from ComponentConfig"

    def test_every_option_is_described(self) -> None:
        """Every option has a docstring or a description."""
        for model in models_in(self.component.config):
            bare = [name for name, field in model.model_fields.items() if not (field.description or "").strip()]
            assert not bare, f"{model.__name__}: no description for {', '.join(bare)}"

    def test_sequences_are_tuples(self) -> None:
        """Options are tuples rather than lists or sets: a frozen config with a list inside is not frozen."""
        for model in models_in(self.component.config):
            for name, field in model.model_fields.items():
                wrong = [t for t in types_in(field.annotation) if t in (list, set, frozenset)]
                assert not wrong, f"{model.__name__}.{name}: {field.annotation} should be a tuple"

    def test_default_options_are_valid(self) -> None:
        """The config can be made from the required options alone, and made again from its own JSON."""
        try:
            config = self.config
            again = self.component.config.model_validate_json(config.model_dump_json())
        except ValidationError as error:
            pytest.fail(f"the options {dict(self.options)} or the defaults beside them are not valid: {error}")
        assert again == config, "the config does not survive JSON"

    def test_imports_without_heavy_libraries(self) -> None:
        """The module that registers the component imports while torch, ray, transformers, sglang and the like cannot."""
        error = import_problem(self.entry_module or entry_module(self.component))
        assert not error, f"move it into `build`: {error}"

    def test_capabilities_are_names(self) -> None:
        """`provides`, `requires` and `needs` work on these options and give sets (or nested tuples) of names."""
        config = self.config
        for what in ("provided", "required", "needed"):
            with no_error(f"{what} of these options"):
                value = getattr(self.component, what)(config)
            wanted = tuple if what == "required" else frozenset
            assert isinstance(value, wanted), f"{what} gave a {type(value).__name__}, not a {wanted.__name__}"
            odd = [x for x in atoms(value) if not isinstance(x, str) or not x]
            assert not odd, f"{what} holds {odd}, which are not names"

    def test_secrets_are_names(self) -> None:
        """`secrets` are names of environment variables, never their values."""
        odd = [s for s in self.component.secrets if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", s)]
        assert not odd, f"not names of environment variables: {odd}"

    def test_traits_are_known(self) -> None:
        """Every trait is one that the core reads for this kind, with a value that it understands."""
        known = TRAITS.get(kind_of(type(self)), {})
        for name, value in self.component.traits.items():
            assert name in known or name in self.own_traits, f'nobody reads the trait "{name}"; known: {sorted(known)}'
            if name in known:
                value = value(self.config) if callable(value) else value
                assert trait_fits(value, known[name]), f"trait {name} = {value!r} is none of {known[name]}"

    def test_state_restores(self, tmp_path: Path) -> None:
        """Where the object has `state`: it is JSON, and what restored it has the same."""
        made = self.build(tmp_path)
        if not hasattr(made, "state"):
            return
        state = as_json(made.state())
        other = self.build(tmp_path)
        other.restore(state)
        assert as_json(other.state()) == state, "restore(state) does not give the same state"


# --- Helpers of the suites -------------------------------------------------------------------------------------------


def kind_of(suite: type) -> str:
    """ "RewardContract" anywhere among the classes of a suite: "reward"."""
    names = [c.__name__.removesuffix("Contract").lower() for c in suite.__mro__ if c.__name__.endswith("Contract")]
    return names[0]


def models_in(config: type[BaseModel]) -> list[type[BaseModel]]:
    """A config class and every model that its options hold."""
    found = {config: None}
    for model in found.copy():
        for field in model.model_fields.values():
            for inner in types_in(field.annotation):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    found.update(dict.fromkeys(models_in(inner)))
    return list(found)


def types_in(annotation: Any) -> Iterator[Any]:
    """Every class in an annotation: `tuple[list[int], ...] | None` holds tuple, list, int, None."""
    origin = typing.get_origin(annotation)
    if origin not in (None, typing.Union, types.UnionType, typing.Annotated, typing.Literal):
        yield origin
    elif origin is None:
        yield annotation
    if origin is not typing.Literal:
        for inner in typing.get_args(annotation):
            yield from types_in(inner)


def atoms(value: Any) -> Iterator[Any]:
    """The members of a set or of tuples in tuples."""
    if isinstance(value, (tuple, frozenset)):
        for inner in value:
            yield from atoms(inner)
    else:
        yield value


def trait_fits(value: Any, known: Any) -> bool:
    if isinstance(known, tuple):
        return value in known
    if known is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    return isinstance(value, known)


def entry_module(component: Component[Any]) -> str:
    if hasattr(component, "function"):
        return component.function.__module__
    if component.config is not NoOptions:
        return component.config.__module__
    return getattr(component.build, "func", component.build).__module__


@functools.cache
def import_problem(module: str) -> str:
    """ "" when `module` imports in a new process in which heavy libraries cannot be imported, else the last error line."""
    file = getattr(sys.modules.get(module), "__file__", None)
    argument = json.dumps([module, file, sys.path, HEAVY])
    done = subprocess.run([sys.executable, "-c", _PROGRAM, argument], capture_output=True, text=True, timeout=120)
    return f"{module} does not import: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""


def as_json(state: Any) -> Any:
    """`state` after a round trip through JSON, as a checkpoint does it."""
    try:
        again = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the state {state!r:.200} is not JSON: {error}") from None
    assert again == state, f"the state does not survive JSON: {state!r:.200} became {again!r:.200}"
    return again


@contextmanager
def no_error(doing: str) -> Iterator[None]:
    """Turns what plugin code raises into a failure that says what was asked of it."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{doing} raised {type(error).__name__}: {error}") from error


@contextmanager
def refused(errors: Any, doing: str) -> Iterator[list[BaseException]]:
    """Expects one of `errors`; another exception and none are both failures. The list holds what was raised."""
    caught: list[BaseException] = []
    try:
        yield caught
    except errors as error:
        caught.append(error)
        return
    except Exception as error:
        raise AssertionError(f"{doing} raised {type(error).__name__} ({error}), not {_names(errors)}") from error
    raise AssertionError(f"{doing} was not refused with {_names(errors)}")


def _names(errors: Any) -> str:
    return " or ".join(e.__name__ for e in (errors if isinstance(errors, tuple) else (errors,)))


def run_within(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    async def bounded() -> T:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        if not done:
            task.cancel()
            raise AssertionError(f"it did not finish within {limit_s:g} s")
        return task.result()

    return asyncio.run(bounded())
