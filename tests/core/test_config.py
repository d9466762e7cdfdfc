"""Config: files, `extends`, `--set`, whose option is whose, and what a wrong one is told. See acme.py for the plugin."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from acme import CONFIG, changed, install, run_of, write
from dists import Dists

from miles_core.config import load
from miles_core.errors import EXIT_USAGE, ConfigError


def refused(dists: Dists, text: str = CONFIG, *sets: str) -> str:
    """The message that a config is refused with; the location starts with "x.toml"."""
    with pytest.raises(ConfigError) as caught:
        run_of(dists, text, *sets)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(str(dists.root) + os.sep, "")


# --- What a valid config becomes -------------------------------------------------------------------------------------


def test_selected_components_carry_validated_options_and_their_place(dists: Dists):
    run = run_of(dists)
    trainer = run.one("trainer")
    assert (trainer.name, trainer.plugin.origin, trainer.options.learning_rate) == ("shard", "miles-acme 1.2", 1e-4)
    assert trainer.where == f"{dists.root / 'x.toml'}: trainer.use"
    assert trainer.table is run.config.trainer
    assert [s.id for s in run.all("reward")] == ["reward/maths"]
    assert run.one("transport").id == "transport/direct"  # a default selects too


@pytest.mark.parametrize("use", ["plain", "fast"])
def test_changing_only_the_choice_leaves_a_valid_config_valid(dists: Dists, use: str):
    """[engine.fast] stays in the file; it is applied only when `fast` is selected."""
    options = run_of(dists, CONFIG, f"engine.use={use}").one("engine").options
    assert getattr(options, "mem_fraction", None) == {"plain": None, "fast": 0.5}[use]


def test_options_of_a_component_that_is_not_selected_are_not_read(dists: Dists):
    run_of(dists, changed(("mem_fraction = 0.5", 'mem_fraction = "no"\nnonsense = 1')))
    assert "nonsense" in refused(dists, changed(("mem_fraction = 0.5", "nonsense = 1"), ('"plain"', '"fast"')))


def test_one_needs_exactly_one(dists: Dists):
    run = run_of(dists, CONFIG + '[[reward]]\nuse = "length"\n')
    with pytest.raises(ConfigError, match="exactly one reward is needed, and 2 are selected"):
        run.one("reward")
    with pytest.raises(ConfigError, match="exactly one sampler is needed, and 0 are selected"):
        run.one("sampler")


def test_qualified_name_picks_the_plugin_and_its_table(dists: Dists):
    install(dists)
    dists.add("other", component="maths")
    assert '"acme:maths" or "other:maths"' in refused(dists)
    for header in ("reward.maths", 'reward."acme:maths"'):
        text = changed(('use = "maths"\n', f'use = "acme:maths"\n[{header}]\nstrict = false\n'))
        chosen = run_of(dists, text).one("reward")
        assert (chosen.plugin.name, chosen.options.strict) == ("acme", False)
    both = 'use = "acme:maths"\n[reward.maths]\nstrict = false\n[reward."acme:maths"]\nstrict = true\n'
    assert "keep one" in refused(dists, changed(('use = "maths"\n', both)))


def test_model_source_and_spec_are_selected_by_the_model_table(dists: Dists):
    assert run_of(dists).all("source") == []
    run = run_of(dists, CONFIG, "model.path=vault:a==1", "model.spec=llama")
    assert (run.one("source").id, run.one("model").id) == ("source/vault", "model/llama")
    assert 'no source named "valt"' in refused(dists, CONFIG, "model.path=valt:a")
    assert run_of(dists, CONFIG, "model.path=C:/models/a").all("source") == []


def test_evaluations_stop_where_training_does_and_stay_greedy_when_partly_set(dists: Dists):
    run = run_of(dists, CONFIG + '[[eval]]\ndata.use = "rows"\nsampling.top_p = 0.5\n', "rollout.sampling.max_new_tokens=6")
    sampling = run.config.eval[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (6, 0.0, 0.5)
    assert run.nested["eval[0].data"].id == "data/rows"
    assert run.data_for(run.config.eval[0]) is run.nested["eval[0].data"] and len(run.all("data")) == 1
    plain = run_of(dists, CONFIG + "[[eval]]\nevery = 1\n")
    assert plain.data_for(plain.config.eval[0]) is plain.one("data")


def test_loading_is_quick(dists: Dists):
    """Measured 0.03 s; the limit is what a person does not notice, on a slow machine."""
    install(dists)
    path = write(dists.root)
    load(path, distributions=dists.all)
    begin = time.perf_counter()
    load(path, distributions=dists.all)
    assert time.perf_counter() - begin < 0.3


# --- G6: wrong options -----------------------------------------------------------------------------------------------

LR = "learning_rate = 1e-4"

WRONG = [
    # (id, edits of CONFIG, --set, what the message says)
    ("typo", [(LR, "learning_rte = 1e-4")], [], ["learning_rte (line 21)", '"learning_rate"', "miles-acme 1.2"]),
    ("dash", [(LR, "learning-rate = 1e-4")], [], ['trainer.shard.learning-rate', 'did you mean "learning_rate"?']),
    ("core-typo", [("use = \"plain\"", "use = \"plain\"\nreplica = 2")], [], ["x.toml: engine.replica", '"replicas"']),
    ("nested-typo", [(LR, "schedule.warmpu = 3")], [], ["trainer.shard.schedule.warmpu", '"warmup"', "miles-acme 1.2"]),
    ("wrong-table", [('use = "shard"', 'use = "shard"\nlearning_rate = 1e-4')], [],
     ['"learning_rate" belongs under [trainer.shard], trainer "shard" (miles-acme 1.2)']),
    ("wrong-core-table", [('use = "rows"', 'use = "rows"\nminibatches = 2')], [], ['"minibatches" belongs under [train]']),
    ("after-a-table", [('use = "rows"', 'use = "rows"\nseed = 2')], [], ['"seed" belongs at the top of the file']),
    ("in-another-component", [('use = "plain"', 'use = "plain"\nmem_fraction = 0.5')], [], ["belongs under [engine.fast]"]),
    ("no-such-component", [("[engine.fast]", "[engine.fats]")], [], ["no installed plugin offers", "[engine.fast]"]),
    ("component-at-top", [("[engine.fast]", "[fast]")], [], ['"fast" is an engine', "[engine.fast]"]),
    ("wrong-kind", [("[engine.fast]", "[trainer.fast]")], [], ['"fast" is an engine', "[engine.fast]"]),
    ("number-as-text", [(LR, 'learning_rate = "1e-6"')], [], ["must be a number greater than 0", "without quotes: 1e-6"]),
    ("nan", [(LR, "learning_rate = nan")], [], ["trainer.shard.learning_rate", "must be a finite number, not nan"]),
    ("inf", [(LR, "learning_rate = inf")], [], ["must be a finite number, not inf"]),
    ("negative", [("groups_per_step = 4", "groups_per_step = -4")], [], ["must be greater than 0, not -4"]),
    ("negative-option", [(LR, "learning_rate = -1.0")], [], ["greater than 0, not -1.0", "(miles-acme 1.2)"]),
    ("float-for-int", [("steps = 3", "steps = 3.0")], [], ["must be a whole number greater than 0, not 3.0; write 3"]),
    ("int-for-bool", [('use = "plain"', 'use = "plain"\nprocess = 1')], [], ["must be true or false, not 1"]),
    ("number-for-text", [("steps = 3", "steps = 3\nname = 5")], [], ['must be text, not 5; put it in quotes: "5"']),
    ("text-for-list", [("steps = 3", 'steps = 3\ntags = "a"')], [], ['must be a list of text', 'write ["a"]']),
    ("choice", [(LR, 'dtype = "bfloat"')], [], ['one of "float32", "bfloat16"', 'did you mean "bfloat16"?']),
    ("validator", [], ["reward[0].maths.url=ftp://x"], ["--set reward[0].maths.url: must start with http"]),
    ("missing", [("groups_per_step = 4\n", "")], [], ["rollout.groups_per_step (line 6): is missing", "whole number"]),
    ("missing-table", [('[data]\nuse = "rows"\n', "")], [], ["data: is missing", "rows"]),
    ("missing-use", [('use = "shard"\n', "")], [], ["trainer.use (line 18): is missing", "installed: shard, toy"]),
    ("single-table", [("[[reward]]", "[reward]")], [], ["x.toml: reward (line 14)", "write [[reward]] instead"]),
    ("text-for-table", [("steps = 3", 'steps = 3\nlauncher = "local"')], [], ["must be a table", 'use = "local"']),
    ("role", [("steps = 3", "steps = 3\n[roles.refernce]")], [], ["roles.refernce", 'did you mean "reference"?']),
    ("no-loss", [('[[loss]]\nuse = "clip"\n', "")], ["loss=[]"], ["--set loss", "at least 1"]),
    ("set-typo", [], ["engin.use=fast"], ["--set engin", 'did you mean "engine"?']),
    ("set-option", [], ["trainer.shard.learning_rate=fast"], ["--set trainer.shard.learning_rate: must be a number"]),
    ("set-index", [], ["reward[1].weight=2"], ["--set reward[1].weight: reward has 1 element(s)"]),
    ("set-no-index", [], ["reward.weight=2"], ["--set reward[0].weight="]),
    ("set-through-value", [], ["steps.more=2"], ["steps is a single value, not a table"]),
    ("set-index-of-table", [], ["engine[0].use=fast"], ["engine is not an array"]),
    ("set-no-value", [], ["engine.use"], ["write --set KEY=VALUE"]),
    ("set-bad-list", [], ["tags=[1,"], ["--set tags=[1,: the value is not valid TOML"]),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "sets", "expected"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_G6_wrong_option_is_named_with_its_place_and_the_nearest_match(dists: Dists, edits, sets, expected):
    message = refused(dists, changed(*edits), *sets)
    assert not [e for e in expected if e not in message], message
    assert "pydantic" not in message and "Input should" not in message


def test_G6_all_problems_are_reported_at_once_in_the_order_of_the_schema(dists: Dists):
    text = changed((LR, 'learning_rte = 1\ndtype = "x"'), ("steps = 3", "steps = -3"), ('"clip"', '"clop"'))
    message = refused(dists, text)
    assert message.startswith("x.toml has 4 problems:")
    places = [message.index(p) for p in ("steps", 'no loss named "clop" (x.toml: loss[0].use)', "dtype", "learning_rte")]
    assert places[0] < places[1] < min(places[2:])


def test_G6_component_of_a_plugin_that_is_not_loaded(dists: Dists):
    """Selected: refused, with the plugin and why it is off. Only its table there: nothing to complain about."""
    install(dists)
    index = {"hook_api": 1, "components": [{"kind": "reward", "name": "judge"}]}
    dists.add("panel", component="judge", index=index)
    text = changed(("steps = 3", 'steps = 3\nplugins = ["acme"]'))
    table = "[reward.judge]\nanything = 1\n"
    run_of(dists, text.replace("[[loss]]", table + "[[loss]]"))
    message = refused(dists, text.replace('use = "maths"', 'use = "judge"'))
    assert 'no reward named "judge" (x.toml: reward[0].use)' in message
    assert "miles-panel 1.0" in message and "-p panel" in message


def test_G6_pairs_that_cannot_be_are_refused_and_valid_ones_are_not(dists: Dists):
    run_of(dists, CONFIG, "train.aggregation=constant-length", "train.constant_length=64", "train.minibatches=4")
    assert "constant_length" in refused(dists, CONFIG, "train.constant_length=64")
    assert "5 minibatches cannot be made of 4 groups" in refused(dists, CONFIG, "train.minibatches=5")
    twice = CONFIG + '[[reward]]\nuse = "maths"\n'
    assert 'reward[0] is a reward named "maths" already' in refused(dists, twice)
    run_of(dists, twice + 'name = "again"\n')


def test_F11_temperature_zero_cannot_be_trained_and_may_be_evaluated(dists: Dists):
    assert "temperature 0 is greedy" in refused(dists, CONFIG, "rollout.sampling.temperature=0")
    assert run_of(dists, CONFIG + "[[eval]]\nsampling.temperature = 0.0\n").notes == []


@pytest.mark.parametrize(
    ("setting", "note"),
    [("rollout.sampling.top_p=0.9", "cut the sampling distribution"), ("train.minibatches=3", "no multiple")],
)
def test_F11_doubtful_values_are_noted(dists: Dists, setting: str, note: str):
    assert run_of(dists).notes == []
    assert note in " ".join(run_of(dists, CONFIG, setting).notes)


def test_G6_origin_of_every_value_is_known(dists: Dists):
    run = run_of(dists, CONFIG, "engine.use=fast", plugins=["acme"])
    origins = {
        ("trainer", "shard", "learning_rate"): f"{dists.root / 'x.toml'}:21",
        ("engine", "use"): "--set",
        ("plugins",): "--plugins",
        ("seed",): "default",
        ("trainer", "shard", "betas"): "default of miles-acme 1.2",
        ("advantage", 0, "grpo", "eps"): "default",
        ("advantage", 0, "use"): "default",
    }
    assert {key: str(run.origin(key)) for key in origins} == origins
    assert run.config.plugins == ("acme",)


# --- --set and extends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "read", "value"),
    [
        ("engine.use=fast", lambda r: r.config.engine.use, "fast"),
        ("trainer.shard.learning_rate=1e-3", lambda r: r.one("trainer").options.learning_rate, 1e-3),
        ("trainer.shard.betas=[0.5, 0.6]", lambda r: r.one("trainer").options.betas, (0.5, 0.6)),
        ("reward[0].weight=2", lambda r: r.config.reward[0].weight, 2.0),
        ("reward[0].maths.strict=false", lambda r: r.one("reward").options.strict, False),
        ("advantage[0].use=rloo", lambda r: r.one("advantage").name, "rloo"),  # an element that is only a default
        ('name="5"', lambda r: r.config.name, "5"),
        ("name=a b#c", lambda r: r.config.name, "a b#c"),
        ("name=2026-01-02", lambda r: r.config.name, "2026-01-02"),
        ('rollout.sampling.stop=["#", "="]', lambda r: r.config.rollout.sampling.stop, ("#", "=")),
        ("model.path=vault:a==1", lambda r: r.config.model.path, "vault:a==1"),
        ("roles.reference.path=m", lambda r: r.config.roles["reference"].path, "m"),
        ("tracker=[]", lambda r: r.config.tracker, ()),
    ],
)
def test_set_values_are_toml_or_plain_text(dists: Dists, setting: str, read, value):
    assert read(run_of(dists, CONFIG, setting)) == value


def test_the_last_set_counts(dists: Dists):
    assert run_of(dists, CONFIG, "steps=5", "steps=6").config.steps == 6


def test_extends_merges_tables_and_replaces_arrays_of_tables(dists: Dists):
    install(dists)
    (dists.root / "base").mkdir()
    base = CONFIG + '[[reward]]\nuse = "length"\n'
    write(dists.root / "base", 'extends = "deep.toml"\n[trainer.shard]\nbetas = [0.1, 0.2]\n', "base.toml")
    write(dists.root / "base", base, "deep.toml")
    text = 'extends = ["base/base.toml", "more.toml"]\nsteps = 9\n[[reward]]\nuse = "length"\n'
    write(dists.root, "seed = 4\nsteps = 1\n", "more.toml")
    run = load(write(dists.root, text), distributions=dists.all)
    assert (run.config.steps, run.config.seed) == (9, 4)  # later ones win, the file itself last
    options = run.one("trainer").options
    assert (options.learning_rate, options.betas) == (1e-4, (0.1, 0.2))
    assert [s.name for s in run.all("reward")] == ["length"]
    assert str(run.origin(("trainer", "shard", "betas"))) == f"{dists.root / 'base' / 'base.toml'}:3"
    assert str(run.origin(("reward", 0, "use"))) == f"{dists.root / 'x.toml'}:4"


def test_extends_in_a_circle_or_of_nothing_is_refused(dists: Dists):
    write(dists.root, 'extends = "x.toml"\n', "b.toml")
    message = refused(dists, 'extends = "b.toml"\n' + CONFIG)
    assert message == "b.toml: extends: these files extend each other in a circle: x.toml -> b.toml -> x.toml"
    message = refused(dists, 'extends = "c.toml"\n' + CONFIG)
    assert "there is no config file c.toml (extended by x.toml)" in message and "b.toml" in message
    assert "must be a file name or a list" in refused(dists, "extends = 5\n" + CONFIG)


# --- Files that cannot be read ---------------------------------------------------------------------------------------


def test_malformed_toml_shows_file_line_column_and_text(dists: Dists):
    message = refused(dists, 'steps = 3\nname = "a\n')
    assert message.splitlines()[:2] == ["x.toml: line 2, column 10: not valid TOML: illegal character '\\n'", '  name = "a']
    assert message.splitlines()[2].index("^") - 2 == 9  # column 10, counted from 1
    assert "line 1" in refused(dists, "steps = [1,")
    assert "dates are not used" in refused(dists, "name = 2026-01-02\n")


def test_missing_file_names_what_lies_nearby(dists: Dists):
    write(dists.root, "", "quickstart.toml")
    write(dists.root, "", "zebra.toml")
    with pytest.raises(ConfigError) as caught:
        load(dists.root / "quikstart.toml")
    message = str(caught.value).replace(str(dists.root) + os.sep, "")
    assert message == "there is no config file quikstart.toml\n  config files nearby: quickstart.toml, zebra.toml"


def test_folder_or_unreadable_or_wrong_encoding_is_said(dists: Dists):
    path = dists.root / "bad.toml"
    path.write_bytes(b'steps = 3\nname = "\xff"\n')
    for target, words in [
        (dists.root, "is a folder, not a config file"),
        (path, "is not UTF-8 text: byte 0xff in line 2"),
        (path / "y.toml", "cannot read"),
        (dists.root / ("n" * 300), "cannot read"),
        (Path("a\0b"), "cannot read"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load(target)


def test_byte_order_mark_and_windows_line_ends_are_fine(dists: Dists):
    path = dists.root / "x.toml"
    path.write_bytes(b"\xef\xbb\xbf" + CONFIG.replace("\n", "\r\n").encode())
    assert load(path, distributions=install(dists)).config.steps == 3
