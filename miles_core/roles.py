"""Second models beside the policy - reference, teacher, critic - and what is read of them. Everything that can be wrong
with them is found in the config, before any model loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from miles_core.config import ResolvedRun
from miles_core.errors import ConfigError
from miles_core.explain import nearest
from miles_core.registry import a
from miles_core.resolve import Selection

FORWARD_COLUMNS = {
    "old_logprobs": ("policy", "logprobs"),
    "reference_logprobs": ("reference", "logprobs"),
    "teacher_logprobs": ("teacher", "logprobs"),
    "old_values": ("critic", "values"),
}
"""Columns that cost a forward pass: name -> (role, output)."""

DIVERGENCE = re.compile(r"(reverse_kl|forward_kl):([a-z_]+)(?::([1-9][0-9]*))?")
TOP_K = re.compile(r"topk:[1-9][0-9]*")
COMPUTED = ("entropy", "logsumexp", "topk", "values", "reverse_kl", "forward_kl")
"""First parts of the names that a trainer computes in its pass for a loss, besides log-probabilities; a trainer says in its
trait "outputs" which of them it can."""
LANGUAGE = ("logprobs", "entropy", "logsumexp", "topk", "reverse_kl", "forward_kl")
"""Those of them, and log-probabilities, that a model without a language-model head cannot give."""


COLUMNS = ("logprobs", "rollout_logprobs", "advantages", "returns", "baseline", "multiplier", "pair_ids", "pair_sign")
"""Further names that `needs` may hold; besides these there are the side channels, and "column/<name>" of a component."""


class Divergence(NamedTuple):
    """What "<kind>:<role>" and "<kind>:<role>:<K>" ask for, per token, in nats.

    reverse_kl: KL(policy || role); forward_kl: KL(role || policy), over the whole next-token distribution. With K, over the
    role's K most likely tokens one by one and all others as one: a lower bound that is exact for K = vocabulary.
    """

    kind: str
    role: str
    k: int
    """0: the whole vocabulary."""


def divergence(name: str) -> Divergence | None:
    """The parsed name, or None for one of another sort. Raises ConfigError where it only looks like one."""
    if not name.startswith(("reverse_kl", "forward_kl")):
        return None
    match = DIVERGENCE.fullmatch(name)
    if match is None:
        raise ConfigError(
            f'"{name}" is no divergence: write <reverse_kl or forward_kl>:<role>, or that and :<K> with K > 0'
        )
    return Divergence(match[1], match[2], int(match[3] or 0))


def check_roles(run: ResolvedRun) -> None:
    """Raises ConfigError with everything that is wrong: divergences from roles that are not there, names that the trainer
    does not compute, a critic without a loss or a value loss without a critic, options of another role."""
    problems = [*_wrong_names(run), *_wrong_critic(run), *_wrong_options(run)]
    if problems:
        raise ConfigError(*problems)


def value_losses(run: ResolvedRun) -> list[Selection]:
    return [s for s in run.all("loss") if s.component.traits.get("scope", "policy") == "value"]


def _wrong_names(run: ResolvedRun) -> Iterator[str]:
    trainer = run.all("trainer")[0]
    offered = trainer.component.traits.get("outputs")
    columns = {*COLUMNS, *FORWARD_COLUMNS, *run.host.fields}
    columns |= {c.removeprefix("column/") for s in run.chosen() for c in s.component.provided(s.options)}
    for selection in (s for kind in ("advantage", "correction", "loss") for s in run.all(kind)):
        who = f"{selection.where}: {selection.label}"
        for name in sorted(selection.component.needed(selection.options)):
            base = name.partition(":")[0]
            if base in COMPUTED and offered is not None and base not in offered:
                yield f'{who} needs "{name}", which {trainer.label} does not compute; it gives {", ".join(sorted(offered))}'
            if base not in columns and base not in COMPUTED:
                close = nearest(name, [*columns, *COMPUTED])
                yield f'{who} needs "{name}", which nothing makes' + (f'; did you mean "{close}"?' if close else "")
            if base == "topk" and not TOP_K.fullmatch(name):
                yield f'{who} needs "{name}"; write topk:<K> with K > 0'
            role = FORWARD_COLUMNS.get(name, ("policy",))[0]
            if role not in ("policy", *run.config.roles):
                yield f'{who} needs "{name}" of the role "{role}", which is not there; add a table [roles.{role}]'
            try:
                wanted = divergence(name)
            except ConfigError as error:
                yield f"{who} needs {error}"
                continue
            if wanted is not None and (wanted.role == "critic" or wanted.role not in run.config.roles):
                others = ", ".join(r for r in run.config.roles if r != "critic") or "none"
                yield f'{who} needs "{name}", and no role "{wanted.role}" has log-probabilities (there is: {others})'
                yield f"  add a table [roles.{wanted.role}], or choose reference or teacher"


def _wrong_critic(run: ResolvedRun) -> Iterator[str]:
    losses = value_losses(run)
    critic = run.config.roles.get("critic")
    if critic is None or not critic.shared:
        for selection in run.all("loss"):
            needs = {name.partition(":")[0] for name in selection.component.needed(selection.options)}
            foreign = needs & (set(LANGUAGE) if selection in losses else {"values"})
            if foreign:
                models = ("value model", "policy") if selection in losses else ("policy", "critic")
                who, what = f"{selection.where}: {selection.label}", ", ".join(sorted(foreign))
                yield f"{who} trains the {models[0]} and needs {what} of the {models[1]}, which is another model"
                yield "  put both on one trunk: [roles.critic] shared = true"
    if "critic" in run.config.roles and not losses:
        offered = [e.name for e in run.host.registry.all("loss") if _scope(e.component) == "value"]
        yield "roles.critic: no selected loss trains the critic"
        yield f"  add a [[loss]] of scope value: {', '.join(offered) or 'none is installed'}, or remove [roles.critic]"
    if losses and "critic" not in run.config.roles:
        yield f"{losses[0].where}: {losses[0].label} trains a critic, and there is none"
        yield "  add a table [roles.critic]"


def _scope(component: Any) -> str:
    return getattr(component, "traits", {}).get("scope", "policy")


def _wrong_options(run: ResolvedRun) -> Iterator[str]:
    for name, table in run.config.roles.items():
        for option in ("shared", "warmup_steps"):
            if name != "critic" and getattr(table, option):
                yield f"roles.{name}.{option} is an option of the critic; {a(name)} has none"
        if table.shared and table.path:
            yield f"roles.{name}: shared = true puts the value head on the policy's trunk, and path names another model"
            yield "  leave one of them out"
    critic = run.config.roles.get("critic")
    if critic is not None and critic.warmup_steps >= run.config.steps:
        yield f"roles.critic.warmup_steps = {critic.warmup_steps} leaves the policy none of the {run.config.steps} steps"
