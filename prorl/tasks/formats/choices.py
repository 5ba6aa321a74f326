"""Multiple choice as published: MMLU and its kin, ARC, GPQA, SciQ.

MMLU has `choices` or `options` and `answer`, ARC `choices` {text, label} and `answerKey`, GPQA and
SciQ a right answer beside wrong ones. Where the right one comes first by the row's making, the
choices are put in an order that depends on the question alone.
"""

from __future__ import annotations

from hashlib import blake2b

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, name_of, text
from prorl.types import Json, Task

_IDS = ("question_id", "id", "Record ID", "uuid")


def _task(row: Row, source: str, index: int, prompt: str, choices: Json, answer: Json) -> Task:
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise TaskError(f"its choices are {str(choices)[:100]}", "a list of texts")
    return Task(
        task_id=name_of(row, source, index, *_IDS),
        env="stem",
        prompt=prompt,
        data={"choices": choices, "answer": answer},
        data_source=source,
    )


def read_listed(row: Row, index: int) -> Task:
    """question, choices or options (a list), answer (index, letter or text)."""
    choices = row.get("choices") or row.get("options")
    answer = row.get("answer")
    if isinstance(answer, str) and answer.isdigit() and answer not in (choices or ()):
        answer = int(answer)
    return _task(row, "choices", index, text(row, "question"), choices, answer)


def read_labelled(row: Row, index: int) -> Task:
    """question, choices {text, label}, answerKey."""
    choices = row["choices"]
    if not isinstance(choices, dict) or row["answerKey"] not in choices.get("label", []):
        raise TaskError(f"answerKey {row['answerKey']!r}", "one of choices.label")
    place = choices["label"].index(row["answerKey"])
    return _task(row, "arc", index, text(row, "question"), choices.get("text"), place)


def read_right_and_wrong(row: Row, index: int) -> Task:
    """A task of GPQA's or SciQ's columns.

    GPQA has Question, Correct Answer, Incorrect Answer 1 ...; SciQ question, correct_answer,
    distractor1 ...
    """
    keys = ("Question", "Correct Answer", "Incorrect Answer ")
    if keys[1] not in row:
        keys = ("question", "correct_answer", "distractor")
    wrong = [text(row, key) for key in sorted(row) if key.startswith(keys[2])]
    right, prompt = text(row, keys[1]), text(row, keys[0])
    choices = sorted((right, *wrong), key=lambda one: _order(prompt, one))
    return _task(row, "choices", index, prompt, choices, choices.index(right))


def _order(question: str, choice: str) -> bytes:
    return blake2b(f"{question}\0{choice}".encode("utf-8", "replace")).digest()


LISTED = Format("choices", ("question", "choices|options", "answer"), read_listed)
LABELLED = Format("arc", ("question", "choices", "answerKey"), read_labelled)
GPQA = Format("gpqa", ("Question", "Correct Answer", "Incorrect Answer 1"), read_right_and_wrong)
SCIQ = Format("sciq", ("question", "correct_answer", "distractor1"), read_right_and_wrong)
