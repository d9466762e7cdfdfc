"""Rows of one file, whatever its format, from any row on."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from miles_core.errors import DataError, RuntimeMissing
from miles_core.files import kind_of_file, lines, open_gzip, parse_line
from miles_core.rows import Place, RowOptions

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
BATCH_BYTES, BATCH_ROWS = 4 << 20, 1024
"""Of a parquet file, so much is turned into objects at once."""
READ_BYTES = 1 << 20
INSTALL = 'pip install "miles-file-data[runtime]"'


def read_rows(file: Path, options: RowOptions, skip: int = 0) -> Iterator[tuple[Place, Any]]:
    """The rows of `file` after the first `skip`, which are passed over without being parsed. The format is told from the
    file's first bytes. Raises DataError naming file and line (row, in parquet)."""
    kind = kind_of_file(file)
    if kind == "parquet" or file.name.endswith(".parquet"):
        yield from _parquet_rows(file, options, skip)
        return
    with _open(file, kind) as stream:
        for row, (line, raw) in islice(enumerate(lines(stream, file), 1), skip, None):
            yield Place(file, row, line), parse_line(raw, file, line)


def _open(file: Path, kind: str) -> Any:
    if kind == "gzip":
        return open_gzip(file)
    if kind == "zstd":  # Arrow's reader: python-zstandard's ends without an error where a file is cut off
        arrow = _arrow(file)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(str(file)), "zstd"), READ_BYTES)
    return file.open("rb")


def _parquet_rows(file: Path, options: RowOptions, skip: int) -> Iterator[tuple[Place, Any]]:
    arrow = _arrow(file)
    import pyarrow.parquet as parquet

    try:
        opened = parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a parquet file: {error}") from None
    with opened:
        columns = _columns(opened.schema_arrow.names, options, file)
        row = 0
        for group in range(opened.num_row_groups):
            size = opened.metadata.row_group(group).num_rows
            if row + size <= skip:
                row += size
                continue
            for batch in _batches(opened, group, columns, row, file, arrow):
                for value in batch:
                    row += 1
                    if row > skip:
                        yield Place(file, row, arrow=True), value


def _batches(opened: Any, group: int, columns: Any, row: int, file: Path, arrow: Any) -> Iterator[list[dict[str, Any]]]:
    about = opened.metadata.row_group(group)
    size = max(1, min(BATCH_ROWS, BATCH_BYTES * about.num_rows // max(about.total_byte_size, 1)))
    batches = opened.iter_batches(batch_size=size, row_groups=[group], columns=columns, use_threads=False)
    while True:
        try:
            batch = next(batches, None)
            values = [] if batch is None else batch.to_pylist()
        except MemoryError:  # Arrow's own is an ArrowException too, and says nothing of the file
            raise
        except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"{file} cannot be read after row {row}: {error}") from None
        if batch is None:
            return
        row += len(values)
        yield values


def _columns(names: list[str], options: RowOptions, file: Path) -> list[str] | None:
    """Columns to read: those that options name, or all (None) where the rest becomes metadata."""
    if double := [name for name in names if names.count(name) > 1]:
        raise DataError(f'{file} has more than one column "{double[0]}"')
    if options.metadata_keys is None:
        return None
    o = options
    keys = (o.prompt_key, o.messages_key, o.label_key, o.id_key, o.task_key, o.tools_key, *options.metadata_keys)
    wanted = {key if key in names else key.partition(".")[0] for key in keys}
    return [name for name in names if name in wanted]


def _arrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise RuntimeMissing(f"reading {file} needs pyarrow", INSTALL) from None
    return pyarrow
