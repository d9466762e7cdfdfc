"""Second models beside the policy: what is refused in the config, before any model loads."""

from __future__ import annotations

import pytest
from acme import CONFIG, run_of
from dists import Dists

from miles_core.errors import ConfigError
from miles_core.roles import Divergence, check_roles, divergence

LOSSES = """
from miles_core import Component, ComponentConfig, hookimpl
class Options(ComponentConfig):
    asks: tuple[str, ...] = ()
    \"\"\"Names that it reads.\"\"\"
def part(name, **more):
    return Component(name=name, summary="a loss", config=Options, needs=lambda c: frozenset(c.asks),
                     build=lambda config, context: context, **more)
@hookimpl
def miles_losses():
    return [part("plain"), part("squares", traits={"scope": "value"})]
@hookimpl
def miles_trainers():
    return [Component(name="modest", summary="a trainer", build=lambda config, context: context,
                      traits={"outputs": frozenset({"logprobs", "entropy"})})]
"""
PLAIN, SQUARES = (
    '[[loss]]\nuse = "plain"\n[loss.plain]\nasks = {}\n',
    '[[loss]]\nuse = "squares"\n[loss.squares]\nasks = {}\n',
)


def plain(*names: str) -> str:
    return PLAIN.format(list(names))


def squares(*names: str) -> str:
    return SQUARES.format(list(names))


def role(name: str, **options: object) -> str:
    return f"[roles.{name}]\n" + "".join(f"{k} = {v}\n" for k, v in options.items()).replace("True", "true")


def problems(dists: Dists, text: str, *sets: str) -> str:
    """What `check_roles` says of the shared config with `text` after it; empty when it accepts."""
    from acme import install

    install(dists)
    dists.add("own", LOSSES)
    run = run_of(dists, CONFIG + text, *sets)
    try:
        check_roles(run)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("reverse_kl:teacher", Divergence("reverse_kl", "teacher", 0)),
        ("forward_kl:reference:64", Divergence("forward_kl", "reference", 64)),
        ("logprobs", None),
        ("topk:3", None),
    ],
)
def test_names_of_divergences(name, parsed):
    assert divergence(name) == parsed


@pytest.mark.parametrize(
    "name", ["reverse_kl", "forward_kl:", "reverse_kl:teacher:0", "reverse_kl:teacher:x", "forward_kls:a"]
)
def test_a_name_that_only_looks_like_a_divergence_is_refused(name):
    with pytest.raises(ConfigError, match=f'"{name}" is no divergence: write'):
        divergence(name)


ACCEPTED = [
    plain(),
    plain("acme_route", "topk:3", "rollout_logprobs"),
    role("teacher") + plain("reverse_kl:teacher"),
    role("reference") + plain("forward_kl:reference:8"),
    role("critic") + squares("values", "returns"),
    role("critic", warmup_steps=2) + squares("values"),
    role("critic", shared=True) + squares("values", "logprobs") + plain("values"),
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_fits_is_accepted(dists: Dists, text):
    assert problems(dists, text) == ""


REFUSED = [
    (
        plain("reverse_kl:teacher"),
        ['loss[1].use: loss "plain"', 'no role "teacher" has', "add a table [roles.teacher]"],
    ),
    (role("reference") + plain("reverse_kl:teacher"), ["(there is: reference)"]),
    (role("teacher") + plain("reverse_kl:teachr"), ['no role "teachr"', "(there is: teacher)"]),
    (role("critic") + squares("values") + plain("reverse_kl:critic"), ['no role "critic" has log-probabilities']),
    (role("teacher") + plain("reverse_kl:teacher:0"), ['"reverse_kl:teacher:0" is no divergence']),
    (role("critic"), ["roles.critic: no selected loss trains the critic", "of scope value: squares"]),
    (
        squares("values"),
        ['loss "squares" (miles-own 1.0) trains a critic, and there is none', "add a table [roles.critic]"],
    ),
    (role("reference", shared=True), ["roles.reference.shared is an option of the critic; a reference has none"]),
    (role("teacher", warmup_steps=1), ["roles.teacher.warmup_steps is an option of the critic"]),
    (role("critic", shared=True, path="'m'") + squares("values"), ["roles.critic: shared = true puts the value head"]),
    (role("critic", warmup_steps=3) + squares("values"), ["warmup_steps = 3 leaves the policy none of the 3 steps"]),
    (role("critic") + squares("values", "entropy"), ["trains the value model and needs entropy of the policy"]),
    (
        plain("old_logprob"),
        ['loss "plain"', 'needs "old_logprob", which nothing', 'did you mean "old_logprobs"?'],
    ),
    (plain("topk:x"), ['needs "topk:x"; write topk:<K> with K > 0']),
    (plain("old_values"), ['needs "old_values" of the role "critic", which is not there; add a table [roles.critic]']),
    (role("critic") + squares("values") + plain("values"), ["trains the policy and needs values of the critic"]),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_does_not_fit_is_refused_before_any_model_loads(dists: Dists, text, words):
    said = problems(dists, text)
    for word in words:
        assert word in said, said


def test_a_trainer_that_does_not_compute_a_name_is_told_apart_from_one_that_does(dists: Dists):
    text = role("teacher") + plain("forward_kl:teacher", "entropy", "old_logprobs")
    assert problems(dists, text) == ""  # "shard" does not say what it computes
    said = problems(dists, text, "trainer.use=modest")
    assert 'needs "forward_kl:teacher", which trainer "modest" (miles-own 1.0) does not compute' in said
    assert "entropy" not in said.replace("it gives entropy, logprobs", "")
