"""Rows as verl's Parquet files have them: `prompt` (messages), `data_source`, `ability`,
`reward_model` {style, ground_truth}, `extra_info`.

A ground truth that is JSON with `inputs` and `outputs` is a program's tests, any other a final
answer.
"""

from __future__ import annotations

import orjson

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, answers, conversation, name_of
from prorl.types import Json, Task


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
    tests = program_tests(judged["ground_truth"])
    return Task(
        task_id=name_of(extra, source, index, "index"),
        env="code" if tests else "math",
        prompt=conversation(row["prompt"]),
        data=tests or {"answer": answers.answer(judged["ground_truth"])},
        data_source=source,
    )


def program_tests(value: Json) -> dict[str, Json]:
    """The tests that a ground truth holds, empty when it is a final answer."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return {}
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        return {"input_output": value}
    return {}


FORMAT = Format("verl", ("prompt", "reward_model"), read)
