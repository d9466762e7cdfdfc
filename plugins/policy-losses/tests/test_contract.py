"""The contract suite of losses: on torch tensors and, where the loss is elementwise, on the toy trainer's arrays."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import miles_policy_losses
from miles_core.testing.contracts import LossContract

COMPONENTS = {c.name: c for c in miles_policy_losses.miles_losses()}
CASES = {
    "PpoClip": ("ppo-clip", {}),
    "PpoClipDual": ("ppo-clip", {"clip_high": 0.28, "dual_clip": 3.0}),
    "Dapo": ("dapo", {}),
    "Gspo": ("gspo", {}),
    "GspoWide": ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    "GspoToken": ("gspo", {"variant": "token", "clip_high": 0.2}),
    "GspoWholeRatio": ("gspo", {"length_norm": False, "clip_high": 0.2}),
    "Cispo": ("cispo", {}),
    "Sapo": ("sapo", {}),
    "Reinforce": ("reinforce", {}),
    "Sft": ("sft", {}),
    "Dpo": ("dpo", {}),
    "DpoSmoothed": ("dpo", {"label_smoothing": 0.1}),
    "Ipo": ("dpo", {"variant": "ipo"}),
    "Value": ("value", {}),
    "ValueUnclipped": ("value", {"clip": None}),
    "Entropy": ("entropy", {}),
    "ZLoss": ("z-loss", {}),
    "DistillReverse": ("distill", {}),
    "DistillForwardTopK": ("distill", {"divergence": "forward", "top_k": 8}),
} | {
    f"Kl{name.title().replace('-', '')}": ("kl", {"estimator": name})
    for name in ("k1", "k2", "k3", "low-variance", "unbiased", "unbiased-k1")
}
ELEMENTWISE = ("PpoClip", "PpoClipDual", "Cispo", "Sapo", "Reinforce", "Sft", *(n for n in CASES if n.startswith("Kl")))
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def suite(name: str, **more):
    loss, options = CASES[name]
    return type(f"Test{name}", (LossContract,), {"component": COMPONENTS[loss], "options": options, **more})


for case in CASES:
    globals()[f"Test{case}"] = needs_torch(suite(case))
for case in ELEMENTWISE:
    globals()[f"Test{case}OnToyArrays"] = suite(case, arrays="toy")


def test_every_loss_has_a_suite():
    assert {name for name, _ in CASES.values()} == set(COMPONENTS)
