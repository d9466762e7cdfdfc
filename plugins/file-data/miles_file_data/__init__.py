"""Prompts from files: JSON lines and parquet, compressed or not, in memory or streamed."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import Field, model_validator

from miles_core import BuildContext, Component, Environment, hookimpl
from miles_core.epochs import size_note
from miles_core.rows import RowOptions

TABLE = "data.files"


class FilesConfig(RowOptions):
    """Options of the data source `files`."""

    path: str = Field(min_length=1)
    """A file, a folder (all its .jsonl, .jsonl.gz, .jsonl.zst and .parquet files by name) or a glob, in which `**` stands
    for folders at any depth; relative to the folder in which Miles is started."""
    streaming: bool = False
    """Keep no more than shuffle_buffer rows in memory. The files are read once for checking before the run starts, and once
    in each epoch."""
    shuffle_buffer: int | None = Field(default=None, gt=0)
    """Rows that are read and shuffled together under `streaming`, besides the order of the files; 10000 by default. Without
    streaming the shuffle is over all rows."""

    @model_validator(mode="after")
    def _buffer_is_used(self) -> FilesConfig:
        if self.shuffle_buffer is not None and not (self.streaming and self.shuffle):
            raise ValueError("shuffle_buffer is for streaming = true with shuffle = true; otherwise nothing reads it")
        return self


def _build(config: FilesConfig, context: BuildContext) -> Any:
    from miles_file_data.sources import build

    return build(config, context)


def _check(config: FilesConfig, environment: Environment) -> None:
    from miles_file_data.sources import count_rows

    if note := size_note(config, count_rows(config), environment, TABLE):
        logging.getLogger("miles.data.files").warning(note)


@hookimpl
def miles_data_sources() -> list[Component[Any]]:
    return [
        Component(
            name="files",
            summary="Prompts from JSON lines and parquet, gz and zst, folders and globs, in memory or streamed.",
            config=FilesConfig,
            build=_build,
            check=_check,
        )
    ]
