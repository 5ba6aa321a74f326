"""SWE-bench (Jimenez et al. 2024, github.com/SWE-bench/SWE-bench) and its family."""

from __future__ import annotations

from prorl.tasks.formats import Format, Row, text
from prorl.types import Task


def read(row: Row, index: int) -> Task:
    """instance_id, problem_statement, test_patch, FAIL_TO_PASS; all else is kept as it is."""
    data = {key: value for key, value in row.items() if key != "problem_statement"}
    return Task(
        task_id=text(row, "instance_id"),
        env="swe",
        prompt=text(row, "problem_statement"),
        data=data,
        data_source="swebench",
    )


FORMAT = Format(
    "swebench", ("instance_id", "problem_statement", "test_patch", "FAIL_TO_PASS"), read
)
