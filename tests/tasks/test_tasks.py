"""Task files: the three formats, the JSON form, and a clear line for every mistake."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.errors import TaskError
from prorl.tasks import load_tasks, task_from_json, task_to_json
from prorl.types import Json, Task

DATA = Path(__file__).parents[2] / "../shared/data"
GSM8K = {"question": "Half of 48?", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "    return 1\n",
    "test": "def check",
}
PRORL = {"task_id": "a", "env": "noop", "prompt": "p", "data": {"x": [1]}}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _write(path: Path, *rows: Mapping[str, Json] | bytes) -> Path:
    path.write_bytes(
        b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows) + b"\n"
    )
    return path


@given(
    st.builds(
        Task,
        task_id=st.text(min_size=1),
        env=st.text(),
        prompt=st.text(),
        data=st.dictionaries(st.text(), values),
        data_source=st.text(),
    )
)
def test_json_round_trip(task: Task) -> None:
    text = task_to_json(task)
    assert task_from_json(text) == task
    assert task_to_json(task_from_json(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"task_id":"a","env":"b","prompt":1}',
        '{"task_id":"","env":"b","prompt":"p"}',
    ],
)
def test_json_of_no_task_is_refused(text: str) -> None:
    with pytest.raises(TaskError):
        task_from_json(text)


def test_formats_are_told_apart(tmp_path: Path) -> None:
    (math,) = load_tasks(_write(tmp_path / "a.jsonl", GSM8K))
    assert (math.task_id, math.env, math.data["answer"], math.data_source) == (
        "gsm8k/0",
        "math",
        "1024",
        "gsm8k",
    )
    (code,) = load_tasks(_write(tmp_path / "b.jsonl", HUMANEVAL))
    assert (code.task_id, code.env, code.data["entry_point"]) == ("HumanEval/0", "code", "f")
    (own,) = load_tasks(_write(tmp_path / "c.jsonl", PRORL))
    assert own == Task(task_id="a", env="noop", prompt="p", data={"x": [1]})


def test_gzip_blank_lines_byte_order_mark_env_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + orjson.dumps(GSM8K) + b"\n\n" + orjson.dumps(GSM8K) + b"\n")
    )
    assert [task.task_id for task in load_tasks(path)] == ["gsm8k/0", "gsm8k/1"]
    assert [task.env for task in load_tasks(path, env="noop", limit=1)] == ["noop"]


@pytest.mark.parametrize(
    ("rows", "line", "found"),
    [
        ((GSM8K, b"{oops"), 2, "not valid JSON"),
        ((b"[1]",), 1, "found list"),
        (({"q": 1},), 1, "of no known format"),
        ((GSM8K, {"question": "x"}), 2, "'answer' is missing"),
        (({"question": 3, "answer": "#### 1"},), 1, "'question' is int"),
        (({"question": "x", "answer": "no mark"},), 1, "'no mark'"),
        ((HUMANEVAL, HUMANEVAL), 2, "also on line 1"),
        ((HUMANEVAL | {"test": " "},), 1, "'test' is empty"),
        ((PRORL | {"extra": 1},), 1, "unknown keys extra"),
        ((PRORL | {"data": []},), 1, "data is list"),
        ((b'{"question": "\xff"}',), 1, "not valid JSON"),
    ],
)
def test_a_bad_row_is_named_with_its_place(
    tmp_path: Path, rows: tuple[Mapping[str, Json] | bytes, ...], line: int, found: str
) -> None:
    path = _write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert f"{path}, line {line}: " in str(caught.value)
    assert found in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no file"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="is a directory"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match="holds no tasks"):
        load_tasks(_write(tmp_path / "empty.jsonl"))
    with pytest.raises(TaskError, match="a positive number"):
        load_tasks(tmp_path / "empty.jsonl", limit=0)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(orjson.dumps(GSM8K))[:-9])
    with pytest.raises(TaskError, match="not a whole gzip file"):
        load_tasks(tmp_path / "cut.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "count", "env"),
    [("gsm8k/train-2000.jsonl", 2000, "math"), ("humaneval/HumanEval.jsonl.gz", 164, "code")],
)
def test_the_real_files_load(name: str, count: int, env: str) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"the data file {name} is not beside this checkout")
    tasks = load_tasks(DATA / name)
    assert len(tasks) == count
    assert {task.env for task in tasks} == {env}
    assert all(task_from_json(task_to_json(task)) == task for task in tasks[:50])
