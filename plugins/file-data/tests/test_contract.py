"""The contract suite of data sources, over files in memory and streamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import miles_file_data
from miles_core.testing.contracts import DataContract

(FILES,) = miles_file_data.miles_data_sources()
ROWS = [{"prompt": f"{i} + 1 =", "label": str(i + 1)} for i in range(6)]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "label": "hi", "id": "chat"}


def write_lines(folder: Path) -> str:
    """Seven rows in two files."""
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS[:4])))
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, [*ROWS[4:], CHAT])))
    return str(folder / "*.jsonl")


class TestInMemory(DataContract):
    component = FILES

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.options = {"path": write_lines(tmp_path)}


class TestStreamed(DataContract):
    """A buffer of 3 rows: an epoch of 7 ends inside a block."""

    component = FILES

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.options = {"path": write_lines(tmp_path), "streaming": True, "shuffle_buffer": 3}


class TestStreamedInOrderTwice(DataContract):
    component = FILES

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.options = {"path": write_lines(tmp_path), "streaming": True, "shuffle": False, "epochs": 2}


class TestParquet(DataContract):
    component = FILES

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=4)
        self.options = {"path": str(tmp_path), "streaming": True, "shuffle_buffer": 5}
