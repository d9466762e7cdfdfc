"""The built-in data source `jsonl` and the built-in reward `exact-match`."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.builtin.data import COMPONENTS, JsonlConfig, load_prompts
from miles_core.builtin.rewards import ExactMatch, ExactMatchConfig, _is_quick
from miles_core.component import BuildContext, Environment
from miles_core.epochs import ListSource
from miles_core.errors import DataError
from miles_core.rows import Names, Place, RowMaker, value_problem
from miles_core.types import Prompt, Sample

(JSONL,) = COMPONENTS["miles_data_sources"]
D1_BYTES = (
    b"\xef\xbb\xbf"
    + (
        '{"prompt":"a","label":"1"}\r\n  \r\n  {"prompt":"b\u2028c 😀","label":"2"}\n     \n  {"prompt":"d","label":"3"}'
    ).encode()
)
D1_PROMPTS = ["a", "b\u2028c 😀", "d"]


def context(seed: int = 0) -> BuildContext:
    return BuildContext(component="data/jsonl", run_dir=Path(), seed=seed, run_config=None)


def write(folder: Path, rows: list, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return str(path)


def source(path: str, seed: int = 0, **options) -> ListSource:
    return JSONL.build(JsonlConfig(path=path, **options), context(seed))


def numbered(folder: Path, n: int, **options) -> ListSource:
    return source(write(folder, [{"prompt": f"q{i}", "label": str(i)} for i in range(1, n + 1)]), **options)


def environment(groups_per_step: int, steps: int, where: str = "data.use") -> Environment:
    rollout = SimpleNamespace(groups_per_step=groups_per_step)
    return Environment(run_config=SimpleNamespace(rollout=rollout, steps=steps), where=where)


# --- D1: what a line is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "zipped-under-another-name.jsonl"])
def test_D1_bom_blank_lines_crlf_line_separator_and_no_last_newline_give_three_rows(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(D1_BYTES if name == "data.jsonl" else gzip.compress(D1_BYTES))
    prompts = load_prompts(JsonlConfig(path=str(path)))
    assert [p.text for p in prompts] == D1_PROMPTS
    assert [p.label for p in prompts] == ["1", "2", "3"]
    assert [p.id for p in prompts] == ["row-1", "row-2", "row-3"]


def test_a_line_of_no_break_spaces_is_blank(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b"\xc2\xa0\xc2\xa0\n" + json.dumps(GOOD).encode())
    assert len(load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl")))) == 1


@pytest.mark.parametrize(("start", "kind"), [(b"PAR1\0\0", "parquet"), (b"\x28\xb5\x2f\xfd\0", "zstd")])
def test_other_formats_are_told_by_their_bytes_and_named_with_the_plugin_that_reads_them(tmp_path, start, kind):
    (tmp_path / "data.jsonl").write_bytes(start)
    with pytest.raises(DataError, match=rf"is a {kind} file(.|\n)*miles-file-data"):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl")))


def test_folders_and_globs_are_read_in_the_order_of_names_without_hidden_files(tmp_path):
    write(tmp_path, [{"prompt": "b", "label": 1}], "b.jsonl")
    write(tmp_path, [{"prompt": "a", "label": 1}], "a.jsonl")
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5\x16")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        prompts = load_prompts(JsonlConfig(path=str(path)))
        assert [(p.text, p.id) for p in prompts] == [("a", "row-1"), ("b", "row-2")]


def test_rows_are_numbered_in_their_file_and_named_over_all_files(tmp_path):
    write(tmp_path, [GOOD, GOOD], "a.jsonl")
    write(tmp_path, [GOOD, {"prompt": "q"}], "b.jsonl")
    with pytest.raises(DataError, match=r'b.jsonl: row 2 has no "label"'):
        load_prompts(JsonlConfig(path=str(tmp_path)))
    prompts = load_prompts(JsonlConfig(path=str(tmp_path), require_label=False))
    assert [p.id for p in prompts] == ["row-1", "row-2", "row-3", "row-4"]


def test_a_changed_file_is_read_anew(tmp_path):
    path = write(tmp_path, [GOOD])
    assert len(load_prompts(JsonlConfig(path=path))) == 1
    write(tmp_path, [GOOD, GOOD])
    assert len(load_prompts(JsonlConfig(path=path))) == 2


# --- D3: bad rows ----------------------------------------------------------------------------------------------------

GOOD = {"prompt": "q", "label": "1"}
CHAT = [{"role": "user", "content": "q"}]


def chat_of(**message) -> dict:
    return {"messages": [*CHAT, message], "label": "1"}


BAD_ROWS = {
    "no label": ({"prompt": "q"}, 'row 4 has no "label"'),
    "label null": (GOOD | {"label": None}, 'row 4: "label" is null'),
    "label half a character": (GOOD | {"label": "\ud83d"}, 'row 4: "label" holds half a character'),
    "no prompt": ({"label": "1"}, 'row 4 has no "prompt"'),
    "prompt null": (GOOD | {"prompt": None}, 'row 4: "prompt" is null'),
    "prompt empty": (GOOD | {"prompt": ""}, 'row 4: "prompt" is empty'),
    "no messages": (GOOD | {"prompt": []}, 'row 4: "prompt" is empty'),
    "prompt a number": (GOOD | {"prompt": 5}, 'row 4: "prompt" is a number'),
    "prompt half a character": (GOOD | {"prompt": "a\ud83d"}, 'row 4: "prompt" holds half a character'),
    "messages a text": (GOOD | {"messages": "q"}, 'row 4: "messages" is a text, not a list of messages'),
    "message without role": (GOOD | {"messages": [{"content": "x"}]}, 'row 4: message 1 of "messages" has no role'),
    "second message without content": (chat_of(role="user"), 'row 4: message 2 of "messages" has no content'),
    "content a number": (chat_of(role="user", content=5), 'row 4: message 2 of "messages" has a content that is no text'),
    "part without type": (chat_of(role="user", content=[{"text": "x"}]), "row 4: message 2"),
    "calls a text": (chat_of(role="assistant", content="", tool_calls="f()"), "row 4: message 2"),
    "half a character inside": (chat_of(role="user", content="\udc00"), 'row 4: "messages"[1].content holds half'),
    "a list": (["q", "1"], "row 4 is a list"),
    "a text": ("q", "row 4 is a text"),
    "tools a text": (chat_of(role="user", content="") | {"tools": "search"}, 'row 4: "tools" is a text'),
    "tool without name": (chat_of(role="user", content="") | {"tools": [{"type": "function"}]}, "row 4: tool 1"),
    "tools beside a plain text": (GOOD | {"tools": [{"name": "f"}]}, 'row 4: a plain text prompt has no place for "tools"'),
    "task a list": (GOOD | {"task": ["a"]}, 'row 4: "task" is a list'),
    "id true": (GOOD | {"id": True}, 'row 4: "id" is true or false'),
    "id a fraction": (GOOD | {"id": 1.5}, 'row 4: "id" is a number, not a text or a whole number'),
    "id empty": (GOOD | {"id": ""}, 'row 4: "id" is an empty text'),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_D3_a_bad_row_is_refused_by_number_and_key_before_anything_starts(tmp_path, kind):
    row, message = BAD_ROWS[kind]
    config = JsonlConfig(path=write(tmp_path, [GOOD, GOOD, GOOD, row, GOOD]))
    with pytest.raises(DataError) as error:
        JSONL.check(config, environment(1, 1))
    assert message in str(error.value) and "data.jsonl" in str(error.value)
    assert error.value.exit_code == 2


def test_D3_labels_may_be_absent_where_no_reward_reads_them(tmp_path):
    rows = [{"prompt": "q"}, {"prompt": "q", "label": None}]
    prompts = load_prompts(JsonlConfig(path=write(tmp_path, rows), require_label=False))
    assert [p.label for p in prompts] == [None, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows"),
        (b"\n \r\n", "no rows"),
        (b'{"prompt": "q"\n', "line 1 is not JSON"),
        (b'"\xff"\n', "line 1 is not UTF-8"),
        (b'{"prompt": "q", "label": NaN}\n', "line 1 is not JSON: NaN is no JSON number"),
        (b'{"prompt": "q", "label": "1", "label": "2"}\n', 'line 1 is not JSON: the key "label" stands twice'),
        (b'{"prompt": "q", "label": ' + b"9" * 5000 + b"}\n", "line 1 is not JSON"),
        (b'{"prompt": "q", "label": ' + b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        (b'{"prompt": "q", "label": 1e999}\n', 'row 1: "label" is inf'),
        (b'{"prompt": "q", "label": ' + b"[" * 99 + b"]" * 99 + b"}", 'row 1: "label".* is nested more than 64 deep'),
    ],
)
def test_files_that_cannot_be_read_are_data_errors(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl")))


def test_a_cut_gzip_file_is_a_data_error(tmp_path):
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(D1_BYTES)[:-12])
    with pytest.raises(DataError, match="is damaged or cut off after line 4"):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl.gz")))


def test_no_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        load_prompts(JsonlConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match=r"holds no .jsonl, .jsonl.gz file(.|\n)*its files: a.csv"):
        (tmp_path / "a.csv").write_text("a,b")
        load_prompts(JsonlConfig(path=str(tmp_path)))


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("miles_core.files.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "data.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + b" " * (2 << 20))
    with pytest.raises(DataError, match="line 2 is longer than 1 MiB"):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl")))


def test_a_second_row_of_the_same_id_is_refused(tmp_path):
    rows = [GOOD | {"id": "x"}, GOOD, GOOD | {"id": "x"}]
    with pytest.raises(DataError, match=r'row 3: "id" is "x", and so it is in row 1'):
        load_prompts(JsonlConfig(path=write(tmp_path, rows)))


def test_an_id_that_is_another_rows_number_is_refused(tmp_path):
    with pytest.raises(DataError, match=r'row 2: "id" is "row-2", and so it is in row 1'):
        load_prompts(JsonlConfig(path=write(tmp_path, [GOOD | {"id": "row-2"}, GOOD])))


def test_equal_hashes_of_ids_are_looked_at_again(monkeypatch):
    """All hashes equal: the second reading tells rows apart by their ids."""
    monkeypatch.setattr("miles_core.rows._hash", lambda name: 7)
    maker = RowMaker(JsonlConfig(path="x"), "data.jsonl")

    def check(*ids: str) -> None:
        names = Names()
        for name in ids:
            names.add(name)
        names.check(((Place("f", i), Prompt(id=name)) for i, name in enumerate(ids, 1)), maker)

    check("a", "b", "c")
    with pytest.raises(DataError, match='f: row 3: "id" is "a", and so it is in row 1'):
        check("a", "b", "a")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, "x", None, True, 1.5]}, ""),
        ({"a": [1, float("nan")]}, ".a[1] is nan, which is no number"),
        ({"a": {"b": b"x"}}, ".a.b is a bytes, which JSON has no form for"),
        ({1: "x"}, " has a key that is no text"),
        ((1, 2), " is a tuple, which JSON has no form for"),
    ],
)
def test_values_are_checked_to_their_depth(value, problem):
    assert value_problem(value) == problem


# --- What a row becomes ----------------------------------------------------------------------------------------------


def test_columns_become_prompts_messages_and_metadata(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {
            "id": 7,
            "messages": chat,
            "prompt": "not read",
            "label": [1, 2],
            "task": "t",
            "tools": [{"name": "f"}],
            "level": 3,
        },
        {"prompt": chat, "label": 0},
        {"prompt": "plain", "label": ""},
    ]
    a, b, c = load_prompts(JsonlConfig(path=write(tmp_path, rows)))
    assert (a.id, a.messages, a.text, a.label, a.task) == ("7", chat, None, [1, 2], "t")
    assert (a.tools, a.metadata) == (({"name": "f"},), {"level": 3})
    assert (b.messages, b.text, b.label) == (chat, None, 0)
    assert (c.messages, c.text, c.label) == (None, "plain", "")


def test_chat_and_system_wrap_a_text_prompt(tmp_path):
    (prompt,) = load_prompts(JsonlConfig(path=write(tmp_path, [GOOD]), chat=True, system=""))
    assert prompt.messages == [{"role": "system", "content": ""}, {"role": "user", "content": "q"}] and prompt.text is None


def test_a_chat_with_a_system_message_of_its_own_keeps_it(tmp_path):
    own = [{"role": "system", "content": "own"}, *CHAT]
    rows = [{"messages": own, "label": 1}, {"messages": CHAT, "label": 1}]
    a, b = load_prompts(JsonlConfig(path=write(tmp_path, rows), system="given"))
    assert a.messages == own and b.messages == [{"role": "system", "content": "given"}, *CHAT]


def test_a_system_message_for_a_plain_text_is_refused_and_not_ignored(tmp_path):
    with pytest.raises(DataError, match=r"row 1: a plain text prompt has no place for data.jsonl.system"):
        load_prompts(JsonlConfig(path=write(tmp_path, [GOOD]), system="be short"))


def test_keys_map_columns_also_inside_objects(tmp_path):
    """The layout of a well-known family of parquet sets, as JSON lines."""
    row = {
        "problem": CHAT,
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "18"},
        "extra": {"index": 3, "answer": "long"},
    }
    keys = {
        "prompt_key": "problem",
        "label_key": "reward_model.ground_truth",
        "id_key": "extra.index",
        "task_key": "data_source",
    }
    (prompt,) = load_prompts(JsonlConfig(path=write(tmp_path, [row]), metadata_keys=("extra.answer",), **keys))
    assert prompt == Prompt(id="3", messages=CHAT, label="18", task="gsm8k", metadata={"extra.answer": "long"})
    (prompt,) = load_prompts(JsonlConfig(path=write(tmp_path, [row]), **keys))
    assert prompt.metadata == {"reward_model": row["reward_model"], "extra": row["extra"]}
    with pytest.raises(DataError, match=r'has no "level" \(data.jsonl.metadata_keys\)(.|\n)*its columns: problem'):
        load_prompts(JsonlConfig(path=write(tmp_path, [row]), metadata_keys=("level",), **keys))


def test_tools_may_be_json_text_and_an_answer_may_be_calls_alone(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    chat = [*CHAT, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "2"}]
    rows = [{"messages": chat, "label": 1, "tools": t} for t in (tools, json.dumps(tools), [], None)]
    a, b, c, d = load_prompts(JsonlConfig(path=write(tmp_path, rows)))
    assert a.tools == b.tools == tuple(tools) and c.tools == d.tools == ()
    assert a.messages == [CHAT[0], {"role": "assistant", "content": None, "tool_calls": calls}, chat[2]]


# --- Order, epochs and resume ----------------------------------------------------------------------------------------


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path):
    data = numbered(tmp_path, 10)
    epochs = [[p.id for p in data.next(10)] for _ in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 10 for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_same_seed_gives_the_same_order_and_another_seed_another(tmp_path):
    ids = [[p.id for p in numbered(tmp_path, 10, seed=seed).next(25)] for seed in (3, 3, 4)]
    assert ids[0] == ids[1] != ids[2]


def test_without_shuffle_rows_come_in_file_order(tmp_path):
    data = numbered(tmp_path, 3, shuffle=False)
    assert [p.label for p in data.next(7)] == ["1", "2", "3", "1", "2", "3", "1"]


def test_draws_count_all_prompts_taken(tmp_path):
    data = numbered(tmp_path, 3)
    prompts = data.next(2) + data.next(5)
    assert [p.draw for p in prompts] == list(range(7))
    assert len({(p.id, p.draw) for p in prompts}) == 7


@given(
    rows=st.integers(1, 7), before=st.integers(0, 20), sizes=st.lists(st.integers(1, 6), max_size=4), shuffle=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_restore_goes_on_exactly_also_at_the_end_of_an_epoch(tmp_path_factory, rows, before, sizes, shuffle):
    folder = tmp_path_factory.mktemp("data")
    first = numbered(folder, rows, shuffle=shuffle)
    first.next(before)
    state = json.loads(json.dumps(first.state()))
    second = numbered(folder, rows, shuffle=shuffle)
    second.restore(state)
    for size in sizes:
        assert second.next(size) == first.next(size)


def test_restore_refuses_other_data(tmp_path):
    state = numbered(tmp_path, 3).state()
    other = source(write(tmp_path, [{"prompt": "q1", "label": "one"}] * 3))
    with pytest.raises(DataError, match=r"has changed since the checkpoint \(3 rows then, 3 now\)"):
        other.restore(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": False}, "as they come, not shuffled"),
        ({"seed": 1}, "under another seed"),
        ({"epochs": 2}, r"epochs = 2 gives 6 prompts, and the checkpoint has taken 7 already"),
    ],
)
def test_restore_refuses_a_cursor_of_another_order(tmp_path, options, message):
    first = numbered(tmp_path, 3)
    first.next(7)
    with pytest.raises(DataError, match=message):
        numbered(tmp_path, 3, **options).restore(first.state())


# --- D6: fewer rows than a step takes --------------------------------------------------------------------------------


def test_D6_ten_rows_for_a_step_of_sixteen_wrap_around_into_the_next_epoch(tmp_path):
    data = numbered(tmp_path, 10)
    step = data.next(16)
    assert len(step) == 16 and len({p.id for p in step[:10]}) == 10 and len({p.id for p in step[10:]}) == 6
    assert len({(p.id, p.draw) for p in step}) == 16
    assert data.num_prompts == 10  # with which the session tells the user


def test_D6_ten_rows_in_one_epoch_cannot_fill_a_step_of_sixteen(tmp_path):
    numbered(tmp_path, 10)
    config = JsonlConfig(path=str(tmp_path / "data.jsonl"), epochs=1)
    with pytest.raises(DataError, match=r"gives 10 prompts in 1 epochs, and one step takes 16"):
        JSONL.check(config, environment(groups_per_step=16, steps=1))
    JSONL.check(config, environment(groups_per_step=16, steps=1, where="eval[0].data.use"))  # evaluation has no steps


def test_D6_ten_rows_in_one_epoch_are_two_steps_of_four_and_the_log_names_the_rest(tmp_path, caplog):
    data = numbered(tmp_path, 10, epochs=1)
    with caplog.at_level(logging.WARNING):
        JSONL.check(data.options, environment(groups_per_step=4, steps=3))
    assert "10 prompts in 1 epochs: enough for 2 of 3 steps of 4, with 2 left over" in caplog.text
    assert [len(data.next(4)) for _ in range(4)] == [4, 4, 2, 0]


def test_D6_enough_rows_say_nothing(tmp_path, caplog):
    numbered(tmp_path, 10)
    JSONL.check(JsonlConfig(path=str(tmp_path / "data.jsonl"), epochs=2), environment(groups_per_step=4, steps=5))
    assert caplog.text == ""


# --- exact-match -----------------------------------------------------------------------------------------------------

MATCHES = [
    # options, response, label, reward
    ({}, " 42\n", "42", 1.0),
    ({}, "42", 42, 1.0),
    ({}, "", "42", 0.0),
    ({}, "", "", 1.0),
    ({}, "42", ["41", "42"], 1.0),
    ({"strip": False}, " 42", "42", 0.0),
    ({}, "Yes", "yes", 0.0),
    ({"case_sensitive": False}, "Yes", "yes", 1.0),
    ({"first_line": True}, "7\n8 + 1 = 9", "7", 1.0),
    ({"first_line": True}, "\n 7 \nmore", "7", 1.0),
    ({"first_line": True, "strip": False}, "\n7", "", 1.0),
    ({}, "7\n8 + 1 = 9", "7", 0.0),
    ({"after": "####"}, "#### 1 so #### 42", "42", 1.0),
    ({"after": "####"}, "42", "42", 0.0),
    ({"pattern": r"-?\d+"}, "from 5 to 42!", "42", 1.0),
    ({"pattern": r"<a>(.*?)</a>"}, "<a>1</a><a>2</a>", "2", 1.0),
    ({"pattern": r"\d+"}, "none", "", 0.0),
]


@pytest.mark.parametrize(("options", "response", "label", "reward"), MATCHES)
def test_exact_match(options, response, label, reward):
    assert ExactMatch(ExactMatchConfig(**options)).score(sample(response, label)) == reward


def sample(response: str, label) -> Sample:
    empty = np.zeros(0, np.float32)
    prompt = Prompt(id="p", text="q", label=label)
    return Sample(
        group_id="p@0", trajectory_id="p@0/0", index=0, tokens=empty, prompt_len=0, loss_mask=empty, logprobs=empty,
        response=response, prompt=prompt,
    )  # fmt: skip


def test_exact_match_without_a_label_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match="needs a label"):
        ExactMatch(ExactMatchConfig()).score(sample("42", None))


def test_exact_match_is_inline_only_without_a_regular_expression():
    assert _is_quick(ExactMatchConfig()) and not _is_quick(ExactMatchConfig(pattern="(a+)+b"))


def test_a_bad_pattern_is_refused_with_the_config():
    with pytest.raises(ValueError, match="not a regular expression"):
        ExactMatchConfig(pattern="(")
