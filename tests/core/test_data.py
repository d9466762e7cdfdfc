"""The built-in data source `jsonl` and the built-in reward `exact-match`."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.builtin.data import COMPONENTS, JsonlConfig, JsonlSource, load_prompts
from miles_core.builtin.rewards import ExactMatch, ExactMatchConfig, _is_quick
from miles_core.component import BuildContext, Environment
from miles_core.errors import DataError, RuntimeMissing
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


def source(path: str, seed: int = 0, **options) -> JsonlSource:
    return JSONL.build(JsonlConfig(path=path, **options), context(seed))


def numbered(folder: Path, n: int, **options) -> JsonlSource:
    return source(write(folder, [{"prompt": f"q{i}", "label": str(i)} for i in range(1, n + 1)]), **options)


def environment(groups_per_step: int, steps: int, where: str = "data.use") -> Environment:
    rollout = SimpleNamespace(groups_per_step=groups_per_step)
    return Environment(run_config=SimpleNamespace(rollout=rollout, steps=steps), where=where)


# --- D1: what a line is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_D1_bom_blank_lines_crlf_line_separator_and_no_last_newline_give_three_rows(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_bytes(D1_BYTES)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(D1_BYTES))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [{"prompt": prompt, "label": str(i)} for i, prompt in enumerate(D1_PROMPTS, 1)]
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    prompts = load_prompts(JsonlConfig(path=str(path)))
    assert [p.text for p in prompts] == D1_PROMPTS
    assert [p.label for p in prompts] == ["1", "2", "3"]
    assert [p.id for p in prompts] == ["row-1", "row-2", "row-3"]


def test_parquet_without_pyarrow_is_an_error_with_a_command(tmp_path, monkeypatch):
    (tmp_path / "data.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RuntimeMissing, match="pip install pyarrow"):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.parquet")))


def test_folders_and_globs_are_read_in_the_order_of_names(tmp_path):
    write(tmp_path, [{"prompt": "b", "label": 1}], "b.jsonl")
    write(tmp_path, [{"prompt": "a", "label": 1}], "a.jsonl")
    (tmp_path / "notes.txt").write_text("not data")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        prompts = load_prompts(JsonlConfig(path=str(path)))
        assert [(p.text, p.id) for p in prompts] == [("a", "row-1"), ("b", "row-2")]


# --- D3: bad rows ----------------------------------------------------------------------------------------------------

GOOD = {"prompt": "q", "label": "1"}
BAD_ROWS = {
    "no label": ({"prompt": "q"}, 'row 4 has no "label"'),
    "label null": (GOOD | {"label": None}, 'row 4 "label" is null'),
    "no prompt": ({"label": "1"}, 'row 4 has no "prompt"'),
    "prompt null": (GOOD | {"prompt": None}, 'row 4: "prompt" is null'),
    "prompt empty": (GOOD | {"prompt": ""}, 'row 4: "prompt" is empty'),
    "no messages": (GOOD | {"prompt": []}, 'row 4: "prompt" is empty'),
    "prompt a number": (GOOD | {"prompt": 5}, 'row 4: "prompt" is a int'),
    "message without role": (GOOD | {"messages": [{"content": "x"}]}, 'row 4: message 1 of "messages"'),
    "a list": (["q", "1"], "row 4 is a list"),
    "tools a text": (GOOD | {"tools": "search"}, "row 4: "),
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
    ],
)
def test_files_that_cannot_be_read_are_data_errors(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl")))


def test_a_cut_gzip_file_is_a_data_error(tmp_path):
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(D1_BYTES)[:-12])
    with pytest.raises(DataError, match="not a complete gzip file"):
        load_prompts(JsonlConfig(path=str(tmp_path / "data.jsonl.gz")))


def test_no_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        load_prompts(JsonlConfig(path=str(tmp_path / "none.jsonl")))


def test_a_second_row_of_the_same_id_is_refused(tmp_path):
    rows = [GOOD | {"id": "x"}, GOOD, GOOD | {"id": "x"}]
    with pytest.raises(DataError, match=r'row 3: "id" is "x", and so it is in row 1'):
        load_prompts(JsonlConfig(path=write(tmp_path, rows)))


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
        JSONL.check(data.config, environment(groups_per_step=4, steps=3))
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
