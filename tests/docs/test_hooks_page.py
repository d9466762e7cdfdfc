"""docs/plugins.md has a section for every hook, with its contract, and a minimal plugin that works."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pages import ROOT, blocks, read, sections

from miles_cli.run import run_command
from miles_core import HOOK_API, BuildContext, Prompt, hookspecs
from miles_core.component import KINDS
from miles_core.errors import ConfigError, RuntimeMissing
from miles_core.plugins import PluginHost
from miles_core.testing import toy_model
from miles_core.testing.toy_arrays import ToyArray
from miles_core.testing.toy_kit import TOKENIZER
from miles_core.types import (
    AdvantageInputs,
    GenerateRequest,
    Generation,
    RoleSpec,
    RolloutContext,
    SamplingParams,
    VersionSpan,
)

PAGE = read("docs/plugins.md")
HOOKS = {name: value for name, value in vars(hookspecs).items() if name.startswith("miles_")}
SECTIONS = {
    match[1]: (match[2], body)
    for heading, body in sections(PAGE, 3).items()
    if (match := re.fullmatch(r"(miles_\w+)\((.*)\)", heading))
}
BASE = f"""\
extends = {json.dumps(str(ROOT / "recipes/toy.toml"))}
steps = 2
eval = []
checkpoint.save_model = false
[rollout]
groups_per_step = 2
samples_per_group = 4
[[reward]]
use = "exact-match"
"""
"""recipes/toy.toml with two small steps and a reward that needs no worker process."""


@pytest.fixture(autouse=True)
def forget_plugin_files() -> Iterator[None]:
    yield
    for name in [n for n in sys.modules if n.startswith("miles_plugin_file_")]:
        del sys.modules[name]


def example(hook: str, folder: Path) -> Path:
    """The section's plugin as a file `acme_<hook>.py`."""
    (code,) = blocks(SECTIONS[hook][1], "python")
    file = folder / f"acme_{hook.removeprefix('miles_')}.py"
    file.write_text(code.text, "utf-8")
    return file


def run_with(folder: Path, files: list[Path], toml: str = "") -> Path:
    """Two steps of the toy with these plugin files and `toml` laid over it; returns the run folder."""
    (folder / "base.toml").write_text(BASE, "utf-8")
    (folder / "acme.toml").write_text(f'extends = "base.toml"\n{toml}', "utf-8")
    assert run_command(folder / "acme.toml", plugins=[], files=files, out=folder / "runs") == 0
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir


def rows(run_dir: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text("utf-8").splitlines()]


# --- The page against the hooks --------------------------------------------------------------------------------------


def test_every_hook_has_a_section_with_its_arguments_and_no_other_has_one():
    assert {name: arguments for name, (arguments, _) in SECTIONS.items()} == {
        name: ", ".join(inspect.signature(spec).parameters) for name, spec in HOOKS.items()
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_a_section_states_the_contract_of_the_docstring(hook: str):
    contract = " ".join((inspect.getdoc(HOOKS[hook]) or "").split())
    contract = contract[contract.index("Runs in:") :]
    assert all(word in contract for word in ("Called:", "Returns:", "Since:"))
    assert contract in " ".join(SECTIONS[hook][1].split())


@pytest.mark.parametrize("hook", hookspecs.REGISTRATION)
def test_a_section_names_the_kind(hook: str):
    assert f"Kind: `{hookspecs.REGISTRATION[hook]}`." in SECTIONS[hook][1]


def test_provisional_hooks_are_called_so():
    for name, spec in HOOKS.items():
        assert ("Provisional" in (inspect.getdoc(spec) or "")) == ("Provisional" in SECTIONS[name][1]), name


# --- The minimal plugins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", hookspecs.REGISTRATION)
def test_the_minimal_plugin_registers_its_component(hook: str, tmp_path: Path):
    host = PluginHost.create(plugins=[], files=[example(hook, tmp_path)])
    kind = hookspecs.REGISTRATION[hook]
    assert [e for e in host.registry.all(kind) if e.plugin.name.startswith("acme-")]
    assert host.infos[-1].state == "loaded"  # plugin files follow what is installed


def trained_ids(run_dir: Path) -> set[str]:
    return {sample[0] for row in rows(run_dir, "trained") for sample in row["samples"]}


def metrics_like(run_dir: Path, end: str) -> list[float]:
    return [value for row in rows(run_dir) for key, value in row.items() if key.endswith(end)]


def any_run(run_dir: Path) -> bool:
    return True


EFFECTS: dict[str, Callable[[Path], bool]] = {
    "miles_data_sources": lambda d: trained_ids(d) == {"digit-0", "digit-1", "digit-2", "digit-3"},  # 2 steps of 2 groups
    "miles_tokenizers": any_run,  # the toy engine answers prompts of these ids; more below
    "miles_engines": lambda d: {r["response"] for r in rows(d, "samples")} == {"2"},
    "miles_rollouts": any_run,  # more below
    "miles_rewards": lambda d: metrics_like(d, "reward/mean")[0] > 0.5,  # nearly every answer is a digit and an end
    "miles_filters": lambda d: sum(metrics_like(d, "dropped/hopeless")) > 0,  # one answer in ten is right at first
    "miles_advantages": any_run,  # more below
    # The engine computes what the trainer computes, so that no ratio is above the cap.
    "miles_corrections": lambda d: metrics_like(d, "/capped") == [0.0, 0.0],
    "miles_losses": any_run,  # more below
    "miles_trainers": lambda d: metrics_like(d, "train/lr") == [0.5, 0.5],
    "miles_model_sources": any_run,  # it fails without the model; more below
    "miles_weight_transports": lambda d: sorted(p.name for p in (d / "weights").iterdir()) == ["version-1", "version-2"],
    "miles_launchers": any_run,  # more below
    "miles_metrics": lambda d: min(metrics_like(d, "lengths/longest")) >= max(1, *metrics_like(d, "lengths/shortest")),
    "miles_trackers": lambda d: len((d / "rewards.csv").read_text().splitlines()) == 2,
}
"""What each minimal plugin is seen to do in a run of two steps."""


@pytest.mark.parametrize("hook", EFFECTS)
def test_the_minimal_plugin_does_its_job_in_a_run(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    toy_model.write_model(tmp_path / "models/toy", toy_model.initial_params(0))  # for the model source
    (toml,) = blocks(SECTIONS[hook][1], "toml")
    run_dir = run_with(tmp_path, [example(hook, tmp_path)], toml.text)
    assert [r["step"] for r in rows(run_dir)] == [1, 2]
    assert EFFECTS[hook](run_dir)


def test_every_registration_hook_is_seen_at_work():
    alone = {"miles_samplers", "miles_model_specs", "miles_precision_recipes", "miles_train_extensions"}
    assert EFFECTS.keys() | alone | {"miles_sample_fields"} == hookspecs.REGISTRATION.keys()
    assert all(blocks(SECTIONS[hook][1], "toml") for hook in EFFECTS)
    assert not any(blocks(SECTIONS[hook][1], "toml") for hook in alone), "a run uses it now: add it to EFFECTS"


def built(hook: str, folder: Path, **options: Any) -> tuple[Any, BuildContext]:
    """The component of a minimal plugin, built outside a run."""
    host = PluginHost.create(plugins=[], files=[example(hook, folder)])
    kind = hookspecs.REGISTRATION[hook]
    (entry,) = [e for e in host.registry.all(kind) if e.plugin.name.startswith("acme-")]
    context = BuildContext(component=f"{kind}/{entry.name}", run_dir=folder, seed=0, run_config=None)
    return entry.component.build(entry.component.config(**options), context), context


def test_the_minimal_sampler_orders_prompts_by_mean_reward(tmp_path: Path):
    sampler, _ = built("miles_samplers", tmp_path)
    prompts = [Prompt(id=name, text=name) for name in "abc"]
    picked = sampler.pick(prompts, {"a": 0.9, "b": 0.1, "c": 0.5})
    assert [p.id for p in picked] == ["b", "c", "a"]


def test_the_minimal_model_spec_maps_names_both_ways(tmp_path: Path):
    spec, _ = built("miles_model_specs", tmp_path)
    (name,) = spec.to_hf("decoder.layers.0.weight")
    assert name == "model.layers.0.weight" and spec.from_hf(name) == ("decoder.layers.0.weight",)


def test_the_minimal_precision_recipe_gives_options_and_leaves_buckets_alone(tmp_path: Path):
    recipe, _ = built("miles_precision_recipes", tmp_path)
    assert recipe.trainer_options("fsdp") == recipe.engine_options("torch") == {"dtype": "bfloat16"}
    assert list(recipe.export(iter([1, 2]))) == [1, 2]


def test_the_minimal_extension_counts_passes(tmp_path: Path):
    extension, context = built("miles_train_extensions", tmp_path)
    for _ in range(3):
        with extension.around_forward(None, {}), extension.around_backward(None, {}):
            pass
    assert context.metrics == {"extension/count-passes/forward_passes": (3.0, 3.0, "sum")}


def test_the_minimal_field_is_declared(tmp_path: Path):
    host = PluginHost.create(plugins=[], files=[example("miles_sample_fields", tmp_path)])
    assert host.fields["acme_route"].align == "transition"


def test_the_minimal_tokenizer_has_the_toys_ids(tmp_path: Path):
    tokenizer, _ = built("miles_tokenizers", tmp_path)
    prompt = tokenizer.render([{"role": "user", "content": "3,4="}])
    assert list(prompt.token_ids) == [toy_model.token_id(c) for c in "3,4="]
    assert tokenizer.decode([*prompt.token_ids, toy_model.EOS]) == "3,4="
    assert tokenizer.vocab_size == toy_model.VOCAB_SIZE and tokenizer.stop_token_ids == (toy_model.EOS,)


def test_the_minimal_rollout_gives_every_second_sample_half_of_the_length(tmp_path: Path):
    asked = []

    class Pool:
        async def generate(self, request: GenerateRequest) -> Generation:
            asked.append(request)
            ids, spans = np.full(1, toy_model.EOS, np.int32), (VersionSpan(start=0, stop=1, version=3),)
            return Generation(id=request.id, token_ids=ids, logprobs=np.zeros(1), finish="stop", versions=spans)

    rollout, _ = built("miles_rollouts", tmp_path)
    context = RolloutContext(
        prompt=Prompt(id="p", text="3,4="),
        num_samples=4,
        sampling=SamplingParams(max_new_tokens=6),
        pool=Pool(),
        tokenizer=TOKENIZER,
        seed=0,
        max_context=0,
    )
    group = asyncio.run(rollout.run_group(context))
    assert [r.params.max_new_tokens for r in asked] == [6, 3, 6, 3]
    assert len({r.seed for r in asked}) == len({r.id for r in asked}) == 4
    assert [s.index for s in group.samples] == [0, 1, 2, 3] and group.born_version == 3


def test_the_minimal_advantage_is_the_reward_minus_the_mean_of_the_batch(tmp_path: Path):
    advantage, _ = built("miles_advantages", tmp_path)
    mask = [np.array([False, True])] * 3
    output = advantage(AdvantageInputs(samples=[], groups=[], rewards=[1.0, None, 0.0], mask=mask))
    # The mean of 1 and 0 is 1/2; without a verdict there is no advantage.
    assert [list(row) for row in output.advantages] == [[0.0, 0.5], [0.0, 0.0], [0.0, -0.5]]


def test_the_minimal_loss_is_the_ratio_times_the_advantage_and_0_where_masked(tmp_path: Path):
    loss, _ = built("miles_losses", tmp_path)
    columns = {"logprobs": np.log([0.2, 0.5, 0.5]), "old_logprobs": np.log([0.1, 0.5, 0.5])}
    x = SimpleNamespace(
        get=lambda name: ToyArray(columns[name]),
        advantages=ToyArray(np.array([1.0, 3.0, np.inf])),
        mask=ToyArray(np.array([True, True, False])),
    )
    assert np.allclose(loss(x).per_token.value, [-2.0, -3.0, 0.0])  # ratios 0.2 / 0.1 and 1


def test_the_minimal_correction_caps_the_ratio(tmp_path: Path):
    correction, _ = built("miles_corrections", tmp_path)
    columns = {"old_logprobs": [np.log([0.3, 0.1])], "rollout_logprobs": [np.log([0.1, 0.1])]}
    output = correction(SimpleNamespace(columns=columns, mask=[np.ones(2, bool)]))
    assert np.allclose(output.multiplier[0], [2.0, 1.0])  # ratios 3, above the cap of 2, and 1
    assert output.metrics == {"capped": (1, 2, "mean")}


def test_the_minimal_source_says_where_it_looked(tmp_path: Path):
    source, _ = built("miles_model_sources", tmp_path, root=str(tmp_path / "models"))
    with pytest.raises(RuntimeMissing, match=r"there is no model toy under .*models"):
        source.fetch("toy", None, lambda *_: None)


def test_the_minimal_launcher_says_what_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    launcher, _ = built("miles_launchers", tmp_path)

    async def check() -> None:
        allocation = await launcher.allocate([RoleSpec(name="engine", component="engine/toy", num_workers=2)])
        await allocation.close()

    asyncio.run(check())
    assert "engine: 2 processes" in caplog.text


def test_the_minimal_engine_says_under_which_version_it_sampled(tmp_path: Path):
    engine, _ = built("miles_engines", tmp_path)
    engine.version = 7
    params = SimpleNamespace(stop_token_ids=(1,))
    answer = asyncio.run(engine.generate(SimpleNamespace(id="r", params=params)))
    assert answer.versions == (VersionSpan(start=0, stop=2, version=7),)
    assert np.array_equal(answer.token_ids, [26, 1])


def test_the_minimal_lifecycle_plugins_see_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    observers = [name for name in HOOKS if name not in hookspecs.REGISTRATION]
    with caplog.at_level(logging.WARNING, "acme"):
        run_dir = run_with(tmp_path, [example(hook, tmp_path) for hook in observers])
    assert (run_dir / "host.txt").read_text().startswith("toy on ")
    said = [r.getMessage() for r in caplog.records if r.name == "acme"]
    step = [
        r"step {0} samples with version {1}",
        r"step {0}: \d of 8 samples are above their group",  # 2 groups of 4
        r"step {0}, minibatch 0: \d+ tokens",
        r"version {0}: [1-9]\d+ bytes in \d+\.\d+ s",
        r"step {0} has mean reward \d\.\d+",
    ]
    expected = [line.format(n, n - 1) for n in (1, 2) for line in step] + ["the run is done"]
    assert len(said) == len(expected)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, said, strict=True)), said
    assert not [r for r in caplog.records if "failed in" in r.getMessage()]


def test_the_minimal_veto_stops_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match="refuses this config: 10001 steps"):
        run_with(tmp_path, [example("miles_configure", tmp_path)], "steps = 10001\n")


# --- The other code on the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1], ids=["decorated", "component"])
def test_the_first_plugins_of_the_page_reward_a_run(place: int, tmp_path: Path):
    code = blocks(sections(PAGE, 2)["The smallest plugin"], "python")[place]
    (tmp_path / "acme.py").write_text(code.text, "utf-8")
    run_dir = run_with(tmp_path, [tmp_path / "acme.py"], '[[reward]]\nuse = "acme"\nacme.bonus = 2.0\n')
    assert {r["reward"] for r in rows(run_dir, "samples")} == {0.0, 2.0}


def test_the_index_on_the_page_is_of_this_hook_api():
    (index,) = [json.loads(b.text) for b in blocks(PAGE, "json")]
    assert index["hook_api"] == HOOK_API
    assert {c["kind"] for c in index["components"]} <= set(KINDS)
