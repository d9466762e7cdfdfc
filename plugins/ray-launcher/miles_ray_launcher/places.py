"""Which workers sit together: roles -> the bundles of one placement group. Nothing here talks to Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.errors import ConfigError, ContractError, RuntimeMissing
from miles_core.placement import PLACEMENTS
from miles_core.types import RoleSpec

CPU_SHARE = 0.001
"""What Ray counts for a worker that asked for one processor, which is everyone's default and may be shared. Not 0, since a
bundle cannot be empty."""


@dataclass(slots=True, kw_only=True)
class Bundle:
    """Resources of one node that workers hold together. `gpus` are whole."""

    gpus: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    workers: list[tuple[str, int]] = field(default_factory=list)
    shared: bool = False

    def resources(self) -> dict[str, float]:
        wanted = {"CPU": round(self.cpus, 4), "GPU": float(self.gpus), "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(slots=True, kw_only=True, frozen=True)
class Place:
    """A worker's part of a bundle: what Ray counts for it, and which of the bundle's GPUs it sees; None leaves that to
    Ray."""

    bundle: int
    cpus: float
    gpus: float
    memory_bytes: int
    slice: tuple[int, int] | None = None


def seat(specs: Sequence[RoleSpec], placement: Any = "auto") -> tuple[list[Bundle], dict[tuple[str, int], Place]]:
    """Bundles, and the place of every (role, index).

    Roles get GPUs of their own, unless `colocate` names another role or the placement is "colocated": then worker 0 of each
    shares its GPUs with worker 0 of the others, and so on. A worker's GPUs are on one node. Raises ConfigError,
    ContractError or RuntimeMissing for demands that no cluster could meet.
    """
    _check(specs, placement)
    bundles: list[Bundle] = []
    places: dict[tuple[str, int], Place] = {}
    for roles in _tables(specs, placement):
        width = max(math.ceil(spec.gpus) for spec in roles)
        first = len(bundles)
        for spec in roles:
            per_bundle = _per_bundle(spec, width)
            while len(bundles) - first < math.ceil(spec.num_workers / per_bundle):
                bundles.append(Bundle(gpus=width, shared=len(roles) > 1))
            for index in range(spec.num_workers):
                at = first + index // per_bundle
                _sit(bundles[at], spec, index)
                offset = index % per_bundle * int(spec.gpus)
                places[spec.name, index] = Place(
                    bundle=at,
                    cpus=_cpus(spec),
                    gpus=spec.gpus,
                    memory_bytes=spec.memory_bytes,
                    slice=(offset, offset + int(spec.gpus)) if spec.gpus >= 1 else (_share(spec, index, per_bundle, width)),
                )
    return bundles, {key: _counted(place, bundles[place.bundle]) for key, place in places.items()}


def describe(specs: Sequence[RoleSpec]) -> str:
    """ "trainer 4 x 1 GPUs, engine 2 x 2 GPUs": what was asked for."""
    parts = []
    for spec in specs:
        each = [f"{spec.gpus:g} GPUs"] if spec.gpus else []
        each += [f"{spec.cpus:g} processors"] if spec.cpus > 1 or not spec.gpus else []
        each += [f"{spec.memory_bytes / 1e9:g} GB"] if spec.memory_bytes else []
        each += [f"nodes labelled {dict(spec.labels)}"] if spec.labels else []
        each += [f"on the devices of {spec.colocate}"] if spec.colocate else []
        parts.append(f"{spec.name} {spec.num_workers} x ({', '.join(each)})")
    return "; ".join(parts)


def _check(specs: Sequence[RoleSpec], placement: Any) -> None:
    if placement not in PLACEMENTS:
        raise ConfigError(f'launcher.placement = "{placement}" is none of {", ".join(PLACEMENTS)}')
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ContractError(f"two roles have the same name: {', '.join(names)}")
    for spec in specs:
        if spec.colocate is not None and spec.colocate not in names:
            raise ContractError(
                f'role "{spec.name}" is to share devices with "{spec.colocate}", which is not among {names}'
            )
        if spec.nodes > 1:
            raise RuntimeMissing(
                f'role "{spec.name}" asks for workers that span {spec.nodes} nodes each, and an actor lives on one',
                "ask for more workers instead",
            )
        if spec.gpus > 1 and spec.gpus != int(spec.gpus):
            raise ContractError(f'role "{spec.name}" asks for {spec.gpus} GPUs per worker; more than one must be whole')


def _tables(specs: Sequence[RoleSpec], placement: str) -> list[list[RoleSpec]]:
    """Roles that share GPUs, together. The largest number of GPUs first, so that its slices are whole."""
    groups: dict[str, list[RoleSpec]] = {}
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        host = spec.name
        for _ in specs:  # a chain of roles, each on the devices of the next
            host = by_name[host].colocate or host
        key = "all" if spec.gpus and placement == "colocated" else f"of {host}" if spec.gpus else f"alone {spec.name}"
        groups.setdefault(key, []).append(spec)
    return [sorted(group, key=lambda s: -s.gpus) for group in groups.values()]


def _per_bundle(spec: RoleSpec, width: int) -> int:
    if not spec.gpus:
        return 1
    return width // int(spec.gpus) if spec.gpus >= 1 else width * int(1 / spec.gpus)


def _share(spec: RoleSpec, index: int, per_bundle: int, width: int) -> tuple[int, int] | None:
    if not spec.gpus:
        return None
    gpu = index % per_bundle // (per_bundle // width)
    return (gpu, gpu + 1)


def _cpus(spec: RoleSpec) -> float:
    return spec.cpus if spec.cpus > 1 else CPU_SHARE


def _sit(bundle: Bundle, spec: RoleSpec, index: int) -> None:
    bundle.workers.append((spec.name, index))
    bundle.cpus += _cpus(spec)
    bundle.memory_bytes += spec.memory_bytes
    for label, value in spec.labels.items():
        if bundle.labels.setdefault(label, value) != value:
            raise ConfigError(
                f'role "{spec.name}" asks for nodes labelled {label} = {value} and is to share devices with '
                f"{bundle.workers[0][0]}, which asks for {bundle.labels[label]}"
            )


def _counted(place: Place, bundle: Bundle) -> Place:
    """Workers that share a bundle count as equal fractions of one GPU, whichever Ray takes them from, so that all fit;
    which GPUs they see is then ours to say. On a bundle of one GPU, or one that is not shared, Ray itself can tell them."""
    if not place.gpus:
        return Place(bundle=place.bundle, cpus=place.cpus, gpus=0.0, memory_bytes=place.memory_bytes)
    if not bundle.shared:
        return Place(bundle=place.bundle, cpus=place.cpus, gpus=place.gpus, memory_bytes=place.memory_bytes)
    share = math.floor(1e4 / len(bundle.workers)) / 1e4
    where = place.slice if bundle.gpus > 1 else None
    return Place(bundle=place.bundle, cpus=place.cpus, gpus=share, memory_bytes=place.memory_bytes, slice=where)
