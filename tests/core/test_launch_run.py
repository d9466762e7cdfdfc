"""From a run's config to workers: the toy in processes of its own, and plugins that must be the driver's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from miles_core.config import load
from miles_core.engines import EnginePool
from miles_core.errors import ConfigError, PluginError
from miles_core.launch import LocalLauncher, RemoteEngine, launch_engines, launch_trainer, role_specs
from miles_core.types import GenerateRequest, SamplingParams
from miles_core.wiring import Wiring

TOY = Path(__file__).resolve().parents[2] / "recipes" / "toy.toml"
PROCESSES = ["trainer.process=true", "engine.process=true", "engine.replicas=2"]


def toy(*sets, **more):
    return load(TOY, sets=sets, plugins=[], **more)


async def open_run(run, tmp_path):
    allocation = await LocalLauncher(run_dir=tmp_path, grace_s=5).allocate(role_specs(run))
    place = {"run_dir": tmp_path, "model_path": None, "allocation": allocation}
    return allocation, await launch_trainer(run, **place), await launch_engines(run, **place)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([], {}),
        (["engine.replicas=2"], {}),
        (["trainer.process=true"], {"trainer": 1}),
        (["trainer.num_workers=2", "engine.process=true", "engine.replicas=3"], {"trainer": 2, "engine": 3}),
        (["engine.python=/bin/sh"], {"engine": 1}),
    ],
)
def test_roles_get_processes_when_the_config_says_so(sets, expected):
    assert {spec.name: spec.num_workers for spec in role_specs(toy(*sets))} == expected


@pytest.mark.parametrize("sets", [[], PROCESSES], ids=["one-process", "processes"])
def test_the_toy_generates_and_takes_weights_wherever_it_runs(tmp_path, sets):
    async def check():
        run = toy(*sets)
        allocation, trainer, engines = await open_run(run, tmp_path)
        assert [isinstance(e, RemoteEngine) for e in engines] == [bool(sets)] * len(engines)
        pool = EnginePool(engines)
        try:
            await asyncio.gather(trainer.start(), pool.start())
            transport = Wiring(run, run_dir=tmp_path).build("transport")
            await transport.connect(trainer, pool)
            report = await pool.sync(transport, 1)
            assert [e.ok for e in report.engines] == [True] * len(engines) and report.num_bytes > 0
            params = SamplingParams(max_new_tokens=4, temperature=0.0)
            request = GenerateRequest(id="r", token_ids=np.arange(1, 4, dtype=np.int32), params=params, seed=1)
            assert len((await pool.generate(request)).token_ids) > 0
        finally:
            await pool.close()
            await trainer.close()
            await allocation.close()

    asyncio.run(asyncio.wait_for(check(), 100))


def test_a_worker_refuses_another_plugin_than_the_driver_has(tmp_path):
    async def check():
        plugin = tmp_path / "mine.py"
        plugin.write_text("import miles_core\n\n@miles_core.reward('mine')\ndef mine(sample):\n    return 1.0\n")
        run = toy("trainer.process=true", files=[plugin])
        payload = {"kind": "trainer", "run": run.payload(), "run_dir": str(tmp_path)}
        allocation = await LocalLauncher(run_dir=tmp_path).allocate(role_specs(run))
        plugin.write_text(plugin.read_text().replace("1.0", "2.0"))
        with pytest.raises(PluginError, match=re.compile("trainer 0: .* has another mine .* than the driver", re.DOTALL)):
            await allocation.launch("trainer", payload)

    asyncio.run(asyncio.wait_for(check(), 60))


def test_what_a_component_refuses_in_its_worker_is_told_as_it_says_it(tmp_path):
    async def check():
        with pytest.raises(ConfigError, match="toy has one rank, not 2"):
            await open_run(toy("trainer.num_workers=2"), tmp_path)

    asyncio.run(asyncio.wait_for(check(), 60))
