"""A grader that does what it is asked to; see test_grading.py."""

from __future__ import annotations

from prorl.helper.child import Answer, serve


def prepare() -> Answer:
    return _answer


def _answer(question: tuple[str]) -> str:
    if question[0] == "raise":
        raise ValueError("an answer like this")
    if question[0] == "recurse":
        return _answer(question)[::-1]
    while question[0] == "spin":
        pass
    return "fine"


if __name__ == "__main__":
    serve(prepare)
