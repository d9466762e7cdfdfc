"""Scoring: verdicts, time limits, workers that die. Rewards come from `zoo_rewards.py`: index i scores i unless bad."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from miles_core import reaping
from miles_core.component import Component
from miles_core.errors import ConfigError, ContractError, PluginError, RunFailed
from miles_core.judging import Judge, judge_group
from miles_core.reaping import kill_tree
from miles_core.reward_pool import clean_environment
from miles_core.reward_wire import decode_group, encode_group
from miles_core.scoring import RewardEntry, Scorer, combine
from miles_core.settings import RewardsTable, RewardTable
from miles_core.types import Prompt, Sample, SampleGroup, VersionSpan

ZOO_FILE = Path(__file__).with_name("zoo_rewards.py")
_spec = spec_from_file_location("zoo_rewards", ZOO_FILE)
zoo = module_from_spec(_spec)
_spec.loader.exec_module(zoo)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


def make_sample(index: int, prompt: Prompt, *, segment: int = 0, status: str = "stop", response: str = "x") -> Sample:
    group = f"{prompt.id}@{prompt.draw}"
    return Sample(
        group_id=group,
        trajectory_id=f"{group}/{index}",
        index=index,
        segment=segment,
        tokens=np.arange(5, dtype=np.int32),
        prompt_len=2,
        loss_mask=np.array([0, 0, 1, 1, 1], bool),
        logprobs=np.linspace(-1, 0, 5, dtype=np.float32),
        versions=(VersionSpan(start=2, stop=5, version=7),),
        status=status,
        prompt=prompt,
        response=response,
    )


def make_group(n: int, id: str = "p", **prompt) -> SampleGroup:
    prompt = Prompt(id=id, messages=[{"role": "user", "content": "?"}], **{"label": "1"} | prompt)
    return SampleGroup(id=f"{id}@0", prompt=prompt, samples=[make_sample(i, prompt) for i in range(n)], num_samples=n)


def make_scorer(
    *names: str, workers: int = 1, timeout_s: float = 20.0, bad=(2,), note="", table=None, log_dir=None, **reward
):
    options = zoo.Options(bad=tuple(bad), note=str(note))
    rows = [(n, zoo.COMPONENTS[n], options, RewardTable(use=n, timeout_s=timeout_s, **reward)) for n in names]
    table = table or RewardsTable(workers=workers)
    return Scorer.from_components(rows, files=[ZOO_FILE], table=table, log_dir=log_dir)


def score(scorer: Scorer, *groups: SampleGroup, after=None):
    """Scores `groups` at once, calls `after(scorer)` while the workers live, and closes."""

    async def go():
        await scorer.start()
        try:
            await asyncio.gather(*(scorer.score_group(group) for group in groups))
            return after(scorer) if after else None
        finally:
            await scorer.close()

    return asyncio.run(go())


def rewards(group: SampleGroup) -> list[float | None]:
    return [s.reward for s in group.samples]


def values(group: SampleGroup, name: str) -> list[float | None]:
    return [s.scores[name].value for s in group.samples]


def sleepers() -> set[int]:
    """Living processes that run `sleep 1000`, of which the zoo starts some."""
    found = subprocess.run(["pgrep", "-f", "^sleep 1000"], capture_output=True, text=True).stdout.split()
    return {int(pid) for pid in found}


def children() -> set[int]:
    """Children of this process, zombies included."""
    found = subprocess.run(
        ["ps", "--no-headers", "-o", "pid,comm", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return {int(line.split()[0]) for line in found.stdout.splitlines() if line.split()[1] != "ps"}


# --- R1: the number of scores ----------------------------------------------------------------------------------------

WRONG_NUMBERS = {
    "one for three": (1, "1 scores"),
    "four for three": (2, "4 scores"),
    "a bare float": (3, "1 value (float)"),
    "a generator of two": (4, "2 scores"),
    "a dictionary": (6, "1 value (dict)"),
    "a text of length three": (7, "1 value (str)"),
    "an endless generator": (12, "more than 3 scores"),
    "nothing": (13, "1 value (NoneType)"),
}


@pytest.mark.parametrize("answer", WRONG_NUMBERS)
def test_R1_wrong_number_of_scores_is_an_error_that_names_the_function(answer):
    code, got = WRONG_NUMBERS[answer]
    judge = Judge.of("group", zoo.Group(zoo.Options(bad=(code,)), None))
    with pytest.raises(ContractError) as error:
        judge_group(judge, make_group(3))
    assert f"expected 3, got {got}" in str(error.value)
    assert "Group.score_group" in str(error.value) and '"group"' in str(error.value)


def test_R1_a_wrong_number_from_a_worker_stops_the_run():
    with pytest.raises(ContractError, match=r"Group.score_group.*\n.*expected 3, got 1 scores"):
        score(make_scorer("group", bad=(1,)), make_group(3))


@pytest.mark.parametrize("code", [0, 5, 9], ids=["list", "generator of the right length", "array"])
def test_R1_right_number_of_scores_keeps_its_order(code):
    group = make_group(3)
    score(make_scorer("group", bad=(code,)), group)
    assert rewards(group) == [0.0, 1.0, 2.0]


def test_R1_five_samples_with_two_empty_answers_get_five_scores_in_order():
    group = make_group(5)
    group.samples[1].response = group.samples[4].response = ""
    score(make_scorer("zoo", "group", bad=(0,)), group)
    assert values(group, "group") == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert values(group, "zoo") == [None, 1.0, 2.0, 3.0, 4.0]  # index 0 raises


# --- R2: no verdict, NaN, inf ----------------------------------------------------------------------------------------


def test_R2_none_is_no_verdict_and_not_an_error():
    group, scorer = make_group(4), make_scorer("nothing", bad=(1,))
    score(scorer, group)
    assert rewards(group) == [0.0, None, 2.0, 3.0]
    assert (scorer.counters["no-verdict"], scorer.counters["errors"]) == (1, 0)


def test_R2_nan_and_inf_are_counted_errors_and_never_passed_on(caplog):
    names = ["not-a-number", "infinite"]
    group, scorer = make_group(4), make_scorer(*names, bad=(1, 3))
    score(scorer, group)
    assert rewards(group) == [0.0, None, 4.0, None]
    assert [values(group, name) for name in names] == [[0.0, None, 2.0, None]] * 2
    assert (scorer.counters["no-verdict"], scorer.counters["errors"]) == (0, 4)
    logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(logged) == 2 and all("p@0/1" in text for text in logged)  # once per reward, for the first of its two


def test_R2_group_reward_may_mix_numbers_none_and_nan():
    group, scorer = make_group(3), make_scorer("group", bad=(8,))
    score(scorer, group)
    assert rewards(group) == [1.0, None, None]
    assert (scorer.counters["no-verdict"], scorer.counters["errors"]) == (1, 1)


def test_numbers_of_every_kind_and_scores_are_accepted():
    group = make_group(6)
    score(make_scorer("kinds"), group)
    assert rewards(group) == [1.0, 2.0, 0.5, 3.0, 0.25, None]
    verdict = group.samples[4].scores["kinds"]
    assert (verdict.parts, verdict.reason) == ({"format": 1.0}, "half right") and verdict.seconds > 0
    assert group.samples[5].scores["kinds"].reason == "unsure"


def test_another_type_is_an_error_that_names_the_function():
    group, scorer = make_group(4), make_scorer("text")
    score(scorer, group)
    assert rewards(group) == [0.0, 1.0, None, 3.0]
    assert "Zoo.score returned str 'correct'" in scorer.first_traceback


# --- R4: exceptions --------------------------------------------------------------------------------------------------


def test_R4_one_failing_sample_of_eight_leaves_the_others_alone(caplog):
    names = ["zoo", "stops-iteration", "exits", "raises-unpicklable", "out-of-memory"]
    group, scorer = make_group(8), make_scorer(*names)
    pids = score(scorer, group, after=lambda s: s.worker_pids())
    for name in names:
        assert values(group, name) == [0.0, 1.0, None, 3.0, 4.0, 5.0, 6.0, 7.0], name
    assert rewards(group) == [0.0, 5.0, None, 15.0, 20.0, 25.0, 30.0, 35.0]  # the sum of five equal scores
    assert (scorer.counters["errors"], scorer.counters["samples"], scorer.counters["retried"]) == (5, 8, 0)  # one for each
    logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(logged) == 5
    assert all("p@0/2" in text and "Traceback" in text and "in misbehave" in text for text in logged)
    assert len(pids) == 1  # the worker survived
    scorer.check_step([group])


def test_R4_all_samples_failing_stops_the_run_with_the_first_traceback():
    group, scorer = make_group(4), make_scorer("zoo", bad=range(4))
    score(scorer, group)
    assert rewards(group) == [None] * 4
    with pytest.raises(RunFailed) as error:
        scorer.check_step([group])
    assert (
        "all 4 samples" in str(error.value) and "ValueError: bad sample" in str(error.value) and "p@0/0" in str(error.value)
    )
    assert error.value.exit_code == 1


def test_R4_failures_are_logged_once_per_sort_and_all_counted(caplog):
    group, scorer = make_group(8), make_scorer("zoo", bad=(1, 2, 3, 4))
    score(scorer, group)
    assert scorer.counters["errors"] == 4
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_R4_asynchronous_rewards_are_awaited_and_overlap():
    group, scorer = make_group(8), make_scorer("asynchronous", "asynchronous-group")
    start = time.perf_counter()
    score(scorer, group)
    assert values(group, "asynchronous") == [0.0, 1.0, None, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert values(group, "asynchronous-group") == [float(i) for i in range(8)]
    assert time.perf_counter() - start < 3.5  # 8 x 0.5 s one after the other would be 4 s, without the start


def test_R4_a_group_reward_that_raises_leaves_its_group_without_verdict():
    group, scorer = make_group(3), make_scorer("group", bad=(11,))
    score(scorer, group)
    assert rewards(group) == [None] * 3 and scorer.counters["errors"] == 3
    assert "IndexError" in scorer.first_traceback


def test_all_none_verdicts_do_not_stop_the_run():
    group, scorer = make_group(2), make_scorer("nothing", bad=(0, 1))
    score(scorer, group)
    scorer.check_step([group])
    assert rewards(group) == [None, None]


# --- R5: time limits -------------------------------------------------------------------------------------------------


def test_R5_three_hanging_of_six_with_two_workers(caplog):
    group, scorer = make_group(6), make_scorer("hangs", workers=2, timeout_s=1.0, bad=(0, 2, 4))
    start = time.perf_counter()
    alive = score(scorer, group, after=lambda s: _wait_for(lambda: len(s.worker_pids()) == 2))
    assert time.perf_counter() - start < 12  # 3 limits of 1 s, two of them side by side, plus three worker starts
    assert rewards(group) == [None, 1.0, None, 3.0, None, 5.0]
    assert [s.scores["hangs"].reason for s in group.samples][::2] == ["timeout after 1 s"] * 3
    assert (scorer.counters["timeouts"], scorer.counters["errors"]) == (3, 0)
    assert alive, "a killed worker was not replaced"
    assert children() == set()
    warnings = " ".join(r.getMessage() for r in caplog.records)
    assert "Zoo.score" in warnings and all(f"p@0/{i}" in warnings for i in (0, 2, 4))


@pytest.mark.parametrize("name", ["spawns", "daemonises"])
def test_R5_grandchildren_are_killed_and_reaped(name):
    before = sleepers()
    group, scorer = make_group(2), make_scorer(name, timeout_s=0.5, bad=(1,))
    score(scorer, group, after=lambda s: _wait_for(lambda: len(s.worker_pids()) == 1))
    assert rewards(group) == [0.0, None] and scorer.counters["timeouts"] == 1
    assert sleepers() == before and children() == set()


def test_R5_a_timeout_may_count_as_zero():
    group, scorer = make_group(2), make_scorer("hangs", timeout_s=0.5, bad=(1,), on_timeout="zero")
    score(scorer, group)
    assert rewards(group) == [0.0, 0.0] and scorer.counters["timeouts"] == 1


def test_R5_time_is_measured_per_sample_not_per_group():
    group = make_group(4)
    score(make_scorer("slow", timeout_s=1.1, bad=range(4)), group)  # 4 x 0.3 s > 1.1 s
    assert rewards(group) == [1.0] * 4


def test_R5_a_group_reward_has_one_limit_for_its_group():
    group, scorer = make_group(3), make_scorer("group", timeout_s=0.5, bad=(10,))
    score(scorer, group)
    assert rewards(group) == [None] * 3 and scorer.counters["timeouts"] == 3


def test_R5_a_slow_asynchronous_sample_is_cancelled_and_its_worker_lives(tmp_path):
    group, scorer = make_group(4), make_scorer("asynchronous-slow", timeout_s=0.5)
    score(scorer, group)
    assert rewards(group) == [0.0, 1.0, None, 3.0]
    assert (scorer.counters["timeouts"], scorer.counters["retried"]) == (1, 0)


def test_R5_a_blocked_event_loop_costs_only_the_sample_that_blocks_it():
    group, scorer = make_group(4), make_scorer("asynchronous-blocks", timeout_s=0.5)
    score(scorer, group)
    assert rewards(group) == [0.0, 1.0, None, 3.0] and scorer.counters["timeouts"] == 1


def test_R5_limits_hold_while_the_drivers_event_loop_is_busy():
    """A long training step in the driver's thread neither delays a kill nor condemns a sample that was in time."""
    slow, hanging = make_group(2, "slow"), make_group(2, "hanging")
    scorers = [make_scorer("slow", timeout_s=1.1, bad=(0, 1)), make_scorer("hangs", timeout_s=1.1, bad=(1,))]

    async def go():
        for scorer in scorers:
            await scorer.start()
        try:
            tasks = [asyncio.create_task(s.score_group(g)) for s, g in zip(scorers, (slow, hanging), strict=True)]
            await asyncio.sleep(0.05)
            pid = scorers[1].worker_pids()[0]
            time.sleep(2.5)  # the loop is blocked
            killed = not Path(f"/proc/{pid}").exists()
            await asyncio.gather(*tasks)
            return killed
        finally:
            for scorer in scorers:
                await scorer.close()

    assert asyncio.run(go())
    assert rewards(slow) == [1.0, 1.0] and rewards(hanging) == [0.0, None]


def test_siblings_of_a_killed_sample_are_scored_once_more_and_finished_ones_are_not(tmp_path):
    group, scorer = make_group(5), make_scorer("hangs", timeout_s=0.5, note=tmp_path / "calls")
    score(scorer, group)
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["0", "1", "2", "3", "4"] and rewards(group) == [0.0, 1.0, None, 3.0, 4.0]
    assert scorer.counters["retried"] == 2  # 3 and 4 were queued behind 2


# --- Workers that die (X1) -------------------------------------------------------------------------------------------


def test_X1_worker_killed_from_outside_costs_nothing():
    group, scorer = make_group(4), make_scorer("slow", bad=range(4))

    async def go():
        await scorer.start()
        task = asyncio.create_task(scorer.score_group(group))
        await asyncio.sleep(0.4)  # the second sample is being scored
        os.kill(scorer.worker_pids()[0], signal.SIGKILL)
        await task
        await scorer.close()

    asyncio.run(go())
    assert rewards(group) == [1.0] * 4
    assert scorer.counters["retried"] == 3 and scorer.counters["errors"] == 0


def test_X1_a_sample_that_kills_its_worker_twice_is_an_error_with_the_cause(tmp_path):
    group, scorer = make_group(4), make_scorer("kills-itself", note=tmp_path / "calls")
    score(scorer, group)
    assert rewards(group) == [0.0, 1.0, None, 3.0] and scorer.counters["errors"] == 1
    assert "died twice" in scorer.first_traceback and "signal 9" in scorer.first_traceback
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()].count("2") == 2


def test_close_kills_a_worker_in_the_middle_of_a_sample():
    group, scorer = make_group(1), make_scorer("hangs", timeout_s=1000.0, bad=(0,))

    async def go():
        await scorer.start()
        task = asyncio.create_task(scorer.score_group(group))
        await asyncio.sleep(0.1)
        start = time.perf_counter()
        await scorer.close()
        with pytest.raises(RunFailed):
            await task
        return time.perf_counter() - start

    assert asyncio.run(go()) < 5 and children() == set()


LOAD_THIS_FILE = f"""
import asyncio, os, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("t", {str(Path(__file__))!r}); t = module_from_spec(spec); spec.loader.exec_module(t)
"""


def test_R5_no_zombie_is_left_where_init_does_not_reap():
    """This process stands for an init that never waits: whatever a driver leaves behind becomes its child and stays."""
    code = (
        LOAD_THIS_FILE
        + """
t.score(t.make_scorer("daemonises", timeout_s=0.5, bad=(1,)), t.make_group(2))
"""
    )
    reaping._set_subreaper(1)
    try:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert children() == set()
    finally:
        reaping._set_subreaper(0)


def test_a_worker_dies_with_a_driver_that_was_killed():
    code = (
        LOAD_THIS_FILE
        + """
async def go():
    scorer = t.make_scorer("hangs", timeout_s=1000.0, bad=(0,))
    await scorer.start()
    asyncio.create_task(scorer.score_group(t.make_group(1)))
    await asyncio.sleep(0.3)
    print(scorer.worker_pids()[0], flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(go())
"""
    )
    driver = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert driver.returncode == -9, driver.stderr
    assert _wait_for(lambda: not Path(f"/proc/{int(driver.stdout)}").exists())


def test_kill_tree_of_a_process_that_is_gone_returns():
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    kill_tree(process, "no-such-token")


def _wait_for(condition, patience_s: float = 10.0) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


# --- Starting --------------------------------------------------------------------------------------------------------


def test_a_reward_that_cannot_be_built_fails_the_start_and_leaves_no_process():
    with pytest.raises(PluginError, match='"fails-to-build" could not be built: RuntimeError: no model file'):
        score(make_scorer("fails-to-build", workers=2))
    assert children() == set()


def test_a_reward_with_neither_method_is_refused():
    with pytest.raises(ContractError, match="neither score nor score_group"):
        score(make_scorer("neither"))


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ConfigError, match='two rewards are named "zoo"'):
        Scorer([RewardEntry(name="zoo", table=RewardTable(use="zoo"))] * 2, RewardsTable(), {})


def test_prints_of_a_reward_go_to_the_log_and_metrics_to_the_driver(tmp_path):
    group, scorer = make_group(3), make_scorer("prints", log_dir=tmp_path / "logs")
    # The worker's numbers come with the end of its job, a moment after the last verdict.
    metrics = score(scorer, group, after=lambda s: time.sleep(0.5) or s.metrics())
    assert rewards(group) == [1.0] * 3
    assert (tmp_path / "logs" / "reward-worker-0.log").read_text().count("raw") == 3
    assert metrics["reward/prints/calls"] == 3.0 and metrics["scoring/samples"] == 3.0
    assert scorer.metrics()["scoring/samples"] == 0.0  # since the last call


def test_secrets_reach_only_the_workers_of_rewards_that_declared_them(monkeypatch):
    monkeypatch.setenv("ZOO_API_KEY", "sesame")
    group = make_group(1)
    workers = score(make_scorer("environment", "told-the-secret"), group, after=lambda s: s.worker_pids())
    assert group.samples[0].scores["environment"].reason == " "
    assert group.samples[0].scores["told-the-secret"].reason == "sesame sesame"
    assert len(workers) == 2  # not in one process


def test_what_looks_like_a_secret_is_left_out_of_the_environment():
    secret = [
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "PGPASSWORD",
        "SSH_AUTH_SOCK",
        "MY_KEY",
    ]
    plain = ["PATH", "HOME", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "KEYBOARD", "PYTHONPATH"]
    source = dict.fromkeys([*secret, *plain], "x") | {"PROXY": "http://me:pass@host:1/", "HUB": "http://host:1/"}
    assert set(clean_environment(frozenset(), source)) == {*plain, "HUB"}
    assert "HF_TOKEN" in clean_environment(frozenset({"HF_TOKEN"}), source)


# --- Groups, segments, combining -------------------------------------------------------------------------------------


def test_a_trajectory_is_judged_once_on_its_last_segment(tmp_path):
    group = make_group(2)
    group.samples.insert(1, make_sample(0, group.prompt, segment=1))
    scorer = make_scorer("zoo", bad=(), note=tmp_path / "calls")
    score(scorer, group)
    assert rewards(group) == [0.0, 0.0, 1.0] and scorer.counters["samples"] == 2
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_failed_samples_are_not_judged_and_the_baseline_is():
    group = make_group(3)
    group.samples[0].status = "error"
    group.baseline = make_sample(5, group.prompt)
    scorer = make_scorer("zoo", "group", bad=(0,))
    score(scorer, group)
    assert rewards(group) == [None, 2.0, 4.0] and group.baseline.reward == 10.0  # the sum of two equal scores
    assert scorer.counters["skipped"] == 1 and group.samples[0].scores == {}


def test_an_empty_response_is_judged():
    group = make_group(2)
    for sample in group.samples:
        sample.tokens, sample.response = sample.tokens[:2], ""
    score(make_scorer("zoo"), group)
    assert rewards(group) == [0.0, 1.0]


COMBINED = [
    # rule, (value, weight) pairs, reward
    ("sum", [(1.0, 1.0), (0.5, 2.0)], 2.0),  # 1 + 2 * 0.5
    ("sum", [(1.0, 1.0), (None, 2.0)], None),
    ("sum", [(1.0, 1.0), (None, 0.0)], 1.0),  # weight 0 is only logged
    ("product", [(0.5, 1.0), (0.5, 2.0)], 0.5),  # 0.5 * (2 * 0.5)
    ("product", [(0.5, 1.0), (3.0, 0.0)], 0.5),
    ("product", [(0.0, 1.0), (None, 1.0)], None),
    ("gate", [(1.0, 0.5), (0.5, 2.0)], 1.5),  # 0.5 * 1 + 2 * 0.5
    ("gate", [(0.0, 0.5), (1.0, 2.0)], 0.0),
    ("gate", [(-1.0, 0.5), (None, 2.0)], -0.5),  # the gate alone decides: 0.5 * -1
    ("gate", [(None, 1.0), (1.0, 1.0)], None),
    ("gate", [(1.0, 1.0), (None, 1.0)], None),
    ("sum", [], 0.0),
    ("product", [], 0.0),
]


@pytest.mark.parametrize(("rule", "scores", "reward"), COMBINED)
def test_combining_scores(rule, scores, reward):
    assert combine(scores, rule) == reward


def test_scores_of_two_rewards_are_combined_with_their_weights():
    rows = [
        ("a", zoo.COMPONENTS["zoo"], zoo.Options(bad=()), RewardTable(use="zoo", weight=0.5)),
        ("b", zoo.COMPONENTS["zoo"], zoo.Options(bad=(1,)), RewardTable(use="zoo", weight=2.0)),
    ]
    group = make_group(3)
    score(Scorer.from_components(rows, files=[ZOO_FILE]), group)
    assert rewards(group) == [0.0, None, 5.0]  # 0.5 * 2 + 2 * 2
    assert values(group, "a") == [0.0, 1.0, 2.0]


# --- The wire --------------------------------------------------------------------------------------------------------


def test_a_group_survives_the_wire():
    metadata = {
        "shape": np.arange(6, dtype=np.int16).reshape(2, 3),
        "raw": b"\0\xff",
        "n": np.int64(3),
        "x": [1, None, "\u2028"],
    }
    group = make_group(2, label={"answer": "½", "big": 2**70}, metadata=metadata)
    group.samples[0].tokens = np.zeros(0, np.int32)
    back = decode_group(encode_group(group, group.samples))
    assert back.prompt.label == group.prompt.label and back.prompt.metadata["n"] == 3
    assert back.prompt.metadata["raw"] == b"\0\xff" and back.prompt.metadata["x"] == [1, None, "\u2028"]
    np.testing.assert_array_equal(back.prompt.metadata["shape"], metadata["shape"])
    for ours, theirs in zip(group.samples, back.samples, strict=True):
        for name in ("tokens", "loss_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert (theirs.versions, theirs.trajectory_id) == (ours.versions, ours.trajectory_id)
        assert theirs.prompt is back.prompt


def test_what_is_not_json_is_refused_by_name():
    with pytest.raises(ContractError, match=r"group p@0 .* type Component is not JSON"):
        encode_group(make_group(1, label=zoo.COMPONENTS["zoo"]), [])


def test_inline_rewards_are_for_built_in_components_only():
    component: Component = zoo.COMPONENTS["zoo"]
    entry = Scorer.from_components([("a", component, zoo.Options(), RewardTable(use="zoo"))], files=[ZOO_FILE]).entries[0]
    assert entry.judge is None


# --- From a run's config ---------------------------------------------------------------------------------------------

RUN = """
steps = 1
[tokenizer]
use = "nothing"
[data]
use = "nothing"
[rollout]
use = "nothing"
groups_per_step = 1
samples_per_group = 2
[engine]
use = "nothing"
[[loss]]
use = "nothing"
[trainer]
use = "nothing"
[rewards]
workers = 2
[[reward]]
use = "exact-match"
[[reward]]
use = "exact-match"
name = "digits"
weight = 0.5
[reward.exact-match]
pattern = "[0-9]+"
[[reward]]
use = "bonus"
[reward.bonus]
bonus = 4.0
"""
PLUGIN = """
import miles_core
from miles_core import Component, hookimpl

@miles_core.reward("bonus")
async def bonus(sample, *, bonus: float = 1.0):
    return bonus if sample.prompt.label in sample.response else 0.0

def _nothing():
    return [Component(name="nothing", summary="stands in", build=lambda options, context: None)]

miles_tokenizers, miles_data_sources, miles_rollouts, miles_engines, miles_losses, miles_trainers = (
    hookimpl(lambda: _nothing(), specname=hook) for hook in
    ("miles_tokenizers", "miles_data_sources", "miles_rollouts", "miles_engines", "miles_losses", "miles_trainers")
)
"""


def test_the_scorer_of_a_run_builds_its_rewards_in_workers_from_the_payload(tmp_path):
    from miles_core.config import load
    from miles_core.wiring import Wiring

    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "bonus.py").write_text(PLUGIN)
    run = load(tmp_path / "run.toml", plugins=[], files=[tmp_path / "bonus.py"], distributions=())
    scorer = Scorer.from_run(run, Wiring(run, run_dir=tmp_path), tmp_path)
    group = make_group(2, label="7")
    group.samples[0].response, group.samples[1].response = "is 7", "7"
    workers = score(scorer, group, after=lambda s: s.worker_pids())
    assert len(workers) == 2 and (tmp_path / "logs" / "reward-worker-1.log").exists()
    assert [e.judge is not None for e in scorer.entries] == [True, False, False]  # only plain text comparison is inline
    assert values(group, "exact-match") == [0.0, 1.0]
    assert values(group, "digits") == [1.0, 1.0]
    assert values(group, "bonus") == [4.0, 4.0]
    assert rewards(group) == [4.5, 5.5]  # 0 + 0.5 * 1 + 4, 1 + 0.5 * 1 + 4
