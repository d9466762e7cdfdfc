"""Wiring: what is required and provided, checks, and what a component is built with. See acme.py for the plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from acme import CONFIG, install, run_of
from dists import Dists

from miles_core.component import Environment
from miles_core.config import ResolvedRun
from miles_core.errors import EXIT_ENVIRONMENT, ConfigError, PluginError, RunFailed, RuntimeMissing
from miles_core.wiring import Wiring, check_requirements, run_checks

HEAD = "from miles_core import Component, hookimpl\nfrom miles_core.errors import ConfigError, RuntimeMissing\n"


def filters(*components: str) -> str:
    """Source of a plugin that offers filters; each text is the arguments of a Component after name and summary."""
    made = ", ".join(f'Component(name="f{i}", summary="a filter", **dict({text}))' for i, text in enumerate(components))
    return HEAD + f"def fail(error): raise error\n@hookimpl\ndef miles_filters():\n    return [{made}]\n"


def run_with(dists: Dists, *components: str, text: str = CONFIG, sets: tuple[str, ...] = ()) -> ResolvedRun:
    """A run that selects the filters f0, f1, ... made of `components`."""
    install(dists)
    dists.add("sieve", filters(*components))
    tables = "".join(f'[[filter]]\nuse = "f{i}"\n' for i in range(len(components)))
    return run_of(dists, text + tables, *sets)


BUILD = "build=lambda config, context: context"


# --- provides and requires -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "text", "missing"),
    [
        ('("engine/plain", "kind/reward")', "", None),  # selecting provides both
        ('("weights/direct",)', "", None),  # declared by engine/plain
        ('("role/policy",)', "", None),
        ('("role/reference",)', "[roles.reference]\n", None),
        ('("role/critic",)', "", "role/critic"),
        ('(("engine/fast", "weights/direct"),)', "", None),  # one of two
        ('(("engine/fast", "role/critic"),)', "", "engine/fast or role/critic"),
        ('(("role/critic", ("engine/plain", "loss/clip")),)', "", None),  # or (both)
        ('(("role/critic", ("engine/plain", "engine/fast")),)', "", "role/critic or (engine/plain and engine/fast)"),
        ("lambda config: ()", "", None),
    ],
)
def test_requirements_are_met_or_one_error(dists: Dists, requires: str, text: str, missing: str | None):
    run = run_with(dists, f"{BUILD}, requires={requires}", text=CONFIG + text)
    if missing is None:
        check_requirements(run)
        return
    with pytest.raises(ConfigError) as caught:
        check_requirements(run)
    assert f'filter[0].use: filter "f0" (miles-sieve 1.0) needs {missing}, and nothing' in str(caught.value)


def test_requirement_may_depend_on_options(dists: Dists):
    """A KL coefficient above 0 needs a reference model, and 0 does not."""
    check_requirements(run_of(dists))
    with pytest.raises(ConfigError) as caught:
        check_requirements(run_of(dists, CONFIG, "loss[0].clip.kl=0.1"))
    assert 'loss "clip" (miles-acme 1.2) needs role/reference' in str(caught.value)
    assert "add a table [roles.reference]" in str(caught.value)
    check_requirements(run_of(dists, CONFIG, "loss[0].clip.kl=0.1", "roles.reference.use=trainer"))


def test_missing_capabilities_are_one_error_that_names_who_would_provide_them(dists: Dists):
    install(dists)
    index = {"hook_api": 1, "components": [{"kind": "engine", "name": "turbo"}]}
    dists.add("racer", index=index)
    text = CONFIG.replace('use = "plain"', 'use = "fast"').replace("steps", 'plugins = ["acme", "sieve"]\nsteps')
    requires = 'requires=("weights/direct", "engine/turbo", "moon/cheese")'
    dists.add("sieve", filters(f"{BUILD}, {requires}", f"{BUILD}, provides=lambda config: frozenset({{'moon/dust'}})"))
    with pytest.raises(ConfigError) as caught:
        check_requirements(run_of(dists, text + '[[filter]]\nuse = "f0"\n'))
    message = str(caught.value)
    assert message.count("and nothing selected provides it") == 3
    assert 'weights/direct is provided by engine "plain" (miles-acme 1.2)' in message
    assert 'engine/turbo is provided by engine "turbo" of plugin "racer" (miles-racer 1.0), which is not loaded' in message
    assert "moon/cheese: no installed component provides it" in message


def test_rule_that_raises_is_attributed_to_its_plugin(dists: Dists):
    run = run_with(dists, f"{BUILD}, requires=lambda config: 1 / 0")
    with pytest.raises(PluginError, match=r'requires of filter "f0" \(miles-sieve 1.0\) raised ZeroDivisionError'):
        check_requirements(run)


# --- checks ----------------------------------------------------------------------------------------------------------


def test_checks_see_their_place_and_are_reported_together(dists: Dists):
    run = run_with(
        dists,
        f"{BUILD}, check=lambda config, env: fail(ConfigError(env.where + ' ' + env.run_config.name))",
        f"{BUILD}, check=lambda config, env: fail(KeyError('x'))",
        f"{BUILD}, check=lambda config, env: None",
    )
    with pytest.raises(ConfigError) as caught:
        run_checks(run, Environment(run_dir=Path("r")))
    message = str(caught.value)
    assert message.startswith("2 components refuse this run:")
    assert "x.toml: filter[0].use run" in message
    assert 'the check of filter "f1" (miles-sieve 1.0) failed: KeyError' in message
    run_checks(run, Environment(), kinds=["engine"])


def test_check_that_misses_a_library_ends_with_the_environment_code(dists: Dists):
    run = run_with(dists, f"{BUILD}, check=lambda config, env: __import__('no_such_library')")
    with pytest.raises(RuntimeMissing, match=r'pip install "miles-sieve\[runtime\]"') as caught:
        run_checks(run, Environment())
    assert caught.value.exit_code == EXIT_ENVIRONMENT


# --- building --------------------------------------------------------------------------------------------------------


def test_context_holds_what_this_process_knows(dists: Dists, tmp_path: Path):
    run = run_of(dists, CONFIG, "seed=7")
    wiring = Wiring(run, run_dir=tmp_path, model_path=tmp_path / "m", role="policy", index=1, world_size=2, device="cpu")
    name, options, context = wiring.build("trainer")
    assert (name, options) == ("trainer/shard", run.one("trainer").options)
    place = (context.run_dir, context.model_path, context.role, context.index, context.world_size, context.device)
    assert place == (tmp_path, tmp_path / "m", "policy", 1, 2, "cpu")
    assert (context.seed, context.run_config, context.needs) == (7, run.config, frozenset({"old_logprobs"}))
    assert [n for n, _ in context.select("loss")] == ["clip"]


def test_context_holds_the_declared_side_channels(dists: Dists, tmp_path: Path):
    install(dists)
    run = run_of(dists)
    fields = Wiring(run, run_dir=tmp_path).context(run.one("engine")).fields
    assert {name: spec.align for name, spec in fields.items()} == {"acme_route": "token"}


def test_needs_are_the_union_over_advantages_corrections_and_losses(dists: Dists):
    """gae reads old_values, the loss old_logprobs."""
    run = run_of(dists, CONFIG, "advantage[0].use=gae", "roles.critic.use=trainer")
    wiring = Wiring(run, run_dir=Path("r"))
    assert wiring.needs >= {"old_logprobs"}
    assert wiring.needs == run.one("loss").component.needed(run.one("loss").options) | run.one(
        "advantage"
    ).component.needed(run.one("advantage").options)


def test_each_selection_is_built_once_and_two_of_one_component_are_two(dists: Dists, tmp_path: Path):
    run = run_of(dists, CONFIG + '[[reward]]\nuse = "maths"\nname = "again"\n')
    wiring = Wiring(run, run_dir=tmp_path)
    built = wiring.build_all("reward")
    assert [n for n, _ in built] == ["maths", "again"]
    assert built[0][1] is not built[1][1]
    assert wiring.build_all("reward")[0][1] is built[0][1]
    assert wiring.build_selection(run.all("reward")[1]) is built[1][1]


def test_tokenizer_is_built_when_first_read_and_once(dists: Dists, tmp_path: Path):
    wiring = Wiring(run_of(dists), run_dir=tmp_path)
    context = wiring.build("engine")[2]
    assert not [k for k in wiring._built if k[0] == "tokenizer"]
    assert context.tokenizer is wiring.tokenizer is wiring.build("data")[2].tokenizer
    assert wiring.tokenizer[2].tokenizer is None  # the tokenizer's own context


def test_secrets_are_only_the_declared_ones(dists: Dists, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wiring = Wiring(run_of(dists), run_dir=tmp_path)
    secrets = wiring.build("reward")[2].secrets
    monkeypatch.delenv("ACME_KEY", raising=False)
    with pytest.raises(RuntimeMissing, match=r'ACME_KEY is not set, and reward "maths" \(miles-acme 1.2\) needs it'):
        secrets["ACME_KEY"]
    assert secrets.get("ACME_KEY") is None and dict(secrets) == {}
    monkeypatch.setenv("ACME_KEY", "v")
    assert secrets["ACME_KEY"] == "v" and dict(secrets) == {"ACME_KEY": "v"} and "v" not in repr(secrets).split("(")[1]
    with pytest.raises(PluginError, match="HOME without declaring it"):
        secrets["HOME"]
    assert secrets.get("HOME") is None


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        ("fail(ValueError('bad'))", RunFailed, 'building filter "f0" (miles-sieve 1.0) failed: ValueError: bad'),
        ("__import__('no_such_library')", RuntimeMissing, 'pip install "miles-sieve[runtime]"'),
        ("fail(ConfigError('own words'))", ConfigError, 'own words\n  in building filter "f0" (miles-sieve 1.0)'),
        ("fail(RuntimeMissing('no gpu'))", RuntimeMissing, "no gpu\n  in building"),
    ],
)
def test_error_in_build_names_component_and_plugin(dists: Dists, tmp_path: Path, build: str, error, words: str):
    wiring = Wiring(run_with(dists, f"build=lambda config, context: {build}"), run_dir=tmp_path)
    with pytest.raises(error) as caught:
        wiring.build("filter")
    assert words in str(caught.value)


def test_parts_are_built_from_the_same_options(dists: Dists, tmp_path: Path):
    wiring = Wiring(
        run_with(dists, f"{BUILD}, parts={{'sender': lambda config, context: ('s', config)}}"), run_dir=tmp_path
    )
    assert wiring.build_part("filter", "sender")[0] == "s"
    assert wiring.build_part("filter", "sender") is wiring.build_part("filter", "sender")
    assert wiring.build_part("filter", "group") is None


def test_auto_model_spec_is_found_by_architecture(dists: Dists, tmp_path: Path):
    wiring = Wiring(run_of(dists), run_dir=tmp_path, model_path=tmp_path)
    assert wiring.build_all("model") == []
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert [name for name, _ in wiring.build_all("model")] == ["llama"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    assert Wiring(run_of(dists), run_dir=tmp_path, model_path=tmp_path).build_all("model") == []


def test_model_path_may_be_known_late(dists: Dists, tmp_path: Path):
    """The driver fetches the model with a source that this same wiring built."""
    wiring = Wiring(run_of(dists, CONFIG, "model.path=vault:a"), run_dir=tmp_path)
    assert wiring.build("source")[2].model_path is None
    wiring.model_path = tmp_path
    assert wiring.build("engine")[2].model_path == tmp_path
