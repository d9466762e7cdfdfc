"""Advantages and filters of the core. Every number is derived beside it; std has ddof=1, eps 1e-6."""

from dataclasses import replace

import numpy as np
import pytest
from acme import CONFIG, run_of
from hypothesis import given, settings
from hypothesis import strategies as st

import miles_core
from miles_core import AdvantageOutput
from miles_core.advantages import discounted_sums
from miles_core.batch import apply_advantages, prepare
from miles_core.builtin import advantages, filters
from miles_core.component import Environment
from miles_core.errors import ConfigError, ContractError, RunFailed
from miles_core.testing.samples import group_of, make_group, make_sample
from miles_core.types import AdvantageInputs
from miles_core.wiring import check_requirements, run_checks

ADVANTAGES = {c.name: c for c in advantages.COMPONENTS["miles_advantages"]}
FILTERS = {c.name: c for c in filters.COMPONENTS["miles_filters"]}


def run(name, groups, *, columns=None, **options):
    """The rollout batch after one advantage."""
    component = ADVANTAGES[name]
    batch = prepare(groups)
    for key, rows in (columns or {}).items():
        batch.put(key, rows, "test")
    apply_advantages(batch, [(name, component.build(component.config(**options), None))])
    return batch


def per_sample(batch):
    """The advantage of each sample at its last token."""
    return [float(row[-1]) for row in batch.columns["advantages"]]


def bf16(value):
    """`value` as bfloat16 holds it: the upper 16 bits of a float32, rounded to nearest."""
    bits = np.float32(value).view(np.uint32)
    return float(np.uint32((int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) & 0xFFFF0000).view(np.float32))


# --- grpo, rloo ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float, np.float32, bf16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, 10.1, 100.3])
@pytest.mark.parametrize(("name", "options"), [("grpo", {}), ("grpo", {"std": False}), ("rloo", {})])
def test_F1_equal_rewards_give_exactly_zero(name, options, value, number):
    for size in (3, 6, 7, 12, 64):
        assert set(per_sample(run(name, [make_group([number(value)] * size)], **options))) == {0.0}


def test_F1_leave_one_out_of_the_odd_sample():
    # The others of the last are all 0.35: 0 - 0.35. Of each other: 0.35 - (6 * 0.35 + 0) / 7 = 0.05.
    assert per_sample(run("rloo", [make_group([0.35] * 7 + [0.0])])) == pytest.approx([0.05] * 7 + [-0.35], rel=1e-6)


def test_R2_no_verdict_is_left_out_of_the_statistics():
    # A over the valid three: mean 1/3, std 0.57735 -> 0.6667 / 0.57735. B: mean 1/2, std 0.57735 -> 0.5 / 0.57735.
    groups = [make_group([1.0, None, 0.0, 0.0], name="a"), make_group([1.0, 0.0, 0.0, 1.0], name="b")]
    batch = run("grpo", groups)
    want = [1.1547, 0, -0.5774, -0.5774, 0.8660, -0.8660, -0.8660, 0.8660]
    assert per_sample(batch) == pytest.approx(want, abs=1e-4)
    assert not batch.mask[1].any()


def test_R2_a_single_verdict_teaches_nothing():
    assert per_sample(run("grpo", [make_group([None, 1.0, None])])) == [0.0, 0.0, 0.0]


def test_F5_a_truncated_reward_counts_in_its_group():
    # Rewards 1 and 0, the second cut and not trained: mean 1/2, std 0.70711 -> 0.5 / 0.70711.
    batch = prepare([group_of([make_sample(reward=1.0), make_sample(index=1, status="length")])], train_truncated=False)
    apply_advantages(batch, [("grpo", ADVANTAGES["grpo"].build(advantages.GrpoConfig(), None))])
    assert per_sample(batch) == pytest.approx([0.7071, 0.0], abs=1e-4)


def test_T3_a_trajectory_has_one_vote():
    # Votes 1 (three segments) and 0: mean 1/2, std 0.70711. Four equal votes would give 0.5 and -1.5.
    samples = [make_sample(index=0, segment=s, reward=1.0) for s in range(3)] + [make_sample(index=1, reward=0.0)]
    assert per_sample(run("grpo", [group_of(samples)])) == pytest.approx([0.7071] * 3 + [-0.7071], abs=1e-4)


def test_std_off_only_centres():
    assert per_sample(run("grpo", [make_group([3.0, 1.0])], std=False)) == [1.0, -1.0]


def test_advantages_stand_on_trainable_tokens_only():
    batch = run("grpo", [group_of([make_sample(3, mask=[1, 0, 1], reward=1.0), make_sample(3, index=1)])], std=False)
    assert batch.columns["advantages"][0].tolist() == [0, 0, 0, 0.5, 0, 0.5]
    assert batch.columns["advantages"][0].dtype == np.float32


@pytest.mark.parametrize("name", ["grpo", "rloo", "gae"])
def test_an_advantage_that_would_discard_others_is_refused(name):
    component = ADVANTAGES[name]
    second = component.build(component.config(), None)
    first = ADVANTAGES["grpo"].build(advantages.GrpoConfig(), None)
    with pytest.raises(ConfigError, match=f'advantage "{name}" starts from rewards'):
        apply_advantages(prepare([make_group([0.0, 1.0])]), [("grpo", first), (name, second)])


# --- gae -------------------------------------------------------------------------------------------------------------


def gae_case(mask, values, reward, **options):
    """Advantages of one sample whose response has this mask and these values."""
    sample = make_sample(len(mask), prompt_len=1, mask=mask, reward=reward)
    batch = run("gae", [group_of([sample])], columns={"old_values": [np.array([9.0, *values])]}, **options)
    return batch.columns["advantages"][0][1:].tolist(), batch.columns["returns"][0][1:].tolist()


F10 = [
    # Token 2 has reward 1: delta 1, and 0 + 0.95 * 1 before it. The masked value 100 would give 5.7 and 6.
    ([1, 1, 0], [0, 0, 100], {}, [0.95, 1, 0]),
    # Two trainable tokens are neighbours, whatever is between: 0.95 once. Counting the gap gives 0.95^3 = 0.857.
    ([1, 0, 0, 1], [0, 0, 0, 0], {}, [0.95, 0, 0, 1]),
    ([1, 1, 0, 0], [0, 0, 0, 0], {}, [0.95, 1, 0, 0]),
    ([1, 1, 0, 0], [0, 0, 0, 0], {"gamma": 0.0}, [0, 1, 0, 0]),  # the reward is not lost behind the mask
]


@pytest.mark.parametrize(("mask", "values", "options", "want"), F10)
def test_F10_masked_tokens_are_skipped(mask, values, options, want):
    advantage, returns = gae_case(mask, values, 1.0, **options)
    assert advantage == pytest.approx(want, abs=1e-6)
    assert returns == pytest.approx(want, abs=1e-6)  # the values of trainable tokens are 0


def test_gae_with_values():
    # gamma 0.5, lambda 0.5, V = 1, 2, r = 4: delta 4 - 2 = 2 and 0.5 * 2 - 1 = 0; advantages 0 + 0.25 * 2 and 2.
    advantage, returns = gae_case([1, 1], [1, 2], 4.0, gamma=0.5, lam=0.5)
    assert advantage == pytest.approx([0.5, 2])
    assert returns == pytest.approx([1.5, 4])  # advantage + value


def test_gae_runs_through_the_segments_of_a_trajectory():
    # One reward at the end of the last segment, seen from the first at 0.95^2 and 0.95^3.
    samples = [make_sample(2, index=0, segment=s, reward=1.0) for s in range(2)]
    batch = run("gae", [group_of(samples[::-1])], columns={"old_values": [np.zeros(5)] * 2})
    second, first = (row[3:].tolist() for row in batch.columns["advantages"])
    assert first == pytest.approx([0.95**3, 0.95**2])
    assert second == pytest.approx([0.95, 1])


def test_of_the_core_only_gae_gives_returns_and_says_so():
    """A loss of a critic requires "column/returns": without them it is refused before any model loads."""
    assert {n for n, c in ADVANTAGES.items() if "column/returns" in c.provided(c.config())} == {"gae"}


def test_E1_gae_of_an_empty_response():
    batch = run(
        "gae",
        [group_of([make_sample(0, reward=1.0), make_sample(1, index=1, reward=1.0)])],
        columns={"old_values": [np.zeros(3), np.zeros(4)]},
    )
    assert [row.tolist() for row in batch.columns["advantages"]] == [[0, 0, 0], [0, 0, 0, 1]]


# --- Penalties per token ---------------------------------------------------------------------------------------------


def kl_columns(*differences):
    """old_logprobs and reference_logprobs of samples with a prompt of one token: old - reference is as given."""
    rows = [np.array([7.0, *row]) for row in differences]  # what stands at the prompt must not matter
    return {"old_logprobs": [row - 1 for row in rows], "reference_logprobs": [np.full(len(row), -1.0) for row in rows]}


GAE_KL = [
    # Rewards per token are -0.2 * 0.5 = -0.1 and 1 + 0.2 * 0.25 = 1.05; V = 0, gamma 1. lambda 1: -0.1 + 1.05 and 1.05.
    (1.0, [0.95, 1.05]),
    # lambda 0.5: -0.1 + 0.5 * 1.05 and 1.05.
    (0.5, [0.425, 1.05]),
]


@pytest.mark.parametrize(("lam", "want"), GAE_KL)
def test_gae_takes_the_penalty_of_every_token(lam, want):
    group = group_of([make_sample(2, prompt_len=1, reward=1.0)])
    columns = {"old_values": [np.zeros(3)], **kl_columns([0.5, -0.25])}
    batch = run("gae", [group], columns=columns, lam=lam, kl_coef=0.2)
    assert batch.columns["advantages"][0][1:].tolist() == pytest.approx(want)
    assert batch.metrics["advantage/gae/kl"] == (0.25, 2.0, "mean")  # the sum of 0.5 and -0.25 over two tokens


def test_rloo_takes_the_penalty_of_the_whole_answer():
    # KL 0.5 + 0.25 - 0.25 = 0.5 and -0.5: rewards 1 - 0.2 * 0.5 = 0.9 and 0 + 0.1; each minus the other.
    samples = [make_sample(3, prompt_len=1, reward=1.0), make_sample(2, prompt_len=1, index=1)]
    batch = run("rloo", [group_of(samples)], columns=kl_columns([0.5, 0.25, -0.25], [-0.25, -0.25]), kl_coef=0.2)
    assert per_sample(batch) == pytest.approx([0.8, -0.8])


@pytest.mark.parametrize(("name", "role"), [("gae", "role/critic"), ("rloo", None)])
def test_a_penalty_needs_the_reference_and_nothing_else_does(name, role):
    component = ADVANTAGES[name]
    plain, penalised = component.config(), component.config(kl_coef=0.1)
    own = (role,) if role else ()
    assert component.required(plain) == own
    assert component.required(penalised) == (*own, "role/reference")
    assert component.needed(penalised) - component.needed(plain) == {"old_logprobs", "reference_logprobs"}


# --- Properties ------------------------------------------------------------------------------------------------------

QUICK = settings(deadline=None, max_examples=40)
REWARDS = st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=6)
NUMBERS = st.integers(-50, 50).map(lambda n: n / 8)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@QUICK
@given(REWARDS, st.integers(-5, 5), st.integers(1, 5))
def test_shift_changes_nothing_and_scale_only_scales(name, rewards, shift, scale):
    options = {"eps": 0.0} if name == "grpo" else {}
    plain = per_sample(run(name, [make_group(rewards)], **options))
    moved = per_sample(run(name, [make_group([shift + scale * r for r in rewards])], **options))
    factor = 1 if name == "grpo" else scale  # a standard deviation takes the scale out
    assert moved == pytest.approx([factor * a for a in plain], abs=1e-4)


@QUICK
@given(st.lists(st.lists(NUMBERS, max_size=9), max_size=6), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_discounted_sums_are_those_of_the_plain_loop(rows, discount):
    want = []
    for row in rows:
        total, sums = 0.0, []
        for x in reversed(row):
            total = x + discount * total
            sums.insert(0, total)
        want.append(sums)
    got = discounted_sums([np.array(row) for row in rows], discount)
    assert len(got) == len(rows)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.tolist() == pytest.approx(theirs)


@QUICK
@given(st.lists(NUMBERS, min_size=4, max_size=4), st.integers(1, 3), NUMBERS)
def test_T3_gae_of_a_trajectory_does_not_depend_on_where_it_is_cut(values, cut, reward):
    whole = [make_sample(4, prompt_len=1, reward=reward)]
    parts = [
        make_sample(cut, prompt_len=1, segment=0, reward=reward),
        make_sample(4 - cut, prompt_len=1, segment=1, reward=reward),
    ]
    one = run("gae", [group_of(whole)], columns={"old_values": [np.array([0.0, *values])]})
    rows = [np.array([0.0, *values[:cut]]), np.array([0.0, *values[cut:]])]
    two = run("gae", [group_of(parts)], columns={"old_values": rows})
    for name in ("advantages", "returns"):
        joined = [x for row in two.columns[name] for x in row[1:].tolist()]
        assert joined == one.columns[name][0][1:].tolist()


# --- Chains, decorated functions, errors -----------------------------------------------------------------------------


@miles_core.advantage("tempered", needs=["old_logprobs"])
def tempered(inputs, *, power: float = 1.0):
    """Advantages times the probability of each token.

    power: exponent of the probability
    """
    pairs = zip(inputs.advantages, inputs.columns["old_logprobs"], strict=True)
    return AdvantageOutput(advantages=[row * np.exp(power * old).astype(np.float32) for row, old in pairs])


def chain(*names, groups=None, columns=None, **made):
    """Runs a chain of built-in advantages, and of functions given by name in `made`."""
    batch = prepare(groups or [make_group([0.0, 1.0])])
    for key, rows in (columns or {}).items():
        batch.put(key, rows, "test")
    built = {n: ADVANTAGES[n].build(ADVANTAGES[n].config(), None) for n in names if n in ADVANTAGES}
    apply_advantages(batch, [(name, (built | made)[name]) for name in names])
    return batch


def test_a_decorated_function_joins_a_chain():
    # rloo gives -1 and 1; the probability of each token is exp(-2 * 0.5) = 0.36788 with power 0.5 and old_logprobs -2.
    assert (tempered.needed(tempered.config()), tempered.summary) == (
        frozenset({"old_logprobs"}),
        "Advantages times the probability of each token.",
    )
    built = tempered.build(tempered.config(power=0.5), None)
    batch = chain("rloo", "tempered", tempered=built, columns={"old_logprobs": [np.full(5, -2.0)] * 2})
    assert per_sample(batch) == pytest.approx([-0.36788, 0.36788], abs=1e-5)


def test_metrics_of_an_advantage_that_is_used_twice_are_kept_apart():
    def halved(inputs):
        rows = [row / 2 for row in inputs.advantages]
        return AdvantageOutput(advantages=rows, metrics={"largest": (float(np.max(rows)), 1.0, "max")})

    # rloo gives -1 and 1; then 0.5, then 0.25.
    batch = chain("rloo", "halved", "halved", halved=halved)
    assert batch.metrics["advantage/halved/largest"][0] == 0.5
    assert batch.metrics["advantage/halved#2/largest"][0] == 0.25
    assert batch.metrics["advantage/rloo/zero"] == (0.0, 2.0, "mean")


def test_an_exception_names_the_advantage_and_its_place():
    def broken(inputs):
        raise KeyError("old_valves")

    with pytest.raises(RunFailed, match=r"advantage/broken \(place 2 of rloo -> broken\) raised KeyError: 'old_valves'"):
        chain("rloo", "broken", broken=broken)


def test_F7_nan_of_an_advantage_names_it_its_place_and_the_sample():
    def spoilt(inputs):
        return AdvantageOutput(advantages=[row * np.nan for row in inputs.advantages])

    with pytest.raises(
        ContractError, match=r"advantage/spoilt \(place 2 of rloo -> spoilt\) .* nan for sample p@0/0 at token 3"
    ):
        chain("rloo", "spoilt", spoilt=spoilt)


def test_a_missing_column_names_who_reads_it():
    with pytest.raises(
        ContractError, match=r'advantage "gae" reads the column "old_values", .* \(it has: rollout_logprobs\)'
    ):
        chain("gae")


def test_F7_a_value_that_is_not_finite_names_reader_column_and_token():
    sample = make_sample(2)
    inputs = AdvantageInputs(
        samples=[sample],
        groups=[(0,)],
        rewards=[1.0],
        mask=[sample.loss_mask],
        columns={"old_values": [np.array([np.nan, 0, 0, 0, np.inf])]},  # the NaN stands at the prompt
    )
    gae = ADVANTAGES["gae"].build(advantages.GaeConfig(), None)
    with pytest.raises(ContractError, match='advantage "gae" was given old_values inf for sample p@0/0 at token 4'):
        gae(inputs)
    with pytest.raises(ContractError, match='advantage "gae" was given the reward nan of sample p@0/0'):
        gae(replace(inputs, rewards=[float("nan")]))


def test_F6_nothing_trainable_is_no_error():
    group = group_of([make_sample(2, mask=[0, 0], reward=1.0), make_sample(2, mask=[0, 0], index=1)])
    for name in ADVANTAGES:
        batch = run(name, [group], columns={"old_values": [np.zeros(5)] * 2})
        assert [row.tolist() for row in batch.columns["advantages"]] == [[0.0] * 5] * 2


def test_gae_without_a_critic_is_refused_before_anything_starts(dists):
    run = run_of(dists, CONFIG + '[[advantage]]\nuse = "gae"\n')
    with pytest.raises(ConfigError) as caught:
        check_requirements(run)
    assert 'advantage "gae"' in str(caught.value) and "add a table [roles.critic]" in str(caught.value)


def test_a_chain_in_the_wrong_order_is_refused_before_anything_starts(dists):
    run = run_of(dists, CONFIG + '[[advantage]]\nuse = "grpo"\n[[advantage]]\nuse = "rloo"\n')
    with pytest.raises(ConfigError, match=r'"rloo" stands in the chain grpo -> rloo, starts from rewards'):
        run_checks(run, Environment(), kinds=("advantage",))


def test_a_chain_in_order_is_not_refused(dists):
    run_checks(run_of(dists, CONFIG + '[[advantage]]\nuse = "rloo"\n'), Environment(), kinds=("advantage",))


# --- Filters ---------------------------------------------------------------------------------------------------------

VERDICTS = [
    ("nonzero-std", [0.0, 1.0], True, ""),
    ("nonzero-std", [100.3] * 6, False, "zero-std"),  # a standard deviation in fp32 would not be 0
    ("nonzero-std", [1.0, 1.0, None], False, "zero-std"),
    ("nonzero-std", [0.0, 1.0, None], True, ""),
    ("nonzero-std", [1.0, None], False, "too-few-verdicts"),
    ("nonzero-std", [None, None], False, "no-verdict"),
    ("all-verdicts", [0.0, 0.0], True, ""),
    ("all-verdicts", [0.0, None], False, "missing-verdict"),
]


@pytest.mark.parametrize(("name", "rewards", "keep", "reason"), VERDICTS)
def test_R2_filters_judge_valid_verdicts(name, rewards, keep, reason):
    component = FILTERS[name]
    verdict = component.build(component.config(), None).check(make_group(rewards))
    assert (verdict.keep, verdict.reason) == (keep, reason)


def test_T3_filters_count_trajectories():
    samples = [make_sample(index=0, segment=0, reward=0.0), make_sample(index=0, segment=1, reward=1.0)]
    group = group_of([*samples, make_sample(index=1, reward=1.0)])
    verdict = FILTERS["nonzero-std"].build(filters.NonzeroStdConfig(), None).check(group)
    assert verdict.reason == "zero-std"  # the votes are 1 and 1


def test_min_verdicts():
    component = FILTERS["nonzero-std"]
    check = component.build(filters.NonzeroStdConfig(min_verdicts=3), None).check
    assert check(make_group([0.0, 1.0, None])).reason == "too-few-verdicts"
    assert check(make_group([0.0, 1.0, 1.0])).keep
