"""The row formats that task files come in.

A format knows the keys that give it away and turns one row into a Task.

| format | keys | source |
|---|---|---|
| gsm8k | question, answer (`... <<48/2=24>>24 ... #### 72`) | Cobbe et al. 2021, github.com/openai/grade-school-math |
| humaneval | task_id, prompt, entry_point, test, canonical_solution | Chen et al. 2021, github.com/openai/human-eval |
| swebench | instance_id, problem_statement, test_patch, FAIL_TO_PASS | Jimenez et al. 2024, github.com/SWE-bench/SWE-bench |
| prorl | task_id, env, prompt [, data, data_source] | ours: the fields of `prorl.types.Task` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prorl.errors import TaskError
from prorl.tasks.codec import task_from_row
from prorl.types import Json, Task

Row = Mapping[str, Json]

_FINAL_ANSWER = re.compile(r"####\s*(\S[^\n]*?)\s*\Z")


class Format(NamedTuple):
    """One row format."""

    name: str
    keys: tuple[str, ...]
    """All of them are in the first row of such a file."""
    read: Callable[[Row, int], Task]
    """(row, index from 0) -> Task. Raises TaskError without a place; the reader adds it."""


def _gsm8k(row: Row, index: int) -> Task:
    question, solution = _text(row, "question"), _text(row, "answer")
    final = _FINAL_ANSWER.search(solution)
    if final is None:
        raise TaskError(
            f"answer ends with {solution[-40:]!r}",
            "a last line `#### <number>`",
            "add the final answer",
        )
    data = {"answer": final[1].replace(",", ""), "solution": solution}
    return Task(
        task_id=f"gsm8k/{index}", env="math", prompt=question, data=data, data_source="gsm8k"
    )


def _humaneval(row: Row, index: int) -> Task:
    data = {name: _text(row, name) for name in ("prompt", "entry_point", "test")}
    if "canonical_solution" in row:
        data["canonical_solution"] = _text(row, "canonical_solution")
    return Task(
        task_id=_text(row, "task_id"),
        env="code",
        prompt=data["prompt"],
        data=data,
        data_source="humaneval",
    )


def _swebench(row: Row, index: int) -> Task:
    prompt, data = (
        _text(row, "problem_statement"),
        {key: value for key, value in row.items() if key != "problem_statement"},
    )
    return Task(
        task_id=_text(row, "instance_id"),
        env="swe",
        prompt=prompt,
        data=data,
        data_source="swebench",
    )


def _prorl(row: Row, index: int) -> Task:
    return task_from_row(row)


FORMATS = (
    Format("prorl", ("task_id", "env", "prompt"), _prorl),
    Format("humaneval", ("task_id", "prompt", "entry_point", "test"), _humaneval),
    Format(
        "swebench", ("instance_id", "problem_statement", "test_patch", "FAIL_TO_PASS"), _swebench
    ),
    Format("gsm8k", ("question", "answer"), _gsm8k),
)


def detect(row: Row) -> Format:
    """The format of a file from its first row. Raises TaskError."""
    for candidate in FORMATS:
        if all(key in row for key in candidate.keys):
            return candidate
    known = " | ".join(f"{candidate.name}: {', '.join(candidate.keys)}" for candidate in FORMATS)
    mend = "rename the keys, or write rows with task_id, env, prompt and data"
    raise TaskError(
        f"keys {', '.join(map(repr, row)) or '(none)'} are of no known format", known, mend
    )


def _text(row: Row, key: str) -> str:
    if key not in row:
        raise TaskError(
            f"the key {key!r} is missing; found {', '.join(map(repr, row))}",
            f"{key!r} with a string",
            "add it",
        )
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        shown = "empty" if isinstance(value, str) else type(value).__name__
        raise TaskError(
            f"{key!r} is {shown}", "a string that is not empty", "mend or remove the row"
        )
    return value
