"""A decorated function is a component with typed options, and still a function."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from pydantic import ValidationError

import miles_core
from miles_core import Score, Verdict
from miles_core.errors import ContractError, PluginError
from miles_core.functional import FunctionComponent

if TYPE_CHECKING:
    from miles_core import Sample  # not importable when annotations are resolved, and needs not be


def built(component: FunctionComponent, **options: Any) -> Any:
    return component.build(component.config(**options), None)


@miles_core.reward("acme", secrets=["ACME_KEY"])
def acme(sample: Sample, *, bonus: float = 1.0, mode: Literal["a", "b"] = "a", words=("x",), limit: int | None = None):
    """Rewards what acme likes.

    bonus: given for every match
    """
    return (sample, bonus, mode, words, limit)


def test_a_reward_is_a_component_with_the_functions_options():
    assert (acme.kind, acme.name, acme.summary, acme.secrets) == (
        "reward",
        "acme",
        "Rewards what acme likes.",
        ("ACME_KEY",),
    )
    assert built(acme).score("s") == ("s", 1.0, "a", ("x",), None)
    assert built(acme, bonus=2.0, mode="b", words=("y",), limit=3).score("s") == ("s", 2.0, "b", ("y",), 3)


def test_it_can_still_be_called():
    assert acme("s", bonus=0.5) == ("s", 0.5, "a", ("x",), None)


@pytest.mark.parametrize(
    "options", [{"bonus": "1"}, {"bonus": float("nan")}, {"mode": "c"}, {"limit": 1.5}, {"bnus": 1.0}, {"words": 3}]
)
def test_options_are_as_strict_as_any_components(options: dict):
    with pytest.raises(ValidationError):
        acme.config(**options)


def test_options_are_described_by_the_docstring_or_by_where_to_look():
    fields = acme.config.model_fields
    assert fields["bonus"].description == "given for every match"
    assert all(f.description for f in fields.values())


def test_an_option_without_default_is_required():
    @miles_core.reward("r")
    def r(sample, *, path: str):
        return path

    with pytest.raises(ValidationError):
        r.config()
    assert built(r, path="p").score(None) == "p"


def test_an_async_reward_stays_async():
    @miles_core.reward("slow")
    async def slow(sample, *, value: float = 0.5):
        return Score(value=value)

    assert asyncio.run(built(slow, value=0.25).score(None)).value == 0.25


def test_a_group_reward_has_score_group_and_no_score():
    @miles_core.reward("rank", group=True)
    def rank(group, *, step: float = 1.0):
        return [step * i for i in range(len(group))]

    reward = built(rank, step=2.0)
    assert reward.score_group("abc") == [0.0, 2.0, 4.0] and not hasattr(reward, "score")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, Verdict(keep=True)),
        (False, Verdict(keep=False, reason="odd")),
        (np.bool_(False), Verdict(keep=False, reason="odd")),
        (Verdict(keep=False, reason="mine"), Verdict(keep=False, reason="mine")),
    ],
)
def test_a_filter_may_return_a_verdict_or_a_bool(returned: Any, expected: Verdict):
    assert built(miles_core.filter("odd")(lambda group: returned)).check(None) == expected


def test_a_filter_that_returns_something_else_is_an_error_naming_it():
    with pytest.raises(ContractError, match=r'filter "odd" \(.*<lambda>\) returned None'):
        built(miles_core.filter("odd")(lambda group: None)).check(None)


def test_the_other_kinds_are_called_as_their_interfaces_say():
    sampler = built(miles_core.sampler("s")(lambda prompts, history, *, n=1: prompts[:n]), n=2)
    assert sampler.pick([1, 2, 3], {}) == [1, 2]
    assert built(miles_core.advantage("a")(lambda inputs, *, scale=2.0: inputs * scale))(3) == 6.0
    assert built(miles_core.correction("c")(lambda inputs: inputs))(3) == 3
    assert built(miles_core.loss("l", needs=["logprobs"])(lambda x, *, eps=0.5: x + eps))(1) == 1.5
    assert built(miles_core.metric("m")(lambda groups, batch, reports: {"n": len(groups)}))([1], None, []) == {"n": 1}


def test_needs_and_traits_are_known_before_anything_is_built():
    loss = miles_core.loss("l", needs=["logprobs", "old_logprobs"], scope="pair")(lambda x: x)
    assert loss.needed(loss.config()) == {"logprobs", "old_logprobs"} and loss.traits["scope"] == "pair"
    assert loss.traits["ratio"] == "token" and "zero_advantage" not in loss.traits
    more = miles_core.loss("m", needs=["logprobs"], ratio="sequence", zero_advantage="no-gradient")(lambda x: x)
    assert more.traits == {"scope": "policy", "ratio": "sequence", "zero_advantage": "no-gradient"}
    correction = miles_core.correction("c", denominator="shrink", needs=["old_logprobs"])(lambda inputs: inputs)
    assert correction.needed(None) == {"old_logprobs"} and correction.traits["denominator"] == "shrink"
    assert miles_core.correction("c")(lambda inputs: inputs).traits["denominator"] == "keep"


def bad(kind: str, function: Any) -> str:
    with pytest.raises(PluginError) as caught:
        getattr(miles_core, kind)("bad")(function)
    return str(caught.value)


def unresolvable(sample, *, x: NoSuchType = 1): ...  # noqa: F821


def mistyped(sample, *, x: float = "1"): ...


@pytest.mark.parametrize(
    ("kind", "function", "message"),
    [
        ("reward", lambda: 1, "must accept (sample)"),
        ("reward", lambda sample, label: 1, "must accept (sample)"),
        ("sampler", lambda prompts: 1, "must accept (prompts, history)"),
        ("reward", lambda sample, bonus=1.0: 1, "bonus would never be set; write options after a *"),
        ("reward", lambda sample, **options: 1, "options would never be set"),
        ("reward", lambda sample, *, limit=None: 1, "annotate the option limit"),
        ("reward", unresolvable, "the type of an option cannot be resolved: name 'NoSuchType'"),
        ("reward", mistyped, "x Input should be a valid number"),
        ("reward", lambda sample, *, _hidden=1: 1, "_hidden"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_where_it_is_written(kind: str, function: Any, message: str):
    text = bad(kind, function)
    assert f'{kind} "bad" (' in text and message in text


def test_a_forgotten_name_is_refused():
    with pytest.raises(PluginError, match=r'@reward needs a name: @miles_core.reward\("my-reward"\)'):
        miles_core.reward(lambda sample: 1.0)


def test_an_unknown_denominator_is_refused():
    with pytest.raises(PluginError, match='"keep" or "shrink"'):
        miles_core.correction("c", denominator="drop")


@pytest.mark.parametrize("wrong", [{"scope": "token"}, {"ratio": "group"}, {"zero_advantage": "none"}])
def test_an_unknown_trait_of_a_loss_is_refused(wrong: dict):
    (name,) = wrong
    with pytest.raises(PluginError, match=f'loss "acme": {name} is one of .*, not'):
        miles_core.loss("acme", needs=(), **wrong)


def test_an_advantage_says_that_it_gives_returns():
    made = miles_core.advantage("acme", provides=["column/returns"])(lambda inputs: inputs)
    assert made.provided(made.config()) == {"column/returns"}


def test_an_option_may_have_the_name_of_a_pydantic_method():
    component = miles_core.reward("r")(lambda sample, *, json=3, copy=False: (json, copy))
    assert built(component, json=4).score(None) == (4, False)
