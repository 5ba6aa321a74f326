"""The program in which answers are read and compared; `grading.py` asks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prorl.envs.answers import final_answer, judge, science
from prorl.envs.case_outputs import same_output
from prorl.helper.child import Answer, serve


def prepare(kind: str) -> Answer:
    """`rules` answers (name of a grader, arguments), `math-verify` (reference, answer)."""
    if kind == "math-verify":
        _equal("1", "1")
        return lambda question: _equal(*question)
    graders: Mapping[str, Callable[..., object]] = {
        "math": _math,
        "science": science.judge,
        "case": same_output,
    }
    return lambda question: graders[question[0]](*question[1:])


def _math(reference: str, text: str, question: str) -> tuple[bool | None, str, str, str]:
    """(verdict, the rule that decided, the answer that was found, how)."""
    answer = final_answer(text)
    return *judge(reference, answer.text, question), *answer


def _equal(reference: str, answer: str) -> bool:
    """Whether math-verify takes them for equal. Raises ValueError for an unread reference."""
    from math_verify import parse, verify

    # its own limits count by the clock and turn a time-out into "wrong"
    wanted = parse(f"${reference}$", parsing_timeout=0, raise_on_error=True)
    if not wanted:
        raise ValueError(f"the reference answer {reference!r} does not parse")
    given = parse(f"${answer}$", parsing_timeout=0)
    return bool(verify(wanted, given, timeout_seconds=0, raise_on_error=True))


if __name__ == "__main__":
    serve(prepare)
