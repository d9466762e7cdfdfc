"""The plugin host: what metadata says, what a broken plugin may do to others (nothing), and in which order hooks run."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path

import pytest
from dists import Dists

from miles_core.discovery import discover
from miles_core.errors import PluginError
from miles_core.plugins import PluginHost
from miles_core.selection import chosen_plugins


def rewards(host: PluginHost) -> list[str]:
    return [e.qualified for e in host.registry.all("reward") if e.plugin is not host.builtin]


def states(host: PluginHost) -> dict[str, str]:
    return {info.name: info.state for info in host.infos}


# --- Metadata --------------------------------------------------------------------------------------------------------


def test_discover_reads_metadata_and_imports_nothing(dists: Dists):
    dists.add("boom", "raise RuntimeError('imported')")
    [info] = discover(dists.all)
    assert (info.name, info.state, info.origin, info.summary) == ("boom", "ok", "miles-boom 1.0", "the boom plugin")
    assert "miles_boom" not in sys.modules


def test_discover_sorts_by_name_whatever_the_order_of_distributions(dists: Dists):
    for name in ("beta", "gamma", "alpha"):
        dists.add(name)
    for order in itertools.permutations(dists.all):
        assert [i.name for i in discover(order)] == ["alpha", "beta", "gamma"]


def test_runtime_extra_is_compared_with_installed_versions(dists: Dists):
    dists.add("fast", requires=('numpy-ish>=2; extra == "runtime"', 'gone>=1; extra == "runtime"', 'no; extra == "docs"'))
    dists.add("other", dist="numpy-ish", version="1.9")
    [info] = [i for i in discover(dists.all) if i.name == "fast"]
    assert info.state == "needs-runtime"
    assert info.missing == ("numpy-ish>=2 (installed: 1.9)", "gone>=1 (not installed)")
    assert info.install == "pip install 'miles-fast[runtime]'"


def test_runtime_extra_that_is_satisfied_is_ok(dists: Dists):
    dists.add("fast", requires=('numpy-ish>=2; extra == "runtime"',))
    dists.add("other", dist="numpy-ish", version="2.1+cpu")
    assert [i.state for i in discover(dists.all)] == ["ok", "ok"]


def test_install_command_of_an_editable_plugin_names_its_folder(dists: Dists):
    dists.add("fast", requires=('gone; extra == "runtime"',), editable=True)
    [info] = discover(dists.all)
    assert info.install == f"pip install -e '{dists.root}/src/miles-fast[runtime]'"


def test_a_plugin_that_needs_its_runtime_still_loads_and_remembers_it(dists: Dists):
    dists.add("fast", requires=('gone; extra == "runtime"',))
    host = PluginHost.create(distributions=dists.all)
    assert host.infos[0].state == "loaded" and host.infos[0].missing == ("gone (not installed)",)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"requires": ("miles-core>=99",)}, "wants miles-core>=99, and this is miles-core 0.1.0"),
        ({"index": {"hook_api": 7, "components": []}}, "written for hook API 7, and this core supports 1 and 0"),
    ],
)
def test_incompatible_plugin_is_not_imported(dists: Dists, options: dict, reason: str):
    dists.add("old", "raise RuntimeError('imported')", **options)
    host = PluginHost.create(distributions=dists.all)
    assert (host.infos[0].state, host.infos[0].reason) == ("incompatible", reason)
    with pytest.raises(PluginError, match="is incompatible"):
        PluginHost.create(plugins=["old"], distributions=dists.all)


@pytest.mark.parametrize("hook_api", [0, 1])
def test_this_and_the_previous_hook_api_are_supported(dists: Dists, hook_api: int):
    dists.add("fine", index={"hook_api": hook_api, "components": []}, requires=("miles-core>=0.1,<0.3",))
    assert discover(dists.all)[0].state == "ok"


@pytest.mark.parametrize("text", ["{", "[]", '{"components": 3, "hook_api": 1}', '{"components": [{"kind": "x"}]}'])
def test_an_unreadable_index_is_said_and_harms_nothing(dists: Dists, text: str):
    dists.add("odd", index={})
    (dists.root / "site/miles_odd/miles-components.json").write_text(text)
    [info] = discover(dists.all)
    assert info.state == "ok" and info.components == () and "miles-components.json cannot be read" in info.reason


def test_metadata_that_is_not_text_makes_a_broken_row_and_no_crash(dists: Dists):
    dists.add("good")
    dists.add("rotten")
    (dists.root / "site/miles_rotten-1.0.dist-info/entry_points.txt").write_bytes(b"[miles]\n\xff\xfe = x\n")
    found = {i.name: i.state for i in discover(dists.all)}
    assert found == {"good": "ok", "miles-rotten": "broken"}


def test_a_requirement_that_cannot_be_parsed_makes_a_broken_row(dists: Dists):
    dists.add("rotten", requires=("what is >>> this",))
    [info] = discover(dists.all)
    assert info.state == "broken" and "InvalidRequirement" in info.reason


def test_content_hash_is_the_same_for_wheel_and_editable_and_follows_the_bytes(dists: Dists):
    wheel = dists.add("one", dist="hashed", site="a")
    editable = dists.add("one", dist="hashed", site="b", editable=True)
    sys.path.remove(str(dists.root / "a"))  # so that the editable copy is the one that imports find
    hashes = {discover([d])[0].content_hash() for d in (wheel, editable)}
    assert len(hashes) == 1 and "hashed" not in sys.modules
    (dists.root / "src/hashed/hashed/__init__.py").write_text("changed = True")
    (dists.root / "src/hashed/hashed/__pycache__").mkdir()
    assert discover([editable])[0].content_hash() not in hashes
    before = discover([editable])[0].content_hash()
    (dists.root / "src/hashed/hashed/__pycache__/x.pyc").write_bytes(b"cache")
    assert discover([editable])[0].content_hash() == before


# --- Choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugins", "adjust", "loaded"),
    [
        (None, [], ["a", "b", "c"]),
        (["a"], [], ["a"]),
        ([], [], []),
        (["builtin"], [], []),
        (["a"], ["C"], ["a", "c"]),
        (None, ["no:b"], ["a", "c"]),
        (["a", "b"], ["no:a"], ["b"]),
        (["a"], ["no:a", "a"], ["a"]),
        (["a"], ["b", "no:b"], ["a"]),
    ],
)
def test_exactly_the_chosen_plugins_are_imported(dists: Dists, plugins, adjust, loaded):
    for name in "abc":
        dists.add(name)
    host = PluginHost.create(plugins=plugins, adjust=adjust, distributions=dists.all)
    assert [i.name for i in host.infos if i.state == "loaded"] == loaded
    assert {m[-1] for m in sys.modules if m in ("miles_a", "miles_b", "miles_c")} == set(loaded)
    assert all(i.reason for i in host.infos if i.state == "off")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"plugins": ["mth"], "origin": "MILES_PLUGINS"}, 'no plugin named "mth" (MILES_PLUGINS)\n  did you mean "math"?'),
        ({"adjust": ["no:mth"]}, 'no plugin named "mth" (-p no:mth)\n  did you mean "math"?'),
        ({"plugins": ["miles-math"]}, 'did you mean "math"?  installed: math'),
        ({"adjust": ["no:builtin"]}, "built-in components cannot be left out"),
    ],
)
def test_a_misspelt_choice_is_an_error(dists: Dists, choice, message):
    dists.add("math")
    with pytest.raises(PluginError) as caught:
        PluginHost.create(distributions=dists.all, **choice)
    assert message in str(caught.value)


def test_flag_beats_environment_beats_config(monkeypatch):
    monkeypatch.setenv("MILES_PLUGINS", "b, c")
    assert chosen_plugins(["a"], ["d"]) == (("a",), "--plugins")
    assert chosen_plugins([], ["d"]) == ((), "--plugins")
    assert chosen_plugins(None, ["d"]) == (("b", "c"), "MILES_PLUGINS")
    monkeypatch.setenv("MILES_PLUGINS", "")
    assert chosen_plugins(None, ["d"]) == (("d",), '"plugins" in the config')
    assert chosen_plugins(None, None) == (None, "all installed")


def test_the_list_in_force_and_who_set_it_is_one_line(dists: Dists):
    for name in ("a", "b"):
        dists.add(name)
    dists.add("c", "raise RuntimeError")
    host = PluginHost.create(plugins=["a"], origin="MILES_PLUGINS", distributions=dists.all)
    assert host.describe() == "plugins (MILES_PLUGINS): a; off: b, c"
    assert PluginHost.create(distributions=dists.all).describe() == "plugins (all installed): a, b; did not load: c"


# --- Plugin files and fields -----------------------------------------------------------------------------------------


def test_five_lines_in_a_file_are_a_plugin(tmp_path: Path):
    file = tmp_path / "My_rewards.py"
    file.write_text(
        "import miles_core\n\n@miles_core.reward('short')\ndef short(sample, *, limit: int = 3):\n    return limit\n"
    )
    host = PluginHost.create(distributions=[], files=[file])
    entry = host.registry.find("reward", "short")
    assert (entry.plugin.name, entry.plugin.origin) == ("my-rewards", str(file))
    assert entry.component.build(entry.component.config(limit=5), None).score(None) == 5
    before = entry.plugin.content_hash()
    file.write_text(file.read_text() + "# changed\n")
    assert PluginHost.create(distributions=[], files=[file]).infos[0].content_hash() != before


def test_a_plugin_file_may_hold_hooks_too(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from miles_core import Component, hookimpl\n@hookimpl\ndef miles_filters():\n"
        "    return [Component(name='f', summary='', build=len)]\n"
    )
    assert PluginHost.create(distributions=[], files=[file]).registry.find("filter", "f").plugin.name == "mine"


@pytest.mark.parametrize(
    ("text", "message"), [(None, "there is no plugin file"), ("x = 1", "offers nothing"), ("(", "SyntaxError")]
)
def test_a_bad_plugin_file_is_an_error(tmp_path: Path, text: str | None, message: str):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(PluginError, match=message):
        PluginHost.create(distributions=[], files=[file])


def test_fields_are_collected_and_two_meanings_of_one_name_are_refused(dists: Dists):
    source = "from miles_core import FieldSpec, hookimpl\n@hookimpl\ndef miles_sample_fields():\n"
    source += "    return [FieldSpec(name='experts', dtype='{dtype}')]\n"
    dists.add("a", source.replace("{dtype}", "int32"))
    dists.add("b", source.replace("{dtype}", "int32"))
    dists.add("c", source.replace("{dtype}", "int64"))
    host = PluginHost.create(distributions=dists.all)
    assert host.fields["experts"].dtype == "int32"
    assert states(host) == {"a": "loaded", "b": "loaded", "c": "broken"}
    assert 'declares the field "experts" otherwise' in host.infos[2].reason


def test_every_built_in_submodule_offers_components():
    from importlib import import_module

    from miles_core import builtin

    for name in builtin.SUBMODULES:
        assert import_module(f"miles_core.builtin.{name}").COMPONENTS, name


def test_a_loaded_plugin_warns_about_nothing(dists: Dists, caplog):
    caplog.set_level(logging.INFO)
    dists.add("good")
    PluginHost.create(distributions=dists.all)
    assert not caplog.records
