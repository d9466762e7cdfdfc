"""Pairs of choices that cannot be together are refused from the config, with the names of the components."""

from __future__ import annotations

import pytest
from acme import CONFIG, install, run_of
from dists import Dists

from miles_core.errors import ConfigError

PLUGIN = """
from miles_core import Component, hookimpl
from miles_core.component import ComponentConfig

class Level(ComponentConfig):
    level: str = "token"

def made(name, traits, **more):
    return Component(name=name, summary=name, build=lambda config, context: None, traits=traits, **more)

@hookimpl
def miles_losses():
    dead = {"ratio": "token", "zero_advantage": "no-gradient"}
    return [made("whole", {"ratio": "sequence"}), made("single", {"ratio": "token"}), made("dead", dead)]

@hookimpl
def miles_advantages():
    return [made("mine", {})]

@hookimpl
def miles_corrections():
    needs = lambda config: frozenset({"old_logprobs"})
    by_option = made("levels", {"ratio": lambda config: config.level}, config=Level, needs=needs)
    return [by_option, made("masks", {})]

@hookimpl
def miles_rollouts():
    return [made("given", {"logprobs": "none"})]
"""
CUT = ("rollout.sampling.top_p=0.8",)


def load(dists: Dists, *sets: str, text: str = ""):
    if not (dists.root / "installed").exists():
        install(dists)
        dists.add("odd", PLUGIN)
        (dists.root / "installed").touch()
    return run_of(dists, CONFIG + text, *sets)


def refused(dists: Dists, *sets: str, text: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(dists, *sets, text=text)
    return str(caught.value)


LOSS, CORRECTION = '[[loss]]\nuse = "{}"\n', '[[correction]]\nuse = "{}"\n'


@pytest.mark.parametrize("setting", ["top_p=0.8", "top_k=40"])
def test_F11_truncated_sampling_is_refused_with_ratios_of_sequences(dists: Dists, setting: str):
    message = refused(dists, f"rollout.sampling.{setting}", text=LOSS.format("whole"))
    assert 'loss[1].use: loss "whole" (miles-odd 1.0) weighs whole sequences' in message
    assert setting.replace("=", " = ") in message and "set top_p = 1 and top_k = 0" in message


def test_F11_token_ratios_and_whole_distributions_are_not_refused(dists: Dists):
    load(dists, *CUT, text=LOSS.format("single") + CORRECTION.format("masks"))
    load(dists, text=LOSS.format("whole"))
    load(dists, *CUT, text=CORRECTION.format("levels"))


def test_F11_the_trait_may_follow_from_options_and_holds_for_corrections(dists: Dists):
    message = refused(dists, *CUT, text=CORRECTION.format("levels") + '[correction.levels]\nlevel = "sequence"\n')
    assert 'correction "levels" (miles-odd 1.0) weighs whole sequences' in message and "choose a correction" in message


def test_F11_several_clashes_are_reported_together(dists: Dists):
    message = refused(dists, *CUT, "rollout.sampling.temperature=0", text=LOSS.format("whole"))
    assert "2 problems" in message and "temperature 0 is greedy" in message and 'loss "whole"' in message


def test_answers_that_were_not_sampled_have_no_logprobs_to_compare_with(dists: Dists):
    given = "rollout.use=given"
    load(dists, given, text=CORRECTION.format("masks"))
    assert 'rollout "given" (miles-odd 1.0) were not sampled' in refused(dists, given, "train.old_logprobs=rollout")
    message = refused(dists, given, text=CORRECTION.format("levels"))
    assert 'correction "levels" (miles-odd 1.0) compares with the log-probabilities of the engine' in message


# --- Choices that are allowed, and with which nothing is learnt ---------------------------------------------------------


def noted(dists: Dists, *sets: str, text: str = "") -> str:
    return " ".join(load(dists, *sets, text=text).notes)


def test_losses_that_all_weigh_nothing_are_refused_and_one_of_them_is_not(dists: Dists):
    assert "loss: every [[loss]] has weight 0" in refused(dists, "loss[0].weight=0.0")
    assert load(dists, "loss[0].weight=0.0", text=LOSS.format("single")).notes == []


def test_a_loss_that_is_turned_round_is_noted(dists: Dists):
    assert 'loss "clip" (miles-acme 1.2) has weight -2: what it minimises is maximised' in noted(
        dists, "loss[0].weight=-2.0"
    )


def test_rewards_that_all_weigh_nothing_are_noted(dists: Dists):
    assert "every [[reward]] has weight 0" in noted(dists, "reward[0].weight=0.0")


def test_one_answer_to_a_prompt_is_noted_where_an_advantage_compares_answers(dists: Dists):
    """`grpo`, the default, gives a single answer 0; a loss without the promise may learn from it all the same."""
    one = "rollout.samples_per_group=1"
    assert 'advantage "grpo" (built in) compares the answers to one prompt' in noted(dists, one, "loss[0].use=dead")
    assert noted(dists, one) == "" == noted(dists, "loss[0].use=dead")
    assert noted(dists, one, "loss[0].use=dead", text='[[advantage]]\nuse = "mine"\n') == ""
