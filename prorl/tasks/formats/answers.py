"""A question and its final answer, under the names that data sets give them.

MATH and AIME (`problem`, `answer`), DeepScaleR, DAPO-Math (`prompt`, `answer`), and most home-made
files.
"""

from __future__ import annotations

from collections.abc import Iterable

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, conversation, name_of
from prorl.types import Json, Task

QUESTIONS = ("prompt", "question", "problem")
ANSWERS = ("answer", "expected_answer", "ground_truth", "final_answer", "target")
IDS = ("task_id", "unique_id", "id", "ID", "index")


def read(row: Row, index: int) -> Task:
    """One of QUESTIONS, one of ANSWERS [, solution, data_source]."""
    source = row.get("data_source")
    source = source if isinstance(source, str) and source else "answers"
    data: dict[str, Json] = {"answer": answer(first(row, ANSWERS))}
    if isinstance(row.get("solution"), str):
        data["solution"] = row["solution"]
    return Task(
        task_id=name_of(row, source, index, *IDS),
        env="math",
        prompt=conversation(first(row, QUESTIONS)),
        data=data,
        data_source=source,
    )


def first(row: Row, keys: Iterable[str]) -> Json:
    """The value of the first key that the row has. Raises TaskError."""
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    raise TaskError(f"found {', '.join(map(repr, row))}", f"one of {', '.join(keys)}", "add it")


def answer(value: Json) -> str:
    """A final answer as text. Raises TaskError.

    >>> answer(["1/2"]), answer(42)
    ('1/2', '42')
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or not str(value).strip()
    ):
        raise TaskError(f"the answer is {str(value)[:100]!r}", "a text or a number")
    return str(value).strip()


FORMAT = Format("answers", ("|".join(QUESTIONS), "|".join(ANSWERS)), read)
