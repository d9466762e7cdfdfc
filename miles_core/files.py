"""Files of rows: which ones a path stands for, and lines of JSON."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from miles_core.errors import DataError

MAX_LINE_BYTES = 64 << 20
"""A line that is longer is refused: without a line feed, a file would be read into memory as one row."""
_BOM = b"\xef\xbb\xbf"
MAGIC = {b"PAR1": "parquet", b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip"}
"""What files begin with; a name may say something else."""
FileKey = tuple[str, int, int]
"""Path, size and time of change: a file with the same key is taken to have the same rows."""


def find_files(path: str, endings: tuple[str, ...], option: str) -> list[Path]:
    """The files that `path` stands for - a file, a folder or a glob - sorted by name; hidden ones are left out.

    Raises DataError naming `option` when there are none.
    """
    here = Path(path).expanduser()
    if here.is_file():
        return [here]
    if here.is_dir():
        files = sorted(p for p in here.iterdir() if p.is_file() and not p.name.startswith("."))
        found = [p for p in files if p.name.endswith(endings)]
        if not found:
            there = f"its files: {', '.join(p.name for p in files[:5])}" if files else "it has no files"
            raise DataError(f"the folder {path} holds no {', '.join(endings)} file ({option})", there)
        return found
    found = sorted(Path(p) for p in glob.glob(str(here), recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"no data at {path} ({option})", f"relative paths start from {Path.cwd()}")
    return found


def file_key(file: Path) -> FileKey:
    """Raises DataError when there is no such file any more."""
    try:
        stat = file.stat()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    return (str(file.resolve()), stat.st_size, stat.st_mtime_ns)


def kind_of_file(file: Path) -> str:
    """ "parquet", "zstd", "gzip", or "" for anything else. Raises DataError when the file cannot be read."""
    try:
        with file.open("rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), "")


def open_gzip(file: Path) -> Any:
    return gzip.open(file, "rb")


def lines(stream: BinaryIO, file: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes) of every line that is not blank. Lines end at a line feed and nowhere else; a byte order
    mark at the start is left out. Raises DataError for a damaged or cut file, and for a line that is too long."""
    number = 0
    while True:
        try:
            raw = stream.readline(MAX_LINE_BYTES + 1)
        except (EOFError, zlib.error, OSError, ValueError) as error:
            if getattr(error, "errno", None):
                raise DataError(f"{file} cannot be read after line {number}: {error}") from None
            raise DataError(f"{file} is damaged or cut off after line {number}: {error}") from None
        if not raw:
            return
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(f"{file}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if not _is_blank(raw):
            yield number, raw


def _is_blank(raw: bytes) -> bool:
    return not raw.strip() or (not raw.isascii() and not raw.decode("utf-8", "replace").strip())


def parse_line(raw: bytes, file: Path, line: int) -> Any:
    """The JSON value of a line. Raises DataError naming file and line, also for a key that stands twice in one object."""
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: line {line} is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: line {line} is not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'the key "{next(k for k in keys if keys.count(k) > 1)}" stands twice in one object')
    return made


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
