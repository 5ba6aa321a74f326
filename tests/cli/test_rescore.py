"""A stored run graded again: no model, the same verdicts for the same tests, nothing changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.storage.files.appended import read_scores
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import query
from prorl.storage.read.verify import verify

RunCommand = Callable[..., str]


def tasks(folder: Path, name: str, *answers: int) -> str:
    rows = [
        {
            "task_id": f"sum-{i}",
            "env": "math",
            "prompt": f"What is {i} + {i}?",
            "data": {"answer": str(answer), "solution": f"#### {2 * i}"},
        }
        for i, answer in enumerate(answers)
    ]
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def root(tmp_path: Path, sandbox_kind: str) -> Path:
    """A root with a finished run `r` of three sums, all solved."""
    flags = {
        "tasks": tasks(tmp_path, "tasks.jsonl", 0, 2, 4),
        "policy": "oracle",
        "name": "r",
        "service": {"workers": 0, "sandbox": {"kind": sandbox_kind}},
    }
    plan = JobPlan.make(None, flags, [], root=tmp_path / "root")
    assert asyncio.run(run_plan(plan, json=True)) == 0
    return tmp_path / "root"


@pytest.fixture
def run_command(root: Path, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    def run(*argv: str, code: int = 0) -> str:
        capsys.readouterr()
        assert dispatch([*argv, "--root", str(root)]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def test_other_tests_give_other_rewards_and_change_nothing(
    root: Path, run_command: RunCommand, tmp_path: Path, sandbox_kind: str
) -> None:
    before = {path: path.read_bytes() for path in (root / "r").rglob("*.parquet")}
    kind = ("--sandbox", sandbox_kind, "--json")
    same = json.loads(run_command("eval", "--stored", "r", "--name", "again", *kind))
    assert (same["scored"], same["mean_reward"]) == (3, 1.0)
    changed = tasks(tmp_path, "changed.jsonl", 0, 2, 5)
    other = json.loads(
        run_command("eval", "--stored", "r", "--name", "changed", "--tasks", changed, *kind)
    )
    assert (other["scored"], round(other["mean_reward"], 3)) == (3, 0.667)
    assert {path: path.read_bytes() for path in before} == before
    assert verify(root / "r") == []
    both = (
        "select score, sum(s.reward) as r from scores s join rollouts using (rollout_id) group by 1"
    )
    scores = json.loads(run_command("sql", "r", both + " order by 1", "--json"))
    assert scores == [{"score": "again", "r": 3.0}, {"score": "changed", "r": 2.0}]
    provenance = read_scores(RunDir(root / "r"), "changed").column("provenance")[0].as_py()
    assert json.loads(provenance)["tasks"] == changed


def test_a_second_scoring_of_the_same_name_is_refused(
    run_command: RunCommand, sandbox_kind: str
) -> None:
    run_command("eval", "--stored", "r", "--name", "again", "--sandbox", sandbox_kind)
    assert "has a scoring 'again'" in run_command(
        "eval", "--stored", "r", "--name", "again", code=2
    )
    assert "score name '../x'" in run_command("eval", "--stored", "r", "--name", "../x", code=2)


SHAKY = """
import os
from pathlib import Path
from prorl.envs.base import BaseEnv
from prorl.errors import GraderError
from prorl.rubric import Rubric, reward
from prorl.types import FailureCode

HERE = Path(__file__).parent

@reward("shaky")
def shaky(task, artifact):
    asked = HERE / f"asked-{task.task_id}-{os.getpid()}-{os.urandom(4).hex()}"
    asked.touch()
    if not (HERE / "mended").exists() and task.task_id != "0":
        raise LookupError("no such key")
    return 1.0

class Env(BaseEnv):
    rubric = Rubric((shaky, 1.0))
"""


@pytest.mark.slow  # EVAL rests for 21 s between its four askings
def test_what_a_reward_raised_for_is_graded_later_and_was_sampled_once(
    tmp_path: Path, sandbox_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shaky.py").write_text(SHAKY)
    env, root = f"{tmp_path}/shaky.py:Env", tmp_path / "root"
    rows = [{"task_id": str(i), "env": env, "prompt": "?"} for i in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    service = {"workers": 0, "sandbox": {"kind": sandbox_kind}}
    flags = {"tasks": f"{tmp_path}/t.jsonl", "policy": "noop", "name": "r", "service": service}
    asyncio.run(run_plan(JobPlan.make(None, flags, [], root=root), json=True))
    counts = query(
        root / "r",
        "select status, failure_code, failure_message, num_sampled > 0 as sampled, attempt,"
        " count(*) as n from rollouts group by all order by n",
    ).to_pylist()
    assert [(row["status"], row["failure_code"], row["n"]) for row in counts] == [
        ("completed", "", 1),
        ("failed", "grader_error", 3),
    ]
    assert all((row["sampled"], row["attempt"]) == (True, 1) for row in counts)
    assert "LookupError: no such key" in counts[1]["failure_message"]
    assert len(list(tmp_path.glob("asked-1-*"))) == 4, "EVAL asked again, with the artifact"
    (tmp_path / "mended").touch()
    dispatch(["eval", "--stored", "r", "--name", "later", "--root", str(root), "--json"])
    assert '"scored":4' in capsys.readouterr().out.replace(" ", "")
    later = query(root / "r", "select count(reward) as n from scores").to_pylist()
    assert later == [{"n": 4}]
    assert verify(root / "r") == []
