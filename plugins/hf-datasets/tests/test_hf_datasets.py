"""The data source `hf-datasets`: saved folders, folders of files, names on the hub, and what stands in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import miles_hf_datasets
from miles_core.builtin.data import JsonlConfig, load_prompts
from miles_core.component import BuildContext, Environment
from miles_core.errors import ConfigError, DataError, RuntimeMissing
from miles_hf_datasets import HfDatasetsConfig

datasets = pytest.importorskip("datasets")
(HF,) = miles_hf_datasets.miles_data_sources()
GOOD = {"prompt": "q", "label": "1"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def source(path, seed: int = 0, **options):
    context = BuildContext(component="data/hf-datasets", run_dir=Path(), seed=seed, run_config=None)
    return HF.build(HfDatasetsConfig(path=str(path), **options), context)


def save(folder: Path, rows: list[dict], name: str = "saved") -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / name))
    return folder / name


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"q{i}", "label": str(i)} for i in range(1, count + 1)]


def test_rows_are_those_of_json_lines_also_nested_ones(tmp_path):
    """Arrow fills up objects that have different keys with nulls; no template may see them."""
    tools = [{"name": "add", "parameters": {"a": "int"}}, {"name": "mul", "parameters": {"b": "int"}}]
    rows = [
        {"id": str(i), "messages": [{"role": "user", "content": "x"}], "label": i, "tools": [tool], "level": i or None}
        for i, tool in enumerate(tools)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl")))
    assert source(save(tmp_path, rows), shuffle=False, epochs=1).next(9) == [
        type(p)(id=p.id, draw=i, messages=p.messages, label=p.label, tools=p.tools, metadata=p.metadata)
        for i, p in enumerate(wanted)
    ]


def test_splits_of_a_saved_folder(tmp_path):
    parts = {"train": datasets.Dataset.from_list(numbered(3)), "test": datasets.Dataset.from_list(numbered(2))}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert source(tmp_path / "saved").num_prompts == 3
    assert source(tmp_path / "saved", split="test").num_prompts == 2
    with pytest.raises(DataError, match=r'has no split "dev"(.|\n)*its splits: train, test'):
        source(tmp_path / "saved", split="dev")
    with pytest.raises(DataError, match='has no split "test": it is one data set'):
        source(save(tmp_path, numbered(2), "one"), split="test")
    with pytest.raises(ConfigError, match="name and revision are for data sets on the hub"):
        source(tmp_path / "saved", revision="main")


def test_D1_a_folder_of_files_is_opened_too(tmp_path):
    (tmp_path / "files").mkdir()
    rows = [{"prompt": "b\u2028c 😀", "label": "2"}, {"prompt": "d", "label": "3"}]
    datasets.Dataset.from_list(rows).to_json(str(tmp_path / "files/train.jsonl"))
    assert [p.text for p in source(tmp_path / "files", shuffle=False).next(2)] == ["b\u2028c 😀", "d"]


def test_D3_a_bad_row_is_refused_by_number_before_anything_starts(tmp_path):
    path = save(tmp_path, [GOOD, GOOD, GOOD, {"prompt": "q", "label": None}, GOOD])
    with pytest.raises(DataError, match=r'saved \(train\): row 4: "label" is null'):
        HF.check(HfDatasetsConfig(path=str(path)), Environment())


def test_an_id_that_comes_twice_and_no_rows_are_refused(tmp_path):
    path = save(tmp_path, [GOOD | {"id": "a"}, GOOD | {"id": "b"}, GOOD | {"id": "a"}])
    with pytest.raises(DataError, match=r'row 3: "id" is "a", and so it is in row 1'):
        source(path)
    with pytest.raises(DataError, match="has no rows"):
        empty = datasets.Dataset.from_dict({"prompt": [], "label": []})
        empty.save_to_disk(str(tmp_path / "empty"), num_shards=1)
        source(tmp_path / "empty")


def test_D6_ten_rows_in_one_epoch_cannot_fill_a_step_of_sixteen(tmp_path):
    from types import SimpleNamespace

    run = SimpleNamespace(rollout=SimpleNamespace(groups_per_step=16), steps=1)
    config = HfDatasetsConfig(path=str(save(tmp_path, numbered(10))), epochs=1)
    with pytest.raises(DataError, match="gives 10 prompts in 1 epochs, and one step takes 16"):
        HF.check(config, Environment(run_config=run, where="data.use"))
    assert len({p.id for p in source(config.path).next(16)[:10]}) == 10


def test_restore_goes_on_and_refuses_other_rows(tmp_path):
    first = source(save(tmp_path, numbered(5)))
    first.next(8)
    second = source(tmp_path / "saved")
    second.restore(json.loads(json.dumps(first.state())))
    assert second.next(7) == first.next(7)
    with pytest.raises(DataError, match="has changed since the checkpoint"):
        source(save(tmp_path, numbered(6), "other")).restore(first.state())


def test_columns_that_nobody_named_are_not_read(tmp_path):
    path = save(tmp_path, [GOOD | {"blob": b"\0", "level": 1}])
    with pytest.raises(DataError, match='"blob" is a bytes, which JSON has no form for'):
        source(path)
    (prompt,) = source(path, metadata_keys=("level",)).next(1)
    assert prompt.metadata == {"level": 1}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./gone", "there is no folder ./gone"),
        ("/gone/at/all", "there is no folder"),
        ("parquet", "is a format and no data set"),
    ],
)
def test_paths_that_are_no_data_set_are_not_looked_up_on_the_hub(path, message):
    with pytest.raises(DataError, match=message):
        source(path)


def test_a_file_is_referred_to_the_source_for_files(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match=r'is a file(.|\n)*use = "files"'):
        source(tmp_path / "a.jsonl")


def test_a_damaged_folder_and_an_unknown_configuration_are_data_errors(tmp_path):
    path = save(tmp_path, [GOOD])
    (path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="is no complete folder of save_to_disk"):
        source(path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/train.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match=r"cannot be opened: (.|\n)*'nope' not found"):
        source(tmp_path / "files", name="nope")


def test_without_a_network_the_error_names_the_alternatives(tmp_path):
    """In a process that may not use the network: both ways out are said, and nothing is tried for half a minute."""
    program = (
        "from miles_hf_datasets import HfDatasetsConfig\nfrom miles_hf_datasets.source import open_dataset\n"
        "from miles_core.errors import MilesError\n"
        "try:\n    open_dataset(HfDatasetsConfig(path='someone/something'))\n"
        "except MilesError as error:\n    print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout.startswith(
        'RuntimeMissing the data set "someone/something" (data.hf-datasets.path) cannot be fetched'
    )
    assert "save_to_disk" in done.stdout and 'use = "files"' in done.stdout


def test_without_the_library_the_error_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeMissing, match=r'pip install "miles-hf-datasets\[runtime\]"'):
        source(tmp_path)
