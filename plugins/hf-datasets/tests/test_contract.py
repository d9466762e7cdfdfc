"""The contract suite of data sources, over a saved Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles_hf_datasets
from miles_core.testing.contracts import DataContract

(HF,) = miles_hf_datasets.miles_data_sources()
ROWS = [{"prompt": f"{i} + 1 =", "label": str(i + 1)} for i in range(6)]


class TestSaved(DataContract):
    component = HF

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        if not (tmp_path / "saved").exists():
            datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
        self.options = {"path": str(tmp_path / "saved")}


class TestAFolderOfFilesTwiceInOrder(DataContract):
    component = HF

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        (tmp_path / "files").mkdir(exist_ok=True)
        datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "files/train.parquet"))
        self.options = {"path": str(tmp_path / "files"), "shuffle": False, "epochs": 2}
