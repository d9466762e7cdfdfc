"""What leaves the process: payloads for workers, dumps for run folders, and no secret in what is written down."""

from __future__ import annotations

import json
import tomllib

import pytest
from acme import CONFIG, install, run_of, write
from dists import Dists
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.config import ResolvedRun, compare_payloads
from miles_core.dump import write_toml
from miles_core.errors import ConfigError, PluginError
from miles_core.tables import keys_of

FULL = (
    CONFIG
    + """
[[eval]]
every = 2
data.use = "rows"
[roles.reference]
path = "a"
"""
)
SETS = (
    'engine.fast.server_args={a = [1, "x"], "b.c" = {d = 1.5}}',
    "engine.use=fast",
    "engine.fast.cache=/tmp/a",
    'name=a "quoted" name',
    "model.path=vault:a",
)


def same(a: ResolvedRun, b: ResolvedRun) -> bool:
    return a.config == b.config and [(s.id, s.options) for s in a.chosen()] == [(s.id, s.options) for s in b.chosen()]


def test_dump_loads_again_to_an_equal_run(dists: Dists):
    run = run_of(dists, FULL, *SETS)
    text = run.dump()
    assert "[miles]" in text and 'version = "1.2"' in text and run.one("trainer").plugin.content_hash() in text
    assert "learning_rate = 0.0001 " in text and f"# {dists.root / 'x.toml'}:21" in text
    assert "mem_fraction" in text and "[engine.plain]" not in text
    again = run_of(dists, text)
    assert same(again, run)
    assert again.effective() == run.effective()


scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_written_toml_reads_back(tables: dict):
    comments = {key: 'from "here"' for key in keys_of(tables)}
    assert tomllib.loads(write_toml(tables, comments)) == tables


def test_payload_survives_json_and_builds_the_same_run_in_a_worker(dists: Dists):
    run = run_of(dists, FULL, *SETS)
    payload = json.loads(json.dumps(run.payload()))
    there = ResolvedRun.from_payload(payload, distributions=dists.all)
    assert same(there, run) and there.nested["eval[0].data"].id == "data/rows"
    assert compare_payloads(payload, there.payload()) == []
    assert there.one("trainer").where == f"{dists.root / 'x.toml'}: trainer.use"


def test_payload_carries_plugin_files(dists: Dists):
    file = write(dists.root, 'import miles_core\n@miles_core.reward("five")\ndef f(sample):\n    return 5.0\n', "mine.py")
    run = run_of(dists, CONFIG, "reward[0].use=five", files=[file])
    there = ResolvedRun.from_payload(run.payload(), distributions=dists.all)
    assert there.one("reward").plugin.path == file
    with pytest.raises(ConfigError, match="no reward named") as caught:
        run_of(dists, run.dump())
    assert f"written by a run with --plugin-file {file}" in str(caught.value)


def test_worker_refuses_another_plugin_than_the_drivers(dists: Dists):
    payload = run_of(dists).payload()
    rows = {row["name"]: row for row in payload["plugins"]}
    rows["acme"] |= {"version": "0.2", "hash": "d" * 64}
    with pytest.raises(PluginError, match=r"has another miles-acme \(1\.2 \w{12}\) than the driver \(0\.2 d{12}\)"):
        ResolvedRun.from_payload(payload, distributions=dists.all)
    rows["acme"] |= {"version": "1.2"}
    with pytest.raises(PluginError, match="another miles-acme"):  # the same version with other files
        ResolvedRun.from_payload(payload, distributions=dists.all)
    rows["acme"]["name"] = "gone"
    with pytest.raises(PluginError, match='no plugin named "gone"'):
        ResolvedRun.from_payload(payload, distributions=dists.all)


def test_worker_that_needs_one_kind_needs_only_its_plugins(dists: Dists):
    """An engine in an environment of its own does not have the trainer's plugins."""
    install(dists)
    dists.add("panel", component="judge")
    payload = run_of(dists, CONFIG, "reward[0].use=judge").payload()
    there = ResolvedRun.from_payload(payload, kinds=["engine", "tokenizer"], distributions=dists.all[:1])
    assert (there.one("engine").id, there.all("reward")) == ("engine/plain", [])
    with pytest.raises(PluginError, match="panel"):
        ResolvedRun.from_payload(payload, distributions=dists.all[:1])


def test_compare_payloads_says_which_plugins_and_values_differ(dists: Dists):
    old = run_of(dists).payload()
    new = run_of(dists, CONFIG, "trainer.shard.learning_rate=1", "engine.use=fast").payload()
    new["plugins"] = [row | {"version": "1.3"} for row in new["plugins"] if row["name"] == "acme"]
    new["plugins"].append({"name": "panel"})
    assert compare_payloads(old, new) == [
        "plugin acme: version 1.2 before, 1.3 now",
        "plugin miles-core: no longer loaded",
        "plugin panel: added",
        "engine.use: 'plain' before, 'fast' now",
        "trainer.shard.learning_rate: 0.0001 before, 1.0 now",
        "engine.fast.mem_fraction: absent before, 0.5 now",
    ]


def test_secrets_are_masked_in_what_is_written_and_kept_for_workers(dists: Dists, monkeypatch: pytest.MonkeyPatch):
    """ACME_KEY is declared by the reward, OTHER_TOKEN only named like a secret; `api_key` is an option named like one."""
    monkeypatch.setenv("ACME_KEY", "k1")
    monkeypatch.setenv("OTHER_TOKEN", "0123456789")
    sets = (
        "name=k1",
        "reward[0].maths.api_key=sk-abc",
        "reward[0].maths.url=http://u:0123456789@h",
        "model.path=vault:k12",
    )
    run = run_of(dists, CONFIG, *sets)
    dump, payload = run.dump(), run.payload(masked=True)
    for text in (dump, json.dumps(payload)):
        assert "0123456789" not in text and "sk-abc" not in text and '"k1"' not in text
        assert "vault:k12" in text  # a short secret is masked only where it is the whole value
    assert "sk-abc" in json.dumps(run.payload())
    assert compare_payloads(payload, run.payload()) == []
    with pytest.raises(ConfigError, match="was a secret and is masked"):
        run_of(dists, dump)
