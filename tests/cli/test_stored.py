"""Commands over a stored run: show, ls, sql, verify, status; plain lines and JSON."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.cli.commands.show import lines
from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.cli.runs import run_directory
from prorl.cli.summary import lines as summary_lines
from prorl.cli.summary import summarise
from prorl.errors import NotFoundError
from prorl.types import Json

ROWS = [
    {
        "task_id": "good",
        "env": "math",
        "prompt": "What is 2 + 2?",
        "data": {"answer": "4", "solution": "<<2+2=4>>\n#### 4"},
    },
    {"task_id": "evil\x1b[2J", "env": "noop", "prompt": "\x1b]0;owned\x07 \u202etxt"},
]

Cli = Callable[..., str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, sandbox_kind: str) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    tasks = folder / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps(row) for row in ROWS))
    flags = {
        "tasks": str(tasks),
        "policy": "oracle",
        "name": "r",
        "service": {"workers": 0, "sandbox": {"kind": sandbox_kind}},
    }
    plan = JobPlan.make(None, flags, [], root=folder / "root")
    assert asyncio.run(run_plan(plan, json=True)) == 0
    return folder / "root"


@pytest.fixture
def cli(root: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: str, code: int = 0) -> str:
        capsys.readouterr()
        assert dispatch([*argv, "--root", str(root)]) == code
        return capsys.readouterr().out

    return run


def test_a_path_without_a_run_names_the_runs_beside_it(root: Path, tmp_path: Path) -> None:
    for run, folder in ((f"{root}/other", root), (f"{tmp_path}/none", "empty"), ("x", "empty")):
        with pytest.raises(NotFoundError) as error:
            run_directory(run, "empty")
        assert f"no run {run!r} in {folder}: " in str(error.value)
        assert str(error.value).endswith("r" if folder == root else "none")


def test_columns_of_the_same_name_keep_their_values(cli: Cli) -> None:
    sql = "select 1 as a, 2 as a, status as a from rollouts limit 1"
    assert cli("sql", "r", sql).splitlines() == ["a\ta_1\ta_2", "1\t2\tcompleted"]
    assert json.loads(cli("sql", "r", sql, "--json")) == [{"a": 1, "a_1": 2, "a_2": "completed"}]


def test_show_names_the_runs(cli: Cli) -> None:
    assert cli("show").splitlines()[1].split("\t")[:4] == ["r", "2", "1", "0"]
    (line,) = json.loads(cli("show", "--json"))
    assert (line["run"], line["rollouts"], line["reward"], line["not_completed"]) == (
        "r",
        2,
        1.0,
        0,
    )


def test_a_run_whose_groups_are_not_all_decided_says_how_many(root: Path) -> None:
    whole = summarise(root / "r")
    begun = whole | {"groups_decided": [{"kept": True, "reason": "unfiltered", "n": 1}]}
    assert "  groups    kept 2 (unfiltered)" in summary_lines(whole)
    assert "  groups    kept 1 (unfiltered) · not decided 1" in summary_lines(begun)


def test_show_lists_the_other_runs_beside_a_damaged_run(root: Path, cli: Cli) -> None:
    bad = root / "bad" / "manifest.json"
    bad.parent.mkdir()
    bad.write_text("{")
    try:
        assert "r\t2\t1\t0" in cli("show", code=1)
        listing = json.loads(cli("show", "--json", code=1))
    finally:
        shutil.rmtree(bad.parent)
    assert [row["run"] for row in listing] == ["r", "bad"]
    assert "is not JSON" in listing[1]["error"]


def test_show_sums_the_run_up_from_its_files(cli: Cli) -> None:
    text = cli("show", "r")
    assert text.startswith("r: 2 rollouts in 2 groups")
    assert "mean 1.000 · rewarded 2 of 2 valid" in text
    assert json.loads(cli("show", "r", "--json"))["states"] == {"completed": 2}


def test_a_transcript_has_every_message_call_and_verdict(cli: Cli) -> None:
    text = cli("show", "r", "--rollout", "0")
    for words in (
        "task good",
        "[user]\n  What is 2 + 2?",
        "-> python(",
        "[tool python]\n  4",
        "#### 4",
        "completed · stopped: done",
        "reward 1 =",
    ):
        assert words in text


def test_a_transcript_cannot_reach_the_terminal(cli: Cli) -> None:
    text = cli("show", "r", "--rollout", "1")
    assert "evil\\x1b[2J" in text
    assert "\\x1b]0;owned\\x07 \\u202etxt" in text
    assert not set(text) & set("\x1b\x07\u202e")


def test_best_and_worst_choose_a_rollout(cli: Cli) -> None:
    for choice in ("--best", "--worst"):
        assert cli("show", "r", choice).startswith("rollout ")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["show", "r", "--failed"], "run r has no failed rollout"),
        (["show", "r", "--best", "--worst"], "several options that choose a rollout"),
        (["show", "r", "--rollout", "9"], "rollout 9"),
        (["show", "rr"], "did you mean `r`?"),
        (["sql", "r", "copy rollouts to '/tmp/x.csv'"], "SELECT"),
        (["report", "r", "--out", "nowhere/file"], "expected a file that can be written"),
        (["status"], "service"),
    ],
)
def test_a_missing_run_is_a_single_line(
    argv: list[str], expected: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch([*argv, "--root", str(root)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    (line,) = captured.err.splitlines()
    assert expected in line


def test_sql_prints_lines_or_json(cli: Cli) -> None:
    query = "select task_id, reward from rollouts order by rollout_id"
    assert cli("sql", "r", query).splitlines() == ["task_id\treward", "good\t1", "evil\\x1b[2J\t1"]
    assert json.loads(cli("sql", "r", query, "--json"))[0] == {"task_id": "good", "reward": 1.0}
    calls = "select distinct name, error from tool_calls"
    assert json.loads(cli("sql", "r", calls, "--json")) == [{"name": "python", "error": ""}]


def test_verify_finds_a_flipped_byte(cli: Cli, root: Path, tmp_path: Path) -> None:
    assert "all hashes, rows and invariants are right" in cli("verify", "r")
    copy = tmp_path / "copy"
    shutil.copytree(root / "r", copy)
    part = next(path for path in (copy / "rollouts").iterdir() if path.name != "empty.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    findings = json.loads(cli("verify", str(copy), "--json", code=1))
    assert any(finding["where"] == f"rollouts/{part.name}" for finding in findings)


def test_gc_says_how_a_damaged_part_is_mended(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root / "r", copy)
    for part in (copy / "rollouts").iterdir():
        if part.name != "empty.parquet":
            part.write_bytes(part.read_bytes()[:-8])
    before = sorted(copy.rglob("*"))
    assert dispatch(["gc", str(copy)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "; expected parts as their commits name them; `prorl verify copy` lists" in line
    assert sorted(copy.rglob("*")) == before


def test_a_transcript_shows_an_error_of_the_policys_call() -> None:
    call = json.dumps([{"name": "bash", "arguments": {}, "error": "no JSON"}])
    rollout: dict[str, Json] = {
        "rollout_id": 1,
        "task_id": "t",
        "sample_index": 0,
        "attempt": 1,
        "status": "failed",
        "stop_reason": "",
        "reward": None,
        "reward_parts": [],
        "failure_class": "infra",
        "failure_code": "worker_lost",
        "failure_message": "gone",
        **{f"{name}_s": 0.0 for name in ("queue", "init", "run", "llm", "tool", "eval")},
    }
    message = {"role": "assistant", "content": "", "tool_calls": call, "name": "", "turn": 0}
    text = "\n".join(
        lines({"rollout": rollout, "messages": [message], "turns": [], "attempts": []})
    )
    assert "-> bash()  ! no JSON" in text
    assert "failure infra/worker_lost: gone" in text
    attempt = {
        "attempt": 0,
        "stage": "run",
        "worker": "w",
        "node": "",
        "server": "",
        "seconds": 1.0,
        "num_sampled": 3,
        "failure_class": "infra",
        "failure_code": "worker_lost",
        "failure_message": "gone",
    }
    record = {"rollout": rollout, "messages": [message], "turns": [], "attempts": [attempt]}
    assert "\n".join(lines(record)).count("gone") == 1
