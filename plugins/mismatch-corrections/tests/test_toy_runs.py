"""Corrections in whole toy runs: they get their columns, change the step, and are refused where they would do nothing."""

from __future__ import annotations

import json

import pytest

from miles_cli.run import run_command
from miles_core.errors import ConfigError

RUN = """
name = "toy"
steps = 4
plugins = ["mismatch-corrections"]
tokenizer.use = "toy"
data.use = "toy"
engine.use = "toy"
[rollout]
groups_per_step = 4
samples_per_group = 4
max_lag = 1             # from step 2 on the trainer is a version ahead of the engine
sampling.max_new_tokens = 3
[trainer]
use = "toy"
toy.lr = 0.1
[[reward]]
use = "exact-match"
[[loss]]
use = "policy-gradient"
"""


def run(folder, *corrections, sets=()):
    config = folder / "run.toml"
    config.write_text(RUN + "".join(f'[[correction]]\nuse = "{name}"\n{more}' for name, more in corrections))
    run_command(config, out=folder / "out", sets=sets)
    (made,) = (folder / "out").iterdir()
    return [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]


def test_a_correction_makes_the_loop_recompute_old_logprobs(tmp_path):
    rows = run(tmp_path, ("tis", ""), ("opsm", "opsm.delta = 1e-4\n"))
    first, last = rows[0], rows[-1]
    assert first["correction/tis/weight"] == pytest.approx(1, abs=1e-5)  # the same weights on both sides
    # A version apart, ratios differ from 1, and the estimate of the KL is the one of the gap that the trainer reports.
    assert abs(last["correction/tis/weight"] - 1) > 1e-4 and last["correction/tis/weight_max"] > 1
    assert abs(first["correction/opsm/kl"]) < 1e-5 < abs(last["correction/opsm/kl"])
    assert all(row["correction/tis/log_ratio_clamped"] == 0 for row in rows)


def test_what_rejection_drops_is_not_trained(tmp_path):
    options = 'rejection = {level = "token", lower = 0.0, upper = 1.0001, veto = 0.0}\n'
    rows = run(tmp_path, ("rejection", options), sets=("train.skip_zero_advantage=false",))
    assert rows[0]["correction/rejection/masked"] == 0 < rows[-1]["correction/rejection/masked"] < 1
    for row in rows:
        kept = (1 - row["correction/rejection/masked"]) * row["tokens/sampled"]
        assert row["train/trainable_tokens"] == pytest.approx(kept)


def test_F6_where_everything_is_rejected_the_step_is_skipped(tmp_path):
    options = 'rejection = {level = "token", lower = 1.0, upper = 1.0, veto = 0.0}\n'
    rows = run(tmp_path, ("rejection", options))
    skipped = [row for row in rows if row["correction/rejection/masked"] == 1]
    assert skipped and rows[-1]["run/skipped_steps"] == len(skipped)
    assert all("train/loss" not in row for row in skipped)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "rejection"])
def test_a_run_with_nothing_to_compare_is_refused_before_it_starts(tmp_path, name):
    with pytest.raises(ConfigError, match=rf'correction\[0\].* correction "{name}" compares') as error:
        run(tmp_path, (name, ""), sets=("train.old_logprobs=rollout",))
    assert error.value.exit_code == 2 and f'or remove "{name}"' in str(error.value)
