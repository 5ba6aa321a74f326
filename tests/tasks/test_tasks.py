"""Task files: the formats, the JSON form, and a clear line for every mistake."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import subprocess
import tracemalloc
import zlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.envs import get_env
from prorl.errors import TaskError
from prorl.tasks import load_tasks, read_tasks, task_from_json, task_to_json
from prorl.tasks.rows import MAX_LINE
from prorl.types import Json, Task
from tests.user_package import installed

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
        task_id=st.text(
            st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1
        ),
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


ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
CASES = [{"input": "1\n", "output": "2\n"}]
TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


@pytest.mark.parametrize(
    ("row", "format_", "env", "data"),
    [
        ({"prompt": "1+1?", "answer": 2}, "answers", "math", {"answer": "2"}),
        ({"problem": "1+1?", "answer": "2", "id": 7}, "answers", "math", {"answer": "2"}),
        ({"question": "1+1?", "answer": "2"}, "answers", "math", {"answer": "2"}),
        (
            {"prompt": ASK, "data_source": "dapo", "reward_model": {"ground_truth": "2"}},
            "verl",
            "math",
            {"answer": "2"},
        ),
        (
            {"prompt": ASK, "reward_model": {"ground_truth": orjson.dumps(TESTS).decode()}},
            "verl",
            "code",
            {"cases": CASES},
        ),
        (
            {"responses_create_params": {"input": ASK}, "expected_answer": "2"},
            "nemo_gym",
            "math",
            {"answer": "2"},
        ),
        (
            {"responses_create_params": {"input": ASK}, "verifier_metadata": {"unit_tests": TESTS}},
            "nemo_gym",
            "code",
            {"cases": CASES},
        ),
    ],
)
def test_published_shapes_are_detected(
    tmp_path: Path, row: dict[str, Json], format_: str, env: str, data: dict[str, Json]
) -> None:
    for name, write in (("a.jsonl", _write), ("a.parquet", _write_parquet)):
        loaded = read_tasks(write(tmp_path / name, row))
        (task,) = loaded.tasks
        assert (loaded.format, task.env, task.prompt, task.data) == (format_, env, "1+1?", data)
        assert f"1 task, read as {format_}, for the env {env}" in loaded.about


def _write_parquet(path: Path, *rows: Mapping[str, Json]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_a_json_list_and_folders_of_a_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": i} for i in range(3)]
    (tmp_path / "list.json").write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
    assert [task.prompt for task in load_tasks(tmp_path / "list.json")] == ["0?", "1?", "2?"]
    shards = tmp_path / "hub" / "data"
    shards.mkdir(parents=True)
    for number in range(2):
        _write_parquet(shards / f"train-0000{number}-of-00002.parquet", rows[number])
    assert [task.prompt for task in load_tasks(tmp_path / "hub")] == ["0?", "1?"]
    _write_parquet(shards / "test-00000-of-00001.parquet", rows[2])
    with pytest.raises(TaskError, match=r"with test, train; expected files of one split; name one"):
        load_tasks(tmp_path / "hub")


def test_what_datasets_saved_to_disk(tmp_path: Path) -> None:
    """A DatasetDict's folder; the files are what `save_to_disk` writes."""
    split = tmp_path / "train"
    split.mkdir()
    table = pa.table({"question": ["a", "b"], "answer": ["1", "2"]})
    with pa.ipc.new_stream(split / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (split / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for folder in (tmp_path, split):
        assert [task.data["answer"] for task in load_tasks(folder)] == ["1", "2"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(TaskError, match=r"holds the splits train, test; .*name it: .*/train"):
        load_tasks(tmp_path)
    (split / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with pytest.raises(TaskError, match="not a whole Arrow stream"):
        load_tasks(split)


@pytest.mark.parametrize(
    ("row", "format_", "answer"),
    [
        ({"question": "q", "choices": ["a", "b"], "answer": 1}, "choices", 1),
        (
            {"question": "q", "options": ["a", "b"], "answer": "B", "answer_index": 1},
            "choices",
            "B",
        ),
        (
            {
                "question": "q",
                "choices": {"text": ["a", "b"], "label": ["1", "2"]},
                "answerKey": "2",
            },
            "arc",
            1,
        ),
    ],
)
def test_multiple_choice(tmp_path: Path, row: dict[str, Json], format_: str, answer: Json) -> None:
    loaded = read_tasks(_write(tmp_path / "a.jsonl", row), check=get_env("stem").check)
    (task,) = loaded.tasks
    assert (loaded.format, task.env) == (format_, "stem")
    assert task.data == {"choices": ["a", "b"], "answer": answer}


def test_the_right_choice_has_no_place_of_its_own(tmp_path: Path) -> None:
    rows = [
        {
            "Question": f"q{i}",
            "Correct Answer": "r",
            **{f"Incorrect Answer {j}": f"w{j}" for j in (1, 2, 3)},
        }
        for i in range(40)
    ]
    tasks = load_tasks(_write(tmp_path / "a.jsonl", *rows))
    assert all(task.data["choices"][task.data["answer"]] == "r" for task in tasks)
    assert {task.data["answer"] for task in tasks} == {0, 1, 2, 3}
    assert load_tasks(tmp_path / "a.jsonl") == tasks


SWE = {
    "instance_id": "django__django-11099",
    "repo": "django/django",
    "base_commit": "d26b2424",
    "problem_statement": "It fails.",
    "patch": "--- a/django/x.py\n+++ b/django/x.py\n",
    "test_patch": "--- a/tests/auth_tests/test_x.py\n+++ b/tests/auth_tests/test_x.py\n",
    "FAIL_TO_PASS": '["test_a (auth_tests.test_x.T)"]',
    "PASS_TO_PASS": "[]",
    "version": "3.0",
}


GO_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout d26b2424 x/x_test.go
git apply -v - <<'EOF_1'
diff --git a/x/x_test.go b/x/x_test.go
+// git apply
EOF_1
export A=1
go build ./...
: '>>>>> Start Test Output'
go test -v ./x
: '>>>>> End Test Output'
git checkout d26b2424 x/x_test.go
"""


@pytest.mark.parametrize(
    ("more", "data"),
    [
        (
            {},
            {
                "image": "docker://swebench/sweb.eval.x86_64.django_1776_django-11099",
                "setup": "cp -a /testbed/. .",
                "test_command": "./tests/runtests.py --verbosity 2 --settings=test_sqlite"
                " --parallel 1 auth_tests.test_x",
            },
        ),
        (
            {
                "docker_image": "docker.io/producer/swe.eval:v2",
                "repo": "a/b",
                "install_config": {
                    "test_cmd": "pytest -rA",
                    "env_vars": {"TZ": "UTC"},
                    "install": "pip install -e .",
                },
            },
            {
                "image": "docker://docker.io/producer/swe.eval:v2",
                "test_command": "pytest -rA tests/auth_tests/test_x.py",
            },
        ),
        (
            {"repo_archive": "/data/repo.tar", "install": "make", "test_cmd": ["a", "make test"]},
            {
                "archive": "/data/repo.tar",
                "setup": "make",
                "test_command": "a\nmake test tests/auth_tests/test_x.py",
            },
        ),
        (
            {
                "repo_archive": "/data/repo.tar",
                "install": ["pytest==7.4.4", "six>=1 ; python_version > '3'"],
                "test_cmd": "pytest -rA",
                "PASS_TO_PASS": ["tests/test_more.py::test_a", "tests/auth_tests/test_x.py::b"],
            },
            {
                "requirements": ["pytest==7.4.4", "six>=1 ; python_version > '3'"],
                "test_command": "pytest -rA tests/auth_tests/test_x.py tests/test_more.py",
            },
        ),
        (
            {
                "image": "swebench/sweb.eval.x86_64.gohugoio_1776_hugo-12768:latest",
                "repo": "gohugoio/hugo",
                "log_parser": "parse_log_gotest",
                "eval_type": "pass_and_fail",
                "eval_script": GO_SCRIPT,
            },
            {
                "image": "docker://swebench/sweb.eval.x86_64.gohugoio_1776_hugo-12768:latest",
                "setup": "cp -a /testbed/. .",
                "test_command": "cd /workspace\nexport A=1\ngo build ./...\ngo test -v ./x",
                "log_parser": "go",
                "environment": {},
            },
        ),
        (
            {"image": "mine", "test_command": "make test", "setup": "cp -a /src/. ."},
            {"image": "mine", "test_command": "make test", "setup": "cp -a /src/. ."},
        ),
    ],
)
def test_swe_rows_as_published(
    tmp_path: Path, more: dict[str, Json], data: dict[str, Json]
) -> None:
    path = _write(tmp_path / "a.jsonl", {**SWE, **more})
    (task,) = read_tasks(path, check=get_env("swe").check).tasks
    assert {key: task.data[key] for key in data} == data
    in_conda = ("sweb" in str(data) or "eval" in str(data)) and "go test" not in str(data)
    assert ("PYTHONPATH" in task.data.get("environment", {})) == in_conda
    assert task.data.get("environment", {}).get("TZ", "UTC") == "UTC"


def test_a_row_with_tests_that_cannot_run_is_refused_in_a_line(tmp_path: Path) -> None:
    check = get_env("swe").check
    patch = {"test_patch": "--- a/spec/x_spec.rb\n+++ b/spec/x_spec.rb\n"}
    with pytest.raises(TaskError, match=r"x_spec.rb are run is not known.*eval_script"):
        read_tasks(_write(tmp_path / "a.jsonl", {**SWE, **patch}), check=check)
    fields = {"image": "a/b", "eval_script": "make", "log_parser": "parse_log_googletest"}
    with pytest.raises(TaskError, match=r"log_parser is 'parse_log_googletest'; expected one of"):
        read_tasks(_write(tmp_path / "b.jsonl", {**SWE, **fields}), check=check)


def test_rows_of_nemotrons_blends_hold_their_producers_row(tmp_path: Path) -> None:
    inner = {key: value for key, value in SWE.items() if key != "problem_statement"}
    fields = {"problem_statement": "It fails.", "dataset_name": "SWE-Gym/SWE-Gym", "split": "train"}

    def row(of: dict[str, Json], **more: Json) -> dict[str, Json]:
        metadata = {**fields, "instance_dict": orjson.dumps(of).decode(), **more}
        return {"responses_create_params": {"input": [], "metadata": metadata}}

    path = _write(
        tmp_path / "a.jsonl",
        row(inner),
        row(
            {**inner, "instance_id": "a__b-1"},
            container_formatter=["docker://reg.example/x.{instance_id}:v1"],
        ),
        row({**inner, "instance_id": "a__b-2"}, container_formatter="/sif/{instance_id}.sif"),
        row({**R2E, "problem_statement": "It fails."}),
    )
    tasks = read_tasks(path, check=get_env("swe").check).tasks
    assert [task.data["image"] for task in tasks] == [
        "docker://swebench/sweb.eval.x86_64.django_1776_django-11099",
        "docker://reg.example/x.a_1776_b-1:v1",
        "/sif/a__b-2.sif",
        f"docker://{R2E['docker_image']}",
    ]
    assert {task.prompt for task in tasks} == {"It fails."}


SMITH_FAULT = (
    "diff --git a/pkg/x.py b/pkg/x.py\n--- a/pkg/x.py\n+++ b/pkg/x.py\n"
    "@@ -1,2 +1,1 @@\n-x = 1\n y = 2\n"
)
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "patch": SMITH_FAULT,
    "FAIL_TO_PASS": ["tests/test_x.py::test_one"],
    "PASS_TO_PASS": ["tests/unit/test_y.py::T::test_two"],
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "problem_statement": "One is wrong.",
}
LINES = [
    {"content": "y = 2", "type": "context"},
    {"content": "x = 1", "type": "added"},
]
RANGES = {"old_range": {"start": 1, "length": 1}, "new_range": {"start": 1, "length": 2}}
R2E = {
    "repo_name": "pyramid",
    "docker_image": "namanjain12/pyramid_final:abc",
    "commit_hash": "abc",
    "problem_statement": "One is wrong.",
    "expected_output_json": '{"T.test_one": "PASSED", "T.test_two": "FAILED"}',
    "parsed_commit_content": json.dumps(
        {
            "file_diffs": [
                {
                    "header": {"file": {"path": "pkg/x.py"}},
                    "old_file_content": "y = 2",
                    "hunks": [{"descriptor": RANGES, "line_group": {"all_lines": LINES}}],
                },
                {"header": {"file": {"path": "tests/test_x.py"}}, "hunks": []},
            ]
        }
    ),
}


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_of_swe_smith_and_r2e_gym(tmp_path: Path, parquet: bool) -> None:
    task_by_format = {}
    for name, row in (("smith", SMITH), ("r2e", R2E)):
        path = tmp_path / f"{name}.{'parquet' if parquet else 'jsonl'}"
        if parquet:
            pq.write_table(pa.Table.from_pylist([row]), path)
        else:
            _write(path, row)
        read = read_tasks(path, check=get_env("swe").check)
        task_by_format[read.format] = read.tasks[0]
    smith, r2e = task_by_format["swe-smith"], task_by_format["r2e-gym"]
    assert smith.data["image"] == (
        "docker://jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536"
    )
    assert SMITH_FAULT in smith.data["setup"]
    assert "@@ -1,1 +1,2 @@\n+x = 1\n y = 2\n" in smith.data["patch"]
    assert smith.data["test_command"].endswith(" tests/test_x.py tests/unit/test_y.py")
    assert r2e.task_id == "pyramid-abc"
    assert r2e.data["image"] == "docker://namanjain12/pyramid_final:abc"
    assert (r2e.data["FAIL_TO_PASS"], r2e.data["PASS_TO_PASS"]) == (["T.test_one"], [])
    assert r2e.data["patch"] == (
        "diff --git a/pkg/x.py b/pkg/x.py\n--- a/pkg/x.py\n+++ b/pkg/x.py\n"
        "@@ -1,1 +1,2 @@\n y = 2\n+x = 1\n"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**SMITH, "FAIL_TO_PASS": "[1]"}, "'FAIL_TO_PASS' is"),
        ({**R2E, "expected_output_json": "{}"}, "no test that passes"),
        ({**R2E, "parsed_commit_content": "["}, "parsed_commit_content is"),
    ],
)
def test_bad_rows_of_theirs_are_named(tmp_path: Path, row: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=f"line 1: .*{says}"):
        read_tasks(_write(tmp_path / "a.jsonl", row))


PACKED = base64.b64encode(zlib.compress(pickle.dumps('[{"input": "2", "output": "4"}]'))).decode()
LCB = {
    "question_content": "Double.",
    "question_id": "abc_1",
    "public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]',
    "private_test_cases": PACKED,
    "metadata": "{}",
    "starter_code": "",
}
DOUBLE = [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]


@pytest.mark.parametrize(
    ("row", "format_", "data"),
    [
        (LCB, "livecodebench", {"cases": DOUBLE}),
        (
            {
                **LCB,
                "public_test_cases": '[{"input": "[1]\\n3", "output": "[3]"}]',
                "private_test_cases": "[]",
                "metadata": '{"func_name": "scale"}',
                "starter_code": "class Solution:",
            },
            "livecodebench",
            {
                "starter_code": "class Solution:",
                "function": "scale",
                "cases": [{"input": [[1], 3], "output": [3]}],
            },
        ),
        (
            {
                "problem_id": 3,
                "question": "Double.",
                "solutions": '["print(2 * int(input()))"]',
                "input_output": '{"inputs": ["1", "2"], "outputs": ["2", "4"]}',
                "time_limit": "2.0 seconds",
            },
            "apps",
            {
                "cases": DOUBLE,
                "canonical_solution": "print(2 * int(input()))",
                "case_s": 2.0,
            },
        ),
        (
            {
                "name": "1_A",
                "description": "Double.",
                "public_tests": {"input": ["1"], "output": ["2"]},
                "private_tests": {"input": ["2"], "output": ["4"]},
                "time_limit": {"seconds": 1, "nanos": 0},
                "solutions": {"language": [2, 3], "solution": ["int main", "print()"]},
            },
            "contest",
            {"cases": DOUBLE, "canonical_solution": "print()", "case_s": 1.0},
        ),
        ({"id": "1/A", "description": "Double.", "examples": DOUBLE}, "contest", {"cases": DOUBLE}),
    ],
)
def test_programs_with_cases(
    tmp_path: Path, row: dict[str, Json], format_: str, data: dict[str, Json]
) -> None:
    loaded = read_tasks(_write(tmp_path / "a.jsonl", row), check=get_env("code").check)
    (task,) = loaded.tasks
    assert (loaded.format, task.prompt, dict(task.data)) == (format_, "Double.", data)


def test_a_pickle_that_is_more_than_a_text_is_not_loaded(tmp_path: Path) -> None:
    evil = base64.b64encode(zlib.compress(pickle.dumps(os.getcwd))).decode()
    with pytest.raises(TaskError, match=r"private_test_cases cannot be read \(it names "):
        load_tasks(_write(tmp_path / "a.jsonl", {**LCB, "private_test_cases": evil}))


def test_bad_rows_are_skipped_only_on_request_and_counted(tmp_path: Path) -> None:
    def refuse(task: Task) -> None:
        if task.data["answer"] == "13":
            raise TaskError("unlucky")

    good, unlucky = {"prompt": "a?", "answer": "1"}, {"prompt": "c?", "answer": 13}
    path = _write(tmp_path / "a.jsonl", good, b"{oops", {"prompt": "b?"}, unlucky)
    loaded = read_tasks(path, skip_invalid=True, check=refuse)
    assert [task.prompt for task in loaded.tasks] == ["a?"]
    assert [error.problem.split(": ")[0] for error in loaded.bad] == [
        f"{path}, line {number}" for number in (2, 3, 4)
    ]
    assert loaded.about.endswith("; 3 bad rows are left out")
    assert f"left out: {path}, line 4: unlucky" in loaded.bad_rows
    with pytest.raises(TaskError, match="line 2: unlucky"):
        read_tasks(_write(tmp_path / "b.jsonl", good, unlucky), check=refuse)
    with pytest.raises(TaskError, match="of no known format"):
        load_tasks(_write(tmp_path / "c.jsonl", {"q": 1}, good), skip_invalid=True)
    with pytest.raises(TaskError, match="holds no tasks that can be used"):
        read_tasks(_write(tmp_path / "d.jsonl", unlucky), skip_invalid=True, check=refuse)


def test_a_format_of_ones_own_is_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        from prorl.tasks.formats import Format
        from prorl.types import Task
        def read(row, index):
            return Task(task_id=str(index), env="noop", prompt=row["prompt"])
        FORMAT = Format("mine", ("prompt", "answer"), read)
    """
    points = {
        "prorl.formats": {
            "mine": "myformats:FORMAT",
        }
    }
    with installed(tmp_path, "myformats", {"myformats.py": code}, points, monkeypatch):
        loaded = read_tasks(_write(tmp_path / "a.jsonl", {"prompt": "p", "answer": "1"}))
    assert (loaded.format, loaded.tasks[0].env) == ("mine", "noop")


def test_gzip_blank_lines_byte_order_mark_env_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + orjson.dumps(GSM8K) + b"\n\n" + orjson.dumps(GSM8K) + b"\n")
    )
    assert [task.task_id for task in load_tasks(path)] == ["gsm8k/0", "gsm8k/1"]
    assert [task.env for task in load_tasks(path, env="noop", limit=1)] == ["noop"]


@pytest.mark.parametrize(
    ("rows", "line", "expected"),
    [
        ((GSM8K, b"{oops"), 2, "not valid JSON"),
        ((b"[1]",), 1, "found list"),
        (({"q": 1},), 1, "of no known format"),
        ((GSM8K, {"question": "x"}), 2, "'answer' is missing"),
        (({"question": 3, "answer": "#### 1"},), 1, "'question' is int"),
        ((GSM8K, {"question": "x", "answer": "no mark"}), 2, "'no mark'"),
        (({"question": "x", "answer": "y" * 41},), 1, "a last line `#### <number>`"),
        (({"question": "x", "answer": True},), 1, "the answer is 'True'"),
        (({"prompt": [{"role": "system", "content": "x"}], "answer": "1"},), 1, "the prompt is"),
        (({"prompt": "x", "reward_model": {}},), 1, "reward_model is {}"),
        (({"responses_create_params": {"input": "x"}},), 1, "expected_answer or"),
        ((HUMANEVAL, HUMANEVAL), 2, "also on line 1"),
        ((HUMANEVAL | {"test": " "},), 1, "'test' is empty"),
        ((PRORL | {"extra": 1},), 1, "unknown keys extra"),
        ((PRORL | {"data": []},), 1, "data is list"),
        ((b'{"question": "\xff"}',), 1, "not valid JSON"),
    ],
)
def test_a_bad_row_is_named_with_its_place(
    tmp_path: Path, rows: tuple[Mapping[str, Json] | bytes, ...], line: int, expected: str
) -> None:
    path = _write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert f"{path}, line {line}: " in str(caught.value)
    assert expected in str(caught.value)
    assert "expected" in str(caught.value)


def test_a_csv_file_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "g.csv"
    path.write_text('question,answer\n"What is 1, plus 1?",#### 2\n')
    with pytest.raises(TaskError, match="looks like CSV") as caught:
        read_tasks(path, skip_invalid=True)
    command = str(caught.value).partition("convert it: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert [task.data["answer"] for task in load_tasks(tmp_path / "g.csv.jsonl")] == ["2"]


def test_a_limit_bounds_what_is_read(tmp_path: Path) -> None:
    """10 GB behind two rows are not read for two tasks; a file of nothing is not read whole."""
    path = _write(tmp_path / "large.jsonl", PRORL, {**PRORL, "task_id": "b"})
    os.truncate(path, 10 << 30)
    assert [task.task_id for task in load_tasks(path, limit=2)] == ["a", "b"]
    tracemalloc.start()
    with pytest.raises(TaskError, match="line 3: more than 64 MiB without an end of line"):
        load_tasks(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LINE
    tracemalloc.stop()


def test_rows_that_repeat_another_under_their_own_id_are_reported(tmp_path: Path) -> None:
    other = {**GSM8K, "question": "Half of 46?"}
    about = read_tasks(_write(tmp_path / "g.jsonl", GSM8K, other, GSM8K)).about
    assert "3 tasks" in about
    assert "1 row repeats an earlier one (" in about
    assert "g.jsonl, line 3)" in about
    assert "earlier" not in read_tasks(_write(tmp_path / "h.jsonl", GSM8K, other)).about


def test_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wide.jsonl"
    path.write_text(json.dumps(PRORL), encoding="utf-16")
    with pytest.raises(TaskError, match="is UTF-16; expected UTF-8"):
        load_tasks(path)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no file"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="is a directory with no task file"):
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


MIXED: list[dict[str, Json]] = [
    {"env": "math", "data": {"answer": "7", "solution": "3 + 4"}},
    {"env": "stem", "data": {"answer": "B", "choices": ["one", "two"]}},
    {"env": "stem", "data": {"answer": "3 m", "tolerance": 0.05, "sandbox": {"memory_mb": 64}}},
    {"env": "code", "data": {"cases": [{"input": "1", "output": "2"}], "case_s": 2.0}},
    {"env": "code", "data": {"prompt": "def f():", "entry_point": "f", "test": "def check(f): 1"}},
    {"env": "swe", "data": {"files": {"a.py": "x = 1\n"}, "test_command": "true"}},
    {"env": "swe", "data": {"files": {"b.py": "y = 1\n"}, "environment": {"A": "1"}}},
]


def test_keys_that_a_table_gave_each_row_are_absent(tmp_path: Path) -> None:
    """A row of a table, and a line that was written from one, have the keys of all rows."""
    rows = [{"task_id": str(n), "prompt": "?", **row} for n, row in enumerate(MIXED)]
    wide = pa.Table.from_pylist(rows).to_pylist()
    assert "choices" in wide[0]["data"]
    assert "b.py" in wide[5]["data"]["files"]
    paths = [
        _write(tmp_path / "wide.jsonl", *wide),
        _write_parquet(tmp_path / "a.parquet", *rows),
    ]
    (tmp_path / "wide.json").write_bytes(orjson.dumps(wide))
    for path in (*paths, tmp_path / "wide.json"):
        assert [task.data for task in load_tasks(path)] == [row["data"] for row in MIXED], path


def test_objects_that_datasets_kept_as_texts_are_read(tmp_path: Path) -> None:
    """It does so where the rows' objects differ in types."""
    ours = {"task_id": "1", "env": "math", "prompt": "?", "data": '{"answer": 7, "x": null}'}
    verl = {"prompt": "?", "reward_model": '{"ground_truth": 7}'}
    for row, answer in ((ours, 7), (verl, "7")):
        for path in (
            _write(tmp_path / "a.jsonl", row),
            _write_parquet(tmp_path / "a.parquet", row),
        ):
            assert load_tasks(path)[0].data == {"answer": answer}
    with pytest.raises(TaskError, match="data is 7; expected the JSON text of an object"):
        load_tasks(_write(tmp_path / "b.jsonl", ours | {"data": "7"}))


def test_a_table_with_keys_of_other_formats_is_identified_by_its_columns(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "#### 2", "choices": None, "input_output": None}
    for path in (_write(tmp_path / "a.jsonl", row), _write_parquet(tmp_path / "a.parquet", row)):
        assert read_tasks(path).format == "gsm8k"


def test_none_in_a_list_is_a_value_and_decimals_are_exact(tmp_path: Path) -> None:
    case = {"input": [None, {"a": None}], "output": None}
    data = {"cases": [case], "function": "f"}
    row = {"task_id": "1", "env": "code", "prompt": "?", "data": data}
    assert load_tasks(_write(tmp_path / "a.jsonl", row))[0].data == data
    exact = {"prompt": "?", "answer": Decimal(2**100)}
    assert load_tasks(_write_parquet(tmp_path / "a.parquet", exact))[0].data["answer"] == str(
        2**100
    )
