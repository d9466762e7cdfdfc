"""Prompts from files: JSON lines, plain or gzipped, and parquet.

Everything is read and checked before anything starts, so that a bad row is reported by its number and not by a reward an
hour later.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from miles_core.component import BuildContext, Component, ComponentConfig, Environment
from miles_core.errors import DataError, RuntimeMissing
from miles_core.interfaces import DataSource
from miles_core.types import Prompt

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


class JsonlConfig(ComponentConfig):
    path: str
    """A file, a folder (all its .jsonl, .jsonl.gz and .parquet files by name) or a glob; relative to the folder in which
    Miles is started."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages."""
    messages_key: str = "messages"
    """Column of chat messages; where a row has it, the prompt column is not read."""
    label_key: str = "label"
    """Column of the right answer."""
    id_key: str = "id"
    """Column of a unique name; rows without it are named row-1, row-2, ..."""
    require_label: bool = True
    """Refuse rows whose label is missing or null; false where no reward reads it."""
    chat: bool = False
    """Send a text prompt as the message of a user, through the chat template, instead of as plain text."""
    system: str | None = None
    """A system message put before every chat; "" is an empty one."""
    shuffle: bool = True
    """Another order in each epoch, from the run's seed."""
    epochs: int | None = Field(default=None, gt=0)
    """Times that the data is gone through; without it, epochs follow each other for as long as the run goes on."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a row stands, for messages. `row` counts over all files, from 1 and without blank lines; `line` in the file."""

    file: Path
    row: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}: row {self.row}" + (f" (line {self.line})" if self.line != self.row else "")


class JsonlSource(DataSource):
    """Epoch after epoch over the rows. The n-th prompt depends on seed and n alone, so `taken` is the whole cursor.

    A request may cross an epoch's end: with fewer rows than a step needs, a step holds rows of several epochs, each under
    a draw of its own. With `epochs` the source ends after rows * epochs prompts, and what does not fill a step is left.
    """

    def __init__(self, config: JsonlConfig, context: BuildContext) -> None:
        self.config = config
        self.prompts = load_prompts(config)
        self.taken = 0
        self._seed = int(context.rng.integers(2**63))
        self._log = context.logger
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        self._sha256 = ""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def total(self) -> int | None:
        """Prompts until the source ends, or None."""
        return None if self.config.epochs is None else self.config.epochs * len(self.prompts)

    def next(self, n: int) -> list[Prompt]:
        if self.total is not None:
            n = min(n, self.total - self.taken)
        return [self._take() for _ in range(n)]

    def _take(self) -> Prompt:
        epoch, place = divmod(self.taken, len(self.prompts))
        if place == 0 and epoch > 0:
            self._log.info("epoch %d of %s starts after %d prompts", epoch + 1, self.config.path, self.taken)
        prompt = self.prompts[self._order_of(epoch)[place]]
        drawn = Prompt(
            id=prompt.id,
            draw=self.taken,
            messages=prompt.messages,
            text=prompt.text,
            label=prompt.label,
            task=prompt.task,
            tools=prompt.tools,
            metadata=prompt.metadata,
        )
        self.taken += 1
        return drawn

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            count = len(self.prompts)
            rng = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, rng.permutation(count) if self.config.shuffle else np.arange(count))
        return self._order[1]

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken, "rows": len(self.prompts), "sha256": self._digest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises DataError when the data is not what the state was saved with."""
        if (state["rows"], state["sha256"]) != (len(self.prompts), self._digest()):
            raise DataError(
                f"{self.config.path} has changed since the checkpoint ({state['rows']} rows then, {len(self.prompts)} now)",
                "go on with the data of the checkpoint, or start a new run",
            )
        self.taken = state["taken"]

    def _digest(self) -> str:
        if not self._sha256:
            digest = hashlib.sha256()
            for p in self.prompts:
                row = [p.id, p.messages, p.text, p.label, p.task, p.tools]
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._sha256 = digest.hexdigest()
        return self._sha256


# --- Reading ---------------------------------------------------------------------------------------------------------


def load_prompts(config: JsonlConfig) -> list[Prompt]:
    """All rows as prompts, in file order. Raises DataError naming row and key for the first bad row, or when there is
    no file or no row."""
    prompts: list[Prompt] = []
    named: dict[str, Place] = {}
    files = find_files(config.path)
    for file in files:
        for line, row in read_rows(file):
            place = Place(file, len(prompts) + 1, line)
            prompt = make_prompt(row, config, place)
            if prompt.id in named:
                raise DataError(f'{place}: "{config.id_key}" is "{prompt.id}", and so it is in row {named[prompt.id].row}')
            named[prompt.id] = place
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"{config.path} has no rows ({', '.join(map(str, files))})")
    return prompts


def find_files(path: str) -> list[Path]:
    """The files that `path` stands for, sorted by name. Raises DataError when there are none."""
    here = Path(path)
    if here.is_file():
        return [here]
    if here.is_dir():
        found = sorted(p for p in here.iterdir() if p.is_file() and p.name.endswith(ENDINGS))
        if not found:
            raise DataError(f"the folder {path} holds no {', '.join(ENDINGS)} file")
        return found
    found = sorted(Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"no data at {path} (data.jsonl.path)", f"relative paths start from {Path.cwd()}")
    return found


def read_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, row) of one file. Lines end at a line feed and nowhere else; blank ones are skipped."""
    if file.name.endswith(".parquet"):
        yield from enumerate(_read_parquet(file), 1)
        return
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as stream:
        for number, raw in enumerate(_lines(stream, file), 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{file}: line {number} is not UTF-8: {error}") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{file}: line {number} is not JSON: {error}") from None


def _lines(stream: Any, file: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{file} is not a complete gzip file: {error}") from None


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise RuntimeMissing(f"reading {file} needs pyarrow", "pip install pyarrow, or convert it to .jsonl") from None
    try:
        return parquet.read_table(file).to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{file} is not a parquet file: {error}") from None


def make_prompt(row: Any, config: JsonlConfig, place: Place) -> Prompt:
    """One row as a prompt; columns without a meaning of their own become metadata. Raises DataError naming row and key."""
    if not isinstance(row, dict):
        raise DataError(f"{place} is a {type(row).__name__}, not an object with columns")
    key = config.messages_key if row.get(config.messages_key) is not None else config.prompt_key
    value = row.get(key)
    if key not in row:
        raise DataError(f'{place} has no "{key}"', f"its columns: {', '.join(row) or 'none'}")
    if value is None or value in ("", []):
        raise DataError(f'{place}: "{key}" is {"null" if value is None else "empty"}')
    messages = _messages(value, key, place) if isinstance(value, list) else None
    if messages is None and not isinstance(value, str):
        raise DataError(f'{place}: "{key}" is a {type(value).__name__}, neither a text nor a list of messages')
    if messages is None and config.chat:
        messages = [{"role": "user", "content": value}]
    if messages is not None and config.system is not None:
        messages = [{"role": "system", "content": config.system}, *messages]
    label = row.get(config.label_key)
    if label is None and config.require_label:
        what = f'"{config.label_key}" is null' if config.label_key in row else f'has no "{config.label_key}"'
        raise DataError(f"{place} {what}", "data.jsonl.require_label = false accepts it, where no reward reads the label")
    if not isinstance(row.get("task"), str | None) or not isinstance(row.get("tools"), list | None):
        raise DataError(f'{place}: "task" is a text and "tools" a list')
    name = row.get(config.id_key)
    used = {config.prompt_key, config.messages_key, config.label_key, config.id_key, "task", "tools"}
    return Prompt(
        id=f"row-{place.row}" if name is None else str(name),
        messages=messages,
        text=value if messages is None else None,
        label=label,
        task=row.get("task"),
        tools=tuple(row.get("tools") or ()),
        metadata={k: v for k, v in row.items() if k not in used},
    )


def _messages(value: list[Any], key: str, place: Place) -> list[dict[str, Any]]:
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f'{place}: message {number} of "{key}" has no role and content: {message!r:.80}')
    return [dict(message) for message in value]


def check_size(config: JsonlConfig, rows: int, run_config: Any) -> str:
    """What a fixed number of epochs means for the run, or "" when it lasts. Raises DataError when it fills no step."""
    if config.epochs is None:
        return ""
    size, steps, have = run_config.rollout.groups_per_step, run_config.steps, rows * config.epochs
    said = f"{config.path} gives {have} prompts in {config.epochs} epochs"
    if have < size:
        raise DataError(
            f"{said}, and one step takes {size} (rollout.groups_per_step)",
            "leave data.jsonl.epochs out to go round again, or lower rollout.groups_per_step",
        )
    full, rest = divmod(have, size)
    lasts = f"{said}: enough for {full} of {steps} steps of {size}, with {rest} left over"
    return lasts if full < steps else ""


def _check(config: JsonlConfig, env: Environment) -> None:
    rows = len(load_prompts(config))
    if env.run_config is not None and "eval[" not in env.where and (note := check_size(config, rows, env.run_config)):
        logging.getLogger("miles.data.jsonl").warning(note)


def _build(config: JsonlConfig, context: BuildContext) -> JsonlSource:
    return JsonlSource(config, context)


COMPONENTS = {
    "miles_data_sources": [
        Component(
            name="jsonl",
            summary="prompts from JSON lines or parquet files",
            config=JsonlConfig,
            build=_build,
            check=_check,
        )
    ]
}
