"""Math word problems, with a Python tool unless the settings leave it out.

The policy's final answer is compared with the reference answer. Where it may stand, and how far it
must be worked out, are settings (`MathSettings`; docs/tasks.md).

Reads `data.answer` (string or number) and, for the oracle, `data.solution` (GSM8K's text with
`<<48/2=24>>` calculator marks). `data.tools` names further tools (`prorl/tools`). RUN needs a
sandbox for the tools, EVAL none. The rules of `prorl.envs.answers` decide what they can read, by
the answer, the reference and the prompt, which tells what the words behind a number are; a
reference that they cannot read goes to math-verify. Both run in helpers (`grading.py`). The grader
log names the path taken. A grader that fails, or a reference that nobody can read, raises
GraderError and never scores 0; whatever the answer causes is 0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from msgspec import Meta

from prorl.envs import grading
from prorl.envs.answers import AnswerFormat, Grading, spell
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.settings import PromptSettings
from prorl.envs.tools import PYTHON
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import FailureCode, Grade, Task, ToolCall

MAX_REFERENCE_CHARS = 1000

_CALCULATOR = re.compile(r"<<([\d\s.+\-*/()]+)=[^<>]*>>")
_ENDS: Mapping[AnswerFormat, str] = {
    "any": "End with the final answer alone on a last line, in the form `#### answer`.",
    "boxed": r"End with the final answer in \boxed{}.",
    "last_line": "End with the final answer alone on a last line.",
}
"""The sentence of the system message about the answer, by its format."""


@dataclass(frozen=True, kw_only=True)
class MathSettings(PromptSettings):
    grading: Annotated[
        Grading, Meta(description="how far an answer must be worked out (docs/tasks.md)")
    ] = "closed_form"
    answer_format: Annotated[
        AnswerFormat,
        Meta(description="where the answer must stand; the env's own system message says so"),
    ] = "any"


@reward("correct")
async def correct(
    task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
) -> Grade:
    gold, text = str(task.data["answer"]), artifact.decode("utf-8", "replace")
    settings = MathSettings.of(task)
    how, zero = (settings.grading, settings.answer_format), spell("0", settings.answer_format)
    graded, why = await grading.ask(
        grading.RULES,
        ("math", gold, text, task.prompt, *how),
        ("math", gold, zero, task.prompt, *how),
        deadline,
    )
    if graded is None:
        return Grade(0.0, f"the answer cannot be graded: {why}")
    right, path, answer, method = graded
    if right is None:
        right, path = await _by_math_verify(gold, answer, deadline)
    return Grade(
        float(right),
        f"answer {answer[:200]!r} ({method}), reference {gold!r}:"
        f" {'equal' if right else 'different'} by {path}",
    )


class MathEnv(BaseEnv):
    name = "math"
    settings = MathSettings
    offers = (PYTHON,)
    rubric = Rubric((correct, 1.0))

    def check(self, task: Task) -> None:
        answer = task.data.get("answer")
        if (
            isinstance(answer, bool)
            or not isinstance(answer, str | int | float)
            or not 0 < len(str(answer)) <= MAX_REFERENCE_CHARS
        ):
            raise TaskError(
                f"task {task.task_id!r}: data.answer is {answer!r}",
                "the reference answer",
                "give it as text or a number",
            )
        grading.check_installed(task)
        super().check(task)

    def system_message(self, task: Task) -> str:
        helped = "; use the python tool for arithmetic" if PYTHON in self.tools(task) else ""
        end = _ENDS[MathSettings.of(task).answer_format]
        return f"Solve the problem. Reason step by step{helped}. {end}"

    def reference(self, task: Task) -> Solution:
        """Returns the calculator's expressions in one Python call, then the answer.

        Without marks, the answer's own number is computed; without the tool, nothing is.
        """
        self.check(task)
        answer, solution = str(task.data["answer"]), task.data.get("solution")
        marks = _CALCULATOR.findall(solution) if isinstance(solution, str) else []
        lines = [f"print({mark.strip()})" for mark in marks if _is_python(mark.strip())]
        code = "\n".join(lines or [f"print({answer!r})"])
        calls = (ToolCall("python", {"code": code}),) if PYTHON in self.tools(task) else ()
        answer_line = spell(answer, MathSettings.of(task).answer_format)
        return Solution(calls, f"The result is {answer}.\n{answer_line}")


async def _by_math_verify(gold: str, answer: str, deadline: Deadline) -> tuple[bool, str]:
    """Grade by math-verify where the rules cannot read the reference. Raises GraderError."""
    if find_spec("math_verify") is None:
        raise GraderError(
            FailureCode.GRADER_ERROR,
            f"the reference answer {gold[:200]!r} is beyond the rules; expected math-verify, which"
            " may read it: install prorl's extra `math`",
        )
    right, why = await grading.ask(grading.MATH_VERIFY, (gold, answer), (gold, "0"), deadline)
    return bool(right), f"math-verify{': ' * bool(why)}{why}"


def _is_python(expression: str) -> bool:
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    return True
