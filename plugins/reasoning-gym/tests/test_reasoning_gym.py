"""The real library on small datasets."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from miles_core import BuildContext, Environment, Prompt, Sample
from miles_core.errors import ConfigError, ContractError, DataError
from miles_reasoning_gym import ReasoningGymConfig, ReasoningGymRewardConfig, miles_data_sources, miles_rewards

pytest.importorskip("reasoning_gym", reason="needs the extra runtime of miles-reasoning-gym")

from miles_reasoning_gym.scorer import ReasoningGymReward, extract
from miles_reasoning_gym.source import ReasoningGymSource

(DATA,), (REWARD,) = miles_data_sources(), miles_rewards()
README = Path(__file__).parent.parent / "README.md"
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]} | {
    "allow_parentheses": False,
    "allow_negation": False,
}


def make(seed: int = 0, **options) -> ReasoningGymSource:
    options = {"dataset": "basic_arithmetic", "params": SUMS} | options
    # As config does it: TOML knows no tuples.
    config = ReasoningGymConfig.model_validate_json(json.dumps(options))
    return DATA.build(config, BuildContext(component="data/reasoning-gym", run_dir=Path(), seed=seed, run_config=None))


def recipe(number: int) -> dict:
    """The n-th TOML block of the README."""
    return tomllib.loads(README.read_text("utf-8").split("```toml\n")[number].split("```")[0])


def answer(prompt: Prompt, response: str) -> Sample:
    empty = np.zeros(0, np.float32)
    return Sample(
        group_id="p@0", trajectory_id="p@0/0", index=0, tokens=empty, prompt_len=0, loss_mask=empty, logprobs=empty,
        response=response, prompt=prompt,
    )  # fmt: skip


def judge(prompt: Prompt, response: str, context=None, **options):
    return ReasoningGymReward(ReasoningGymRewardConfig(**options), context).score(answer(prompt, response))


# --- Messages --------------------------------------------------------------------------------------------------------


def test_readme_addition_gives_system_shots_and_the_open_sum():
    prompt = make(**recipe(1)["data"]["reasoning-gym"]).next(1)[0]
    *before, last = prompt.messages
    assert before == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "12 + 7 ="},
        {"role": "assistant", "content": "19"},
        {"role": "user", "content": "9 - 4 ="},
        {"role": "assistant", "content": "5"},
    ]
    assert last["role"] == "user"
    a, plus, b, equals = last["content"].split(" ")
    assert (plus, equals) == ("+", "=") and str(int(a) + int(b)) == prompt.label


def test_readme_opened_answer_leaves_the_question_and_opens_the_assistants_turn():
    prompt = make(**recipe(2)["data"]["reasoning-gym"]).next(1)[0]
    system, user, assistant = prompt.messages
    assert system == {"role": "system", "content": ""}
    assert user["content"] == f"Calculate {assistant['content'].removesuffix(' =')}."
    assert assistant["role"] == "assistant" and assistant["content"].endswith(" =")


def test_readme_blocks_are_valid_configs():
    (table,) = recipe(2)["reward"]
    ReasoningGymRewardConfig(**table["reasoning-gym"])
    assert recipe(1)["reward"][0]["use"] == "exact-match"


def test_plain_question_by_default():
    prompt = make().next(1)[0]
    assert [m["role"] for m in prompt.messages] == ["user"] and prompt.messages[0]["content"].startswith("Calculate ")


def test_a_pattern_that_finds_nothing_is_an_error_with_the_question():
    with pytest.raises(DataError, match=r"finds nothing in the question 'Calculate "):
        make(pattern="What is (.*)").next(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{part} ="}, "there is no pattern"),
        ({"template": "{answer}"}, "not {answer}"),
        ({"open_answer": "{0}"}, "not {0}"),
        ({"pattern": "("}, "not a regular expression"),
        ({"shots": [["one"]]}, "shots"),
    ],
)
def test_bad_templates_are_refused_with_the_config(options, message):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert message in str(error.value)


# --- Order, seeds, resume --------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_ids_and_problems_also_in_another_process():
    first, again = make(seed=5).next(5), make(seed=5).next(5)
    assert first == again
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "import test_reasoning_gym as t; print(json.dumps([[p.id, p.messages] for p in t.make(seed=5).next(5)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[p.id, p.messages] for p in first]


@pytest.mark.parametrize("other", [{"seed": 6}, {"seed_offset": 1}])
def test_another_seed_gives_other_problems_and_ids_and_not_the_same_ones_shifted(other):
    params = SUMS | {"min_digits": 4, "max_digits": 4}  # so many sums that equal ones are no accident
    ours, theirs = make(seed=5, params=params).next(50), make(**{"seed": 5, "params": params} | other).next(50)
    for key in (lambda p: p.id, lambda p: p.messages[-1]["content"]):
        assert not {key(p) for p in ours} & {key(p) for p in theirs}


def test_an_endless_stream_goes_on_with_new_problems_after_a_chunk():
    source = make(params=SUMS | {"min_digits": 6, "max_digits": 6})
    prompts = source.next(1001)  # chunks of 500: the third one begins with the last prompt
    assert len({p.id for p in prompts}) == 1001
    assert len({p.messages[0]["content"] for p in prompts}) > 990  # a sum that comes twice is unlikely: 1e12 pairs
    assert [p.draw for p in prompts] == list(range(1001)) and source.num_prompts is None


def test_size_bounds_the_number_of_problems():
    prompts = make(size=3).next(7)
    assert [p.id for p in prompts[:3]] == [p.id for p in prompts[3:6]] and len({p.id for p in prompts}) == 3
    assert len({(p.id, p.draw) for p in prompts}) == 7 and make(size=3).num_prompts == 3


@pytest.mark.parametrize(("size", "before"), [(None, 0), (None, 499), (None, 500), (4, 3), (4, 4), (4, 9)])
def test_restore_goes_on_exactly(size, before):
    first, second = make(size=size), make(size=size)
    first.next(before)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.next(6) == first.next(6)


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"params": SUMS | {"max_digits": 2}}, {"dataset": "chain_sum", "params": {}}]
)
def test_restore_refuses_other_problems(changed):
    with pytest.raises(DataError, match="gives other problems than the checkpoint's"):
        make(**changed).restore(make().state())


# --- Check -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "basic_arithmetik"}, 'did you mean "basic_arithmetic"?'),
        ({"params": {"min_term": 2}}, "unexpected keyword argument 'min_term'"),
        ({"params": {"min_terms": 0}}, "min_terms must be positive"),
        ({"params": {"operators": ["%"]}}, "unsupported operator: %"),
        ({"params": {"seed": 1}}, "params.seed is set by"),
        ({"params": {"size": 1}}, "params.size is set by data.reasoning-gym.size"),
    ],
)
def test_what_the_library_refuses_is_a_config_error_with_its_own_words(options, message):
    config = ReasoningGymConfig(**{"dataset": "basic_arithmetic"} | options)
    with pytest.raises(ConfigError) as error:
        DATA.check(config, Environment(where="run.toml: data.use"))
    assert message in str(error.value) and "run.toml: data.use" in str(error.value)
    assert error.value.exit_code == 2


def test_check_accepts_what_works():
    DATA.check(ReasoningGymConfig(dataset="basic_arithmetic", params=SUMS), Environment())


# --- Reward ----------------------------------------------------------------------------------------------------------


def test_reward_is_the_datasets_own_score():
    prompt = make().next(1)[0]
    right = prompt.label
    assert judge(prompt, right).value == 1.0
    assert judge(prompt, f"{right} it is").value == len(right) / len(f"{right} it is")  # its partial credit, by length
    assert judge(prompt, "").value == judge(prompt, "none").value == 0.0
    assert judge(prompt, f"{right} it is", exact=True).value == 0.0
    assert judge(prompt, f" {right}\nand on", extract="first-line", exact=True).value == 1.0
    assert judge(prompt, f"1 + 1 is {right}.", extract="last-integer").value == 1.0
    assert judge(prompt, "no idea", extract="last-integer").value == 0.0


def test_R4_an_answer_that_the_scorer_cannot_read_is_wrong_and_counted():
    prompt = make(dataset="prime_factorization", params={}).next(1)[0]
    context = BuildContext(component="reward/reasoning-gym", run_dir=Path(), seed=0, run_config=None)
    verdict = judge(prompt, "junk", context)
    assert verdict.value == 0.0 and "ValueError" in verdict.reason
    assert context.metrics == {"reward/reasoning-gym/unreadable": (1.0, 1.0, "sum")}
    assert judge(prompt, prompt.label, context).value == 1.0


def test_R4_a_scorer_that_fails_on_its_own_answer_is_not_a_wrong_answer(monkeypatch):
    prompt = make().next(1)[0]

    def broken(self, answer, entry):
        raise KeyError("bug")

    monkeypatch.setattr(
        "reasoning_gym.arithmetic.basic_arithmetic.BasicArithmeticDataset.score_answer", broken, raising=False
    )
    with pytest.raises(KeyError):
        judge(prompt, "5")


def test_prompts_of_another_source_are_refused():
    with pytest.raises(ContractError, match='data source "reasoning-gym" only'):
        judge(Prompt(id="x", text="q", label="1"), "1")


EXTRACTED = [
    ("all", " 8 \n", " 8 \n"),
    ("first-line", "\n 8 \n9", "8"),
    ("first-line", "", ""),
    ("last-integer", "from 5 to 8.", "8"),
    ("last-integer", "7-3", "3"),
    ("last-integer", "is -3", "-3"),
    ("last-integer", "is \u22123", "-3"),
    ("last-integer", "1,234", "1234"),
    ("last-integer", "8.0", "8"),
    ("last-integer", "8.5", None),
    ("last-integer", "none", None),
]


@pytest.mark.parametrize(("how", "response", "part"), EXTRACTED)
def test_extract(how, response, part):
    assert extract(response, how) == part


def test_scores_in_a_reward_worker():
    import asyncio

    from miles_core.scoring import Scorer
    from miles_core.settings import RewardTable
    from miles_core.types import SampleGroup

    prompt = make().next(1)[0]
    samples = [answer(prompt, text) for text in (prompt.label, "nothing")]
    for index, sample in enumerate(samples):
        sample.index, sample.trajectory_id = index, f"p@0/{index}"
    group = SampleGroup(id="p@0", prompt=prompt, samples=samples, num_samples=2)
    table = RewardTable(use="reasoning-gym")
    scorer = Scorer.from_components([("rg", REWARD, ReasoningGymRewardConfig(), table)], modules=["miles_reasoning_gym"])

    async def go():
        await scorer.start()
        await scorer.score_group(group)
        await scorer.close()

    asyncio.run(go())
    assert [s.reward for s in samples] == [1.0, 0.0]


def test_the_entry_module_imports_nothing_heavy():
    code = "import sys, miles_reasoning_gym as m; m.miles_rewards(); print({'torch', 'reasoning_gym'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
    )
