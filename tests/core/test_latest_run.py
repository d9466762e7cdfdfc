"""Which run folder `--resume` without a folder takes."""

from __future__ import annotations

import pytest

from miles_cli.run import latest_run_dir
from miles_core.errors import ConfigError


def make(out, name, saved=True):
    folder = out / name
    (folder / "checkpoints" / "step-000002" if saved else folder).mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["toy-20260101-000000", "toy-20260102-000000"], "toy-20260102-000000"),
        (["toy-20260101-000000", "toy-long-20260102-000000"], "toy-20260101-000000"),  # a run of another name
        (["toy-20260101-000000-2", "toy-20260101-000000-10"], "toy-20260101-000000-10"),  # numbers, not text
    ],
)
def test_the_newest_run_of_this_name_is_taken(tmp_path, names, taken):
    for name in names:
        make(tmp_path, name)
    assert latest_run_dir(tmp_path, "toy").name == taken


def test_a_start_that_failed_is_passed_over_and_named(tmp_path):
    old, _ = make(tmp_path, "toy-20260101-000000"), make(tmp_path, "toy-20260102-000000", saved=False)
    notes = []
    assert latest_run_dir(tmp_path, "toy", notes.append) == old
    assert notes[0].startswith("toy-20260102-000000 has no checkpoint")


def test_without_any_checkpoint_the_newest_starts_again(tmp_path):
    make(tmp_path, "toy-20260101-000000", saved=False)
    new = make(tmp_path, "toy-20260102-000000", saved=False)
    assert latest_run_dir(tmp_path, "toy") == new


def test_none_of_this_name_says_what_there_is(tmp_path):
    make(tmp_path, "other-20260101-000000")
    with pytest.raises(ConfigError, match="other-20260101-000000"):
        latest_run_dir(tmp_path, "toy")
