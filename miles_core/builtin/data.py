"""Prompts from files of JSON lines, plain or gzipped, held in memory.

Parquet, zstd and files larger than memory are read by the source `files` of miles-file-data, which gives the same prompts
for the same rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from miles_core.component import BuildContext, Component, Environment
from miles_core.epochs import ListSource, size_note
from miles_core.errors import DataError
from miles_core.files import FileKey, file_key, find_files, kind_of_file, lines, open_gzip, parse_line
from miles_core.rows import Place, RowMaker, RowOptions, collect
from miles_core.types import Prompt

ENDINGS = (".jsonl", ".jsonl.gz")
TABLE = "data.jsonl"
MORE = 'use = "files" reads it: pip install "miles-file-data[runtime]"'


class JsonlConfig(RowOptions):
    path: str = Field(min_length=1)
    """A file, a folder (all its .jsonl and .jsonl.gz files by name) or a glob; relative to the folder in which Miles is
    started."""


def load_prompts(config: JsonlConfig) -> list[Prompt]:
    """All rows as prompts, in file order. Raises DataError naming row and key for the first bad row, or when there is
    no file or no row."""
    files = find_files(config.path, ENDINGS, f"{TABLE}.path")
    return _load(config, tuple(file_key(file) for file in files), tuple(files))


@functools.lru_cache(maxsize=2)
def _load(config: JsonlConfig, _: tuple[FileKey, ...], files: tuple[Path, ...]) -> list[Prompt]:
    """Kept for training's and evaluation's data: they are read for a check, for the run, and for every evaluation."""
    prompts = collect((pair for file in files for pair in read_rows(file)), RowMaker(config, TABLE))
    if not prompts:
        raise DataError(f"{config.path} has no rows ({', '.join(map(str, files[:5]))})")
    return prompts


def read_rows(file: Path) -> Iterator[tuple[Place, Any]]:
    """Every row of one file and where it stands."""
    kind = kind_of_file(file)
    if kind in ("parquet", "zstd"):
        raise DataError(f"{file} is a {kind} file, and {TABLE} reads JSON lines, plain or gzipped", MORE)
    with open_gzip(file) if kind == "gzip" else file.open("rb") as stream:
        for row, (line, raw) in enumerate(lines(stream, file), 1):
            yield Place(file, row, line), parse_line(raw, file, line)


def _check(config: JsonlConfig, environment: Environment) -> None:
    if note := size_note(config, len(load_prompts(config)), environment, TABLE):
        logging.getLogger("miles.data.jsonl").warning(note)


def _build(config: JsonlConfig, context: BuildContext) -> ListSource:
    return ListSource(config, context, load_prompts(config))


COMPONENTS = {
    "miles_data_sources": [
        Component(
            name="jsonl",
            summary="prompts from JSON lines, plain or gzipped",
            config=JsonlConfig,
            build=_build,
            check=_check,
        )
    ]
}
