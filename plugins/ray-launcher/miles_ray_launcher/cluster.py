"""The connection of this process to a Ray cluster: one that runs already, or one of our own that ends with its user."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import ray

from miles_core.errors import RuntimeMissing

REACH_S = 5.0
"""How long the address of a cluster may take to accept a connection."""

_lock = threading.Lock()
_users = 0
_ours = False


async def connect(config: Any) -> None:
    """Joins or starts a cluster, or uses the connection that this process has. Raises RuntimeMissing within seconds when
    there is no cluster at the address, or it runs another version. Each `connect` wants a `release`."""
    await asyncio.to_thread(_connect, config)


async def release() -> None:
    """Leaves the cluster with the last user, and ends it if it was started here."""
    await asyncio.to_thread(_release)


def _connect(config: Any) -> None:
    global _users, _ours
    with _lock:
        if not ray.is_initialized():
            _init(config)
            _ours = True
        _users += 1


def _release() -> None:
    global _users, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _ours:
            _ours = False
            ray.shutdown()


def _init(config: Any) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "configure_logging": False}
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    # of a change of GPU variables to come, which does not concern us: actors get theirs from us
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=config.num_cpus or None,
            num_gpus=None if config.num_gpus < 0 else config.num_gpus,
            object_store_memory=config.object_store_bytes,
            **quiet,
        )
        return
    _reach(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _no_cluster(address, f"{type(error).__name__}: {error}") from error


def _reach(address: str) -> None:
    """Ray itself would try for a minute."""
    match = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if match:
        try:
            socket.create_connection((match[1], int(match[2])), REACH_S).close()
        except OSError as error:
            raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, why: str) -> RuntimeMissing:
    return RuntimeMissing(
        f"no Ray cluster can be joined at {address}: {why}",
        "check launcher.ray.address and RAY_ADDRESS, start a cluster with `ray start --head`, or leave both empty for a "
        f"cluster on this machine; nodes need Ray {ray.__version__}, like the driver",
    )


# --- What there is ---------------------------------------------------------------------------------------------------


def nodes() -> list[dict[str, Any]]:
    """Every living node: id, name, total and available resources by name, labels."""
    free = _available()
    return [
        {
            "id": node["NodeID"],
            "name": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            "total": node["Resources"],
            "free": free.get(node["NodeID"], {}),
            "labels": {k: v for k, v in (node.get("Labels") or {}).items() if not k.startswith("ray.io/")},
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


def describe_nodes() -> list[str]:
    """A line for each living node: what is free of what it has."""
    lines = []
    for node in nodes():
        total, free = node["total"], node["free"]
        have = [
            f"{_amount(free.get(name, 0.0), unit)} of {_amount(total.get(name, 0.0), unit)} {text}"
            for name, text, unit in (("GPU", "GPUs", 1), ("CPU", "processors", 1), ("memory", "GB of memory", 1e9))
            if name == "GPU" or name in total
        ]
        labels = f", labels {node['labels']}" if node["labels"] else ""
        lines.append(f"node {node['name']}: free {', '.join(have)}{labels}")
    return lines


def _amount(value: float, unit: float) -> str:
    return f"{round(value / unit, 1):g}"


def _available() -> Mapping[str, Mapping[str, float]]:
    if ray.util.client.ray.is_connected():  # the state of the cluster is only known inside it
        remote = ray.remote(num_cpus=0)(_available)
        return ray.get(remote.remote())
    return ray._private.state.available_resources_per_node()
