"""The table of `cases.toml`, and where and how the reward runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core import Prompt, Sample, SampleGroup
from miles_math_reward import MathConfig, miles_rewards

pytest.importorskip("math_verify", reason="needs the extra runtime of miles-math-reward")

from miles_math_reward import equality, numerals
from miles_math_reward.places import answer_text
from miles_math_reward.reward import MathReward, gold_text

CASES = tomllib.loads((Path(equality.__file__).with_name("cases.toml")).read_text("utf-8"))
OPTIONS = ("percent", "decimal_comma", "require_box")


def sample(response: str, label: object = "42", index: int = 0) -> Sample:
    empty = np.zeros(0, np.float32)
    return Sample(
        group_id="p@0",
        trajectory_id=f"p@0/{index}",
        index=index,
        tokens=empty,
        prompt_len=0,
        loss_mask=empty,
        logprobs=empty,
        response=response,
        prompt=Prompt(id="p", text="q", label=label),
    )


def score(response: str, label: object = "42", **options) -> float:
    return MathReward(MathConfig(**options)).score(sample(response, label)).value


def options_of(case: dict) -> dict:
    return {key: case[key] for key in OPTIONS if key in case}


@pytest.mark.parametrize("case", CASES["equality"], ids=lambda c: f"{c['gold']}|{c['answer']}|{c.get('percent', '')}")
def test_R7_equality_table(case):
    assert score(rf"\boxed{{{case['answer']}}}", case["gold"], **options_of(case)) == float(case["right"])


@pytest.mark.parametrize("case", CASES["place"], ids=lambda c: f"{c['response']}|{c['gold']}")
def test_R8_place_table(case):
    assert score(case["response"], case["gold"], **options_of(case)) == float(case["right"])


def test_R8_no_tail_window_cuts_the_answer_off():
    assert score("so\n#### 42\n" + "chatter " * 60) == 1.0  # 480 characters


def test_R8_an_unclosed_box_is_wrong_and_no_exception():
    verdict = MathReward(MathConfig()).score(sample(r"\boxed{4", "4"))
    assert (verdict.value, verdict.parts, verdict.reason) == (0.0, {"answered": 0.0}, "no answer found")


def test_R8_nested_braces_are_matched():
    assert answer_text(r"\boxed{\frac{1}{2}} and so on", True) == r"\frac{1}{2}"
    assert answer_text(r"\boxed{\{1, 2\}}", True) == r"\{1, 2\}"


# --- R6: wherever it runs --------------------------------------------------------------------------------------------

THIRD = (r"\boxed{\frac13}", r"\sqrt{\frac19}")  # not plain numbers: math-verify is really called


def test_R6_right_in_the_main_thread_a_thread_pool_and_an_executor():
    def third() -> float:
        equality._parsed.cache_clear()
        return score(*THIRD)

    async def in_executor() -> float:
        return await asyncio.get_running_loop().run_in_executor(None, third)

    with ThreadPoolExecutor(2) as pool:
        in_threads = [future.result() for future in [pool.submit(third) for _ in range(4)]]
    assert [third(), *in_threads, asyncio.run(in_executor())] == [1.0] * 6


def score_in_worker(*samples: Sample, timeout_s: float) -> tuple[list[float | None], dict]:
    from miles_core.scoring import Scorer
    from miles_core.settings import RewardTable

    (component,) = miles_rewards()
    table = RewardTable(use="math", timeout_s=timeout_s)
    scorer = Scorer.from_components([("math", component, MathConfig(), table)], modules=["miles_math_reward"])
    group = SampleGroup(id="p@0", prompt=samples[0].prompt, samples=list(samples), num_samples=len(samples))

    async def go():
        await scorer.start()
        await scorer.score_group(group)
        await scorer.close()

    asyncio.run(go())
    return [s.reward for s in samples], dict(scorer.counters)


def test_R6_right_in_ray_actors_of_both_sorts(monkeypatch, tmp_path):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")

    class Blocking:
        def score(self):
            return score(*THIRD)

    class Awaited:
        async def score(self):
            return score(*THIRD)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        actors = [ray.remote(kind).remote() for kind in (Blocking, Awaited)]
        assert ray.get([actor.score.remote() for actor in actors], timeout=60) == [1.0, 1.0]
    finally:
        ray.shutdown()


def test_R6_right_in_a_reward_worker_with_a_bound_that_holds():
    """An integer that sympy would expand for longer than anyone waits: only its sample is lost."""
    endless = r"\boxed{\sqrt{9^{9^{9^{9}}}}}"
    start = time.perf_counter()
    rewards, counters = score_in_worker(
        sample(r"\boxed{\frac13}", THIRD[1], 0),
        sample(endless, THIRD[1], 1),
        sample(r"\boxed{\frac14}", THIRD[1], 2),
        timeout_s=3.0,
    )
    assert rewards == [1.0, None, 0.0] and counters["timeouts"] == 1
    assert time.perf_counter() - start < 30  # one limit of 3 s and two starts of a worker that imports sympy


# --- Labels, robustness ----------------------------------------------------------------------------------------------


def test_any_of_several_labels_is_right():
    assert score(r"\boxed{7}", ["6", "7"]) == 1.0 and score(r"\boxed{8}", ["6", "7"]) == 0.0


@pytest.mark.parametrize(
    ("label", "gold"), [(42, "42"), ("6 * 7 = 42\n#### 42", "42"), (r"so \boxed{\frac12}", r"\frac12")]
)
def test_a_label_may_be_a_number_or_a_whole_solution(label, gold):
    assert gold_text(label) == gold


@pytest.mark.parametrize("label", [None, "", [], r"\boxed{4"])
def test_a_missing_label_is_an_error_and_not_a_zero(label):
    with pytest.raises(ValueError, match="needs a label"):
        score(r"\boxed{42}", label)


def test_an_endless_answer_is_wrong_without_being_parsed():
    start = time.perf_counter()
    assert score(r"\boxed{" + "1+" * 5000 + "1}") == 0.0
    assert time.perf_counter() - start < 1


@given(st.text(alphabet="0123456789.,/%-+eE ^{}\\fracsqtx()[]*=", max_size=30))
@settings(max_examples=150, deadline=None)
def test_reading_numbers_never_raises(text):
    for comma in (False, True):
        found = numerals.read(text, comma)
        assert found is None or isinstance(found.value, numerals.Fraction)


@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
@settings(max_examples=100, deadline=None)
def test_fractions_are_equal_only_when_they_are(a, b):
    assert equality.equal(str(a), rf"\frac{{{b.numerator}}}{{{b.denominator}}}") == (a == b)


def test_the_entry_module_imports_nothing_heavy():
    code = (
        "import sys, miles_math_reward as m; m.miles_rewards(); print({'torch', 'sympy', 'math_verify'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
    )
