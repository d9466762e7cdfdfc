"""Each rule of each contract suite fails on a component that breaks it; so no rule is one that cannot fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.testing import CONTRACTS, broken
from miles_core.testing.contracts import rules

CASES = broken.cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_suite_fails_on(case: broken.Broken, tmp_path: Path):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        case.run(tmp_path)


def test_every_rule_has_a_broken_fake():
    there_are = {(contract, rule) for contract in CONTRACTS for rule in rules(contract)}
    assert {(case.contract, case.rule) for case in CASES} == there_are


def test_every_rule_says_what_it_wants():
    silent = [f"{contract}.{rule}" for contract in CONTRACTS for rule, text in rules(contract).items() if not text]
    assert not silent


def test_a_skipped_rule_is_no_proof(tmp_path: Path):
    suite = next(case.suite for case in CASES if case.contract == "SourceContract")
    case = broken.Broken(suite=suite, rule="test_it_gives_a_model_folder", name="skips", attributes={"reference": ""})
    with pytest.raises(RuntimeError, match="was skipped"):
        case.run(tmp_path)


def test_assertions_of_the_suites_explain_themselves(tmp_path: Path):
    case = next(c for c in CASES if c.name == "OneTokenMore")
    with pytest.raises(
        AssertionError, match=r"assert \(2, 'length'\) == \(1, 'length'\)"
    ):  # rewritten: the values are shown
        case.run(tmp_path)


def test_a_run_needs_no_pytest():
    program = (
        "import sys; from miles_core import builtin; builtin.collect('miles_engines'); sys.exit('pytest' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
