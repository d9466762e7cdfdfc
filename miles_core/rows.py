"""Rows as prompts: what every data source that reads a table shares - options, checks, and messages that say where.

A source reads rows from somewhere and calls `make_prompt` on each. Everything is checked before a run starts, so that a
bad row is reported by its number and not by a reward an hour later.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from miles_core.component import ComponentConfig
from miles_core.errors import DataError
from miles_core.types import Prompt

MAX_DEPTH = 64
"""Levels of lists and objects inside one column; what is deeper is no data, and would end in a RecursionError."""
_ABSENT = object()


class RowOptions(ComponentConfig):
    """Options of every source of rows. A key with dots (`reward_model.ground_truth`) reaches into objects, unless there is
    a column of just that name; a null counts as absent."""

    path: str = Field(min_length=1)
    """Where the rows are."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages. Dots reach into objects: `extra.question`."""
    messages_key: str = "messages"
    """Column of chat messages; where a row has it, the prompt column is not read."""
    label_key: str = "label"
    """Column of the right answer, of any JSON type."""
    id_key: str = "id"
    """Column of a unique name, a text or a whole number; rows without it are named row-1, row-2, ... over all files."""
    task_key: str = "task"
    """Column of the task's name, a text."""
    tools_key: str = "tools"
    """Column of the tools that a chat may call: a list of JSON descriptions, or that list as JSON text."""
    metadata_keys: tuple[str, ...] | None = None
    """Columns that become metadata, which rewards can read; without it, all that have no meaning of their own."""
    require_label: bool = True
    """Refuse rows whose label is missing or null; false where no reward reads it."""
    chat: bool = False
    """Send a text prompt as the message of a user, through the chat template, instead of as plain text."""
    system: str | None = None
    """A system message put before every chat that does not begin with one; "" is an empty one."""
    shuffle: bool = True
    """Another order in each epoch, from the run's seed."""
    epochs: int | None = Field(default=None, gt=0)
    """Times that the data is gone through; without it, epochs follow each other for as long as the run goes on."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a row stands, for messages: its number in the file, from 1 and without blank lines, and the file's line.

    `arrow`: the row was an Arrow table's, which fills up objects that have different keys with nulls; in messages and
    tools these are left out.
    """

    file: Path | str
    row: int
    line: int | None = None
    arrow: bool = False

    def __str__(self) -> str:
        return f"{self.file}: row {self.row}" + (f" (line {self.line})" if self.line not in (None, self.row) else "")


class RowMaker:
    """Makes prompts of rows. `table` is the component's table in the config, for messages: "data.jsonl"."""

    def __init__(self, options: RowOptions, table: str) -> None:
        self.options, self.table = options, table
        keys = (options.prompt_key, options.messages_key, options.label_key, options.id_key)
        self._used = {*keys, options.task_key, options.tools_key}

    def make(self, row: Any, place: Place, number: int) -> Prompt:
        """One row as a prompt; `number` names a row without an id. Raises DataError naming row and column."""
        options = self.options
        if not isinstance(row, dict):
            raise DataError(f"{place} is {kind_of(row)}, not an object with columns")
        messages, text = self._chat_or_text(row, place)
        tools = self._tools(row, place)
        if text is not None and (tools or options.system is not None):
            what = f'"{options.tools_key}"' if tools else f"{self.table}.system"
            raise DataError(
                f"{place}: a plain text prompt has no place for {what}",
                f"{self.table}.chat = true sends the text as a user's message",
            )
        task = self._known(row, options.task_key)
        if task is not None and not isinstance(task, str):
            raise DataError(f'{place}: "{options.task_key}" is {kind_of(task)}, not a text')
        prompt = Prompt(
            id=self._id(row, place, number),
            messages=messages,
            text=text,
            label=self._label(row, place),
            task=task,
            tools=tools,
            metadata=self._metadata(row, place),
        )
        for name, value in (
            (self._prompt_column(row), messages or text),
            (options.label_key, prompt.label),
            (options.tools_key, list(tools)),
            (options.id_key, prompt.id),
            (options.task_key, task),
            *prompt.metadata.items(),
        ):
            if problem := value_problem(value):
                raise DataError(f'{place}: "{name}"{problem}', *self._advice(name))
        return prompt

    def _known(self, row: dict[str, Any], key: str) -> Any:
        """The value of a column, None where it is absent."""
        value = pick(row, key)
        return None if value is _ABSENT else value

    def _chat_or_text(self, row: dict[str, Any], place: Place) -> tuple[list[dict[str, Any]] | None, str | None]:
        options, key = self.options, self._prompt_column(row)
        value = pick(row, key)
        if value is _ABSENT:
            raise DataError(f'{place} has no "{key}"', _columns(row), f"{self.table}.prompt_key names another column")
        if value is None or value in ("", []):
            raise DataError(f'{place}: "{key}" is {"null" if value is None else "empty"}')
        if isinstance(value, list):
            return self._with_system(self._messages(value, key, place)), None
        if not isinstance(value, str) or (key == options.messages_key and key != options.prompt_key):
            wanted = "a list of messages" if key == options.messages_key else "a text or a list of messages"
            raise DataError(f'{place}: "{key}" is {kind_of(value)}, not {wanted}')
        return (self._with_system([{"role": "user", "content": value}]), None) if options.chat else (None, value)

    def _prompt_column(self, row: dict[str, Any]) -> str:
        options = self.options
        return options.prompt_key if self._known(row, options.messages_key) is None else options.messages_key

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.options.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.options.system}, *messages]

    def _messages(self, value: list[Any], key: str, place: Place) -> list[dict[str, Any]]:
        messages = without_nulls(value) if place.arrow else value
        for number, message in enumerate(messages, 1):
            if problem := message_problem(message):
                raise DataError(f'{place}: message {number} of "{key}" {problem}: {message!r:.80}')
        return [{"content": None, **message} if "content" not in message else dict(message) for message in messages]

    def _tools(self, row: dict[str, Any], place: Place) -> tuple[dict[str, Any], ...]:
        key, value = self.options.tools_key, self._known(row, self.options.tools_key)
        if value is None or value in ("", []):
            return ()
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise DataError(f'{place}: "{key}" is a text, and not the JSON of a list of tools: {value!r:.80}') from None
        elif place.arrow:
            value = without_nulls(value)
        if not isinstance(value, list):
            raise DataError(f'{place}: "{key}" is {kind_of(value)}, not a list of tools')
        for number, tool in enumerate(value, 1):
            inner = tool.get("function", tool) if isinstance(tool, dict) else None
            if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
                raise DataError(f'{place}: tool {number} of "{key}" has no name: {tool!r:.80}')
        return tuple(value)

    def _label(self, row: dict[str, Any], place: Place) -> Any:
        key = self.options.label_key
        value = pick(row, key)
        if self.options.require_label and (value is None or value is _ABSENT):
            raise DataError(
                f'{place}: "{key}" is null' if value is None else f'{place} has no "{key}"',
                *(() if value is None else (_columns(row),)),
                f"{self.table}.require_label = false accepts it, where no reward reads the label",
            )
        return None if value is _ABSENT else value

    def _id(self, row: dict[str, Any], place: Place, number: int) -> str:
        key, value = self.options.id_key, self._known(row, self.options.id_key)
        if value is None:
            return f"row-{number}"
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise DataError(f'{place}: "{key}" is {kind_of(value)}, not a text or a whole number')
        return str(value)

    def _metadata(self, row: dict[str, Any], place: Place) -> dict[str, Any]:
        names = self.options.metadata_keys
        if names is None:
            return {key: value for key, value in row.items() if key not in self._used and value is not None}
        values = {name: pick(row, name) for name in names}
        if absent := [name for name, value in values.items() if value is _ABSENT]:
            raise DataError(f'{place} has no "{absent[0]}" ({self.table}.metadata_keys)', _columns(row))
        return {name: value for name, value in values.items() if value is not None}

    def _advice(self, name: str) -> tuple[str, ...]:
        if name in self._used or self.options.metadata_keys is not None:
            return ()
        return (f"rewards could not read it; {self.table}.metadata_keys names the columns to keep",)


def pick(row: dict[str, Any], key: str) -> Any:
    """The value at `key`: a column of that name, or with dots a way into objects. `_ABSENT` where there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def message_problem(message: Any) -> str:
    """What is wrong with a chat message, or "": it has a role, and a content (a text or parts) or calls of tools."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        return "has no role and content"
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls)):
        return "has tool_calls that are no list of objects"
    if isinstance(content, list):
        parts = all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
        return "" if parts and content else "has content parts without a type"
    if content is None and calls:
        return ""
    return "" if isinstance(content, str) else "has no content" if content is None else "has a content that is no text"


def value_problem(value: Any, depth: int = 0) -> str:
    """How a value, or one inside it, is not JSON, as the end of a sentence about its column; "" where all of it is."""
    if value is None or isinstance(value, bool | int):
        return ""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f" holds half a character ({value[error.start]!r} without its other half)"
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f" is {value}, which is no number"
    if depth >= MAX_DEPTH:
        return f" is nested more than {MAX_DEPTH} deep"
    if isinstance(value, dict):
        inside: Iterable[tuple[str, Any]] = ((f".{key}", inner) for key, inner in value.items())
        if any(not isinstance(key, str) for key in value):
            return " has a key that is no text"
    elif isinstance(value, list):
        inside = ((f"[{number}]", inner) for number, inner in enumerate(value))
    else:
        return f" is {kind_of(value)}, which JSON has no form for"
    return next((at + problem for at, inner in inside if (problem := value_problem(inner, depth + 1))), "")


def without_nulls(value: Any) -> Any:
    """`value` without the keys of objects whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def kind_of(value: Any) -> str:
    """A value's type in words."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    if value is None or value == "":
        return "null" if value is None else "an empty text"
    return words.get(type(value), f"a {type(value).__name__}")


def _columns(row: dict[str, Any]) -> str:
    return f"its columns: {', '.join(map(str, row)) or 'none'}"[:300]


# --- Whole data sets -------------------------------------------------------------------------------------------------


def collect(rows: Iterable[tuple[Place, Any]], maker: RowMaker) -> list[Prompt]:
    """All rows as prompts, in order. Raises DataError for the first bad row, and for an id that comes twice."""
    prompts: list[Prompt] = []
    named: dict[str, Place] = {}
    for number, (place, row) in enumerate(rows, 1):
        prompt = maker.make(row, place, number)
        if prompt.id in named:
            raise twice(prompt.id, place, named[prompt.id], maker)
        named[prompt.id] = place
        prompts.append(prompt)
    return prompts


def twice(name: str, place: Place, first: Place, maker: RowMaker) -> DataError:
    where = f"row {first.row}" if first.file == place.file else str(first)
    return DataError(f'{place}: "{maker.options.id_key}" is "{name}", and so it is in {where}')


class Digest:
    """SHA-256 over prompts in order: equal for equal prompts, from whatever format they were read."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, p: Prompt) -> None:
        row = [p.id, p.messages, p.text, p.label, p.task, p.tools, p.metadata]
        self._hash.update(json.dumps(row, sort_keys=True).encode())

    def hex(self) -> str:
        return self._hash.hexdigest()


class Names:
    """Finds ids that come twice, in 8 bytes a row: hashes first, and the rows whose hashes are equal once more."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, name: str) -> None:
        self._hashes.append(_hash(name))

    def check(self, again: Iterator[tuple[Place, Prompt]], maker: RowMaker) -> None:
        """Raises DataError for the first id that comes twice; `again` is read only when two hashes are equal."""
        ordered = np.sort(np.frombuffer(self._hashes, np.uint64)) if self._hashes else np.zeros(0, np.uint64)
        suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        named: dict[str, Place] = {}
        for place, prompt in again if suspects else ():
            if _hash(prompt.id) in suspects:
                if prompt.id in named:
                    raise twice(prompt.id, place, named[prompt.id], maker)
                named[prompt.id] = place


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
