"""`fsdp_support` is shared by the tests and by the processes that they start."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of tiny random models by name."""
    import fsdp_support

    root = tmp_path_factory.mktemp("models")
    return {name: fsdp_support.make_model(root / name, name) for name in fsdp_support.CONFIGS}
