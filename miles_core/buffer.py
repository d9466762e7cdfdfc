"""GroupBuffer: which groups run, which are trained next, and how old they may be. One code for every `max_lag`.

G groups are trained per step, u steps lie between two pushes, and L is `max_lag`: a token sampled under version v may be
trained while the trainer is at most L pushes further. Two rules hold that bound.

*Capacity.* If b steps had been trained when the present version was pushed, at most (b + u * (1 + L)) * G groups are ever
started - counted as trained, running, waiting and complete ones; dropped ones do not count. With u = 1 this is the
rule (trained steps + 1 + L) * G - (consumed + running + complete). It is a function of what the checkpoint keeps, so it
is the same after a resume.

*Age.* A group born under version v has its last step under v + L. Batches take the oldest complete groups first, and
under `on_stale = "wait"` a batch is formed only when the rest can still make it: for every k in 0..L, of the groups whose
last step comes within k further pushes, no more may be left than the steps until then can take. By the capacity rule
that can always be had by waiting for some group that runs, so nothing is ever too old or done in vain. Waiting between
batch and push, as one would naively do, would complete groups that have missed their last step. "abort_requeue" does
not wait: before a push, groups that would be too old start again under the same (prompt id, draw); after
`max_requeues` restarts a group is waited for as above, so that no prompt is put off for ever. "continue" lets them go on
under new weights; tokens carry their versions, and those too old when trained are masked (`staleness.mask_stale`;
`batch` does it).

With L = 0 nothing runs ahead: groups start only while a step waits for its batch, each dropped group starts exactly one
more, and so the kept groups are the first prompts in data order that the filters keep, whatever finishes first.

A batch that was handed out counts as trained: take `state()` between steps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.drops import Drops
from miles_core.errors import ContractError, RunFailed
from miles_core.group_state import group_from_state, group_to_state, holds_references, prompt_from_state, prompt_to_state
from miles_core.staleness import staleness
from miles_core.types import Prompt, SampleGroup, Verdict

OnStale = Literal["wait", "abort_requeue", "continue"]
Key = tuple[str, int]

MAX_ABORTS = 8
"""How often a group may come back with aborted samples before it is dropped as "aborted"."""
CANCEL_S = 60.0
"""How long a cancelled group may take to end."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One prompt draw on its way to a batch. `born`: version when it started (this time)."""

    prompt: Prompt
    order: int
    born: int = 0
    requeues: int = 0
    aborts: int = 0
    partial: SampleGroup | None = None
    group: SampleGroup | None = None
    task: asyncio.Task[SampleGroup] | None = None
    cancelled: bool = False

    @property
    def key(self) -> Key:
        return (self.prompt.id, self.prompt.draw)

    @property
    def oldest(self) -> int:
        """Version of the oldest token; that of birth for a group that runs, or sampled nothing."""
        samples = self.group.samples if self.group else ()
        return min((s.oldest_version for s in samples if s.oldest_version is not None), default=self.born)

    @property
    def newest(self) -> int:
        spans = (span for s in (self.group.samples if self.group else ()) for span in s.versions)
        return max((span.version for span in spans), default=self.born)


class GroupBuffer:
    """Starts groups, keeps complete ones, hands out batches.

    `take_prompts(n)`: up to n further prompts in data order; an empty list ends the data. `run(prompt, order, partial)`:
    rollout and rewards of one group. `verdict(group)`: what the filters say. `on_group(group, verdict)` sees every judged
    group, kept or dropped. `note(text, level)` is told of a step that trains fewer groups than it should. What `run` or
    `verdict` raises is raised by `next_batch`.
    """

    def __init__(
        self,
        *,
        take_prompts: Callable[[int], Sequence[Prompt]],
        run: Callable[[Prompt, int, SampleGroup | None], Awaitable[SampleGroup]],
        verdict: Callable[[SampleGroup], Verdict],
        groups_per_step: int,
        max_lag: int = 0,
        on_stale: OnStale = "wait",
        update_every: int = 1,
        max_rounds: int = 10,
        on_exhausted: Literal["fail", "train"] = "fail",
        max_requeues: int = 2,
        version: int = 0,
        on_group: Callable[[SampleGroup, Verdict], None] | None = None,
        note: Callable[[str, str], None] = lambda text, level: None,
    ) -> None:
        self.take_prompts, self.run, self.verdict, self.on_group = take_prompts, run, verdict, on_group
        self.note = note
        self.groups_per_step, self.max_lag, self.on_stale = groups_per_step, max_lag, on_stale
        self.update_every, self.max_rounds, self.on_exhausted = update_every, max_rounds, on_exhausted
        self.max_requeues, self.version = max_requeues, version
        self.trained_steps = 0
        self.data_ended = False
        self.drops = Drops()
        self.counts: Counter[str] = Counter()
        """Totals over the run: started, kept, dropped, dropped/<reason>, requeued, requeued/<reason>, trained."""
        self._base = 0  # steps that had been trained when `version` came
        self._next_order = 0
        self._running: dict[Key, _Entry] = {}
        self._again: list[_Entry] = []
        self._complete: list[_Entry] = []
        self._staleness: dict[str, float] = {}
        self._open = self._pushing = False
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    # --- What the loop calls -----------------------------------------------------------------------------------------

    async def next_batch(self) -> list[SampleGroup]:
        """The next step's groups: exactly G, in the order in which they were started.

        Fewer, possibly none, when the data has ended, or after max_rounds * G tries with on_exhausted="train"; with
        "fail" that raises RunFailed with the counts. Raises whatever a group's rollout or filter raised.
        """
        if self.trained_steps - self._base >= self.update_every:
            self._base = self.trained_steps  # a push that was due did not come: this version serves longer
        self._open = True
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._changed.clear()
                self._fill()
                batch = self._ready()
                if batch is None and self._stuck():
                    batch = self._exhausted()
                if batch is not None:
                    return self._hand_out(batch)
                await self._changed.wait()
        finally:
            self._open = self.max_lag > 0 and self._failure is None

    async def before_push(self, next_version: int) -> None:
        """Restarts groups that would be too old for every step from `next_version` on. Nothing starts until `advance`."""
        self._pushing = True
        oldest_allowed = next_version - self.max_lag
        if self.on_stale != "continue":
            late = [e for e in self._running.values() if e.born < oldest_allowed]
            await self._cancel(late)
            for entry in late:
                # One that ended in spite of being cancelled was not lost: it is judged below.
                if self._running.pop(entry.key, None) is not None:
                    self._requeue(entry, "stale-running")
        for entry in list(self._complete):
            age = entry.newest if self.on_stale == "continue" else entry.oldest
            if age < oldest_allowed:
                self._complete.remove(entry)
                self._requeue(entry, "stale-complete")

    def advance(self, version: int) -> None:
        """After the push: engines now serve `version`."""
        self.version, self._base, self._pushing = version, self.trained_steps, False
        self._fill()

    def metrics(self) -> dict[str, float]:
        """Totals (`buffer/...`) and the age of the last batch in pushes (`staleness/...`), over its trained tokens."""
        names = sorted({"started", "kept", "dropped", "requeued", *self.counts})
        rows = {f"buffer/{name}": float(self.counts[name]) for name in names}
        rows |= {"buffer/running": float(len(self._running)), "buffer/complete": float(len(self._complete))}
        return rows | self._staleness

    def capacity(self) -> int:
        """How many new groups may start now."""
        limit = (self._base + self.update_every * (1 + self.max_lag)) * self.groups_per_step
        return limit - self.trained_steps * self.groups_per_step - self._in_flight

    async def close(self) -> None:
        """Cancels every group that runs."""
        self._open = False
        await self._cancel(list(self._running.values()))
        self._running.clear()

    # --- Checkpoint --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON types and numpy arrays. Complete groups are kept; groups that run are kept as prompts, which start again
        under the same (id, draw) and order. Together with the data cursor of the same moment no prompt is lost or
        trained twice."""
        keep = [e for e in self._complete if e.group is not None and not holds_references(e.group)]
        again = [e for e in (*self._running.values(), *self._again, *self._complete) if e not in keep]
        return {
            "version": self.version,
            "trained_steps": self.trained_steps,
            "base": self._base,
            "next_order": self._next_order,
            "counts": dict(self.counts),
            "dropped": self.drops.state(),
            "complete": [{**_entry_state(e), "group": group_to_state(e.group)} for e in keep if e.group],
            "pending": [
                {
                    **_entry_state(e),
                    "prompt": prompt_to_state(e.prompt),
                    "partial": group_to_state(e.partial) if e.partial and not holds_references(e.partial) else None,
                }
                for e in sorted(again, key=lambda e: e.order)
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; before the first batch."""
        assert not self._running and not self._complete, "restore comes before the first batch"
        self.version, self.trained_steps, self._base = state["version"], state["trained_steps"], state["base"]
        self._next_order = state["next_order"]
        self.counts = Counter(state["counts"])
        self.drops.restore(state["dropped"])
        for row in state["complete"]:
            group = group_from_state(row["group"])
            self._complete.append(_entry_from(row, group.prompt, group=group))
        for row in state["pending"]:
            partial = group_from_state(row["partial"]) if row["partial"] else None
            self._again.append(_entry_from(row, prompt_from_state(row["prompt"]), partial=partial))

    # --- Starting and ending groups ----------------------------------------------------------------------------------

    @property
    def _in_flight(self) -> int:
        return len(self._running) + len(self._again) + len(self._complete)

    def _room(self) -> int:
        """New groups that may start: the capacity, within the tries of this step and of those that it runs ahead."""
        steps = self.max_rounds + self.update_every * (1 + self.max_lag) - 1
        tries = steps * self.groups_per_step - self.drops.step.total() - self._in_flight
        return min(self.capacity(), tries)

    def _fill(self) -> None:
        """Starts what may start: first those that were sent back, oldest first, then new prompts."""
        if not self._open or self._pushing or self._failure is not None:
            return
        for entry in sorted(self._again, key=lambda e: e.order):
            self._start(entry)
        self._again.clear()
        while not self.data_ended and (room := self._room()) > 0:
            prompts = self.take_prompts(room)
            self.data_ended = not prompts
            for prompt in prompts:
                self._start(_Entry(prompt, self._next_order))
                self._next_order += 1
                self.counts["started"] += 1

    def _start(self, entry: _Entry) -> None:
        if entry.key in self._running or any(e.key == entry.key for e in self._complete):
            raise ContractError(
                f'the data source gave prompt "{entry.prompt.id}" twice with draw {entry.prompt.draw}; '
                "(id, draw) must be unique in a run"
            )
        entry.born, entry.cancelled = self.version, False
        self._running[entry.key] = entry
        entry.task = asyncio.ensure_future(self.run(entry.prompt, entry.order, entry.partial))
        entry.task.add_done_callback(lambda task: self._ended(entry, task))

    def _ended(self, entry: _Entry, task: asyncio.Task[SampleGroup]) -> None:
        if self._running.get(entry.key) is not entry or (entry.cancelled and task.cancelled()):
            return
        del self._running[entry.key]
        try:
            if task.cancelled():
                raise RunFailed(f"the rollout of group {entry.prompt.id}@{entry.prompt.draw} cancelled itself")
            self._judge(entry, task.result())
            self._fill()
        except BaseException as error:
            self._failure = self._failure or error
        self._changed.set()

    def _judge(self, entry: _Entry, group: SampleGroup) -> None:
        if any(s.status == "aborted" for s in group.samples):
            entry.aborts += 1
            if entry.aborts <= MAX_ABORTS:
                # Its tokens live on only where one sample may hold several versions.
                entry.partial = group if self.on_stale == "continue" else None
                self._requeue(entry, "aborted")
                return
            verdict = Verdict(keep=False, reason="aborted")
        else:
            verdict = self.verdict(group)
        group.order = entry.order
        if self.on_group is not None:
            self.on_group(group, verdict)
        if verdict.keep:
            entry.group, entry.partial = group, None
            self._complete.append(entry)
            self.counts["kept"] += 1
        else:
            reason = verdict.reason or "no-reason"
            self.counts["dropped"] += 1
            self.counts[f"dropped/{reason}"] += 1
            self.drops.add(reason, group)

    def _requeue(self, entry: _Entry, reason: str) -> None:
        if entry.group is not None:
            self.counts["kept"] -= 1
        entry.group, entry.task = None, None
        if reason != "aborted":
            entry.partial = None
            entry.requeues += 1
        self.counts["requeued"] += 1
        self.counts[f"requeued/{reason}"] += 1
        self._again.append(entry)

    async def _cancel(self, entries: Sequence[_Entry]) -> None:
        tasks = {e.task: e for e in entries if e.task is not None}
        for task, entry in tasks.items():
            entry.cancelled = True
            task.cancel()
        if not tasks:
            return
        _, hanging = await asyncio.wait(tasks, timeout=CANCEL_S)
        await asyncio.sleep(0)  # let `_ended` see those that finished anyway
        if hanging:
            names = ", ".join(f"{tasks[t].prompt.id}@{tasks[t].prompt.draw}" for t in hanging)
            raise RunFailed(f"these groups did not end within {CANCEL_S:g} s of being cancelled: {names}")

    # --- Forming batches ---------------------------------------------------------------------------------------------

    def _ready(self) -> list[_Entry] | None:
        """The batch, if it is determined."""
        size = self.groups_per_step
        if len(self._complete) < size:
            return None
        unfinished = [*self._running.values(), *self._again]
        if self.max_lag == 0:
            batch = sorted(self._complete, key=lambda e: e.order)[:size]
            return None if any(e.order < batch[-1].order for e in unfinished) else batch
        batch = sorted(self._complete, key=lambda e: (e.oldest, e.order))[:size]
        left = [e for e in self._complete if e not in batch]
        due = [e for e in self._running.values() if self._waits_for(e)]
        steps = max(self._base + self.update_every - self.trained_steps - 1, 0)  # that this version still has
        for born in range(self.version - self.max_lag, self.version + 1):
            late = sum(e.born <= born for e in due)
            if late and late + sum(e.oldest <= born for e in left) > steps * size:
                return None
            steps += self.update_every
        return batch

    def _waits_for(self, entry: _Entry) -> bool:
        if self.on_stale == "abort_requeue":
            return entry.requeues >= self.max_requeues
        return self.on_stale == "wait"

    def _stuck(self) -> bool:
        return not self._running and not self._again and not self._pushing and (self.data_ended or self._room() <= 0)

    def _exhausted(self) -> list[_Entry]:
        """What is handed out, or raised, when no further group can start and the batch is not full."""
        rest = sorted(self._complete, key=lambda e: (e.oldest, e.order))[: self.groups_per_step]
        if self.data_ended:
            return rest
        step, kept = self.trained_steps + 1, len(self._complete)
        tried = self.drops.step.total() + kept
        if self.on_exhausted == "train":
            drops = self.drops.step_summary()
            self.note(f"step {step} trains {kept} of {self.groups_per_step} groups; dropped of {tried}: {drops}", "warning")
            return rest
        raise RunFailed(
            f"step {step} cannot be filled: of {tried} prompts tried (rollout.max_rounds = {self.max_rounds}, "
            f"groups_per_step = {self.groups_per_step}), {kept} were kept",
            "dropped, by reason and rewards of the group:",
            *self.drops.step_lines(),
            'easier or harder prompts, another filter, a larger rollout.max_rounds, or rollout.on_exhausted = "train"',
        )

    def _hand_out(self, batch: list[_Entry]) -> list[SampleGroup]:
        self._complete = [e for e in self._complete if e not in batch]
        self.trained_steps += 1
        self.drops.step.clear()
        groups = [e.group for e in sorted(batch, key=lambda e: e.order) if e.group is not None]
        self.counts["trained"] += len(groups)
        self._staleness = staleness(groups, self.version, self.max_lag)
        return groups


def _entry_state(entry: _Entry) -> dict[str, Any]:
    return {"order": entry.order, "born": entry.born, "requeues": entry.requeues, "aborts": entry.aborts}


def _entry_from(row: Mapping[str, Any], prompt: Prompt, **rest: Any) -> _Entry:
    numbers = {name: row[name] for name in ("order", "born", "requeues", "aborts")}
    return _Entry(prompt, **numbers, **rest)
