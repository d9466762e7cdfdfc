"""A stranger's plugin: everything that it adds to Miles is in this file."""

import numpy as np

import miles_core as miles
from miles_core.types import AdvantageOutput, LossOutput


@miles.loss("acme-squared-log-ratio", needs=("logprobs", "old_logprobs"), summary="A soft trust region instead of a clip")
def squared_log_ratio(x, *, strength: float = 0.5):
    """-A log p + strength (log p - log p_old)^2 per token."""
    logprobs = x.get("logprobs")
    distance = (logprobs - x.get("old_logprobs")).square()
    per_token = (strength * distance - x.advantages * logprobs).where(x.mask, logprobs.new_zeros(()))
    metrics = {"distance": (distance.where(x.mask, distance.new_zeros(())).detach().sum(), x.mask.sum(), "mean")}
    return LossOutput(per_token=per_token, metrics=metrics)


@miles.advantage("acme-rank", summary="Ranks in the group instead of rewards, from -1 to 1")
def rank(inputs):
    """With k of a group's n samples worse and m better than this one: (k - m) / n; equal rewards give exactly 0."""
    advantages = [np.zeros(len(mask), np.float32) for mask in inputs.mask]
    for group in inputs.groups:
        judged = [i for i in group if inputs.rewards[i] is not None]
        rewards = np.array([inputs.rewards[i] for i in judged])
        for i, reward in zip(judged, rewards, strict=True):
            advantages[i][inputs.mask[i]] = (np.sum(reward > rewards) - np.sum(reward < rewards)) / len(rewards)
    return AdvantageOutput(advantages=advantages)


@miles.reward("acme-first-token", summary="1 when the first word of the answer is the label")
def first_token(sample):
    return float(sample.response.split()[:1] == [str(sample.prompt.label)])
