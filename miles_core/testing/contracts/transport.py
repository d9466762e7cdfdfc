"""Suite of the kind transport. It runs on toy engines and a toy trainer, or on yours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles_core.builtin.losses import policy_gradient
from miles_core.component import BuildContext
from miles_core.errors import ConfigError, WeightSyncFailed
from miles_core.interfaces import EngineReplica, TrainerRank
from miles_core.launch import InlineWorkerGroup
from miles_core.testing import toy, toy_model
from miles_core.testing.contracts.base import ComponentContract, no_error, refused
from miles_core.testing.toy_engine import ToyEngine
from miles_core.testing.toy_trainer import ToyTrainer
from miles_core.trainers import RankHost, TrainerGroup
from miles_core.types import SyncReport, WeightMessage

DATA = ("path", "ipc", "broadcast", "expose")


class FaultyEngine(ToyEngine):
    """A toy engine that notes what it receives and, at a message of the kind `at`, does `what`: "raise", "hang",
    "corrupt" (confirms other bytes than it was sent) or "lie" (confirms another version)."""

    def __init__(self, config: Any, context: BuildContext, at: str = "", what: str = "") -> None:
        super().__init__(config, context)
        self.at, self.what = at, what
        self.seen: list[WeightMessage] = []

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        self.seen.append(message)
        if message.kind == self.at and self.what == "raise":
            raise WeightSyncFailed(f"{self.id} cannot do {message.kind}")
        if message.kind == self.at and self.what == "hang":
            await asyncio.sleep(3600)
        answer = await super().receive(message)
        if message.kind == self.at and self.what == "corrupt":
            return {**answer, "sha": "0" * 64}
        if message.kind == self.at and self.what == "lie":
            return {**answer, "version": message.version + 1}
        return answer


class CountingTrainer(ToyTrainer):
    """A toy trainer that counts the buckets of an export that were taken."""

    taken = 0

    def export(self, layout: str, bucket_bytes: int) -> Any:
        self.taken = 0
        for bucket in super().export(layout, bucket_bytes):
            self.taken += 1
            yield bucket


class TransportContract(ComponentContract):
    """A `WeightTransport` with its sender. Override `engine` and `trainer` where the toy ones do not have its channel."""

    phase_s: float = 1.0
    """`transport.timeout_s` of the run: the limit of each phase of a push."""
    push_s: float = 20.0
    """A push to engines of which one is silent is over within this time."""

    collective: bool = False
    """Whether an engine that fails stops the others: all of them are then reported, and the next push reaches those that
    are left."""

    # --- Helpers ---

    def make_context(self, folder: Path, **fields: Any) -> BuildContext:
        losses = [("contract", policy_gradient)]
        return super().make_context(folder, **({"select": lambda kind: losses if kind == "loss" else []} | fields))

    def run_config(self) -> Any:
        run = super().run_config()
        table = run.transport.model_copy(update={"bucket_bytes": 1 << 15, "timeout_s": self.phase_s})
        return run.model_copy(update={"transport": table})

    def engine(self, folder: Path, index: int, at: str = "", what: str = "") -> EngineReplica:
        """An engine with other weights than the trainer's; see `FaultyEngine`."""
        return FaultyEngine(toy.ToyEngineConfig(), self.make_context(folder, seed=9, index=index), at, what)

    def trainer(self, folder: Path) -> TrainerRank:
        return CountingTrainer(toy.ToyTrainerConfig(), self.make_context(folder, seed=1))

    @asynccontextmanager
    async def connected(self, folder: Path, *faults: tuple[str, str]) -> AsyncIterator[SimpleNamespace]:
        """One engine for each of `faults`, a trainer, and the transport between them."""
        rank = self.trainer(folder)
        sender = self.component.parts["sender"]
        context = self.make_context(folder)
        host = RankHost(rank, lambda plan: sender(self.config, context))
        group = TrainerGroup(await InlineWorkerGroup.create("trainer", [lambda: host]), timeout_s=self.timeout_s)
        await group.start()
        engines = [self.engine(folder, i, *fault) for i, fault in enumerate(faults)]
        for engine in engines:
            await engine.start()
        transport = self.build(folder)
        try:
            await transport.connect(group, SimpleNamespace(replicas=engines))
            yield SimpleNamespace(transport=transport, trainer=group, rank=rank, engines=engines)
        finally:
            await transport.close()
            await group.close()
            for engine in engines:
                await engine.close()

    def pushed(
        self, folder: Path, *faults: tuple[str, str], then: Callable[..., Coroutine[Any, Any, Any]] | None = None
    ) -> Any:
        """(report, session) of one push of version 1 to paused engines; `then(session, report)` runs before it closes."""

        async def work() -> Any:
            async with self.connected(folder, *faults) as session:
                report = await self.push(session, 1)
                if then is not None:
                    await then(session, report)
                return report, session

        return self.run(work())

    async def push(self, session: SimpleNamespace, version: int) -> SyncReport:
        for engine in session.engines:
            await engine.pause("abort")
        started = time.monotonic()
        with no_error("push"):
            report = await session.transport.push(version, session.engines)
        assert time.monotonic() - started < self.push_s, f"a push took {time.monotonic() - started:.0f} s"
        names = [sync.engine for sync in report.engines]
        assert names == [e.id for e in session.engines], f"the report speaks of {names}"
        return report

    # --- Rules ---

    def test_there_is_a_sender(self) -> None:
        """`Component.parts["sender"]` builds the transport's end in the trainer ranks."""
        assert callable(self.component.parts.get("sender")), f"parts: {sorted(self.component.parts)}"

    def test_every_tensor_arrives(self, tmp_path: Path) -> None:
        """After a push every engine holds the trainer's weights, bit for bit, and says the version; the report is true."""

        async def check(session: Any, report: SyncReport) -> None:
            wanted = session.rank.state_hash()
            for engine, sync in zip(session.engines, report.engines, strict=True):
                assert sync.ok, f"{sync.engine}: {sync.phase}: {sync.error}"
                assert (await engine.health())["version"] == 1 == report.version
                assert sync.state_hash in ("", wanted)
                assert _hash(engine) == wanted, f"{sync.engine} holds other weights than the trainer"

        report, _ = self.pushed(tmp_path, ("", ""), ("", ""), then=check)
        sizes = sum(value.nbytes for value in self._initial(tmp_path).values())
        assert (report.num_bytes, report.num_buckets > 1) == (sizes, True), f"{report.num_bytes} bytes of {sizes}"

    def _initial(self, folder: Path) -> Any:
        rank = ToyTrainer(toy.ToyTrainerConfig(), self.make_context(folder, seed=1))
        rank.start()
        return rank.params

    def test_messages_come_in_order(self, tmp_path: Path) -> None:
        """begin, data, flush, commit, once each but the data; all for the engine's incarnation and the version."""
        _, session = self.pushed(tmp_path, ("", ""))
        (engine,) = session.engines
        kinds = ["data" if m.kind in DATA else m.kind for m in engine.seen if m.kind != "join"]
        order = [k for i, k in enumerate(kinds) if i == 0 or (k, kinds[i - 1]) != ("data", "data")]
        assert order[:4] == ["begin", "data", "flush", "commit"], f"messages came as {kinds}"
        assert {(m.version, m.incarnation) for m in engine.seen[: len(kinds)]} == {(1, engine.incarnation)}

    def test_changed_bytes_are_noticed(self, tmp_path: Path) -> None:
        """An engine that answers with another hash than was sent is not ok, and does not get a commit."""
        report, session = self.pushed(tmp_path, ("ipc", "corrupt"), ("", ""))
        verdicts(report, False, True)
        assert "commit" not in [m.kind for m in session.engines[0].seen], "committed bytes that arrived changed"

    def test_a_wrong_version_is_noticed(self, tmp_path: Path) -> None:
        """An engine that answers the commit with another version is not ok."""
        verdicts(self.pushed(tmp_path, ("commit", "lie"), ("", ""))[0], False, True)

    def test_a_failing_engine_does_not_stop_the_others(self, tmp_path: Path) -> None:
        """Whatever message an engine refuses: its entry names the phase and the error, and the others are ok."""
        for kind in ("begin", "ipc", "flush", "commit"):
            self._others_go_on(tmp_path, ("", ""), (kind, "raise"), ("", ""))

    def test_a_silent_engine_does_not_stop_the_others(self, tmp_path: Path) -> None:
        """An engine that never answers is given up after the time limit."""
        self._others_go_on(tmp_path, ("", ""), ("begin", "hang"), ("commit", "hang"))

    def _others_go_on(self, folder: Path, *faults: tuple[str, str]) -> None:
        """Faulty engines are reported; the others are ok, at the latest after a second push to them alone."""

        async def second(session: Any, report: SyncReport) -> None:
            if self.collective and not all(sync.ok for sync in report.engines):
                session.engines = [e for e, (at, _) in zip(session.engines, faults, strict=True) if not at]
                verdicts(await self.push(session, 2), *[True] * len(session.engines))

        report, _ = self.pushed(folder, *faults, then=second)
        wanted = [not at for at, _ in faults]
        verdicts(
            report, *([s.ok and w for s, w in zip(report.engines, wanted, strict=True)] if self.collective else wanted)
        )

    def test_the_export_is_taken_to_its_end(self, tmp_path: Path) -> None:
        """Once begun, also when no engine is left: it is collective, and ranks that stop early hang the others."""
        whole = sum(1 for _ in ToyTrainer.export(self._rank(tmp_path), "hf_full", 1 << 15))
        for fault in (("ipc", "raise"), ("ipc", "corrupt")):
            _, session = self.pushed(tmp_path, fault)
            assert session.rank.taken in (0, whole), f"{session.rank.taken} of {whole} buckets were taken with {fault}"

    def _rank(self, folder: Path) -> Any:
        rank = self.trainer(folder)
        rank.start()
        return rank

    def test_a_second_push_works(self, tmp_path: Path) -> None:
        """After a push in which an engine failed, the same transport brings all of them to the next version."""

        async def again(session: Any, report: SyncReport) -> None:
            for engine in session.engines:
                engine.at = ""
            second = await self.push(session, 2)
            verdicts(second, True, True)
            assert {_hash(engine) for engine in session.engines} == {session.rank.state_hash()}

        self.pushed(tmp_path, ("ipc", "raise"), ("", ""), then=again)

    def test_an_engine_without_the_channel_is_refused(self, tmp_path: Path) -> None:
        """`connect` raises a ConfigError that names the engine, before anything is sent."""

        async def work() -> None:
            async with self.connected(tmp_path) as session:
                engine = self.engine(tmp_path, 0)
                engine.capabilities = frozenset({"score"})
                with refused(ConfigError, "connect to an engine without any weight channel") as caught:
                    await session.transport.connect(session.trainer, SimpleNamespace(replicas=[engine]))
                assert engine.id in str(caught[0]), f"the engine is not named: {caught[0]}"

        self.run(work())


def verdicts(report: SyncReport, *wanted: bool) -> None:
    """Each engine came out as wanted, and one that failed says in which phase and why."""
    assert [sync.ok for sync in report.engines] == list(wanted), "\n".join(map(str, report.engines))
    for sync in report.engines:
        assert sync.ok or (sync.phase and sync.error), f"{sync} does not say why it failed"


def _hash(engine: Any) -> str:
    return toy_model.state_hash(engine.params)
