"""What the plugin registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from miles_core import BuildContext, Environment
from miles_core.errors import RuntimeMissing
from miles_torch_rollout import TorchEngineConfig, miles_engines


def test_the_entry_module_imports_no_heavy_library():
    code = "import sys, miles_torch_rollout; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_component_builds_an_engine_from_the_run(tmp_path: Path):
    (component,) = miles_engines()
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special: f"{ids} {skip_special}")
    context = BuildContext(
        component="engine/torch",
        run_dir=tmp_path,
        seed=0,
        run_config=SimpleNamespace(model=SimpleNamespace(max_context=77)),
        model_path=tmp_path,
        tokenizer=tokenizer,
        index=3,
    )
    engine = component.build(TorchEngineConfig(), context)
    assert (engine.id, engine.max_context) == ("engine-3", 77)
    assert engine.capabilities == component.provided(TorchEngineConfig())
    assert engine._make_decode()([1]) == "[1] False"  # special tokens count for stop strings


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_is_refused_before_any_model_loads():
    (component,) = miles_engines()
    with pytest.raises(RuntimeMissing, match=r"engine\.torch.*cuda:3"):
        component.check(TorchEngineConfig(device="cuda:3"), Environment(where="engine.torch"))
