"""The source: rows in memory, or streamed through a buffer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from miles_core.component import BuildContext
from miles_core.epochs import EpochSource, ListSource
from miles_core.errors import DataError
from miles_core.files import FileKey, file_key, find_files
from miles_core.rows import Digest, Names, Place, RowMaker, collect
from miles_core.types import Prompt
from miles_file_data import TABLE, FilesConfig
from miles_file_data.reading import ENDINGS, read_rows

DEFAULT_BUFFER = 10_000
FILE_ORDER = 1
BLOCKS = 2
"""Purposes that the seed is used for, so that no two draw the same numbers."""


@dataclass(slots=True, frozen=True)
class FileRows:
    """A file as it was when it was checked; `before` rows stand in the files before it."""

    file: Path
    key: FileKey
    before: int
    rows: int


@dataclass(slots=True, frozen=True)
class Index:
    files: tuple[FileRows, ...]
    rows: int
    sha256: str


def build(config: FilesConfig, context: BuildContext) -> EpochSource:
    if config.streaming:
        return StreamSource(config, context, scan(config))
    return ListSource(config, context, load(config))


def count_rows(config: FilesConfig) -> int:
    """Reads and checks everything. Raises DataError for the first bad row, an id that comes twice, and no rows."""
    return scan(config).rows if config.streaming else len(load(config))


def load(config: FilesConfig) -> list[Prompt]:
    """All rows as prompts, in the order of files and rows. Raises DataError as `count_rows` does."""
    return _load(config, *_files(config))


def scan(config: FilesConfig) -> Index:
    """What streaming needs to know of the files, in memory for 8 bytes a row. Raises DataError as `count_rows` does."""
    return _scan(config, *_files(config))


def _files(config: FilesConfig) -> tuple[tuple[Path, ...], tuple[FileKey, ...]]:
    files = find_files(config.path, ENDINGS, f"{TABLE}.path")
    return tuple(files), tuple(file_key(file) for file in files)


@functools.lru_cache(maxsize=2)
def _load(config: FilesConfig, files: tuple[Path, ...], _: tuple[FileKey, ...]) -> list[Prompt]:
    """Kept for training's and evaluation's data: they are read for a check, for the run, and for every evaluation."""
    prompts = collect((pair for file in files for pair in read_rows(file, config)), RowMaker(config, TABLE))
    if not prompts:
        raise DataError(f"{config.path} has no rows ({', '.join(map(str, files[:5]))})")
    return prompts


@functools.lru_cache(maxsize=4)
def _scan(config: FilesConfig, files: tuple[Path, ...], keys: tuple[FileKey, ...]) -> Index:
    names, digest = Names(), Digest()
    found: list[FileRows] = []
    before = 0
    for file, key in zip(files, keys, strict=True):
        rows = 0
        for _, prompt in prompts_of(file, config, before):
            names.add(prompt.id)
            digest.add(prompt)
            rows += 1
        found.append(FileRows(file, key, before, rows))
        before += rows
    if not before:
        raise DataError(f"{config.path} has no rows ({', '.join(map(str, files[:5]))})")
    again = (pair for f in found for pair in prompts_of(f.file, config, f.before))
    names.check(again, RowMaker(config, TABLE))
    return Index(tuple(found), before, digest.hex())


def prompts_of(file: Path, config: FilesConfig, before: int, skip: int = 0) -> Iterator[tuple[Place, Prompt]]:
    """The rows of one file after the first `skip`; `before` rows stand in the files before it."""
    maker = RowMaker(config, TABLE)
    for place, row in read_rows(file, config, skip):
        yield place, maker.make(row, place, before + place.row)


class StreamSource(EpochSource):
    """Rows read block by block. Under `shuffle`, an epoch goes through the files in an order of its own, cuts their rows
    into blocks of `shuffle_buffer` (the first one shorter, by chance, so that blocks begin elsewhere in each epoch) and
    permutes each block. One block is in memory at a time, and any place of an epoch can be gone to by passing over the
    rows before its block."""

    def __init__(self, config: FilesConfig, context: BuildContext, index: Index) -> None:
        super().__init__(config, context, index.rows)
        self.config, self.index = config, index
        self.buffer = config.shuffle_buffer or DEFAULT_BUFFER
        self._block: tuple[int, int, int] = (-1, 0, 0)
        self._prompts: list[Prompt] = []
        self._reader: Iterator[Prompt] = iter(())
        self._reads_next = (-1, 0)

    @property
    def order(self) -> str:
        return f"shuffled in buffers of {self.buffer}" if self.config.shuffle else super().order

    def digest(self) -> str:
        return self.index.sha256

    def at(self, epoch: int, place: int) -> Prompt:
        known, start, stop = self._block
        if known != epoch or not start <= place < stop:
            start, stop = self._block_around(epoch, place)
            self._load(epoch, start, stop)
        return self._prompts[place - start]

    def _block_around(self, epoch: int, place: int) -> tuple[int, int]:
        first = self.buffer
        if self.config.shuffle:
            first = int(np.random.default_rng([self.seed, epoch, BLOCKS]).integers(1, self.buffer + 1))
        start = 0 if place < first else first + (place - first) // self.buffer * self.buffer
        return start, min(first if start == 0 else start + self.buffer, self.rows)

    def _load(self, epoch: int, start: int, stop: int) -> None:
        self._block, self._prompts = (-1, 0, 0), []  # the old block goes before the new one comes
        if self._reads_next != (epoch, start):
            self._reader = self._read(epoch, start)
        self._reads_next = (-1, 0)
        prompts = list(islice(self._reader, stop - start))
        if self.config.shuffle:
            order = np.random.default_rng([self.seed, epoch, BLOCKS, start]).permutation(len(prompts))
            prompts = [prompts[i] for i in order]
        self._prompts, self._block, self._reads_next = prompts, (epoch, start, stop), (epoch, stop)

    def _read(self, epoch: int, skip: int) -> Iterator[Prompt]:
        """The prompts of an epoch, unshuffled within files, after the first `skip`."""
        files = self.index.files
        if self.config.shuffle:
            order = np.random.default_rng([self.seed, epoch, FILE_ORDER]).permutation(len(files))
            files = tuple(files[i] for i in order)
        for known in files:
            if skip >= known.rows:
                skip -= known.rows
                continue
            if file_key(known.file) != known.key:
                raise DataError(
                    f"{known.file} has changed since it was checked at the start of the run",
                    "a file that is streamed must stay as it is while a run goes on; start the run again",
                )
            for _, prompt in prompts_of(known.file, self.config, known.before, skip):
                yield prompt
            skip = 0
