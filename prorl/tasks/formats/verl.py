"""Rows as verl's Parquet files have them.

A row has `prompt` (messages), `data_source`, `ability`, `reward_model` {style, ground_truth},
`extra_info`. A ground truth that is JSON with `inputs` and `outputs` is a program's tests, any
other a final answer.
"""

from __future__ import annotations

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, answers, conversation, name_of
from prorl.tasks.formats.programs import program_data
from prorl.types import Task


def read(row: Row, index: int) -> Task:
    """prompt, reward_model [, data_source, ability, extra_info]."""
    judged = row["reward_model"]
    if not isinstance(judged, dict) or judged.get("ground_truth") is None:
        raise TaskError(
            f"reward_model is {str(judged)[:100]}", "an object with ground_truth", "add it"
        )
    source = row.get("data_source")
    source = source if isinstance(source, str) and source else "verl"
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    tests = program_data(judged["ground_truth"])
    return Task(
        task_id=name_of(extra, source, index, "index"),
        env="code" if tests else "math",
        prompt=conversation(row["prompt"]),
        data=tests or {"answer": answers.answer(judged["ground_truth"])},
        data_source=source,
    )


FORMAT = Format("verl", ("prompt", "reward_model"), read)
