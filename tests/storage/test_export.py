"""An export equals the stored run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from prorl.analysis.export import KEYS, atif, chat, hf, sequences, trl, verl
from prorl.cli.app import dispatch
from prorl.schema.fields import SPANS
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from tests.storage.compactable_run import ORDER, run_of_many_parts

SERVED = [*ORDER, 1, 3]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six groups of four."""
    return run_of_many_parts(tmp_path)


@pytest.mark.parametrize(
    ("form", "name", "context", "rest", "mask", "logprobs"),
    [
        ("trl", "x.parquet", "prompt_ids", "completion_ids", "env_mask", "logprobs"),
        ("trl", "x.jsonl", "prompt_ids", "completion_ids", "env_mask", "logprobs"),
        ("verl", "x.parquet", "prompts", "responses", "response_mask", "rollout_log_probs"),
        ("verl", "x.jsonl", "prompts", "responses", "response_mask", "rollout_log_probs"),
        ("hf", "x", "", "token_ids", "loss_mask", "logprobs"),
    ],
)
def test_an_exported_row_equals_the_stored_sequence(
    run: RunDir,
    tmp_path: Path,
    form: str,
    name: str,
    context: str,
    rest: str,
    mask: str,
    logprobs: str,
) -> None:
    out = tmp_path / name
    assert dispatch(["export", run.root, str(out), "--as", form]) == 0
    if form == "hf":
        assert "data/*.parquet" in (out / "README.md").read_text()
        (out,) = (out / "data").iterdir()
    if out.suffix == ".parquet":
        rows = pq.read_table(out).to_pylist()
    else:
        rows = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    stored = [row for batch in sequences(StoredRun(run.root), False) for row in batch.to_pylist()]
    assert len(rows) == len(stored) > 0
    for row, sequence in zip(rows, stored, strict=True):
        assert [*row.get(context, []), *row[rest]] == sequence["token_ids"]
        assert {key: row[key] for key in (*KEYS, *SPANS)} == {
            key: sequence[key] for key in (*KEYS, *SPANS)
        }
        sampled = np.array(row[logprobs], np.float32)[np.array(row[mask], bool)]
        assert np.array_equal(sampled, np.array(sequence["logprobs"], np.float32))


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
    trajectories = list(atif(stored))
    assert len(trajectories) == 24
    first = trajectories[0]
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


@pytest.mark.parametrize("form", ["trl", "chat"])
def test_the_number_of_skipped_rollouts_is_reported_and_all_skips_none(
    run: RunDir, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "select count(distinct rollout_id) as n from sequences"
    total = StoredRun(run.where).sql(sql)["n"][0].as_py()
    argv = ["export", run.root, "--as", form, "--json"]
    assert dispatch([*argv, str(tmp_path / "kept")]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert dispatch([*argv, str(tmp_path / "all"), "--all"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["rows"] == whole["of"] == kept["of"] >= total
    assert kept["rows"] <= whole["rows"]
    if form == "chat":
        assert whole["rows"] == total
