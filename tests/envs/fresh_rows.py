# ruff: noqa: E501
"""Fresh rows of ten published formats, written from their descriptions: read, played and graded.

    python -m tests.envs.fresh_rows [KIND ...] [--datasets PYTHON]

Each row goes through JSON lines, through Parquet of its own and through one Parquet file and one
file of JSON lines per env, whose rows have the keys of all (as `datasets` and pandas write them).
`PYTHON` is an interpreter that has `datasets`, which then writes those files; else pyarrow does.
Prints one line for each kind of sandbox: rewards of right, wrong and empty replies.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import pickle
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.sandbox import open as open_sandbox
from prorl.tasks import read_tasks
from prorl.types import Json, Stage, Task


class Fresh(NamedTuple):
    format: str
    row: dict[str, Json]
    right: str
    wrong: str


def _fenced(program: str) -> str:
    return f"```python\n{program}\n```"


STARTER = "class Solution:\n    def widest(self, spans: List[List[int]]) -> Optional[int]:"
PRIVATE = [{"input": "[[1, 9], [2, 3]]", "output": "8", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode()

ROWS = (
    Fresh(
        "gsm8k",
        {"question": "Ada has 7 jars of 12 nuts. How many nuts?", "answer": "7*12=<<7*12=84>>84\n#### 84"},
        "7 * 12 = 84\n#### 84",
        "#### 19",
    ),
    Fresh(
        "answers",  # AIME
        {"problem": "Find the remainder when $25\\cdot 41$ is divided by $1000$.", "answer": "025", "id": 61},
        "$\\boxed{625}$? No: \\boxed{25}",
        "\\boxed{250}",
    ),
    Fresh(
        "answers",  # DeepScaleR
        {"problem": "What is $30!/29!+25!$, less 30?", "answer": 15511210043330985984000000, "solution": "..."},
        "\\boxed{15511210043330985984000000}",
        "\\boxed{15511210043330986000000000}",
    ),
    Fresh(
        "verl",
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "In how many ways can 2 of 5 be taken?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "10", "style": "rule"},
            "extra_info": {"index": "a-1"},
        },
        "Answer: \\boxed{\\binom{5}{2}}",
        "Answer: 20",
    ),
    Fresh(
        "choices",  # MMLU
        {"question": "Which is a noble gas?", "subject": "chemistry", "choices": ["Iron", "Argon", "Tin", "Zinc"], "answer": 1},
        "#### B",
        "#### C",
    ),
    Fresh(
        "gpqa",
        {
            "Question": "Which force binds quarks?",
            "Correct Answer": "The strong force",
            "Incorrect Answer 1": "Gravity",
            "Incorrect Answer 2": "The weak force",
            "Incorrect Answer 3": "Electromagnetism",
        },
        "#### The strong force",
        "#### Gravity",
    ),
    Fresh(
        "humaneval",
        {
            "task_id": "Fresh/0",
            "prompt": 'from typing import List\n\n\ndef last(xs: List[int]) -> int:\n    """Give the last."""\n',
            "entry_point": "last",
            "canonical_solution": "    return xs[-1]\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 2\n    assert candidate([7]) == 7\n",
        },
        _fenced("def last(xs: List[int]) -> int:\n    return xs[-1]"),
        _fenced("def last(xs: List[int]) -> int:\n    return xs[0]"),
    ),
    Fresh(
        "livecodebench",
        {
            "question_title": "Widest span",
            "question_content": "Give the width of the widest span.",
            "question_id": "9001",
            "starter_code": STARTER,
            "public_test_cases": json.dumps([{"input": "[[1, 4]]", "output": "3", "testtype": "functional"}]),
            "private_test_cases": PACKED,
            "metadata": '{"func_name": "widest"}',
        },
        _fenced(f"{STARTER}\n        return max(starmap(lambda a, b: b - a, spans), default=None)"),
        _fenced(f"{STARTER}\n        return spans[-1][1] - spans[-1][0]"),
    ),
    Fresh(
        "apps",
        {
            "problem_id": 5001,
            "question": "Read n numbers, one a line, and print their sum.",
            "input_output": json.dumps({"inputs": ["2\n1\n2\n", "1\n5\n"], "outputs": ["3\n", "5\n"]}),
            "difficulty": "introductory",
            "starter_code": "",
            "solutions": "",
        },
        _fenced("n = int(input())\nprint(sum(int(sys.stdin.readline()) for _ in range(n)))"),
        _fenced("print(input())"),
    ),
    Fresh(
        "contest",  # CodeContests
        {
            "name": "fresh_a",
            "description": "Print the number twice as large.",
            "public_tests": {"input": ["1\n"], "output": ["2\n"]},
            "private_tests": {"input": ["21\n"], "output": ["42\n"]},
            "generated_tests": {"input": [], "output": []},
            "time_limit": {"seconds": 2, "nanos": 0},
        },
        _fenced("print(2 * int(input()))"),
        _fenced("print(2)"),
    ),
)  # fmt: skip
BY_DATASETS = (
    "import sys, datasets\n"
    "d = datasets.load_dataset('json', data_files=sys.argv[1], split='train')\n"
    "d.to_parquet(sys.argv[2]); d.to_json(sys.argv[3])\n"
)


def files(folder: Path, python: str = "") -> list[tuple[Path, Fresh | None]]:
    """Each row as a file of either kind; and all rows of ours in one file of either kind."""
    fresh_files: list[tuple[Path, Fresh | None]] = []
    ours = []
    for number, fresh in enumerate(ROWS):
        lines = folder / f"{number}-{fresh.format}.jsonl"
        lines.write_text(json.dumps(fresh.row) + "\n")
        fresh_files.append((lines, fresh))
        (task,) = read_tasks(lines).tasks
        row = {"task_id": str(number), "env": task.env, "prompt": task.prompt}
        ours.append(row | {"data": dict(task.data)})
        is_big = fresh.row.get("answer") == 15511210043330985984000000
        if not is_big:  # a column of Arrow holds no such integer
            fresh_files += [(path, fresh) for path in _columns(lines, [fresh.row], python)]
    for name in {row["env"]: None for row in ours}:
        # cases of texts and of values are no one type of a column
        rows = [row for row in ours if row["env"] == name and "function" not in row["data"]]
        mixed = folder / f"{name}-ours.jsonl"
        mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fresh_files += [(path, None) for path in (mixed, *_columns(mixed, rows, python))]
    return fresh_files


def _columns(lines: Path, rows: list[dict[str, Json]], python: str) -> list[Path]:
    """Parquet, and lines that were written from a table: every row has the keys of all."""
    parquet, wide = lines.with_suffix(".parquet"), lines.with_name(f"{lines.stem}-wide.jsonl")
    if python:
        argv = [python, "-c", BY_DATASETS, str(lines), str(parquet), str(wide)]
        subprocess.run(argv, check=True, capture_output=True)
    else:
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, parquet)
        wide.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return [parquet, wide]


async def rewards(task: Task, kind: str, *replies: str) -> list[float]:
    """Returns the reward of each reply, graded in a sandbox of its own."""
    env = get_env(task.env)
    env.check(task)
    scores = []
    for reply in replies:
        artifact = await env.artifact(task, reply, None)
        spec = env.sandbox(task, Stage.EVAL)
        if spec is None:
            score = await env.score(task, artifact, None, Deadline(120))
        else:
            async with open_sandbox(kind, spec) as sandbox:
                score = await env.score(task, artifact, sandbox, Deadline(120))
        scores.append(score.reward)
    return scores


async def graded(kind: str, folder: Path, python: str = "") -> list[str]:
    """Per task: what is not (right 1, wrong 0, no-op 0), of every container."""
    problems = []
    for path, fresh in files(folder, python):
        loaded = read_tasks(path)
        if fresh is not None and loaded.format != fresh.format:
            problems.append(f"{path.name}: read as {loaded.format}")
        for task in loaded.tasks:
            row = fresh or ROWS[int(task.task_id)]
            earned = await rewards(task, kind, row.right, row.wrong, "I do not know.")
            if earned != [1.0, 0.0, 0.0]:
                problems.append(f"{path.name}, {task.task_id}: right, wrong, no-op earn {earned}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["pyns"])
    parser.add_argument("--datasets", default="", metavar="PYTHON")
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            problems = asyncio.run(graded(kind, Path(folder), options.datasets))
            number = sum(len(read_tasks(path).tasks) for path in Path(folder).iterdir())
        print(f"{kind}: {number} tasks: {'; '.join(problems) or 'right 1, wrong 0, no-op 0'}")


if __name__ == "__main__":
    main()
