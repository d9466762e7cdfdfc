"""Broken advantages, corrections and losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.builtin.advantages import group_normalised, per_group
from miles_core.builtin.losses import policy_gradient
from miles_core.testing import fakes, suites
from miles_core.testing.broken import Shelf
from miles_core.testing.toy_arrays import ToyArray
from miles_core.types import AdvantageInputs, AdvantageOutput, CorrectionInputs, CorrectionOutput, LossInputs, LossOutput

ADVANTAGE = Shelf(suites.Grpo, lambda function: lambda config, context: function)


def grpo(inputs: AdvantageInputs, rule: Any = lambda r: group_normalised(r, True, 1e-6)) -> AdvantageOutput:
    return per_group(inputs, "grpo", rule)


@ADVANTAGE.breaks("test_rows_fit_the_samples")
def double_precision(inputs: AdvantageInputs) -> AdvantageOutput:
    return AdvantageOutput(advantages=[row.astype(np.float64) for row in grpo(inputs).advantages])


@ADVANTAGE.breaks("test_masked_tokens_get_exactly_zero")
def whole_answer(inputs: AdvantageInputs) -> AdvantageOutput:
    whole = replace(inputs, mask=[np.arange(s.num_tokens) >= s.prompt_len for s in inputs.samples])
    return grpo(whole)


NEEDS_VALUES = replace(suites.Grpo.component, needs=lambda config: frozenset({"old_values"}))


@ADVANTAGE.breaks("test_masked_values_do_not_matter", component=NEEDS_VALUES)
def mean_of_all_values(inputs: AdvantageInputs) -> AdvantageOutput:
    means = [row.mean() for row in inputs.columns["old_values"]]
    rows = zip(grpo(inputs).advantages, means, inputs.mask, strict=True)
    return AdvantageOutput(advantages=[row - mean * mask for row, mean, mask in rows])


@ADVANTAGE.breaks("test_values_are_finite")
def no_epsilon(inputs: AdvantageInputs) -> AdvantageOutput:
    with np.errstate(all="ignore"):
        return grpo(inputs, lambda r: (r - r.mean()) / r.std())


@ADVANTAGE.breaks("test_equal_rewards_give_exactly_zero")
def rounding_error(inputs: AdvantageInputs) -> AdvantageOutput:
    return grpo(inputs, lambda r: (r - r.mean()) / (r.std() + 1e-6))


@ADVANTAGE.breaks("test_the_better_sample_gets_more")
def upside_down(inputs: AdvantageInputs) -> AdvantageOutput:
    return AdvantageOutput(advantages=[-row for row in grpo(inputs).advantages])


@ADVANTAGE.breaks("test_no_verdict_is_no_vote")
def none_is_zero(inputs: AdvantageInputs) -> AdvantageOutput:
    return grpo(replace(inputs, rewards=[r or 0.0 for r in inputs.rewards]))


@ADVANTAGE.breaks("test_order_does_not_matter")
def first_counts_double(inputs: AdvantageInputs) -> AdvantageOutput:
    first, *rest = grpo(inputs).advantages
    return AdvantageOutput(advantages=[first * 2, *rest])


@ADVANTAGE.breaks("test_one_trajectory_is_one_vote")
def one_segment_one_vote(inputs: AdvantageInputs) -> AdvantageOutput:
    own = [replace(s, trajectory_id=f"{s.trajectory_id}#{s.segment}") for s in inputs.samples]
    return grpo(replace(inputs, samples=own))


@ADVANTAGE.breaks("test_groups_do_not_mix")
def one_big_group(inputs: AdvantageInputs) -> AdvantageOutput:
    return grpo(replace(inputs, groups=[tuple(i for group in inputs.groups for i in group)]))


@ADVANTAGE.breaks("test_the_inputs_are_not_changed")
def masks_in_place(inputs: AdvantageInputs) -> AdvantageOutput:
    output = grpo(inputs)
    for mask, reward in zip(inputs.mask, inputs.rewards, strict=True):
        mask &= reward is not None
    return output


CORRECTION = Shelf(suites.Correction, lambda cls: lambda config, context: cls(config))


class Changed(fakes.TruncatedImportance):
    """`change(output, inputs)` spoils a good output."""

    def change(self, output: CorrectionOutput, inputs: CorrectionInputs) -> CorrectionOutput:
        return output

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        return self.change(super().__call__(inputs), inputs)


CORRECTION.component("test_it_says_what_becomes_of_the_denominator", "no-trait", traits={})


@CORRECTION.breaks("test_rows_fit_the_samples")
class MaskOfNumbers(Changed):
    def change(self, output: CorrectionOutput, inputs: CorrectionInputs) -> CorrectionOutput:
        return replace(output, mask=[m.astype(np.float32) for m in output.mask])


@CORRECTION.breaks("test_it_never_unmasks")
class MaskOfItsOwn(Changed):
    def change(self, output: CorrectionOutput, inputs: CorrectionInputs) -> CorrectionOutput:
        return replace(output, mask=[m <= self.config.cap for m in output.multiplier])


@CORRECTION.breaks("test_multipliers_are_finite")
class Unbounded(fakes.TruncatedImportance):
    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        pairs = zip(inputs.columns["old_logprobs"], inputs.columns["rollout_logprobs"], strict=True)
        with np.errstate(over="ignore"):
            return CorrectionOutput(mask=inputs.mask, multiplier=[np.exp(old - new) for old, new in pairs])


@CORRECTION.breaks("test_agreement_changes_nothing")
class AlwaysShrinks(Changed):
    def change(self, output: CorrectionOutput, inputs: CorrectionInputs) -> CorrectionOutput:
        return replace(output, multiplier=[m * np.float32(0.9) for m in output.multiplier])


@CORRECTION.breaks("test_nothing_trainable_is_fine")
class NormalisesByCount(Changed):
    def change(self, output: CorrectionOutput, inputs: CorrectionInputs) -> CorrectionOutput:
        total = np.sum([m[k].sum() for m, k in zip(output.multiplier, output.mask, strict=True)])
        mean = total / np.sum([m.sum() for m in output.mask])
        return replace(output, multiplier=[m / np.float32(mean) for m in output.multiplier])


@CORRECTION.breaks("test_the_inputs_are_not_changed")
class MasksInPlace(Changed):
    def change(self, output: CorrectionOutput, inputs: CorrectionInputs) -> CorrectionOutput:
        for own, new in zip(inputs.mask, output.mask, strict=True):
            own &= new & (np.arange(len(own)) % 2 == 0)
        return replace(output, mask=inputs.mask)


LOSS = Shelf(suites.PolicyGradientOnToyArrays, lambda function: lambda config, context: function)


@LOSS.breaks("test_it_gives_one_number_per_token")
def already_summed(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=ToyArray(policy_gradient(x).per_token.value.sum()))


@LOSS.breaks("test_masked_tokens_count_for_nothing")
def unmasked(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=-x.advantages * x.get("logprobs"))


@LOSS.breaks("test_masked_tokens_count_for_nothing")
def masked_by_product(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=-x.advantages * x.get("logprobs") * x.mask)


@LOSS.breaks("test_microbatches_do_not_matter")
def mean_of_the_microbatch(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=policy_gradient(x).per_token / float(x.mask.sum() + 1e-9))


@LOSS.breaks("test_a_gradient_reaches_the_model")
def detached(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=policy_gradient(x).per_token.detach())


@LOSS.breaks("test_no_advantage_gives_no_gradient_where_promised")
def adds_a_term_of_its_own(x: LossInputs) -> LossOutput:
    logprobs = x.get("logprobs")
    return LossOutput(per_token=policy_gradient(x).per_token - 0.01 * logprobs.where(x.mask, logprobs.new_zeros(())))


NEEDS_OLD = replace(
    suites.PolicyGradientOnToyArrays.component, needs=lambda config: frozenset({"logprobs", "old_logprobs"})
)


@LOSS.breaks("test_far_apart_policies_stay_finite", component=NEEDS_OLD)
def unclamped_ratio(x: LossInputs) -> LossOutput:
    zero = x.advantages.new_zeros(())
    log_ratio = (x.get("logprobs") - x.get("old_logprobs")).where(x.mask, zero)
    with np.errstate(over="ignore", invalid="ignore"):
        return LossOutput(per_token=-log_ratio.exp() * x.advantages.where(x.mask, zero))


@LOSS.breaks("test_nothing_trainable_gives_zeros")
def metric_is_a_mean(x: LossInputs) -> LossOutput:
    output = policy_gradient(x)
    count = float(x.mask.sum())
    return replace(output, metrics={"loss": (float(output.per_token.detach().sum()) / count, count, "mean")})


@LOSS.breaks("test_it_reads_what_it_announced")
def reads_old_logprobs(x: LossInputs) -> LossOutput:
    x.get("old_logprobs")
    return policy_gradient(x)


@LOSS.breaks("test_the_scope_is_the_one_of_the_trait")
def scope_of_another(x: LossInputs) -> LossOutput:
    return replace(policy_gradient(x), scope="value")


@LOSS.breaks("test_metrics_can_be_merged")
def metric_is_a_number(x: LossInputs) -> LossOutput:
    return replace(policy_gradient(x), metrics={"one": 1.0})


@LOSS.breaks("test_metrics_can_be_merged")
def metric_with_a_gradient(x: LossInputs) -> LossOutput:
    return replace(policy_gradient(x), metrics={"logprobs": (x.get("logprobs"), 1.0, "sum")})


@LOSS.breaks("test_metrics_can_be_merged")
def metric_of_means(x: LossInputs) -> LossOutput:
    output = policy_gradient(x)
    return replace(output, metrics={"loss": (float(output.per_token.detach().mean()), float(x.mask.sum()), "mean")})
