"""The data source `files`: the same prompts from every format, in memory and streamed, in bounded memory."""

from __future__ import annotations

import gzip
import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miles_file_data
from miles_core.builtin.data import JsonlConfig, load_prompts
from miles_core.component import BuildContext, Environment
from miles_core.errors import DataError, RuntimeMissing
from miles_core.prompts import PromptFeed
from miles_core.types import PromptTokens
from miles_file_data import FilesConfig

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
(FILES,) = miles_file_data.miles_data_sources()
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
D1_BYTES = (
    b"\xef\xbb\xbf"
    + (
        '{"prompt":"a","label":"1"}\r\n  \r\n  {"prompt":"b\u2028c 😀","label":"2"}\n     \n  {"prompt":"d","label":"3"}'
    ).encode()
)
D1_ROWS = [{"prompt": p, "label": str(i)} for i, p in enumerate(["a", "b\u2028c 😀", "d"], 1)]
GOOD = {"prompt": "q", "label": "1"}
both = pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])


def source(path: Path | str, seed: int = 0, **options):
    context = BuildContext(component="data/files", run_dir=Path(), seed=seed, run_config=None)
    return FILES.build(FilesConfig(path=str(path), **options), context)


def packed(data: bytes, kind: str) -> bytes:
    if kind == "jsonl.gz":
        return gzip.compress(data)
    return arrow.compress(data, "zstd", asbytes=True) if kind == "jsonl.zst" else data


def write(folder: Path, rows: list[dict], kind: str = "jsonl", name: str = "data") -> Path:
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = arrow.table({name: [row.get(name) for row in rows] for name in names})
        parquet.write_table(table, path, row_group_size=3)
    else:
        path.write_bytes(packed("\n".join(map(json.dumps, rows)).encode(), kind))
    return path


def numbered(count: int, first: int = 1) -> list[dict]:
    return [{"prompt": f"q{i}", "label": str(i)} for i in range(first, first + count)]


def environment(groups_per_step: int, steps: int, where: str = "data.use") -> Environment:
    rollout = SimpleNamespace(groups_per_step=groups_per_step)
    return Environment(run_config=SimpleNamespace(rollout=rollout, steps=steps), where=where)


# --- The same rows from every format ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", FORMATS)
def test_D1_bom_blank_lines_crlf_line_separator_and_no_last_newline_give_three_rows(tmp_path, kind, streaming):
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        write(tmp_path, D1_ROWS, kind)
    else:
        path.write_bytes(packed(D1_BYTES, kind))
    data = source(path, streaming=streaming, shuffle=False)
    assert [(p.text, p.label, p.id) for p in data.next(3)] == [
        ("a", "1", "row-1"),
        ("b\u2028c 😀", "2", "row-2"),
        ("d", "3", "row-3"),
    ]
    assert data.num_prompts == 3


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
ODD_ROWS = [
    {
        "id": "x",
        "messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": None, "tool_calls": CALLS}],
        "label": "2",
        "tools": [{"name": "add", "parameters": {"a": "int"}}],
        "level": 1,
    },
    {
        "id": "y",
        "messages": [{"role": "user", "content": "2 + 2"}],
        "label": "4",
        "tools": [{"name": "mul", "parameters": {"b": "int"}}],
        "hint": ["none"],
    },
]


@both
@pytest.mark.parametrize("kind", FORMATS)
def test_chats_tools_and_metadata_are_the_same_from_every_format(tmp_path, kind, streaming):
    """Arrow fills up objects that have different keys with nulls; no template may see them."""
    wanted = load_prompts(JsonlConfig(path=str(write(tmp_path, ODD_ROWS))))
    got = source(write(tmp_path, ODD_ROWS, kind, "other"), streaming=streaming, shuffle=False).next(2)
    assert [p.metadata for p in wanted] == [{"level": 1}, {"hint": ["none"]}]
    assert [p.tools for p in got] == [
        ({"name": "add", "parameters": {"a": "int"}},),
        ({"name": "mul", "parameters": {"b": "int"}},),
    ]
    assert [(p.id, p.messages, p.text, p.label, p.tools, p.metadata) for p in got] == [
        (p.id, p.messages, p.text, p.label, p.tools, p.metadata) for p in wanted
    ]


def test_a_folder_of_all_formats_is_read_in_the_order_of_names(tmp_path):
    for i, kind in enumerate(FORMATS):
        write(tmp_path, numbered(2, first=2 * i + 1), kind, f"{i}")
    (tmp_path / "README.md").write_text("no data")
    for options in ({}, {"streaming": True}):
        data = source(tmp_path, shuffle=False, **options)
        assert [(p.id, p.text) for p in data.next(8)] == [(f"row-{i}", f"q{i}") for i in range(1, 9)]


def test_two_stars_reach_into_folders(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    write(tmp_path / "a/b", numbered(2), "parquet")
    write(tmp_path, numbered(3), "parquet")
    assert source(f"{tmp_path}/**/*.parquet").num_prompts == 5


# --- D3: bad rows, by file and number --------------------------------------------------------------------------------

BAD = {
    "no label": ({"prompt": "q", "label": None}, '"label" is null'),
    "prompt empty": ({"prompt": "", "label": "1"}, '"prompt" is empty'),
}


@both
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bad", BAD)
def test_D3_a_bad_row_is_refused_by_number_before_anything_starts(tmp_path, kind, streaming, bad):
    row, message = BAD[bad]
    write(tmp_path, [GOOD], "jsonl", "a")
    write(tmp_path, [GOOD, GOOD, GOOD, row, GOOD], kind, "b")
    with pytest.raises(DataError, match=rf"b.{kind}: row 4: {message}"):
        FILES.check(FilesConfig(path=str(tmp_path), streaming=streaming), environment(1, 1))


@both
@pytest.mark.parametrize("kind", FORMATS)
def test_an_id_that_comes_twice_is_refused_with_both_places(tmp_path, kind, streaming):
    write(tmp_path, [GOOD | {"id": "x"}, GOOD | {"id": "y"}], "jsonl", "a")
    write(tmp_path, [GOOD | {"id": "z"}, GOOD | {"id": "y"}], kind, "b")
    with pytest.raises(DataError, match=rf'b.{kind}: row 2: "id" is "y", and so it is in .*a.jsonl: row 2'):
        source(tmp_path, streaming=streaming)


@both
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_without_rows_is_refused(tmp_path, kind, streaming):
    empty = arrow.table({"prompt": arrow.array([], arrow.string())})
    if kind == "parquet":
        parquet.write_table(empty, tmp_path / "data.parquet")
    else:
        (tmp_path / f"data.{kind}").write_bytes(packed(b"\n", kind))
    with pytest.raises(DataError, match="has no rows"):
        source(tmp_path, streaming=streaming)


@pytest.mark.parametrize("kind", FORMATS[1:])
@pytest.mark.parametrize("share", [0.3, 0.99])
def test_a_cut_file_is_refused(tmp_path, kind, share):
    data = write(tmp_path, numbered(2000), kind).read_bytes()
    (tmp_path / f"data.{kind}").write_bytes(data[: int(share * len(data))])
    with pytest.raises(
        DataError, match=r"damaged or cut off after line \d+" if kind != "parquet" else "not a parquet file"
    ):
        source(tmp_path)


@pytest.mark.parametrize("kind", ["jsonl.zst", "parquet"])
def test_a_damaged_file_is_refused(tmp_path, kind):
    data = bytearray(write(tmp_path, numbered(2000), kind).read_bytes())
    data[len(data) // 2] ^= 255
    data[len(data) // 2 + 1] ^= 255
    (tmp_path / f"data.{kind}").write_bytes(data)
    with pytest.raises(DataError, match=rf"data.{kind}"):
        source(tmp_path)


def test_values_without_a_json_form_are_refused_or_left_out(tmp_path):
    from datetime import datetime

    write(tmp_path, [GOOD | {"when": datetime(2026, 1, 1), "level": 1}], "parquet")
    with pytest.raises(DataError, match=r'row 1: "when" is a datetime, which JSON has no form for(.|\n)*metadata_keys'):
        source(tmp_path)
    (prompt,) = source(tmp_path, metadata_keys=("level",)).next(1)
    assert prompt.metadata == {"level": 1}


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = arrow.Table.from_arrays(
        [arrow.array(["a"]), arrow.array(["b"]), arrow.array(["c"])], ["prompt", "label", "label"]
    )
    parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match='more than one column "label"'):
        source(tmp_path)


def test_without_pyarrow_the_error_names_the_command_and_json_lines_still_work(tmp_path, monkeypatch):
    write(tmp_path, [GOOD], "parquet")
    write(tmp_path, [GOOD], "jsonl.zst")
    write(tmp_path, [GOOD], "jsonl.gz")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for kind in ("parquet", "jsonl.zst"):
        with pytest.raises(RuntimeMissing, match=r'pip install "miles-file-data\[runtime\]"'):
            source(tmp_path / f"data.{kind}")
    assert source(tmp_path / "data.jsonl.gz").num_prompts == 1


def test_a_buffer_that_nothing_would_read_is_refused():
    for options in ({}, {"streaming": True, "shuffle": False}):
        with pytest.raises(ValueError, match="otherwise nothing reads it"):
            FilesConfig(path="x", shuffle_buffer=5, **options)


# --- D5, D6 ----------------------------------------------------------------------------------------------------------


class OneTokenPerLetter:
    def encode(self, text: str) -> PromptTokens:
        import numpy as np

        return PromptTokens(token_ids=np.zeros(len(text), np.int32), text=text)


@both
@pytest.mark.parametrize("kind", FORMATS)
def test_D5_prompts_that_leave_no_room_are_dropped_and_counted(tmp_path, kind, streaming):
    """Context 64: prompts of 81 and 64 tokens leave no room, 60 and 63 do."""
    path = write(tmp_path, [{"prompt": "x" * n, "label": "1"} for n in (81, 60, 64, 63)], kind)
    data = source(path, streaming=streaming, shuffle=False)
    feed = PromptFeed(data, OneTokenPerLetter(), 64, refuse_long=False, note=lambda text, level: None)
    feed.check(1)
    assert [len(p.text) for p in feed.take(4)] == [60, 63, 60, 63] and feed.dropped == 4


@both
@pytest.mark.parametrize("kind", FORMATS)
def test_D6_fewer_rows_than_a_step(tmp_path, kind, streaming, caplog):
    path = write(tmp_path, numbered(10), kind)
    step = source(path, streaming=streaming).next(16)
    assert len({p.id for p in step[:10]}) == 10 and len({(p.id, p.draw) for p in step}) == 16
    config = FilesConfig(path=str(path), streaming=streaming, epochs=1)
    with pytest.raises(DataError, match="gives 10 prompts in 1 epochs, and one step takes 16"):
        FILES.check(config, environment(16, 1))
    with caplog.at_level(logging.WARNING):
        FILES.check(config, environment(4, 3))
    assert "enough for 2 of 3 steps of 4, with 2 left over" in caplog.text


# --- Order, and the cursor -------------------------------------------------------------------------------------------


def test_in_memory_files_have_the_order_of_the_core_source(tmp_path):
    """One seed, one component name: `files` in memory is `jsonl` for more formats."""
    from miles_core.builtin.data import COMPONENTS

    (jsonl,) = COMPONENTS["miles_data_sources"]
    path = str(write(tmp_path, numbered(20)))
    context = BuildContext(component="data/files", run_dir=Path(), seed=0, run_config=None)
    wanted = jsonl.build(JsonlConfig(path=path), context).next(50)
    assert source(path).next(50) == wanted


def test_a_streamed_epoch_mixes_within_buffers_and_orders_files_anew(tmp_path):
    """Three files of 10 rows, a buffer of 10: rows of one buffer stand together, and epochs differ in the order of files
    and in where buffers begin."""
    for i in range(3):
        write(tmp_path, numbered(10, first=10 * i + 1), "jsonl", f"{i}")
    data = source(tmp_path, streaming=True, shuffle_buffer=10)
    epochs = [[p.id for p in data.next(30)] for _ in range(20)]
    assert all(len(set(epoch)) == 30 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 20
    first_file = {int(epoch[0].removeprefix("row-")) // 10.1 for epoch in epochs}
    assert first_file == {0.0, 1.0, 2.0}
    assert len({data._block_around(epoch, 0)[1] for epoch in range(20)}) > 5


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    buffer=st.integers(1, 9),
    before=st.integers(0, 30),
    shuffle=st.booleans(),
    kind=st.sampled_from(FORMATS),
)
@settings(max_examples=60, deadline=None)
def test_restore_goes_on_exactly_across_files_epochs_and_buffers(tmp_path_factory, sizes, buffer, before, shuffle, kind):
    folder = tmp_path_factory.mktemp("data")
    for i, size in enumerate(sizes):
        write(folder, [GOOD | {"id": f"{i}-{j}"} for j in range(size)], kind, f"{i}")
    options = {"streaming": True, "shuffle": shuffle} | ({"shuffle_buffer": buffer} if shuffle else {})
    first = source(folder, **options)
    first.next(before)
    state = json.loads(json.dumps(first.state()))
    rest = first.next(2 * sum(sizes) + 1)
    second = source(folder, **options)
    second.restore(state)
    assert second.next(2 * sum(sizes) + 1) == rest
    second.restore(state)  # also backwards, in a source that has gone on
    assert second.next(3) == rest[:3]


def test_a_cursor_of_another_buffer_is_refused(tmp_path):
    path = write(tmp_path, numbered(10))
    state = source(path, streaming=True, shuffle_buffer=3).state()
    with pytest.raises(DataError, match="shuffled in buffers of 4, not shuffled in buffers of 3"):
        source(path, streaming=True, shuffle_buffer=4).restore(state)
    with pytest.raises(DataError, match="shuffled, not shuffled in buffers of 3"):
        source(path).restore(state)


def test_streaming_in_order_and_memory_in_order_are_one_cursor_over_any_format(tmp_path):
    first = source(write(tmp_path, numbered(10)), shuffle=False)
    first.next(4)
    second = source(write(tmp_path, numbered(10), "parquet"), shuffle=False, streaming=True)
    second.restore(first.state())
    assert second.next(9) == first.next(9)


def test_a_file_that_changes_under_a_stream_is_an_error_and_not_other_rows(tmp_path):
    write(tmp_path, numbered(3), "jsonl", "a")
    path = write(tmp_path, numbered(3), "jsonl", "b")
    data = source(tmp_path, streaming=True, shuffle=False)
    data.next(2)
    path.write_text("\n".join(map(json.dumps, numbered(4))))
    with pytest.raises(DataError, match=r"b.jsonl has changed since it was checked"):
        data.next(500)


# --- Memory ----------------------------------------------------------------------------------------------------------

MIB = 1 << 20
_PROGRAM = """
import resource, sys
from pathlib import Path
from miles_core.component import BuildContext
import miles_file_data, numpy, pyarrow.parquet
from miles_file_data import sources
path, streaming, room = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
(files,) = miles_file_data.miles_data_sources()
options = {"shuffle_buffer": 40} if streaming else {}
config = files.config(path=path, streaming=streaming, **options)
pyarrow.set_cpu_count(1); pyarrow.set_io_thread_count(1)
now = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + room, now + room))
try:
    data = files.build(config, BuildContext(component="data/files", run_dir=Path(), seed=0, run_config=None))
    seen = {p.id for _ in range(data.num_prompts) for p in data.next(1)}
    print(len(seen), sum(len(p.text) for p in data.next(5)))
except MemoryError:
    print("MemoryError")
"""


def read_within(room: int, path: Path, streaming: bool) -> str:
    command = [sys.executable, "-c", _PROGRAM, str(path), str(streaming), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or "MemoryError" in done.stderr, done.stderr[-2000:]
    return done.stdout.strip() or "MemoryError"


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA as Linux has it")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_larger_than_the_memory_is_streamed(tmp_path, kind):
    """1,280 rows of 100 KiB are 125 MiB; the process may take 60 MiB besides what it has after its imports. A buffer of 40
    rows holds 4 MiB. In memory, the same file does not fit - which shows that the bound holds."""
    text = random.Random(0).randbytes(50 * 1024).hex()
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        table = arrow.table({"prompt": [text] * 64, "label": ["1"] * 64})
        with parquet.ParquetWriter(path, table.schema, use_dictionary=False) as writer:
            writer.write_table(arrow.concat_tables([table] * 20))  # one row group
    else:
        block = packed(64 * f'{{"prompt": "{text}", "label": "1"}}\n'.encode(), kind)
        with path.open("wb") as file:  # members and frames may follow each other
            for _ in range(20):
                file.write(block)
    assert read_within(60 * MIB, path, streaming=True) == f"1280 {5 * 100 * 1024}"
    assert read_within(60 * MIB, path, streaming=False) == "MemoryError"
