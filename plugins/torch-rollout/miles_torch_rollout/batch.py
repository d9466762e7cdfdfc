"""The running batch of one engine: who waits, who runs, and one step for all of them. Single-threaded; knows no asyncio."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from miles_core.errors import RunFailed
from miles_core.types import Status
from miles_torch_rollout.kv import Prefix, PrefixCache, Rows
from miles_torch_rollout.prompts import plan_prompts, prompt_key
from miles_torch_rollout.request import Running
from miles_torch_rollout.sampling import SamplingPlan, sample


class Batch:
    """Continuous batching. Waiting requests with the same context are computed once, together, and so is what different
    contexts share; sequences join between steps and leave the batch at once when they end."""

    def __init__(
        self,
        decoder: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        vocab: int,
        max_running: int,
        max_kv_tokens: int,
        prefill_tokens: int,
        prefix_cache_tokens: int,
    ) -> None:
        self.decoder, self.device, self.vocab = decoder, device, vocab
        self.max_running, self.max_kv_tokens, self.prefill_tokens = max_running, max_kv_tokens, prefill_tokens
        self.rows = Rows(device, dtype, share=decoder.share_prompts)
        self.cache = PrefixCache(prefix_cache_tokens)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []  # by row
        self._plan: SamplingPlan | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self, version: int) -> list[tuple[Running, Status]]:
        """Admits what has room and samples one token for everyone; returns the requests that ended."""
        ended = []
        admitted = self._admit()
        if admitted:
            ended += self._start(admitted, version)
        if self.running:
            ended += self._decode(version)
        if not self.running:
            self.rows.clear()
        return ended

    def take(self, ids: Iterable[str] | None = None) -> list[Running]:
        """Removes these requests (all when None), waiting or running."""
        wanted = None if ids is None else set(ids)
        taken = [r for r in self.waiting if wanted is None or r.request.id in wanted]
        self.waiting = deque(r for r in self.waiting if r not in taken)
        for row in reversed(range(len(self.running))):
            if wanted is None or self.running[row].request.id in wanted:
                taken.append(self._remove(row))
        return taken

    def retract(self) -> None:
        """Puts running requests back, first in line; their keys and values are computed again."""
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self.rows.clear()
        self._plan = None

    def _admit(self) -> list[list[Running]]:
        """Waiting requests for which there is room, those with one context together."""
        count, need = len(self.running), max((r.need for r in self.running), default=0)
        new_tokens, groups = 0, {}
        while self.waiting and count < self.max_running:
            candidate = self.waiting[0]
            longest = max(need, candidate.need)
            if count and (count + 1) * longest > self.max_kv_tokens:
                break
            key = prompt_key(candidate.context)
            if key not in groups and self.cache.get(key) is None:
                size = len(candidate.context) - self.cache.longest(key)[1]
                if new_tokens and new_tokens + size > self.prefill_tokens:
                    break
                new_tokens += size
            groups.setdefault(key, []).append(self.waiting.popleft())
            count, need = count + 1, longest
        return list(groups.values())

    def _start(self, groups: list[list[Running]], version: int) -> list[tuple[Running, Status]]:
        """Computes the contexts that are not cached and samples the first token of each request."""
        prefixes = self._prefixes(groups)
        requests = [r for group in groups for r in group]
        logits = torch.stack([p.logits for p, group in zip(prefixes, groups, strict=True) for _ in group])
        plan = self._sampling(requests)
        outcomes = self._accept(requests, logits, plan, version)
        starting = []
        for prefix, group in zip(prefixes, groups, strict=True):
            going = [r for r in group if outcomes[r] is None]
            if going:
                starting.append((prefix, len(going), max(r.limit - len(r.tokens) for r in going)))
                self.running += going
        if starting:
            self.rows.add(starting)
        self._plan = None
        return [(r, status) for r, status in outcomes.items() if status is not None]

    def _prefixes(self, groups: list[list[Running]]) -> list[Prefix]:
        contexts = [group[0].context for group in groups]
        found = [self.cache.get(prompt_key(context)) for context in contexts]
        known = [len(context) for context in contexts]  # tokens that the first request of a group finds computed
        missing = [i for i, prefix in enumerate(found) if prefix is None]
        if missing:
            order, prompts = plan_prompts([contexts[i] for i in missing], self.cache.longest, self.device)
            missing = [missing[place] for place in order]
            for i, prompt, prefix in zip(missing, prompts, self.decoder.prefill(prompts), strict=True):
                found[i], known[i] = prefix, prompt.depth
                if not groups[i][0].tokens:  # a retracted request's context comes once
                    self.cache.put(prompt_key(contexts[i]), prefix)
        for i, group in enumerate(groups):
            for place, request in enumerate(group):
                if not request.tokens:
                    request.cached_tokens = known[i] if place == 0 else len(contexts[i])
        return found

    def _decode(self, version: int) -> list[tuple[Running, Status]]:
        if self._plan is None:
            self._plan = self._sampling(self.running)
        tokens = torch.tensor([r.tokens[-1] for r in self.running], device=self.device)
        logits = self.decoder.decode(tokens, self.rows, self.rows.plan())
        outcomes = self._accept(self.running, logits, self._plan, version)
        ended = [(r, status) for r, status in outcomes.items() if status is not None]
        for row in reversed(range(len(self.running))):
            if outcomes[self.running[row]] is not None:
                self._remove(row)
        return ended

    def _accept(
        self, requests: list[Running], logits: torch.Tensor, plan: SamplingPlan, version: int
    ) -> dict[Running, Status | None]:
        positions = np.array([len(r.tokens) for r in requests])
        tokens, sampled = sample(logits, plan, positions)
        logprobs = sampled.tolist()
        if not all(map(math.isfinite, logprobs)):
            raise RunFailed("the model's logits are not finite; its weights are broken")
        pairs = zip(requests, tokens.tolist(), logprobs, strict=True)
        return {r: r.accept(token, logprob, version) for r, token, logprob in pairs}

    def _remove(self, row: int) -> Running:
        request = self.running[row]
        last = self.rows.remove(row)
        self.running[row] = self.running[last]
        self.running.pop()
        self._plan = None
        return request

    def _sampling(self, requests: list[Running]) -> SamplingPlan:
        return SamplingPlan.of(
            [r.request.params for r in requests], [r.request.seed for r in requests], self.vocab, self.device
        )
