"""Math word problems with a Python tool.

The policy ends with `#### answer`, which is compared with the reference answer.

Reads `data.answer` (string or number), `data.grading` (how far an answer must be worked out:
`strict`, `closed_form`, which is the default, or `value`; docs/tasks.md) and, for the oracle,
`data.solution` (GSM8K's text with `<<48/2=24>>` calculator marks). `data.tools` names further tools
(`prorl/tools`). RUN needs a
sandbox for the tools, EVAL none. The rules of `prorl.envs.answers` decide what they can read, by
the answer, the reference and the prompt, which tells what the words behind a number are; a
reference that they cannot read goes to math-verify. Both run in helpers (`grading.py`). The grader
log names the path taken. A grader that fails, or a reference that nobody can read, raises
GraderError and never scores 0; whatever the answer causes is 0.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec

from prorl.envs import grading
from prorl.envs.answers import GRADINGS
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.tools import PYTHON
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import FailureCode, Json, Judgement, Task, ToolCall

MAX_REFERENCE_CHARS = 1000

_CALCULATOR = re.compile(r"<<([\d\s.+\-*/()]+)=[^<>]*>>")
_SYSTEM = (
    "Solve the problem. Reason step by step; use the python tool for arithmetic. "
    "End with the final answer alone on a last line, in the form `#### answer`."
)


@reward("correct")
async def correct(
    task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
) -> Judgement:
    gold, text = str(task.data["answer"]), artifact.decode("utf-8", "replace")
    judged, why = await grading.ask(
        grading.RULES,
        ("math", gold, text, task.prompt, grading_of(task)),
        ("math", gold, "#### 0", task.prompt, grading_of(task)),
        deadline,
    )
    if judged is None:
        return Judgement(0.0, f"the answer cannot be judged: {why}")
    right, path, answer, found = judged
    if right is None:
        right, path = await _by_math_verify(gold, answer, deadline)
    return Judgement(
        float(right),
        f"answer {answer[:200]!r} ({found}), reference {gold!r}:"
        f" {'equal' if right else 'different'} by {path}",
    )


class MathEnv(BaseEnv):
    name = "math"
    system = _SYSTEM
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
        if grading_of(task) not in GRADINGS:
            raise TaskError(
                f"task {task.task_id!r}: data.grading is {task.data['grading']!r}"[:300],
                f"one of {', '.join(GRADINGS)}",
            )
        grading.check_installed(task)
        super().check(task)

    def reference(self, task: Task) -> Solution:
        """The calculator's expressions in one Python call, then the answer.

        Without marks, the answer's own number is computed.
        """
        self.check(task)
        answer, solution = str(task.data["answer"]), task.data.get("solution")
        marks = _CALCULATOR.findall(solution) if isinstance(solution, str) else []
        lines = [f"print({mark.strip()})" for mark in marks if _is_python(mark.strip())]
        code = "\n".join(lines or [f"print({answer!r})"])
        return Solution(
            (ToolCall("python", {"code": code}),), f"The result is {answer}.\n#### {answer}"
        )


def grading_of(task: Task) -> Json:
    return task.data.get("grading", "closed_form")


async def _by_math_verify(gold: str, answer: str, deadline: Deadline) -> tuple[bool, str]:
    """Judge by math-verify where the rules cannot read the reference. Raises GraderError."""
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
