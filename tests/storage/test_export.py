"""What is exported is what is stored, and comes back equal."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from prorl.analysis.export import atif, chat, hf, trl, verl
from prorl.analysis.foreign import Line, read_lines
from prorl.analysis.importing import import_rows
from prorl.cli.app import dispatch
from prorl.errors import UserError
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from tests.storage.compacting import ORDER, replayed, run_of_many_parts

SERVED = [*ORDER, 1, 3]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six groups of four."""
    return run_of_many_parts(tmp_path)


@pytest.mark.parametrize(
    ("form", "name"),
    [("trl", "x.parquet"), ("trl", "x.jsonl"), ("verl", "x.parquet"), ("verl", "x.jsonl")],
)
def test_a_round_trip_is_equal(run: RunDir, tmp_path: Path, form: str, name: str) -> None:
    out = tmp_path / name
    assert dispatch(["export", run.root, str(out), "--as", form]) == 0
    assert dispatch(["import", str(out), "--name", "back", "--root", str(tmp_path)]) == 0
    assert verify(tmp_path / "back") == []
    assert replayed(RunDir(tmp_path / "back")) == replayed(run), "values and order"
    again = tmp_path / f"again-{name}"
    assert dispatch(["export", str(tmp_path / "back"), str(again), "--as", form]) == 0
    kept = (
        [name for name in pq.read_schema(out).names if name != "task_id"]
        if (out.suffix == ".parquet")
        else None
    )
    if kept:
        assert pq.read_table(again, columns=kept) == pq.read_table(out, columns=kept)


def test_a_dataset_folder_comes_back_equal(run: RunDir, tmp_path: Path) -> None:
    assert dispatch(["export", run.root, str(tmp_path / "hf"), "--as", "hf"]) == 0
    (file,) = (tmp_path / "hf" / "data").iterdir()
    assert "data/*.parquet" in (tmp_path / "hf" / "README.md").read_text()
    import_rows(read_lines(file), tmp_path / "back", "hf")
    assert replayed(RunDir(tmp_path / "back")) == replayed(run)


def test_each_format_has_the_rows_in_order_of_delivery(run: RunDir) -> None:
    stored = StoredRun(run.root)
    for form in (trl, verl, hf, chat):
        assert list(dict.fromkeys(row["group_id"] for row in form(stored))) == SERVED
    row = next(trl(stored))
    assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["env_mask"])
    assert [p == 0.0 for p in row["logprobs"]] == [not m for m in row["env_mask"]]
    assert next(verl(stored))["uid"] == str(SERVED[0])
    assert [m["role"] for m in next(chat(stored))["messages"]] == ["user", "assistant"]


def test_a_trajectory_of_atif(run: RunDir) -> None:
    stored = StoredRun(run.root)
    found = list(atif(stored))
    assert len(found) == 24
    first = found[0]
    assert [step["step_id"] for step in first["steps"]] == [1, 2, 3]
    assert [step["source"] for step in first["steps"]] == ["user", "agent", "agent"]
    for step in first["steps"][1:]:  # two sequences, of which one has a message
        metrics = step["metrics"]
        assert len(metrics["completion_token_ids"]) == len(metrics["logprobs"]) == 50
    assert first["final_metrics"]["total_completion_tokens"] == 100
    assert set(first) == {
        "schema_version",
        "session_id",
        "agent",
        "steps",
        "final_metrics",
        "extra",
    }
    assert orjson.dumps(first)


GOOD = {
    "prompt": "1+1?",
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4, 5],
    "env_mask": [1, 0, 1],
    "logprobs": [-0.5, 0.0, -0.25],
    "reward": 1.0,
}


def test_rows_of_others_without_keys_and_spans(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "reward": 0.0}, {**GOOD, "prompt": "2+2?"}]
    file = tmp_path / "theirs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert import_rows(read_lines(file), tmp_path / "theirs", "theirs") == 3
    assert verify(tmp_path / "theirs") == []
    stored = StoredRun(tmp_path / "theirs").read("sequences").to_pylist()
    assert [row["group_id"] for row in stored] == [0, 0, 1]
    assert stored[0]["token_ids"] == [1, 2, 3, 4, 5]
    assert stored[0]["logprobs"] == [-0.5, -0.25]
    assert stored[0]["span_end"] == [2, 3, 4, 5]
    assert stored[0]["span_kind"] == [0, 1, 0, 1]
    assert stored[0]["span_turn"] == [0, 0, 0, 1]


SPANNED = {
    "span_end": [5],
    "span_kind": [1],
    "span_version": [0],
    "span_turn": [0],
    "span_temperature": [1.0],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"completion_ids": None}, "x:2: no list completion_ids"),
        ({"completion_ids": [3, 4]}, "x:2: 3 of env_mask for 2 of completion_ids"),
        ({"logprobs": [0.5, 0.0, -0.1]}, "x:2: "),
        ({"logprobs": ["a", 0.0, -0.1]}, "x:2: logprobs"),
        ({"completion_ids": [3, 2**40, 1]}, "x:2: completion_ids"),
        ({"reward": None}, "x:2: reward None"),
        ({"rollout_id": 0}, "x:2: sequence 0 comes twice"),
        ({"rollout_id": -1}, "x:2: rollout_id -1"),
        ({"attempt": 2**40}, "x:2: attempt 1099511627776"),
        ({"reward": 10**400}, "x:2: a reward above all floats"),
        ({"env_mask": [0, 2, 1]}, "x:2: 2 in env_mask"),
        ({**SPANNED, "span_end": ["a"]}, "x:2: span_end"),
        ({**SPANNED, "span_end": [None]}, "x:2: span_end"),
    ],
)
def test_a_refused_row_is_named_by_its_line(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    lines = [Line("x:1", GOOD), Line("x:2", {**GOOD, **change})]
    with pytest.raises(UserError, match=said):
        import_rows(lines, tmp_path / "run", "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["trl", "chat"])
def test_it_says_how_many_were_left_out_and_all_leaves_none_out(
    run: RunDir, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "select count(distinct rollout_id) as n from sequences"
    total = StoredRun(run.where).sql(asked)["n"][0].as_py()
    argv = ["export", run.root, "--as", form, "--json"]
    assert dispatch([*argv, str(tmp_path / "kept")]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert dispatch([*argv, str(tmp_path / "all"), "--all"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["rows"] == whole["of"] == kept["of"] >= total
    assert kept["rows"] <= whole["rows"]
    if form == "chat":
        assert whole["rows"] == total
