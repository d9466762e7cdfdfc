"""What one machine has, and how the roles of a run share it. Nothing here imports a GPU library or waits."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import ConfigError, ContractError, RuntimeMissing
from miles_core.types import RoleSpec

PLACEMENTS = ("auto", "colocated", "disaggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`gpus` are values for CUDA_VISIBLE_DEVICES, in order; `memory_bytes` 0 means unknown."""

    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int

    @classmethod
    def here(cls, env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> Machine:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            memory = 0
        return cls(gpus=visible_gpus(env, dev), cpus=cpus, memory_bytes=memory)


def visible_gpus(env: Mapping[str, str], dev: Path) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES if set, up to an invalid entry as CUDA reads it; else one per device node."""
    nodes = sorted(int(m[1]) for p in dev.glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", p.name)))
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not nodes:
        return tuple(str(i) for i in range(len(nodes)))
    names = [name.strip() for name in listed.split(",")]
    bad = next((i for i, name in enumerate(names) if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name)), len(names))
    return tuple(names[:bad])


def assign_gpus(specs: Sequence[RoleSpec], machine: Machine, placement: str = "auto") -> dict[str, list[tuple[str, ...]]]:
    """Role -> GPUs of each of its workers; () for a worker that asked for none.

    Roles get GPUs of their own, unless `colocate` names another role, or the placement is "colocated": then they start
    again at the first. Workers that ask for less than one share. Raises RuntimeMissing with what was asked and what
    there is, and ConfigError or ContractError for demands that make no sense.
    """
    check_demands(specs, machine, placement)
    result: dict[str, list[tuple[str, ...]]] = {}
    used = 0
    for spec in sorted(specs, key=lambda s: s.colocate is not None):
        if not spec.gpus:
            result[spec.name] = [()] * spec.num_workers
            continue
        host = None if spec.colocate is None else [gpu for worker in result[spec.colocate] for gpu in worker]
        shared = placement == "colocated" or host is not None
        pool = list(dict.fromkeys(host)) if host else list(machine.gpus[0 if shared else used :])
        need = _gpus_of(spec)
        if need > len(pool):
            raise _too_few(specs, machine, placement, spec)
        if not shared:
            used += need
        result[spec.name] = [_slice(pool, spec.gpus, i) for i in range(spec.num_workers)]
    return result


def check_demands(specs: Sequence[RoleSpec], machine: Machine, placement: str) -> None:
    """Raises for everything but GPUs: names, nodes, labels, interpreters, processors and memory."""
    if isinstance(placement, Mapping):
        raise ConfigError(
            'launcher.placement names labels of nodes, and the launcher "local" has this machine only',
            'choose a launcher for many machines, for example launcher.use = "ray"',
        )
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
        if spec.nodes > 1 or spec.labels:
            asked = f"{spec.nodes} nodes" if spec.nodes > 1 else f"nodes labelled {dict(spec.labels)}"
            raise RuntimeMissing(
                f'role "{spec.name}" asks for {asked}, and the launcher "local" has this machine only',
                'choose a launcher for many machines, for example launcher.use = "ray"',
            )
        if spec.gpus > 1 and spec.gpus != int(spec.gpus):
            raise ContractError(f'role "{spec.name}" asks for {spec.gpus} GPUs per worker; more than one must be whole')
        if spec.python is not None and shutil.which(spec.python) is None:
            raise RuntimeMissing(
                f'role "{spec.name}" is to run under {spec.python}, which is no program here (option: python)'
            )
    _check_sum(specs, "processors", [s.num_workers * s.cpus * (s.cpus > 1) for s in specs], machine.cpus, "cpus")
    if machine.memory_bytes:
        asked = [spec.num_workers * spec.memory_bytes for spec in specs]
        _check_sum(specs, "bytes of memory", asked, machine.memory_bytes, "memory_bytes")


def _check_sum(specs: Sequence[RoleSpec], what: str, asked: Sequence[float], available: float, option: str) -> None:
    """One processor is everyone's default and may be shared; only what was asked for beyond that is added up."""
    if sum(asked) <= available:
        return
    each = ", ".join(f"{spec.name} {number:g}" for spec, number in zip(specs, asked, strict=True) if number)
    raise RuntimeMissing(f"asked for {sum(asked):g} {what} ({each}), and this machine has {available:g}", f"lower {option}")


def _gpus_of(spec: RoleSpec) -> int:
    if spec.gpus >= 1:
        return spec.num_workers * int(spec.gpus)
    return math.ceil(spec.num_workers / int(1 / spec.gpus))


def _slice(pool: Sequence[str], gpus: float, index: int) -> tuple[str, ...]:
    if gpus < 1:
        return (pool[index // int(1 / gpus)],)
    return tuple(pool[index * int(gpus) : (index + 1) * int(gpus)])


def _too_few(specs: Sequence[RoleSpec], machine: Machine, placement: str, spec: RoleSpec) -> RuntimeMissing:
    asked = [
        f"{s.name} {s.num_workers} x {s.gpus:g}" + (f" (on those of {s.colocate})" if s.colocate else "")
        for s in specs
        if s.gpus
    ]
    has = f"{len(machine.gpus)} GPUs are visible" + (f" ({', '.join(machine.gpus)})" if machine.gpus else "")
    return RuntimeMissing(
        f'no room for role "{spec.name}" with launcher.placement = "{placement}": asked for {", ".join(asked)} GPUs; {has}',
        'lower trainer.num_workers or engine.replicas, share with launcher.placement = "colocated", run on the CPU '
        "(the component's device option), or check CUDA_VISIBLE_DEVICES",
    )
