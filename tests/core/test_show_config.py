"""What people read about configs: `miles show-config`, the reference page, and where a line number comes from."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from acme import CONFIG, install, run_of, write
from dists import Dists

from miles_cli.show_config import as_data, as_text, show_config_command
from miles_core.component import ComponentConfig
from miles_core.errors import ConfigError
from miles_core.resolve import core_tables
from miles_core.settings import RunConfig
from miles_core.tables import scan_lines, show_key

ROOT = Path(__file__).resolve().parents[2]


def reference():
    spec = spec_from_file_location("config_reference", ROOT / "scripts" / "config_reference.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_text_is_toml_with_an_origin_on_every_value(dists: Dists):
    run = run_of(dists, CONFIG, "train.minibatches=3")
    text = as_text(run)
    assert tomllib.loads(text)["train"]["minibatches"] == 3
    assert text.startswith(f"# {run.host.describe()}\n# note: rollout.groups_per_step = 4 is no multiple")
    body = text.partition("[miles]")[0].splitlines()
    assert [line for line in body if "=" in line.partition("#")[0] and "  # " not in line] == []
    assert run_of(dists, text).config == run.config


def test_changed_leaves_defaults_out(dists: Dists):
    run = run_of(dists, CONFIG, "reward[0].weight=2")
    tables = tomllib.loads(as_text(run, changed=True))
    assert tables["reward"] == [{"use": "maths", "weight": 2.0}]
    assert tables["trainer"] == {"use": "shard", "shard": {"learning_rate": 1e-4}}
    assert not {"advantage", "transport", "checkpoint", "miles"} & tables.keys()


def test_json_has_values_origins_and_plugins(dists: Dists, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACME_KEY", "hush-hush")
    run = run_of(dists, CONFIG, "name=hush-hush")
    data = json.loads(json.dumps(as_data(run)))
    assert data["tables"]["trainer"]["shard"]["learning_rate"] == 1e-4
    assert data["origins"]["trainer.shard.learning_rate"].endswith("x.toml:21")
    assert data["origins"]["reward[0].use"].endswith("x.toml:15")
    assert {row["name"] for row in data["plugins"]} == {"builtin", "acme"}
    assert "hush" not in json.dumps(data)


def test_command_prints_first_and_then_says_what_is_missing(dists: Dists, capsys: pytest.CaptureFixture, monkeypatch):
    """The config is printed even when a requirement is not met: that is when one wants to see it."""
    install(dists)
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: dists.all)
    path = write(dists.root)
    assert show_config_command(path, sets=["reward[0].weight=2"], changed=True) == 0
    out = capsys.readouterr().out
    assert "weight = 2" in out and "\x1b" not in out
    with pytest.raises(ConfigError, match="role/reference"):
        show_config_command(path, sets=["loss[0].clip.kl=1.0"], as_json=True)
    assert json.loads(capsys.readouterr().out)["tables"]["loss"][0]["clip"]["kl"] == 1.0


def test_terminal_gets_the_same_words(dists: Dists, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    from miles_cli.show_config import show

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = as_text(run_of(dists))
    show(text)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert [line.split() for line in shown.splitlines()] == [line.split() for line in text.splitlines()]


def test_reference_page_is_up_to_date_for_the_core():
    module = reference()
    page = module.PAGE.read_text("utf-8").partition(module.COMPONENTS)[0]
    assert page == module.core_page(), "run python scripts/config_reference.py"


def test_every_option_of_the_core_is_described():
    tables = [("top level", RunConfig), *((t.header, t.cls) for t in core_tables())]
    missing = [f"{header} {name}" for header, cls in tables for name, i in cls.model_fields.items() if not i.description]
    assert missing == []
    assert all(issubclass(cls, ComponentConfig) and cls.__doc__ for _, cls in tables)


def test_lines_of_keys_are_found():
    text = '\n'.join([
        'a = 1 # [x]',                  # 1
        '["b.c"]',                      # 2
        'd.e = "[["',                   # 3
        'text = """',                   # 4
        'fake = 1',                     # 5, inside a text
        '"""',                          # 6
        'list = [',                     # 7
        '  "x", # ] ',                  # 8
        ']',                            # 9
        'after = 1',                    # 10
        '[[r]]',                        # 11
        'use = "u"',                    # 12
        '[[ r ]]',                      # 13
        "'q' = 2",                      # 14
        '[r.sub]',                      # 15
        'k = {x = 1}',                  # 16
    ])  # fmt: skip
    found = {show_key(key): line for key, line in scan_lines(text).items()}
    assert tomllib.loads(text)  # it is a valid file
    assert found == {
        "a": 1,
        '"b.c"': 2,
        '"b.c".d.e': 3,
        '"b.c".text': 4,
        '"b.c".list': 7,
        '"b.c".after': 10,
        "r": 11,
        "r[0]": 11,
        "r[0].use": 12,
        "r[1]": 13,
        "r[1].q": 14,
        "r[1].sub": 15,
        "r[1].sub.k": 16,
    }
