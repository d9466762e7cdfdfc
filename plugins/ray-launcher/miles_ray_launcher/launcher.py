"""Roles of a run as Ray actors: room for all of them at once in one placement group, then an actor for each worker."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_core.errors import RunFailed, RuntimeMissing
from miles_core.interfaces import Allocation, Launcher
from miles_core.launch import LocalWorkerGroup
from miles_core.processes import gather_calls
from miles_core.types import RoleSpec
from miles_ray_launcher.actor import visible_devices
from miles_ray_launcher.cluster import connect, describe_nodes, nodes, release
from miles_ray_launcher.places import Bundle, Place, describe, seat
from miles_ray_launcher.racks import idle_nodes, label_choices, racks_of
from miles_ray_launcher.worker import MAX_CONCURRENT_CALLS, RayWorker

logger = logging.getLogger(__name__)

FREE_ROOM_S = 2.0
"""How long a lost bundle may look for free room before a spare node is given up for it."""
LOOK_S = 0.05
"""How often the state of a placement group is looked at."""
ADVICE = (
    'lower trainer.num_workers or engine.replicas, share GPUs with launcher.placement = "colocated", run on the CPU (the '
    "component's device option), or add nodes to the cluster"
)


class RayLauncher(Launcher):
    """Actors of a Ray cluster; the cluster is joined or started by the first `allocate`."""

    def __init__(self, *, run_dir: Path, config: Any) -> None:
        self.run_dir, self.config = Path(run_dir).absolute(), config

    async def allocate(self, specs: Sequence[RoleSpec], placement: Any = "auto") -> RayAllocation:
        if isinstance(placement, Mapping):  # labels of each role's nodes
            specs = [replace(spec, labels={**spec.labels, **placement.get(spec.name, {})}) for spec in specs]
        bundles, places = seat(specs, "auto" if isinstance(placement, Mapping) else placement)
        await connect(self.config)
        groups: list[Any] = []
        try:
            if bundles:
                groups.append(await self._reserve(specs, bundles, placement))
                await self._hold_spares(groups, max(bundle.gpus for bundle in bundles))
            devices = await _devices(groups[0], bundles, places) if groups else {}
        except BaseException:
            for group in groups:
                remove_placement_group(group)
            await release()
            raise
        return RayAllocation(self, specs, groups, bundles, places, devices)

    async def _reserve(self, specs: Sequence[RoleSpec], bundles: Sequence[Bundle], placement: Any) -> Any:
        """A placement group with room for everything, or RuntimeMissing that says why there is none."""
        label = self.config.rack_label
        choices = label_choices(bundles, label, racks_of(nodes(), label) if label else ())
        for labels in choices if _could_fit(bundles) else ():
            more = {"bundle_label_selector": labels} if any(labels) else {}
            group = placement_group([bundle.resources() for bundle in bundles], strategy="PACK", **more)
            try:
                if await _placed(group, self.config.placement_timeout_s / len(choices)):
                    return group
            except BaseException:
                remove_placement_group(group)
                raise
            remove_placement_group(group)
        where = f"launcher.placement = {json.dumps(placement)}" + (
            f' and launcher.ray.rack_label = "{label}"' if label else ""
        )
        raise await _no_room(where, specs)

    async def _hold_spares(self, groups: list[Any], gpus: int) -> None:
        """Adds a group that takes all of a node, for each spare node. Ray moves what was on a lost node wherever there is
        room, so giving up such a group is all that it takes to use the spare."""
        if not self.config.num_spares:
            return
        taken = list(placement_group_table(groups[0])["bundles_to_node_id"].values())
        for node in idle_nodes(nodes(), taken, self.config.num_spares, label=self.config.rack_label, gpus=gpus):
            whole = {name: node["total"][name] for name in ("GPU", "CPU") if node["total"].get(name)}
            groups.append(placement_group([whole], bundle_label_selector=[{"ray.io/node-id": node["id"]}]))
            if not await _placed(groups[-1], self.config.placement_timeout_s):
                raise RuntimeMissing(
                    f"node {node['name']} cannot be held back as a spare: another job came first", "try again"
                )


class RayAllocation(Allocation):
    def __init__(
        self,
        launcher: RayLauncher,
        specs: Sequence[RoleSpec],
        groups: Sequence[Any],
        bundles: Sequence[Bundle],
        places: Mapping[tuple[str, int], Place],
        devices: Mapping[int, Sequence[str]],
    ) -> None:
        self._launcher, self._bundles, self._places, self._devices = launcher, bundles, places, dict(devices)
        self._group, self._spares = (groups[0], list(groups[1:])) if groups else (None, [])
        self._homes = _homes(self._group)
        self._moving = asyncio.Lock()
        self._specs = {spec.name: spec for spec in specs}
        self._groups: dict[str, LocalWorkerGroup] = {}
        self._payloads: dict[str, dict[str, Any]] = {}
        self._env: dict[str, dict[str, str | None]] = {}
        self._restarts: dict[tuple[str, int], int] = {}
        self._closed = False

    async def launch(self, role: str, payload: Mapping[str, Any]) -> LocalWorkerGroup:
        spec, config = self._specs[role], self._launcher.config
        assert role not in self._groups, f'role "{role}" has been launched'
        own = {"role": role, "world_size": spec.num_workers, "rendezvous": ""}
        self._payloads[role] = {"device": "auto", "run_dir": str(self._launcher.run_dir), **payload, **own}
        self._env[role] = {"OMP_NUM_THREADS": None}  # Ray sets it to 1 for whoever asks for less than a processor
        workers = [self._worker(spec, index) for index in range(spec.num_workers)]
        group = self._groups[role] = LocalWorkerGroup(role, workers, grace_s=config.grace_s)
        until = time.monotonic() + config.startup_timeout_s
        try:
            await _all([worker.appear(config.startup_timeout_s) for worker in workers], workers)
            await self._meet(spec, workers)
            await _all([worker.build(max(0.0, until - time.monotonic())) for worker in workers], workers)
        except BaseException:
            await group.close()
            raise
        for worker in workers:
            logger.info("%s: process %s on %s, log %s", worker.name, worker.place["pid"], worker.place["host"], worker.log)
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
        async with self._moving:
            await self._regain_room()
            await self._look_around()
        await self._groups[role].put(index, self._worker(spec, index), self._launcher.config.startup_timeout_s)

    async def close(self) -> None:
        """Ends all actors, gives the room back, and ends the cluster if this run started it; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.gather(*(group.close() for group in self._groups.values()))
            for group in (self._group, *self._spares):
                if group is not None:
                    remove_placement_group(group)
        finally:
            await release()

    async def _meet(self, spec: RoleSpec, workers: Sequence[RayWorker]) -> None:
        """Tells the ranks of a role where they meet: at the first one, which is there by now."""
        if spec.num_workers == 1:
            return
        same_node = len({worker.place["node"] for worker in workers}) == 1
        payload = self._payloads[spec.name]
        payload["rendezvous"] = await workers[0].meeting_point(same_node=same_node)
        cpus = next((int(n["total"].get("CPU", 1)) for n in nodes() if workers[0].place["ip"] in n["name"]), 1)
        self._env[spec.name]["OMP_NUM_THREADS"] = str(max(1, cpus // spec.num_workers))
        if same_node:
            self._env[spec.name]["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's name, which it may lack
        for index, worker in enumerate(workers):
            worker.payload["rendezvous"] = payload["rendezvous"]
            worker.env = self._env_of(spec, index)

    def _worker(self, spec: RoleSpec, index: int) -> RayWorker:
        place = self._places[spec.name, index]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle)
        options = {
            "num_cpus": place.cpus,
            "num_gpus": place.gpus,
            "memory": place.memory_bytes or None,
            "scheduling_strategy": strategy,
            "max_restarts": 0,  # the core restarts, since a fresh engine wants weights before it may serve
            "max_task_retries": 0,
            "max_concurrency": MAX_CONCURRENT_CALLS,
        }
        if spec.python:
            options["runtime_env"] = {"py_executable": spec.python}
        return RayWorker(
            spec.name,
            index,
            options=options,
            payload={**self._payloads[spec.name], "index": index},
            env=self._env_of(spec, index),
            log=self._launcher.run_dir / "logs" / f"{spec.name}-{index}.log",
            room=self._check_room,
            patience_s=self._launcher.config.placement_timeout_s,
        )

    def _env_of(self, spec: RoleSpec, index: int) -> dict[str, str | None]:
        """What an actor gets on top of its node's environment; None takes a variable away."""
        place = self._places[spec.name, index]
        patterns = self._launcher.config.forward_env
        env = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}
        env = {**self._env[spec.name], **env}
        if place.slice is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices[place.bundle][slice(*place.slice)])
        elif not place.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""
        return {**env, **spec.env}

    async def _regain_room(self) -> None:
        """After the loss of a node: waits until Ray has found other room for what was on it, on a spare if need be."""
        patience_s = self._launcher.config.placement_timeout_s
        if await _placed(self._group, min(FREE_ROOM_S, patience_s)):
            return
        while self._spares:
            remove_placement_group(self._spares.pop(0))
            if await _placed(self._group, patience_s):
                logger.info("a spare node has taken over; %d are left", len(self._spares))
                return
        await self._check_room()

    async def _look_around(self) -> None:
        """The GPUs of bundles that have moved, while nothing is on them yet."""
        before, self._homes = self._homes, _homes(self._group)
        moved = {index for index, node in self._homes.items() if before.get(index) != node}
        self._devices |= await _devices(self._group, self._bundles, self._places, moved)

    async def _check_room(self) -> None:
        """Raises RuntimeMissing when a node was lost and no other has room for what was on it."""
        if placement_group_table(self._group)["state"] != "CREATED":
            raise await _no_room("the nodes that are left", list(self._specs.values()))


async def _all(starts: Sequence[Any], workers: Sequence[RayWorker]) -> None:
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await gather_calls(tasks, workers, "start-up", None)
    except BaseException:
        await asyncio.wait(tasks)
        raise


def _homes(group: Any) -> dict[int, str]:
    """Bundle -> id of its node."""
    return {} if group is None else dict(placement_group_table(group)["bundles_to_node_id"])


async def _devices(
    group: Any, bundles: Sequence[Bundle], places: Mapping[tuple[str, int], Place], among: Container[int] | None = None
) -> dict[int, list[str]]:
    """The GPUs of each bundle whose workers are told which to see; asked by a task that holds all of them."""
    asked = {place.bundle for place in places.values() if place.slice is not None}
    asked = sorted(index for index in asked if among is None or index in among)
    tasks = []
    for index in asked:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        task = ray.remote(visible_devices).options(
            num_cpus=0, num_gpus=bundles[index].gpus, scheduling_strategy=strategy, max_retries=0
        )
        tasks.append(asyncio.wrap_future(task.remote().future()))
    return {index: names.split(",") for index, names in zip(asked, await asyncio.gather(*tasks), strict=True)}


async def _placed(group: Any, timeout_s: float) -> bool:
    """Whether all of a group has its place; False at once when no node could ever give what a bundle asks for."""
    until = time.monotonic() + timeout_s
    while True:
        state = placement_group_table(group)
        if state["state"] == "CREATED":
            return True
        infeasible = state["state"] == "PENDING" and state["stats"]["scheduling_state"] == "INFEASIBLE"
        if infeasible or time.monotonic() >= until:
            return False
        await asyncio.sleep(LOOK_S)


def _could_fit(bundles: Sequence[Bundle]) -> bool:
    """Whether the cluster, were it empty, had enough of everything; Ray only says so of single bundles."""
    for name in ("GPU", "CPU", "memory"):
        asked = sum(bundle.resources().get(name, 0.0) for bundle in bundles)
        if asked > sum(node["total"].get(name, 0.0) for node in nodes()):
            return False
    return True


async def _no_room(what: str, specs: Sequence[RoleSpec]) -> RuntimeMissing:
    lines = await asyncio.to_thread(describe_nodes)
    return RuntimeMissing(f"no room on the Ray cluster with {what}: asked for {describe(specs)}", *lines, ADVICE)
