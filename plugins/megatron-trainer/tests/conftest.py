"""Real Megatron-Core on the CPU. Outside the CI leg `megatron` these tests are skipped where it is not installed."""

import os
import sys
from pathlib import Path

import pytest

if os.environ.get("MILES_LEG") != "megatron":
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    pytest.importorskip("miles_fsdp_trainer")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of tiny random models by name."""
    import megatron_support

    root = tmp_path_factory.mktemp("models")
    return {name: megatron_support.make_model(root / name, name) for name in megatron_support.CONFIGS}
