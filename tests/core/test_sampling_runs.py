"""Whole toy runs, in this process: what is sampled, dropped, masked and recomputed between a push and the next step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_cli.run import run_command
from miles_core.errors import RunFailed
from tests.core import runs

# A loss that reads old_logprobs, a correction that does, a filter, rewards, a sampler, and a record of every minibatch.
PLUGIN = """
import asyncio, json
import numpy as np
import miles_core
from miles_core import CorrectionOutput, LossOutput, hookimpl

@hookimpl
def miles_run_start(config, run_dir):
    global FILE
    FILE = run_dir / "minibatches.jsonl"

@hookimpl
def miles_before_step(step, batch):
    column = lambda name: [r.tolist() for r in batch.columns[name]] if name in batch.columns else None
    row = {
        "step": step, "minibatch": batch.minibatch, "version": batch.version, "current": batch.old_is_current,
        "old": column("old_logprobs"), "rollout": column("rollout_logprobs"),
        "samples": [s.trajectory_id for s in batch.samples],
        "engine": [s.logprobs.tolist() for s in batch.samples], "mask": [m.tolist() for m in batch.mask],
        "spans": [[[v.start, v.stop, v.version] for v in s.versions] for s in batch.samples],
    }
    with open(FILE, "a") as file:
        file.write(json.dumps(row) + "\\n")

@miles_core.loss("ratio", needs={"logprobs", "old_logprobs"})
def ratio(x):
    return LossOutput(per_token=-x.advantages * (1.0 + x.get("logprobs") - x.get("old_logprobs")))

@miles_core.correction("watch", needs={"old_logprobs"})
def watch(inputs):
    assert "old_logprobs" in inputs.columns
    return CorrectionOutput(mask=inputs.mask)

@miles_core.filter("odd")
def odd(group):
    return int(group.prompt.id[-1]) % 2 == 1

@miles_core.sampler("watching")
def watching(prompts, history):
    with open("HISTORY", "a") as file:
        file.write(json.dumps([[p.id for p in prompts], dict(history)]) + "\\n")
    return [p for p in prompts if history.get(p.id, 0.0) < 0.9]
"""


def toy(
    folder: Path,
    *sets: str,
    more: str = "",
    out: str = "out",
    resume: Path | None = None,
    loss: str = "policy-gradient",
    reward: str = "exact-match",
) -> Path:
    """The run folder of a run of `runs.CONFIG` with the plugin above. `exact-match` is scored in this process."""
    plugin, config = folder / "observer.py", folder / "config.toml"
    plugin.write_text(PLUGIN.replace("HISTORY", str(folder / "history.jsonl")))
    text = runs.CONFIG.replace('[[reward]]\nuse = "toy"', f'[[reward]]\nuse = "{reward}"')
    text = text.replace('use = "policy-gradient"', f'use = "{loss}"')
    config.write_text(text + more)
    run_command(config, files=[plugin], out=folder / out, sets=sets, resume=str(resume) if resume else None)
    return runs.run_dir(folder / out)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "minibatches.jsonl").read_text().splitlines()]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def groups_per_step(folder: Path) -> list[int]:
    """Different prompt draws that each step trained."""
    return [len({(sample[0], sample[1]) for sample in samples}) for _, samples in sorted(runs.trained(folder).items())]


# --- Where old log-probabilities come from ---------------------------------------------------------------------------

LAG = ("steps=4", "rollout.max_lag=1")  # from step 2 on the trainer is ahead of the engine


def mean_gap(row: dict[str, Any], name: str) -> float:
    """mean |name - engine| over the trainable tokens of a minibatch."""
    pairs = zip(row[name], row["engine"], row["mask"], strict=True)
    return float(
        np.mean([abs(a - b) for left, right, mask in pairs for a, b, m in zip(left, right, mask, strict=True) if m])
    )


def test_old_logprobs_of_the_rollout_are_the_engines(tmp_path):
    rows = records(toy(tmp_path, *LAG, "train.old_logprobs=rollout", "train.minibatches=2", loss="ratio"))
    assert len(rows) == 8 and not any(row["current"] for row in rows)
    assert all(mean_gap(row, "old") == 0 for row in rows)


@pytest.mark.parametrize(("sets", "more"), [(("train.minibatches=2",), ""), ((), '[[correction]]\nuse = "watch"\n')])
def test_recomputed_old_logprobs_are_the_trainers_at_the_start_of_the_step(tmp_path, sets, more):
    folder = toy(tmp_path, *LAG, *sets, more=more, loss="ratio")
    rows = [row for row in records(folder) if row["minibatch"] == 0]
    logged = metrics(folder)
    for row, step in zip(rows, logged, strict=True):
        # The trainer reports its log-probabilities from before the first update: the same distance from the engine's.
        assert mean_gap(row, "old") == pytest.approx(step["gap/mean_abs"], rel=1e-4, abs=1e-6)
        assert not row["current"]
    assert mean_gap(rows[0], "old") < 1e-5 < mean_gap(rows[-1], "old")  # the same weights, and a version apart


def test_one_optimizer_step_without_correction_needs_no_pass_of_its_own(tmp_path):
    rows = records(toy(tmp_path, *LAG, loss="ratio"))
    assert all(row["current"] and row["old"] is None for row in rows)


# --- Partial rollout -------------------------------------------------------------------------------------------------

# Answers take 8 x 60 ms, a step a few, also on a loaded machine: a push finds groups that are being sampled.
SLOW = ("steps=6", "rollout.max_lag=2", "rollout.sampling.max_new_tokens=8", "engine.toy.token_seconds=0.06")
SLOW += ("rollout.groups_per_step=2", "checkpoint.every=0", "transport.verify=false")


def versions_of(row: dict[str, Any]) -> list[set[int]]:
    return [{version for *_, version in spans} for spans in row["spans"]]


@pytest.mark.parametrize("how", ["rollout.partial=true", "rollout.on_stale=continue"])
def test_A3_a_group_interrupted_by_a_push_has_a_version_per_token_and_trains_within_max_lag(tmp_path, how):
    rows = records(toy(tmp_path, *SLOW, how))
    assert max(len(v) for row in rows for v in versions_of(row)) >= 2
    for row in rows:
        for spans, mask, engine, rollout in zip(row["spans"], row["mask"], row["engine"], row["rollout"], strict=True):
            sampled = [(t, version) for start, stop, version in spans for t in range(start, stop)]
            assert all(row["version"] - version <= 2 for t, version in sampled if mask[t])
            assert [t for t, m in enumerate(mask) if m] == [t for t, v in sampled if row["version"] - v <= 2]
            assert [engine[t] for t, m in enumerate(mask) if m] == [rollout[t] for t, m in enumerate(mask) if m]


def test_A3_without_partial_rollout_no_sample_spans_versions(tmp_path):
    rows = records(toy(tmp_path, *SLOW))
    assert {len(v) for row in rows for v in versions_of(row)} == {1}
    assert {row["version"] - v for row in rows for vs in versions_of(row) for v in vs} >= {0, 1}  # it did run ahead


# --- Dynamic sampling ------------------------------------------------------------------------------------------------

FILTERED = '[[filter]]\nuse = "nonzero-std"\n'


def constant_reward(folder: Path, *sets: str) -> Path:
    """No answer contains the marker, so that every reward is 0."""
    return toy(folder, *sets, more=FILTERED, reward='exact-match"\nexact-match.after = "no such text')


def test_F9_a_constant_reward_ends_the_run_with_counts_and_an_exit_code(tmp_path, capsys):
    with pytest.raises(RunFailed) as error:
        constant_reward(tmp_path, "rollout.max_rounds=3")
    assert error.value.exit_code == 1
    assert "of 12 prompts tried" in str(error.value) and "12  zero-std: all 0" in str(error.value)  # 3 rounds of 4
    shown = capsys.readouterr().out
    assert "groups dropped: 12 of 12" in shown and "zero-std" in shown


def test_F9_F6_a_constant_reward_may_be_skipped_step_by_step(tmp_path, capsys):
    folder = constant_reward(tmp_path, "rollout.max_rounds=2", "rollout.on_exhausted=train", "steps=3")
    shown = capsys.readouterr().out
    assert "step 1 trains 0 of 4 groups; dropped of 8: 8 zero-std (all 0)" in shown
    last = metrics(folder)[-1]
    assert (last["step"], last["run/skipped_steps"], last["run/optimizer_steps"]) == (3, 3, 0)
    assert last["buffer/dropped/zero-std"] == 24  # 3 steps of 2 rounds of 4


def test_F9_every_step_is_full_and_the_end_says_why_groups_were_dropped(tmp_path, capsys):
    folder = toy(tmp_path, "steps=3", more='[[filter]]\nuse = "odd"\n')
    assert groups_per_step(folder) == [4, 4, 4]
    started = int(metrics(folder)[-1]["buffer/started"])
    shown = capsys.readouterr().out
    assert f"groups dropped: {started - 12} of {started}" in shown  # 12 were trained
    assert sum(int(line.split()[-1]) for line in shown.splitlines() if line.startswith("odd ")) == started - 12


# --- Samplers --------------------------------------------------------------------------------------------------------

SAMPLER = '[sampler]\nuse = "watching"\n'
FEW = ("data.toy.num_prompts=8", "trainer.toy.lr=0.2", "checkpoint.keep=10", "steps=8")


def picks(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_history_reaches_the_sampler_and_survives_a_resume(tmp_path):
    whole = toy(tmp_path, *FEW, more=SAMPLER)
    seen = picks(tmp_path)
    assert seen[0][1] == {} and len(seen[-1][1]) == 8  # nothing is known at first, all 8 prompts at the end
    first_trained = {str(prompt_id) for prompt_id, *_ in runs.trained(whole)[1]}
    assert set(seen[1][1]) == first_trained  # what was judged in step 1, and nothing else

    half = tmp_path / "half" / whole.name
    shutil.copytree(whole, half)
    for step in (6, 8):
        shutil.rmtree(half / "checkpoints" / f"step-{step:06d}")
    (tmp_path / "history.jsonl").unlink()
    toy(tmp_path, *FEW, more=SAMPLER, out="half", resume=half)
    again = picks(tmp_path)
    assert again == seen[-len(again) :] and again[0][1] != {}
    assert runs.trained(half) == runs.trained(whole) and runs.weights(half) == runs.weights(whole)


def test_a_sampler_can_drop_and_every_step_is_still_full(tmp_path):
    assert groups_per_step(toy(tmp_path, *FEW, more=SAMPLER)) == [4] * 8
