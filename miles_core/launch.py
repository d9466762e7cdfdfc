"""Workers of a run on this machine: in the driver's process, or each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.channel import RemoteError
from miles_core.errors import ContractError, EngineFailed, RunFailed, WorkerDied
from miles_core.interfaces import Allocation, EngineReplica, Launcher, WorkerGroup
from miles_core.placement import Machine, assign_gpus
from miles_core.processes import CallTimeout, WorkerProcess, gather_calls
from miles_core.trainers import TrainerGroup, host_rank
from miles_core.types import Death, GenerateRequest, Generation, RoleSpec, WeightMessage
from miles_core.worker import CLOSE_LIMIT_S, Hosted

logger = logging.getLogger(__name__)

ENGINE_RESTARTS = 3
"""How often each engine worker may be started again in one run."""


# --- Groups ----------------------------------------------------------------------------------------------------------


def spread_arguments(
    size: int, args: tuple[Any, ...], ranks: Sequence[int] | None, per_rank: Sequence[tuple[Any, ...]] | None
) -> list[tuple[int, tuple[Any, ...]]]:
    """(rank, arguments) of each call. `per_rank` is aligned with `ranks`, or with all ranks when that is None."""
    chosen = list(range(size)) if ranks is None else list(ranks)
    if per_rank is None:
        return [(rank, args) for rank in chosen]
    if len(per_rank) != len(chosen):
        raise ContractError(f"arguments for {len(per_rank)} ranks were given for a call of {len(chosen)}")
    return [(rank, (*args, *own)) for rank, own in zip(chosen, per_rank, strict=True)]


class InlineWorkerGroup(WorkerGroup):
    """Objects in the driver's own process: plain methods run in one thread per object, coroutines on the loop."""

    def __init__(self, role: str, hosted: Sequence[Hosted]) -> None:
        self.role, self.size = role, len(hosted)
        self._hosted = list(hosted)

    @classmethod
    async def create(cls, role: str, builds: Sequence[Callable[[], Any]], *, in_thread: bool = True) -> InlineWorkerGroup:
        """Builds the objects one after the other, each in the thread in which its plain methods will run."""
        hosted = [Hosted(f"{role} {i}") for i in range(len(builds))]
        for host, build in zip(hosted, builds, strict=True):
            await host.build(build, in_thread=in_thread)
        return cls(role, hosted)

    async def call(
        self,
        method: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        calls = spread_arguments(self.size, args, ranks, per_rank)
        tasks = [asyncio.ensure_future(self._hosted[rank].call(method, own, kwargs)) for rank, own in calls]
        return await gather_calls(tasks, [self._hosted[rank] for rank, _ in calls], method, timeout_s)

    async def deaths(self) -> AsyncIterator[Death]:
        """None: what ends the driver's process ends the driver."""
        return
        yield

    async def close(self) -> None:
        """Closes the objects; one whose thread is stuck is left behind, which cannot keep the process from ending."""
        for host in self._hosted:
            try:
                await asyncio.wait_for(host.close(), CLOSE_LIMIT_S)
            except TimeoutError:
                logger.warning("%s did not close within %g s", host.name, CLOSE_LIMIT_S)
        self._hosted = []


class LocalWorkerGroup(WorkerGroup):
    """One process for each worker of a role."""

    def __init__(self, role: str, workers: Sequence[WorkerProcess], *, grace_s: float, folder: Path | None = None) -> None:
        self.role, self.size = role, len(workers)
        self.workers = list(workers)
        self._grace_s, self._folder = grace_s, folder
        self._deaths: list[Death] = []
        self._changed = asyncio.Event()
        self._closed = False
        for worker in workers:
            worker.on_death = self._note_death

    async def call(
        self,
        method: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        calls = spread_arguments(self.size, args, ranks, per_rank)
        futures = [self.workers[rank].submit(method, own, kwargs) for rank, own in calls]
        return await gather_calls(futures, [self.workers[rank] for rank, _ in calls], method, timeout_s)

    async def deaths(self) -> AsyncIterator[Death]:
        """Every unexpected end, also those before this was called; ends when the group is closed."""
        seen = 0
        while True:
            while seen < len(self._deaths):
                seen += 1
                yield self._deaths[seen - 1]
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()

    async def put(self, index: int, worker: WorkerProcess, timeout_s: float) -> None:
        """Ends the worker at `index` and starts `worker` in its place."""
        await self.workers[index].stop(self._grace_s)
        worker.on_death = self._note_death
        self.workers[index] = worker
        await worker.start(timeout_s)

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        await asyncio.gather(*(worker.stop(self._grace_s) for worker in self.workers))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _note_death(self, death: Death) -> None:
        self._deaths.append(death)
        self._changed.set()


# --- Launcher --------------------------------------------------------------------------------------------------------


class LocalLauncher(Launcher):
    """Processes on this machine. `startup_timeout_s` bounds imports and building, not loading a model."""

    def __init__(
        self, *, run_dir: Path, startup_timeout_s: float = 300.0, grace_s: float = 10.0, machine: Machine | None = None
    ) -> None:
        self.run_dir, self.startup_timeout_s, self.grace_s = Path(run_dir), startup_timeout_s, grace_s
        self.machine = machine or Machine.here()

    async def allocate(self, specs: Sequence[RoleSpec], placement: Any = "auto") -> LocalAllocation:
        return LocalAllocation(self, specs, assign_gpus(specs, self.machine, placement))


class LocalAllocation(Allocation):
    def __init__(
        self, launcher: LocalLauncher, specs: Sequence[RoleSpec], gpus: Mapping[str, Sequence[tuple[str, ...]]]
    ) -> None:
        self._launcher, self._gpus = launcher, gpus
        self._specs = {spec.name: spec for spec in specs}
        self._groups: dict[str, LocalWorkerGroup] = {}
        self._payloads: dict[str, dict[str, Any]] = {}
        self._restarts: dict[tuple[str, int], int] = {}

    async def launch(self, role: str, payload: Mapping[str, Any]) -> LocalWorkerGroup:
        spec = self._specs[role]
        assert role not in self._groups, f'role "{role}" has been launched'
        folder, rendezvous = None, ""
        if spec.num_workers > 1:
            # a local file: no port to lose to someone else, and file locks of a network disk are not to be trusted
            folder = Path(tempfile.mkdtemp(prefix="miles-"))
            rendezvous = f"file://{folder}/rendezvous"
        own = {"role": role, "world_size": spec.num_workers, "rendezvous": rendezvous}
        self._payloads[role] = {"device": "auto", "run_dir": str(self._launcher.run_dir), **payload, **own}
        workers = [self._worker(spec, index) for index in range(spec.num_workers)]
        group = self._groups[role] = LocalWorkerGroup(role, workers, grace_s=self._launcher.grace_s, folder=folder)
        starts = [asyncio.ensure_future(worker.start(self._launcher.startup_timeout_s)) for worker in workers]
        try:
            await gather_calls(starts, workers, "start-up", None)
        except BaseException:
            await asyncio.wait(starts)
            await group.close()
            raise
        return group

    async def replace(self, role: str, index: int) -> None:
        spec, key = self._specs[role], (role, index)
        if self._restarts.get(key, 0) >= spec.restarts:
            raise RunFailed(
                f"{role} {index} is not started again: it has been {self._restarts.get(key, 0)} times, and {spec.restarts} "
                "is the limit of its role",
                self._groups[role].workers[index].log_tail(),
            )
        self._restarts[key] = self._restarts.get(key, 0) + 1
        await self._groups[role].put(index, self._worker(spec, index), self._launcher.startup_timeout_s)

    async def close(self) -> None:
        await asyncio.gather(*(group.close() for group in self._groups.values()))

    def _worker(self, spec: RoleSpec, index: int) -> WorkerProcess:
        return WorkerProcess(
            spec.name,
            index,
            python=shutil.which(spec.python) if spec.python else sys.executable,
            env=worker_env(spec, self._gpus[spec.name][index], self._launcher.machine),
            payload={**self._payloads[spec.name], "index": index},
            log=self._launcher.run_dir / "logs" / f"{spec.name}-{index}.log",
        )


def worker_env(spec: RoleSpec, gpus: Sequence[str], machine: Machine) -> dict[str, str]:
    """This process's environment, with the worker's GPUs and no others, and threads that fit beside its siblings."""
    env = dict(os.environ)
    if machine.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if spec.num_workers > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, machine.cpus // spec.num_workers)))
        if sys.platform.startswith("linux"):
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks up the host's name, which laptops may lack
    return {**env, **spec.env}


# --- Engines elsewhere -----------------------------------------------------------------------------------------------


class EngineDied(EngineFailed, WorkerDied):
    """The process of an engine is gone."""


class RemoteEngine(EngineReplica):
    """An engine in a worker. Raises what the engine raises; EngineFailed when it hangs, EngineDied when it is gone."""

    def __init__(
        self,
        workers: WorkerGroup,
        index: int,
        *,
        allocation: Allocation | None = None,
        timeout_s: float = 300.0,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self.id = f"{workers.role}-{index}"
        self.place: dict[str, Any] = {}
        self._workers, self._index, self._allocation = workers, index, allocation
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s

    async def start(self) -> None:
        await self._within(self._start_timeout_s, "start")
        self.place = await self._call("@place")
        incarnation, capabilities, limit = await self._call("@get", "incarnation", "capabilities", "max_running")
        self.incarnation, self.capabilities, self.max_running = incarnation, frozenset(capabilities), limit

    async def restart(self) -> RemoteEngine:
        """A new worker in place of a dead one; `start` comes next. Raises RunFailed when it has died too often."""
        if self._allocation is None:
            raise RunFailed(f"{self.id} was launched without an allocation that could start it again")
        await self._allocation.replace(self._workers.role, self._index)
        return self

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._within(None, "generate", request)  # the pool has the limit

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        await self._call("abort", None if ids is None else list(ids))

    async def pause(self, mode: str = "abort") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def receive(self, message: WeightMessage) -> dict[str, Any]:
        return await self._within(message.timeout_s, "receive", message)

    async def health(self) -> dict[str, Any]:
        return await self._call("health")

    async def score(self, token_ids: Sequence[np.ndarray], topk: int = 0) -> list[dict[str, np.ndarray]]:
        return await self._within(None, "score", list(token_ids), topk)

    async def sleep(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        await self._call("sleep", tuple(tags))

    async def wake(self, tags: Sequence[str] = ("weights", "cache")) -> None:
        await self._call("wake", tuple(tags))

    async def layout(self, rank: int = 0) -> list[tuple[str, int, tuple[int, ...], str]]:
        return await self._call("layout", rank)

    def deaths(self) -> AsyncIterator[Death]:
        """Every unexpected end of a worker of this engine's group."""
        return self._workers.deaths()

    async def close(self) -> None:
        """Closes the engine; its process ends with the allocation. One that is gone or stuck is closed already."""
        with contextlib.suppress(EngineFailed):
            await self._within(CLOSE_LIMIT_S, "close")

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._within(self._timeout_s, method, *args)

    async def _within(self, timeout_s: float | None, method: str, *args: Any) -> Any:
        try:
            (result,) = await self._workers.call(method, *args, ranks=[self._index], timeout_s=timeout_s)
        except WorkerDied as error:
            raise EngineDied(str(error)) from error
        except CallTimeout as error:
            raise EngineFailed(str(error)) from error
        except RemoteError as error:
            raise (error.__cause__ or error) from None  # callers tell NotImplementedError from a fault
        return result


# --- From a run's config ---------------------------------------------------------------------------------------------


def role_specs(run: Any) -> list[RoleSpec]:
    """What a launcher must provide for `run` (a ResolvedRun): roles that fit into the driver's process are left out.

    A component's trait "gpus", a number or a function of its options, says how many GPUs one worker needs. An engine with
    the trait python = "server" runs a server of its own under `engine.python`, which then says nothing of a worker. A
    launcher with the trait processes = "all" hosts trainer and engines even where the driver's process could.
    """
    everything = run.one("launcher").component.traits.get("processes") == "all"
    trainer, engine = run.config.trainer, run.config.engine
    python = None if run.one("engine").component.traits.get("python") == "server" else engine.python
    specs = []
    if everything or trainer.num_workers > 1 or trainer.process:
        specs.append(
            RoleSpec(name="trainer", component=trainer.use, num_workers=trainer.num_workers, gpus=_gpus(run, "trainer"))
        )
    if everything or engine.process or python:
        specs.append(
            RoleSpec(
                name="engine",
                component=engine.use,
                num_workers=engine.replicas,
                gpus=_gpus(run, "engine"),
                python=python,
                restarts=ENGINE_RESTARTS,
            )
        )
    return specs


async def launch_trainer(
    run: Any, *, run_dir: Path, model_path: Path | None, allocation: Allocation | None
) -> TrainerGroup:
    """The run's trainer, not yet started: in this process, or by `allocation` if `role_specs` asks for it."""
    if any(spec.name == "trainer" for spec in role_specs(run)):
        workers = await allocation.launch("trainer", _payload(run, "trainer", run_dir, model_path))
    else:
        from miles_core.wiring import Wiring

        wiring = Wiring(run, run_dir=run_dir, model_path=model_path, role="policy")
        workers = await InlineWorkerGroup.create("trainer", [lambda: host_rank(wiring)])
    return TrainerGroup(workers, timeout_s=run.config.trainer.timeout_s)


async def launch_engines(
    run: Any, *, run_dir: Path, model_path: Path | None, allocation: Allocation | None
) -> list[EngineReplica]:
    """The run's engine replicas, not yet started."""
    table = run.config.engine
    if any(spec.name == "engine" for spec in role_specs(run)):
        workers = await allocation.launch("engine", _payload(run, "engine", run_dir, model_path))
        return [RemoteEngine(workers, i, allocation=allocation) for i in range(table.replicas)]
    from miles_core.wiring import Wiring

    engines = []
    for index in range(table.replicas):
        engine = Wiring(run, run_dir=run_dir, model_path=model_path, role="engine", index=index).build("engine")
        engine.id = f"engine-{index}"
        engines.append(engine)
    return engines


def _gpus(run: Any, kind: str) -> float:
    selection = run.one(kind)
    gpus = selection.component.traits.get("gpus", 0.0)
    return float(gpus(selection.options) if callable(gpus) else gpus)


def _payload(run: Any, kind: str, run_dir: Path, model_path: Path | None) -> dict[str, Any]:
    path = str(model_path) if model_path else None
    return {"kind": kind, "run": run.payload(), "run_dir": str(run_dir), "model_path": path}
