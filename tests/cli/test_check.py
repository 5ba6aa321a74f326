"""`prorl check` on tasks of an env of one's own: what its reference solution does is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.cli.commands import check as check_command

ENV = """
from prorl.envs.base import BaseEnv, Solution, tool
from prorl.rubric import Rubric, reward
from prorl.types import ToolCall


@reward("exact")
def exact(task, artifact):
    return float(artifact.decode() == task.data["answer"])


class Capitals(BaseEnv):
    name = "capitals"
    needs = ("answer",)
    rubric = Rubric((exact, 1.0))

    @tool("Look up a word.", word={"type": "string"})
    def look_up(self, task, word):
        return "Oslo"

    def reference(self, task):
        return Solution((ToolCall("TOOL", {"word": "Norway"}),), task.data["answer"])
"""


@pytest.mark.parametrize(
    ("tool", "code", "expected"),
    [
        ("look_up", 0, "1 task: reference right, twice the same; useless answer wrong"),
        (
            "lookup",
            1,
            "norway: the reference solution calls 'lookup': there is no tool 'lookup'; did you mean"
            " 'look_up'?",
        ),
    ],
)
def test_a_reference_that_calls_a_tool_that_is_not_there_is_refused(
    tool: str,
    code: int,
    expected: str,
    tmp_path: Path,
    sandbox_kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its answer is right all the same: nobody would see that the tool was never used."""
    (tmp_path / "capitals.py").write_text(ENV.replace("TOOL", tool))
    row = {"task_id": "norway", "env": "capitals.py:Capitals", "prompt": "Capital of Norway?"}
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({**row, "data": {"answer": "Oslo"}}))
    assert dispatch(["check", str(tasks), "--sandbox", sandbox_kind]) == code
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("partial_credit = True", "1 task: reference right"),
        ("", "a useless answer scores 0.5 (an env may say partial_credit = True)"),
        ("partial_credit, reward_range = True, (-1, 1)", "1 task: reference right"),
        ("partial_credit, reward_range = True, (0, float('inf'))", "1 task: reference right"),
        (
            "partial_credit, reward_range = True, (1, float('inf'))",
            "the reference solution scores 1; expected more than 1 (an env may say reward_range",
        ),
        (
            "partial_credit, reward_range = True, (0, 5)",
            "the reference solution scores 1; expected 5 (an env may say reward_range = (worst,",
        ),
        ("reward_range = (1, 0)", "reward_range of env 'capitals' is (1, 0); expected the worst"),
        ("def messages(self, task): return 1 / 0", "ZeroDivisionError: division by zero (/"),
        ("def messages(self, task): os._exit(3)", "ended its process (exit code 3)"),
    ],
)
def test_what_is_wrong_with_an_env_is_its_own_words_and_line(
    broken: str,
    expected: str,
    tmp_path: Path,
    sandbox_kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    half = ENV.replace(
        'artifact.decode() == task.data["answer"]', "1 if b'Oslo' in artifact else .5"
    )
    code = half.replace("TOOL", "look_up").replace("    needs", f"    {broken}\n    needs")
    (tmp_path / "half.py").write_text(f"import os\n{code}")
    row = {"task_id": "norway", "env": f"{tmp_path}/half.py:Capitals", "prompt": "?"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row | {"data": {"answer": "Oslo"}}))
    status = dispatch(["check", str(tmp_path / "tasks.jsonl"), "--sandbox", sandbox_kind])
    output = capsys.readouterr().out
    assert expected in " ".join(output.split())
    assert status == (0 if "reference right" in expected else 1)


def test_a_slow_grader_is_named_while_the_check_waits(
    tmp_path: Path,
    sandbox_kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_command, "PROGRESS_S", 0.5)
    slow = ENV.replace("    return float", "    time.sleep(2)\n    return float")
    (tmp_path / "slow.py").write_text("import time\n" + slow.replace("TOOL", "look_up"))
    row = {"task_id": "norway", "env": f"{tmp_path}/slow.py:Capitals", "prompt": "?"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row | {"data": {"answer": "Oslo"}}))
    dispatch(["check", str(tmp_path / "tasks.jsonl"), "--sandbox", sandbox_kind])
    reported = capsys.readouterr().err
    assert "norway: playing and grading the reference solution has taken 1 s" in reported


BEST_IS_FIVE = ENV.replace("float(", "5.0 * (").replace("TOOL", "look_up")


@pytest.mark.parametrize(
    ("env", "row", "says"),
    [
        (
            BEST_IS_FIVE.replace("    needs", "    reward_range = (0.0, 5.0)\n    needs"),
            {"env": "capitals.py:Capitals", "prompt": "?", "data": {"answer": "Oslo"}},
            "1 task: reference right, twice the same; useless answer wrong",
        ),
        (
            ENV.partition("    def reference")[0],
            {"env": "capitals.py:Capitals", "prompt": "?", "data": {"answer": "Oslo"}},
            "1 task without a reference solution: useless answer wrong, twice the same",
        ),
        (
            "",
            {"description": "Double it.", "public_tests": {"input": ["1"], "output": ["2"]}},
            "1 task without a reference solution",
        ),
        (
            "",
            {"question": "Double it.", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'},
            "1 task without a reference solution",
        ),
        (
            "",
            {
                "env": "code",
                "prompt": "Double it.",
                "data": {"cases": [{"input": "1", "output": "2"}]},
            },
            "1 task without a reference solution",
        ),
    ],
)
def test_a_task_is_fine_without_a_reference_and_a_best_reward_may_be_five(
    env: str,
    row: dict[str, object],
    says: str,
    tmp_path: Path,
    sandbox_kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "capitals.py").write_text(env)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task_id": "1", **row} if "env" in row else row))
    status = dispatch(["check", str(tasks), "--sandbox", sandbox_kind])
    output = capsys.readouterr().out
    assert says in output
    assert status == 0, output


def test_a_problem_that_many_tasks_have_is_listed_for_a_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, object]]
    rows = [{"task_id": f"t{n}", "env": "math", "prompt": f"{n} + 1?"} for n in range(6)]
    rows += [{**rows[0], "task_id": "other", "data": {"answer": "1", "image": 5}}]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dispatch(["check", str(tasks), "--sandbox", "local"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["t0", "t1", "t2"]
    assert lines[3] == "3 further tasks have the same problem; `--json` lists all"
    assert lines[4].startswith("other: task 'other': data.image is 5")
    assert lines[5].endswith(": 7 of 7 tasks fail")
    assert dispatch(["check", str(tasks), "--sandbox", "local", "--json"]) == 1
    assert capsys.readouterr().out.count("t5") >= 1
