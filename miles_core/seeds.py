"""Seeds of single requests: a function of what is sampled, never of when, where or by how many workers."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(run_seed: int, prompt_id: str, draw: int, index: int, turn: int = 0) -> int:
    """A seed in [0, 2**63) for sample `index` of prompt draw (`prompt_id`, `draw`) at `turn`.

    Siblings differ, and so do two epochs over one prompt (their draws differ). The same arguments give the same seed in
    every process, on every machine and after a resume: no step, worker or clock takes part. The prompt id stands last
    in the hashed text, so that no two argument lists give the same text.
    """
    return _hash63(f"{run_seed}|{draw}|{index}|{turn}|{prompt_id}")


def continue_seed(seed: int, position: int) -> int:
    """The seed with which a request goes on after `position` sampled tokens. An engine may draw its random numbers by
    (seed, tokens sampled in this request); with the first seed the rest would see the first part's numbers again."""
    return _hash63(f"continue|{seed}|{position}")


def _hash63(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
