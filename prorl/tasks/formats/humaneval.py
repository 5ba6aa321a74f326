"""HumanEval (Chen et al. 2021, github.com/openai/human-eval): complete a function."""

from __future__ import annotations

from prorl.tasks.formats import Format, Row, text
from prorl.types import Task


def read(row: Row, index: int) -> Task:
    """task_id, prompt, entry_point, test [, canonical_solution]."""
    data = {name: text(row, name) for name in ("prompt", "entry_point", "test")}
    if "canonical_solution" in row:
        data["canonical_solution"] = text(row, "canonical_solution")
    return Task(
        task_id=text(row, "task_id"),
        env="code",
        prompt=data["prompt"],
        data=data,
        data_source="humaneval",
    )


FORMAT = Format("humaneval", ("task_id", "prompt", "entry_point", "test"), read)
