"""Stored runs in a notebook: one or many, by path, glob or root; ready analyses of them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

import prorl
from prorl.analysis.analyses import ANALYSES
from prorl.cli.app import dispatch
from prorl.errors import NotFoundError, UserError
from prorl.types import Json
from tests.storage.compactable_run import run_of_many_parts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two equal runs."""
    for name in ("a", "b"):
        run_of_many_parts(tmp_path, name)
    return tmp_path


def test_many_runs_are_a_single_table_with_their_names(root: Path) -> None:
    runs = prorl.open(root / "*")
    sql = "select run_id, count(*) as n, sum(num_tokens) as t from rollouts group by 1 order by 1"
    first, other = runs.table(sql).to_pylist()
    assert (first["run_id"], other["run_id"], first["n"], other["t"]) == ("a", "b", 25, first["t"])
    lengths = runs.table(
        "select run_id, sum(len(token_ids)) as t from sequences group by 1 order by 1"
    )
    assert [row["t"] for row in lengths.to_pylist()] == [first["t"], other["t"]]
    assert runs.table("from deliveries").num_rows == 8
    assert runs.table("from scores").num_rows == 0
    assert runs.sql("select 1").fetchall() == [(1,)]


def test_paths_globs_and_roots(root: Path) -> None:
    assert [run.run_id for run in prorl.open(root).runs] == ["a", "b"]
    assert [run.run_id for run in prorl.open(root / "b", root / "b", f"{root}/[ab]").runs] == [
        "b",
        "a",
    ]
    assert [run.run_id for run in prorl.open(f"file://{root}/a").runs] == ["a"]
    with pytest.raises(NotFoundError, match="no run at"):
        prorl.open(root / "c*")


HUGE = "select max(strlen(repeat('x', 2000000000 - n))) as m from (select 1 as n), range(400)"
"""DuckDB looks up between rows only: one value takes seconds, whatever interrupts it."""


def test_a_time_limit_is_obeyed_inside_a_single_huge_value(root: Path) -> None:
    runs, rows = prorl.open(root), "select count(*) as n from rollouts"
    assert runs.table(rows, timeout_s=30.0).to_pylist() == runs.table(rows).to_pylist()
    began = time.monotonic()
    with pytest.raises(UserError, match="SQL was stopped after 1 s"):
        runs.table(HUGE, timeout_s=1.0)
    assert time.monotonic() - began < 60
    with pytest.raises(UserError, match="no_such"):
        runs.table("select * from no_such", timeout_s=30.0)


async def test_a_time_limit_in_a_notebook(root: Path) -> None:
    """The loop of a notebook runs already."""
    table = prorl.open(root / "a").table("select count(*) as n from rollouts", timeout_s=30.0)
    assert table.to_pylist() == [{"n": 25}]


def test_every_analysis_gives_x_and_y(root: Path) -> None:
    for name, analysis in ANALYSES.items():
        columns = prorl.open(root / "a").table(analysis.sql).column_names
        assert columns[0] == "x", name
        assert analysis.picture == "stack" or columns[1] == "y", name
    funnel = prorl.open(root / "a").table(ANALYSES["funnel"].sql).to_pylist()
    assert {row["x"]: row["y"] for row in funnel} == {
        "accepted": 0,
        "decided": 6,
        "kept": 6,
        "delivered": 4,
        "stale": 0,
    }
    (k1, *_) = prorl.open(root / "a").table(ANALYSES["pass"].sql).to_pylist()
    assert (k1["x"], k1["y"], k1["groups"]) == (1, 1.0, 6)


def test_a_report_is_a_single_file_that_loads_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.html"
    assert dispatch(["report", "a", "--out", str(out), "--root", str(root)]) == 0
    text = out.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    capsys.readouterr()
    assert dispatch(["report", "a", "--only", "funnel", "--json", "--root", str(root)]) == 0
    assert len(json.loads(capsys.readouterr().out)["funnel"]) == 5


def test_a_report_of_two_equal_runs_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["report", "a", "b", "--json", "--root", str(root)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["figures"]["rollouts"] == [25, 25]
    assert (report["shared_tasks"], report["changed_tasks"]) == (6, [])
    assert all(value == other for value, other in report["provenance"].values())


@pytest.mark.parametrize("text", ["{", "[]", '{"sha256": 5}', '{"sha256": {"/a/env.py": null}}'])
def test_a_damaged_job_file_costs_its_own_line(
    text: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (root / "a" / "manifest.json", root / "b" / "manifest.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "code_version": "0.1.0"}))
    (root / "a" / "job.json").write_text(text)
    assert dispatch(["report", "a", "b", "--json", "--root", str(root)]) == 0
    made = json.loads(capsys.readouterr().out)["provenance"]
    assert made.get("job.json", ["unreadable"])[0] == "unreadable"
    assert made["prorl"][0] == made["prorl"][1]


def test_a_report_of_two_runs_says_what_made_them_differ(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The env's own code, the task file, the served model."""
    for name, code, weights in (("a", "1" * 64, "x"), ("b", "2" * 64, "y")):
        (root / name / "job.json").write_text(json.dumps({"sha256": {f"/{name}/env.py": code}}))
        path = root / name / "manifest.json"
        manifest = json.loads(path.read_text())
        served = {"model": "m", "root": f"/models/{weights}"}
        manifest["backends"] = {"http://h:1": {"policy": "http://h:1", "served": served}}
        path.write_text(json.dumps(manifest))
    assert dispatch(["report", "a", "b", "--json", "--root", str(root)]) == 0
    made = json.loads(capsys.readouterr().out)["provenance"]
    assert made["file env.py"] == ["1" * 12, "2" * 12]
    assert made["policy"] == ["http://h:1 m /models/x", "http://h:1 m /models/y"]
    assert dispatch(["report", "a", "b", "--root", str(root)]) == 0
    output = capsys.readouterr().out
    assert "1" * 12 in output
    assert "envs" not in output, "only what differs"


def test_sql_over_several_runs_and_what_is_made_of_their_tables(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sql(*argv: str) -> list[dict[str, Json]]:
        assert dispatch(["sql", *argv, "--root", str(root), "--json"]) == 0
        rows: list[dict[str, Json]] = json.loads(capsys.readouterr().out)
        return rows

    counted = "select run_id, count(*) as n from rollouts group by 1 order by 1"
    assert sql("a", "b", counted) == [{"run_id": "a", "n": 25}, {"run_id": "b", "n": 25}]
    share = "select k, avg(pass_at_k) as p, count(*) as groups from passk group by 1 order by 1"
    by_analysis = prorl.open(root / "a").table(ANALYSES["pass"].sql).to_pylist()
    expected = [{"k": row["x"], "p": row["y"], "groups": row["groups"]} for row in by_analysis]
    assert sql("a", share) == expected
    assert sql("a", "b", share) == [{**row, "groups": 2 * row["groups"]} for row in expected]
    assert dispatch(["sql", "a", "--root", str(root)]) == 2
