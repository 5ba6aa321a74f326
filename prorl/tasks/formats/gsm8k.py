"""GSM8K (Cobbe et al. 2021, github.com/openai/grade-school-math).

`answer` is a worked solution with calculator marks, `... <<48/2=24>>24 ... #### 72`. Files of
questions and short answers have the same two keys: they are the format `answers`.
"""

from __future__ import annotations

import re

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, text
from prorl.types import Task

_FINAL_ANSWER = re.compile(r"####\s*(\S[^\n]*?)\s*\Z")
_SHORT_CHARS = 40


def read(row: Row, index: int) -> Task:
    """Read a row of the columns question and answer."""
    question, solution = text(row, "question"), text(row, "answer")
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


def is_worked(row: Row) -> bool:
    """Whether the answer is a worked solution."""
    answer = row["answer"]
    return isinstance(answer, str) and ("####" in answer or len(answer) > _SHORT_CHARS)


FORMAT = Format("gsm8k", ("question", "answer"), read, is_worked)
