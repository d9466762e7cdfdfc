"""What a wrong name is answered with: where, what exists, what to do."""

from __future__ import annotations

import pytest

from miles_core import Component
from miles_core.discovery import ComponentRef, PluginInfo
from miles_core.errors import ConfigError, PluginError
from miles_core.registry import Registry, suggest

WHERE = "recipes/gsm8k.toml: reward[0].use"


def component(name: str) -> Component:
    return Component(name=name, summary="", build=len)


def plugin(name: str, state: str = "loaded", offers: str = "", **more) -> PluginInfo:
    refs = tuple(ComponentRef(*text.split("/")) for text in offers.split())
    return PluginInfo(name=name, module="m", dist=f"miles-{name}", version="0.1.0", state=state, components=refs, **more)


def registry(*infos: PluginInfo) -> Registry:
    """Loaded plugins offer what their index says."""
    made = Registry([i for i in infos if i.name != "builtin"])
    for info in infos:
        for ref in info.components if info.state == "loaded" else ():
            made.add(ref.kind, component(ref.name), info)
    return made


BUILTIN = plugin("builtin", offers="reward/exact-match filter/nonzero-std")
MATH = plugin("math-reward", offers="reward/math")
SGLANG = plugin("sglang-rollout", offers="engine/sglang")
ACME = plugin("acme-rewards", "off", "reward/acme reward/math", reason="left out by --plugins")
BROKEN = plugin("broken-one", "broken", "reward/sharp", reason="importing it raised ImportError: no")


def message(made: Registry, kind: str, name: str, error: type = ConfigError) -> str:
    with pytest.raises(error) as caught:
        made.find(kind, name, WHERE)
    return str(caught.value)


def test_a_name_and_a_qualified_name_find_the_component():
    made = registry(BUILTIN, MATH)
    for name in ("math", "math-reward:math", "math_reward:math"):
        assert made.find("reward", name).qualified == "math-reward:math"
    assert made.find("reward", "builtin:exact-match").plugin is BUILTIN


def test_unknown_name_is_answered_with_suggestion_installed_and_not_loaded():
    assert message(registry(BUILTIN, MATH, ACME), "reward", "math_verify") == (
        'no reward named "math_verify" (recipes/gsm8k.toml: reward[0].use)\n'
        '  did you mean "math"?  installed: exact-match (built in), math (miles-math-reward 0.1.0)\n'
        "  not loaded because of --plugins: acme-rewards"
    )


def test_a_component_of_a_plugin_that_is_off_is_attributed_to_it():
    text = message(registry(BUILTIN, ACME), "reward", "acme")
    assert 'plugin "acme-rewards" (miles-acme-rewards 0.1.0) offers it and is left out by --plugins; add it with -p' in text


def test_what_is_off_is_no_clash():
    assert registry(MATH, ACME).find("reward", "math").plugin is MATH


@pytest.mark.parametrize("name", ["sglang-rollout", "miles-sglang-rollout", "sglang_rollout"])
def test_a_plugins_name_where_a_components_is_wanted(name: str):
    text = message(registry(BUILTIN, SGLANG), "engine", name)
    assert f'"{name}" is a plugin; its engine is named "sglang"' in text


def test_a_plugins_name_for_a_kind_that_it_does_not_offer():
    text = message(registry(BUILTIN, SGLANG), "reward", "sglang-rollout")
    assert '"sglang-rollout" is a plugin; it offers no reward, but engine "sglang"' in text


def test_the_name_of_another_kind():
    text = message(registry(BUILTIN, SGLANG), "reward", "nonzero-std")
    assert 'there is a filter named "nonzero-std"' in text
    assert 'there is an engine named "sglang"' in message(registry(BUILTIN, SGLANG), "reward", "sglang")


def test_two_plugins_with_one_component_clash_only_when_it_is_selected():
    other = plugin("acme", offers="reward/math reward/own")
    made = registry(BUILTIN, MATH, other)
    assert made.find("reward", "own").plugin is other
    assert made.find("reward", "acme:math").plugin is other
    assert message(made, "reward", "math") == (
        '2 plugins offer a reward named "math" (recipes/gsm8k.toml: reward[0].use)\n'
        "  acme (miles-acme 0.1.0), math-reward (miles-math-reward 0.1.0)\n"
        '  write "acme:math" or "math-reward:math"'
    )


def test_a_clash_with_a_plugin_that_failed_is_no_reason_to_pick_the_other_silently():
    failed = plugin("acme", "broken", "reward/math", reason="no")
    text = message(registry(MATH, failed), "reward", "math")
    assert "acme (miles-acme 0.1.0, did not load)" in text and 'write "math-reward:math"' in text
    assert registry(MATH, failed).find("reward", "math-reward:math").plugin is MATH


def test_selecting_what_a_broken_plugin_offers_is_answered_with_its_reason():
    text = message(registry(BUILTIN, BROKEN), "reward", "sharp", PluginError)
    assert text == (
        'a reward named "sharp" is offered by plugin "broken-one" (miles-broken-one 0.1.0), which did not load '
        "(recipes/gsm8k.toml: reward[0].use)\n  importing it raised ImportError: no"
    )


def test_an_unknown_name_mentions_plugins_that_failed():
    assert "did not load: broken-one (importing it raised ImportError: no)" in message(
        registry(BUILTIN, BROKEN), "reward", "x"
    )


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("mth-reward:math", ConfigError, 'no plugin named "mth-reward"'),
        ("mth-reward:math", ConfigError, 'did you mean "math-reward:math"?'),
        ("acme-rewards:acme", PluginError, "left out by --plugins\n  add it with -p acme-rewards"),
        ("broken-one:sharp", PluginError, "importing it raised ImportError: no"),
        ("math-reward:mth", ConfigError, 'did you mean "math"?  in math-reward: math (miles-math-reward 0.1.0)'),
    ],
)
def test_a_qualified_name_that_leads_nowhere(name: str, error: type, expected: str):
    assert expected in message(registry(BUILTIN, MATH, ACME, BROKEN), "reward", name, error)


def test_all_is_sorted_whatever_the_order_of_loading():
    a, b = plugin("a", offers="reward/x reward/m"), plugin("b", offers="reward/x reward/c")
    names = ["b:c", "a:m", "a:x", "b:x"]
    assert [e.qualified for e in registry(a, b).all("reward")] == names
    assert [e.qualified for e in registry(b, a).all("reward")] == names
    assert registry(a).all("engine") == []


@pytest.mark.parametrize(
    ("word", "expected"), [("math_verify", "math"), ("Exact_Match", "exact-match"), ("zzz", None), ("mth", "math")]
)
def test_suggest(word: str, expected: str | None):
    assert suggest(word, ["exact-match", "math"]) == expected
