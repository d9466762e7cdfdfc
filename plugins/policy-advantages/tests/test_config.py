"""What is refused before a run starts, and what options fall back on."""

from __future__ import annotations

import pytest
from advantage_support import ADVANTAGES, last, run

from miles_core.batch import apply_advantages, prepare
from miles_core.component import BuildContext, Environment
from miles_core.errors import ConfigError
from miles_core.settings import RunConfig
from miles_core.testing.samples import make_group
from miles_core.types import Score


def config(*chain: str, **tables) -> RunConfig:
    kinds = {name: {"use": "toy"} for name in ("tokenizer", "data", "engine", "trainer")}
    rollout = {"groups_per_step": 2, "samples_per_group": 2}
    advantage = tuple({"use": name} for name in chain)
    made = {**kinds, "steps": 1, "rollout": rollout, "loss": ({"use": "ppo-clip"},), "advantage": advantage, **tables}
    return RunConfig.model_validate(made)


def check(name: str, run_config: RunConfig, **options) -> None:
    component = ADVANTAGES[name]
    component.check(component.config(**options), Environment(where="x.toml: advantage[0].use", run_config=run_config))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_dr_grpo_refuses_a_loss_that_divides_by_lengths(aggregation):
    with pytest.raises(ConfigError, match=f'x.toml: .* "dr-grpo" .*"{aggregation}"') as caught:
        check("dr-grpo", config("dr-grpo", train={"aggregation": aggregation}))
    assert 'train.aggregation = "constant-length"' in str(caught.value)
    check("dr-grpo", config("dr-grpo", train={"aggregation": aggregation}), any_aggregation=True)


@pytest.mark.parametrize("aggregation", ["constant-length", "sequence-mean-token-sum"])
def test_dr_grpo_takes_a_loss_over_a_constant(aggregation):
    check("dr-grpo", config("dr-grpo", train={"aggregation": aggregation}))


FIRST = ["gdpo", "opo", "reinforce-pp", "reinforce-pp-baseline", "remax"]


@pytest.mark.parametrize("name", [*FIRST, "dr-grpo"])
def test_what_starts_from_rewards_comes_first(name):
    tables = {"train": {"aggregation": "constant-length"}, "reward": ({"use": "math"},)}
    check(name, config(name, "whiten", **tables))
    with pytest.raises(ConfigError, match=f'"{name}" stands in the chain grpo -> {name}, starts from rewards'):
        check(name, config("grpo", f"policy-advantages:{name}", **tables))


@pytest.mark.parametrize("name", [*FIRST, "dr-grpo"])
def test_what_starts_from_rewards_says_so_at_work_too(name):
    options = {"weights": {"a": 1.0}} if name == "gdpo" else {}
    with pytest.raises(ConfigError, match=f'advantage "{name}" starts from rewards'):
        run([("grpo", {}), (name, options)], [make_group([0.0, 1.0])])


def test_whiten_needs_something_before_it():
    with pytest.raises(
        ConfigError, match=r'"whiten" stands in the chain whiten -> grpo and changes the advantages of another'
    ):
        check("whiten", config("whiten", "grpo"))
    with pytest.raises(ConfigError, match='advantage "whiten" changes the advantages of another, and none stands before'):
        run("whiten", [make_group([0.0, 1.0])])


REFUSED = [
    ({"reward": ({"use": "math"},), "rewards": {"combine": "product"}}, {}, 'rewards.combine = "product" would have no'),
    ({"reward": ({"use": "math"},)}, {"weights": {"maths": 1.0}}, '"maths", and no .* has that name\n  rewards: math'),
    ({"reward": ({"use": "math", "weight": 0.0},)}, {}, "no reward with a weight other than 0"),
    ({}, {}, "no reward with a weight other than 0"),
]


@pytest.mark.parametrize(("tables", "options", "said"), REFUSED)
def test_gdpo_refuses_rewards_that_it_could_not_use(tables, options, said):
    with pytest.raises(ConfigError, match=said):
        check("gdpo", config("gdpo", **tables), **options)


def test_gdpo_weighs_as_the_reward_tables_do(tmp_path):
    # Scores "a" 1, 0 -> 0.7071, -0.7071; "brief" 0, 1 the reverse. 2 and 1 of them: 0.7071, -0.7071, std 1.
    tables = ({"use": "a", "weight": 2.0}, {"use": "other:length", "name": "brief"}, {"use": "seen", "weight": 0.0})
    component = ADVANTAGES["gdpo"]
    context = BuildContext(component="advantage/gdpo", run_dir=tmp_path, seed=0, run_config=config("gdpo", reward=tables))
    group = make_group([2.0, 1.0])
    for sample, a, brief in zip(group.samples, [1.0, 0.0], [0.0, 1.0], strict=True):
        sample.scores = {"a": Score(value=a), "brief": Score(value=brief)}
    batch = prepare([group])
    apply_advantages(batch, [("gdpo", component.build(component.config(), context))])
    assert last(batch) == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert "advantage/gdpo/equal/seen" not in batch.metrics


NEEDS = [
    ("remax", {}, {"baseline"}, ()),
    ("reinforce-pp", {}, set(), ()),
    ("reinforce-pp", {"kl_coef": 0.1}, {"old_logprobs", "reference_logprobs"}, ("role/reference",)),
    ("on-policy-distillation", {}, {"old_logprobs", "teacher_logprobs"}, ("role/teacher",)),
    ("whiten", {}, set(), ()),
]


@pytest.mark.parametrize(("name", "options", "columns", "roles"), NEEDS)
def test_what_is_needed_depends_on_the_options(name, options, columns, roles):
    component = ADVANTAGES[name]
    chosen = component.config(**options)
    assert (component.needed(chosen), component.required(chosen)) == (columns, roles)
