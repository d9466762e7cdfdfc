"""What fits on a machine, who gets which GPU, and refusals that say what was asked and what there is."""

from __future__ import annotations

import asyncio
import time

import pytest

from miles_core.errors import ConfigError, RuntimeMissing
from miles_core.launch import LocalLauncher
from miles_core.placement import Machine, assign_gpus, visible_gpus
from miles_core.types import RoleSpec

CPU = Machine(gpus=(), cpus=2, memory_bytes=8 << 30)
FOUR = Machine(gpus=("0", "1", "2", "3"), cpus=4, memory_bytes=8 << 30)


def role(name, num_workers=1, **more):
    return RoleSpec(name=name, component="x", num_workers=num_workers, **more)


@pytest.mark.parametrize(
    ("specs", "placement", "expected"),
    [
        ([role("t", 2, gpus=1), role("e", 1, gpus=2)], "auto", {"t": [("0",), ("1",)], "e": [("2", "3")]}),
        (
            [role("t", 4, gpus=1), role("e", 2, gpus=2)],
            "colocated",
            {"t": [(g,) for g in "0123"], "e": [("0", "1"), ("2", "3")]},
        ),
        ([role("e", 1, gpus=2, colocate="t"), role("t", 2, gpus=1)], "auto", {"t": [("0",), ("1",)], "e": [("0", "1")]}),
        ([role("t", 3, gpus=0.5), role("e", 2)], "auto", {"t": [("0",), ("0",), ("1",)], "e": [(), ()]}),
    ],
)
def test_gpus_are_shared_out(specs, placement, expected):
    assert assign_gpus(specs, FOUR, placement) == expected


@pytest.mark.parametrize(
    ("specs", "machine", "message"),
    [
        ([role("trainer", 8, gpus=1)], CPU, "asked for trainer 8 x 1 GPUs; 0 GPUs are visible"),
        (
            [role("trainer", 4, gpus=1), role("engine", 1, gpus=1)],
            FOUR,
            r'role "engine".*4 x 1, engine 1 x 1 GPUs; 4 GPUs .*0, 1',
        ),
        (
            [role("trainer", cpus=4), role("engine", cpus=4)],
            FOUR,
            r"asked for 8 processors \(trainer 4, engine 4\).* has 4",
        ),
        ([role("trainer", memory_bytes=9 << 30)], FOUR, "memory"),
        ([role("trainer", nodes=2)], FOUR, "2 nodes.*this machine only"),
        ([role("engine", python="/no/such/python")], FOUR, "/no/such/python"),
    ],
)
def test_X3_what_cannot_fit_is_refused_at_once_with_asked_available_and_option(tmp_path, specs, machine, message):
    launcher = LocalLauncher(run_dir=tmp_path, machine=machine)
    started = time.monotonic()
    with pytest.raises(RuntimeMissing, match=message):
        asyncio.run(launcher.allocate(specs))
    assert time.monotonic() - started < 2


def test_X3_the_option_to_change_is_named_and_unknown_placements_are_refused():
    with pytest.raises(RuntimeMissing, match=r"lower trainer.num_workers or engine.replicas.*launcher.placement"):
        assign_gpus([role("trainer", 8, gpus=1)], CPU)
    with pytest.raises(ConfigError, match="labels of nodes"):
        assign_gpus([role("trainer")], CPU, {"engine": {"rack": "b"}})
    with pytest.raises(ConfigError, match=r'launcher.placement = "here"'):
        assign_gpus([role("trainer")], CPU, "here")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [(None, ("0", "1", "2")), ("2,0", ("2", "0")), ("", ()), ("-1", ()), ("1,x,2", ("1",)), ("GPU-ab,1", ("GPU-ab", "1"))],
)
def test_gpus_are_counted_without_a_library(tmp_path, listed, expected):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(env, tmp_path) == expected
