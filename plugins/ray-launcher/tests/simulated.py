"""A program: a cluster of a head and four nodes in two racks on this machine, and what the launcher makes of it.

Nodes a0, a1 are in rack a, b0, b1 in rack b, with two pretended GPUs each. Two ranks of the trainer and two engines have
one GPU each. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from miles_core.errors import RuntimeMissing
from miles_core.types import RoleSpec
from miles_ray_launcher import RayLauncherConfig
from miles_ray_launcher.launcher import RayLauncher

HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}
PAYLOAD = {"kind": "trainer", "factory": str(Path(__file__).with_name("ray_fakes.py")) + ":plain", "args": {}}


async def main(folder: Path, cluster: Cluster, nodes: dict[str, Any]) -> dict[str, Any]:
    names = {node.node_id: name for name, node in nodes.items()}
    config = RayLauncherConfig(rack_label="rack", num_spares=1, grace_s=2.0)
    specs = [RoleSpec(name="trainer", component="x", num_workers=2, gpus=1)]
    specs += [RoleSpec(name="engine", component="x", num_workers=2, gpus=1, restarts=1)]
    allocation = await RayLauncher(run_dir=folder, config=config).allocate(specs)
    try:
        trainer, engine = await asyncio.gather(*(allocation.launch(spec.name, PAYLOAD) for spec in specs))
        seen: dict[str, Any] = {"trainer": await where(trainer, names), "engine": await where(engine, names)}
        try:
            await RayLauncher(run_dir=folder, config=config).allocate([RoleSpec(name="more", component="x", gpus=2)])
        except RuntimeMissing as error:
            seen["spare is held"] = str(error)
        lost = next(index for index, node in enumerate(seen["engine"]) if node not in seen["trainer"])
        cluster.remove_node(nodes[seen["engine"][lost]], allow_graceful=False)
        began = time.monotonic()
        death = await asyncio.wait_for(anext(aiter(engine.deaths())), 60)
        seen["death"] = [death.role, death.index, death.cause]
        await allocation.replace("engine", death.index)
        seen |= {"lost": lost, "after": await where(engine, names), "seconds": time.monotonic() - began}
        seen["trainer after"] = await where(trainer, names)
    finally:
        await allocation.close()
    return seen


async def where(group: Any, names: dict[str, str]) -> list[str]:
    return [names[node] for node in await group.call("node")]


if __name__ == "__main__":
    simulated = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "_system_config": HEALTH},
    )
    made = {
        f"{rack}{i}": simulated.add_node(
            num_cpus=1, num_gpus=2, labels={"rack": rack}, object_store_memory=80 << 20, wait=False
        )
        for rack in "ab"
        for i in range(2)
    }
    try:
        simulated.wait_for_nodes()
        ray.init(address=simulated.address, log_to_driver=False, configure_logging=False)
        found = asyncio.run(main(Path(sys.argv[1]), simulated, made))
        print("FOUND", json.dumps(found))
    finally:
        ray.shutdown()
        simulated.shutdown()
