"""Field cases G1, G2, G4: what one broken, doubled or failing plugin may do to the others (nothing), and in which order
hooks run."""

from __future__ import annotations

import builtins
import itertools
import shutil
import sys
from pathlib import Path

import pytest
from dists import Dists

from miles_core import plugins as host_module
from miles_core.discovery import discover
from miles_core.errors import ConfigError, Interrupted, PluginError
from miles_core.plugins import PluginHost


def rewards(host: PluginHost) -> list[str]:
    return [e.qualified for e in host.registry.all("reward") if e.plugin is not host.builtin]


def states(host: PluginHost) -> dict[str, str]:
    return {info.name: info.state for info in host.infos}


# --- G1: a broken plugin harms nobody --------------------------------------------------------------------------------

BROKEN = {
    "ImportError": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    "SyntaxError": ("def broken(:", "SyntaxError"),
    "SystemExit": ("import sys; sys.exit(3)", "SystemExit(3)"),
    "BaseException": ("class Odd(BaseException): pass\nraise Odd('away')", "Odd: away"),
    "RuntimeError in hook": (
        "from miles_core import hookimpl\n@hookimpl\ndef miles_rewards():\n    raise RuntimeError('cannot')",
        "miles_rewards raised RuntimeError: cannot",
    ),
    "error after the first component": (
        "from miles_core import hookimpl, Component\n@hookimpl\ndef miles_rewards():\n"
        "    yield Component(name='half', summary='', build=len)\n    raise RuntimeError('cannot')",
        "cannot",
    ),
    "not components": (
        "from miles_core import hookimpl\n@hookimpl\ndef miles_rewards():\n    return ['math']",
        "miles_rewards returned 'math', which is no Component",
    ),
    "nothing": (
        "from miles_core import hookimpl\n@hookimpl\ndef miles_rewards(): pass",
        "miles_rewards returned NoneType, not an iterable of Components",
    ),
    "bad name": (
        "from miles_core import hookimpl, Component\n@hookimpl\ndef miles_rewards():\n"
        "    return [Component(name='My_Reward', summary='', build=len)]",
        "named 'My_Reward'; names are kebab-case",
    ),
    "same name twice": (
        "from miles_core import hookimpl, Component\n@hookimpl\ndef miles_rewards():\n"
        "    return [Component(name='x', summary='', build=len)] * 2",
        'two reward components named "x"',
    ),
    "unknown hook": (
        "from miles_core import hookimpl\n@hookimpl\ndef miles_reward(): return []",
        'there is no hook "miles_reward"; did you mean "miles_rewards"?',
    ),
    "wrong arguments": (
        "from miles_core import hookimpl\n@hookimpl\ndef miles_filters(): return []\n"
        "@hookimpl\ndef miles_rewards(config): return []",
        "config",
    ),
    "unmarked hook": ("def miles_rewards(): return []", "miles_rewards is not marked with @hookimpl"),
    "no hook at all": ("x = 1", "it offers nothing"),
    "old wrapper": (
        "from miles_core import hookimpl\n@hookimpl(hookwrapper=True)\ndef miles_rewards():\n    yield",
        "miles_rewards is a wrapper",
    ),
    "wrapper": (
        "from miles_core import hookimpl\n@hookimpl(wrapper=True)\ndef miles_rewards():\n    return (yield)",
        "miles_rewards is a wrapper",
    ),
    "async hook": (
        "from miles_core import hookimpl\n@hookimpl\nasync def miles_step_end(step): pass",
        "miles_step_end is asynchronous",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_G1_one_broken_plugin_leaves_the_others_and_nothing_of_itself(dists: Dists, case: str, caplog):
    source, reason = BROKEN[case]
    dists.add("bad", source + "\n")
    dists.add("good")
    host = PluginHost.create(distributions=dists.all)
    assert states(host) == {"bad": "broken", "good": "loaded"}
    assert rewards(host) == ["good:good"]
    assert not host._pm.has_plugin("bad") and "miles_bad" not in {
        getattr(p, "__name__", "") for p in host._pm.get_plugins()
    }
    assert all(impl.plugin_name != "bad" for impl in host._pm.hook.miles_rewards.get_hookimpls())
    assert all(impl.plugin_name != "bad" for impl in host._pm.hook.miles_filters.get_hookimpls())
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1 and lines[0].startswith('plugin "bad" (miles-bad 1.0)') and "\n" not in lines[0]
    assert reason in lines[0]


@pytest.mark.parametrize("case", BROKEN)
def test_G1_a_named_plugin_that_is_broken_stops_the_run_with_its_reason(dists: Dists, case: str):
    source, reason = BROKEN[case]
    dists.add("bad", source + "\n")
    for choice in ({"plugins": ["bad"]}, {"adjust": ["bad"]}):
        with pytest.raises(PluginError) as caught:
            PluginHost.create(distributions=dists.all, **choice)
        assert 'plugin "bad" (miles-bad 1.0)' in str(caught.value) and reason in str(caught.value)


def test_G1_selecting_a_component_of_a_broken_plugin_gives_the_plugins_reason(dists: Dists):
    index = {"hook_api": 1, "components": [{"kind": "reward", "name": "sharp", "summary": ""}]}
    dists.add("bad", "raise RuntimeError('no licence')", index=index)
    dists.add("good")
    host = PluginHost.create(distributions=dists.all)
    with pytest.raises(
        PluginError, match=r'"sharp" is offered by plugin "bad" \(miles-bad 1.0\).*run.toml(.|\n)*no licence'
    ):
        host.registry.find("reward", "sharp", "run.toml: reward[0].use")
    with pytest.raises(PluginError, match="no licence"):
        host.registry.find("reward", "bad:sharp")
    assert host.registry.find("reward", "good").plugin.name == "good"


def test_G1_strict_raises_what_the_plugin_raised(dists: Dists):
    dists.add("bad", "raise ZeroDivisionError('mine')")
    with pytest.raises(ZeroDivisionError, match="mine"):
        PluginHost.create(distributions=dists.all, strict=True)


def test_G1_keyboard_interrupt_is_the_users_and_passes(dists: Dists):
    dists.add("bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginHost.create(distributions=dists.all)


@pytest.mark.parametrize("editable", [False, True])
def test_G1_dist_info_left_after_uninstall(dists: Dists, editable: bool, caplog):
    dists.add("gone", editable=editable, dist="miles-gone-away")
    dists.add("good")
    shutil.rmtree(dists.root / ("src/miles-gone-away" if editable else "site/miles_gone_away"))
    assert [(i.name, i.state) for i in discover(dists.all)] == [("gone", "ok"), ("good", "ok")]
    host = PluginHost.create(distributions=dists.all)
    assert states(host) == {"gone": "broken", "good": "loaded"}
    assert 'module "miles_gone_away" is not there' in caplog.text and "pip uninstall miles-gone-away" in caplog.text
    with pytest.raises(PluginError, match="has no files"):
        host.infos[0].content_hash()


def test_G1_the_way_round_a_broken_plugin_is_to_leave_it_out(dists: Dists, caplog):
    dists.add("bad", "raise RuntimeError")
    host = PluginHost.create(distributions=dists.all, adjust=["no:bad"])
    assert states(host) == {"bad": "off"} and not caplog.records


def test_G1_a_slow_import_is_announced_while_it_lasts(dists: Dists, monkeypatch, capsys):
    monkeypatch.setattr(host_module, "SLOW_IMPORT_S", 0.05)
    dists.add(
        "slow",
        "import time; time.sleep(0.4)\n" + "from miles_core import hookimpl\n@hookimpl\ndef miles_rewards(): return []",
    )
    PluginHost.create(distributions=dists.all)
    assert 'still importing plugin "slow" (miles-slow 1.0)' in capsys.readouterr().err


# --- G2: two plugins, one name ---------------------------------------------------------------------------------------


def test_G2_the_same_distribution_seen_twice_counts_once(dists: Dists):
    first = dists.add("acme", site="a")
    second = dists.add("acme", site="b")
    for order in ([first, second], [second, first], [first, first]):
        host = PluginHost.create(distributions=order)
        assert states(host) == {"acme": "loaded"} and rewards(host) == ["acme:acme"]


@pytest.mark.parametrize("name", ["grpo", "My_Grpo"])
def test_G2_two_distributions_with_one_plugin_name_are_both_refused_and_named(dists: Dists, name: str):
    dists.add(name, dist="acme-grpo", component="one")
    dists.add(name.replace("_", "-").lower(), dist="zeta-grpo", component="two", version="2.5")
    dists.add("good")
    for order in (dists.all, dists.all[::-1]):
        host = PluginHost.create(distributions=order)
        assert rewards(host) == ["good:good"]
        for info in host.infos[:2] if host.infos[0].name != "good" else host.infos[1:]:
            assert info.state == "broken" and "acme-grpo 1.0 and zeta-grpo 2.5" in info.reason
    with pytest.raises(PluginError, match=r"acme-grpo 1\.0 and zeta-grpo 2\.5; uninstall one"):
        PluginHost.create(distributions=dists.all, plugins=[name])


def test_G2_a_plugin_cannot_take_the_name_of_the_built_ins(dists: Dists):
    dists.add("builtin", dist="acme-builtin")
    host = PluginHost.create(distributions=dists.all)
    assert host.infos[0].state == "broken" and 'the name "builtin" belongs to' in host.infos[0].reason
    assert host.builtin.state == "loaded"


def test_G2_one_module_under_two_names_is_loaded_once(dists: Dists):
    dists.add("acme")
    dists.add("twin", value="miles_acme")
    host = PluginHost.create(distributions=dists.all)
    assert states(host) == {"acme": "loaded", "twin": "broken"}
    assert 'module "miles_acme" is already loaded as plugin "acme"' in host.infos[1].reason


def test_G2_a_plugin_file_named_like_a_plugin_is_refused(dists: Dists, tmp_path: Path):
    dists.add("acme")
    file = tmp_path / "acme.py"
    file.write_text("import miles_core\n@miles_core.reward('r')\ndef r(sample): return 1.0\n")
    with pytest.raises(PluginError, match=r'two plugins are named "acme": miles-acme 1\.0 and .*acme\.py'):
        PluginHost.create(distributions=dists.all, files=[file])
    assert rewards(PluginHost.create(distributions=dists.all, files=[file], adjust=["no:acme"])) == ["acme:r"]


# --- G4: observers and order -----------------------------------------------------------------------------------------

OBSERVER = """
    from miles_core import hookimpl
    calls = []

    @hookimpl
    def miles_step_end(step):
        calls.append(step)
        {body}
"""


def calls(name: str) -> list[int]:
    return sys.modules[f"miles_{name}"].calls


def test_G4_one_observer_that_raises_silences_no_other(dists: Dists, caplog):
    for name, body in (("a", "raise RuntimeError('mine')"), ("b", "pass"), ("c", "raise SystemExit(1)"), ("d", "pass")):
        dists.add(name, OBSERVER.replace("{body}", body))
    host = PluginHost.create(distributions=dists.all)
    host.observe("miles_step_end", step=1, metrics={})
    assert [calls(n) for n in "abcd"] == [[1]] * 4
    assert [r.getMessage() for r in caplog.records] == [
        'plugin "a" (miles-a 1.0) failed in miles_step_end: RuntimeError: mine',
        'plugin "c" (miles-c 1.0) failed in miles_step_end: SystemExit(1)',
    ]


def test_G4_an_observer_that_keeps_failing_is_switched_off_with_one_line(dists: Dists, caplog):
    dists.add("a", OBSERVER.replace("{body}", "raise RuntimeError('mine')"))
    dists.add("b", OBSERVER.replace("{body}", "pass"))
    host = PluginHost.create(distributions=dists.all)
    for step in range(6):
        host.observe("miles_step_end", step=step, metrics={})
    assert calls("a") == [0, 1, 2]  # off after 3 failures
    assert calls("b") == [0, 1, 2, 3, 4, 5]
    assert caplog.text.count("is switched off after 3 failures") == 1 and len(caplog.records) == 4


def test_G4_strict_raises_what_the_observer_raised(dists: Dists):
    dists.add("a", OBSERVER.replace("{body}", "raise ZeroDivisionError"))
    with pytest.raises(ZeroDivisionError):
        PluginHost.create(distributions=dists.all, strict=True).observe("miles_step_end", step=1, metrics={})


def test_G4_a_request_to_stop_that_arrives_inside_an_observer_is_not_swallowed(dists: Dists):
    dists.add("a", OBSERVER.replace("{body}", "from miles_core.errors import Interrupted; raise Interrupted('stop')"))
    host = PluginHost.create(distributions=dists.all)
    with pytest.raises(Interrupted):
        host.observe("miles_step_end", step=1, metrics={})


def test_G4_order_is_by_name_and_not_by_the_file_system(dists: Dists):
    mark = "import builtins; builtins.order = getattr(builtins, 'order', []) + [__name__[6:]]"
    for name in ("b", "d", "a"):
        dists.add(name, OBSERVER.replace("{body}", mark))
    dists.add("z", OBSERVER.replace("@hookimpl", "@hookimpl(tryfirst=True)").replace("{body}", mark))
    dists.add("0", OBSERVER.replace("@hookimpl", "@hookimpl(trylast=True)").replace("{body}", mark))
    for order in itertools.islice(itertools.permutations(dists.all), 0, None, 29):
        builtins.order = []
        host = PluginHost.create(distributions=order)
        assert host.describe() == "plugins (all installed): 0, a, b, d, z"
        host.observe("miles_step_end", step=1, metrics={})
        assert builtins.order == ["z", "a", "b", "d", "0"]
    del builtins.order


def test_G4_two_plugins_for_one_slot_are_asked_about_and_never_picked_by_order(dists: Dists):
    source = "from miles_core import Component, hookimpl\n@hookimpl\ndef miles_trainers():\n"
    source += "    return [Component(name='fast', summary='', build=len)]\n"
    dists.add("one", source)
    dists.add("two", source)
    for order in (dists.all, dists.all[::-1]):
        host = PluginHost.create(distributions=order)
        with pytest.raises(ConfigError, match=r'2 plugins offer a trainer named "fast"(.|\n)*"one:fast" or "two:fast"'):
            host.registry.find("trainer", "fast")
        assert host.registry.find("trainer", "two:fast").plugin.name == "two"


def test_G4_configure_may_veto_and_the_error_names_the_plugin(dists: Dists):
    source = "from miles_core import hookimpl\n@hookimpl\ndef miles_configure(config):\n"
    source += "    if config < 3: raise ValueError('too small')"
    dists.add("careful", source)
    host = PluginHost.create(distributions=dists.all)
    host.configure(3)
    with pytest.raises(ConfigError, match=r'plugin "careful" \(miles-careful 1.0\) refuses this config: too small'):
        host.configure(2)
