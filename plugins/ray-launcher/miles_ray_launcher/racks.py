"""Racks and spare nodes: which labels a bundle asks for, and whole nodes that are held back until another is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.errors import RuntimeMissing
from miles_ray_launcher.places import Bundle

SPREAD = ("engine",)
"""Roles whose workers are spread over racks, since each works for itself; the others are kept inside one."""


def label_choices(bundles: Sequence[Bundle], label: str, racks: Sequence[str]) -> list[list[dict[str, str]]]:
    """For each rack that could be the home of the roles that stay together: the labels that every bundle then asks for.
    Engines go round the racks, beginning after that one. What a bundle asks for by itself stays."""
    if not label:
        return [[bundle.labels for bundle in bundles]]
    choices = []
    for home in range(len(racks)):
        labels = []
        for bundle in bundles:
            spread = all(role in SPREAD for role, _ in bundle.workers)
            at = home + 1 + bundle.workers[0][1] if spread else home
            labels.append({label: racks[at % len(racks)], **bundle.labels})
        choices.append(labels)
    return choices


def racks_of(nodes: Sequence[Mapping[str, Any]], label: str) -> list[str]:
    """The racks there are, the one with the most free GPUs (and then processors) first. Raises RuntimeMissing for none."""
    free: dict[str, tuple[float, float]] = {}
    for node in nodes:
        if rack := node["labels"].get(label):
            gpus, cpus = free.get(rack, (0.0, 0.0))
            free[rack] = (gpus + node["free"].get("GPU", 0.0), cpus + node["free"].get("CPU", 0.0))
    if not free:
        seen = sorted({name for node in nodes for name in node["labels"]}) or ["none"]
        raise RuntimeMissing(
            f'no node of the Ray cluster has the label "{label}" (launcher.ray.rack_label); there are: {", ".join(seen)}',
            f'start nodes with `ray start --labels "{label}=..."`, or leave the option empty',
        )
    return sorted(free, key=lambda rack: (-free[rack][0], -free[rack][1], rack))


def idle_nodes(
    nodes: Sequence[Mapping[str, Any]], taken: Sequence[str], number: int, *, label: str, gpus: int
) -> list[Mapping[str, Any]]:
    """`number` nodes of at least `gpus` GPUs with nothing on them, from as many racks as possible. Raises RuntimeMissing
    when there are fewer."""
    idle = [node for node in nodes if node["id"] not in taken and _whole(node) and node["total"].get("GPU", 0) >= gpus]
    if len(idle) < number:
        raise RuntimeMissing(
            f"launcher.ray.num_spares = {number}, and beside what the run needs only {len(idle)} of {len(nodes)} nodes of "
            f"the Ray cluster have nothing on them" + (f" and at least {gpus} GPUs" if gpus else ""),
            "lower it, or add nodes to the cluster",
        )
    chosen: list[Mapping[str, Any]] = []
    while len(chosen) < number:
        racks = [node["labels"].get(label) for node in chosen]
        chosen.append(min((n for n in idle if n not in chosen), key=lambda n: racks.count(n["labels"].get(label))))
    return chosen


def _whole(node: Mapping[str, Any]) -> bool:
    """Whether a node offers anything, and all of it is free."""
    free, total = ([node[which].get(name, 0.0) for name in ("GPU", "CPU")] for which in ("free", "total"))
    return any(total) and free == total
