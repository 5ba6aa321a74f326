"""Questions of science, technology, engineering and mathematics.

The answer is a choice, a quantity with its unit or a short text.

| `task.data` | |
|---|---|
| answer | letter, index or text of the right choice; else a quantity (`units.py`) or short text |
| choices | texts; shown as A, B, C ... below the prompt |
| aliases | further right texts |
| tolerance | relative, of numbers (0.01; whole numbers without a unit are exact) |
| solution | kept for people |

Where the answer may stand is a setting (`StemSettings`).
`answers/science.py` says what is right; what none of its rules settles is wrong.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from prorl.envs import grading
from prorl.envs.answers import AnswerFormat, spell
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.settings import PromptSettings
from prorl.envs.tools import PYTHON
from prorl.errors import TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import Grade, Json, Task, ToolCall

LETTERS = string.ascii_uppercase
TOLERANCE = 0.01
_ENDS: Mapping[AnswerFormat, str] = {
    "any": "alone on a last line, in the form `#### answer`",
    "boxed": r"in \boxed{}",
    "last_line": "alone on a last line",
}
"""The place where the system message wants the answer, by its format."""


@dataclass(frozen=True, kw_only=True)
class StemSettings(PromptSettings):
    answer_format: Annotated[
        AnswerFormat,
        Meta(description="where the answer must stand; the env's own system message says so"),
    ] = "any"


@reward("correct")
async def correct(
    task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
) -> Grade:
    """Returns 1 for the right choice, quantity or text, else 0. Raises GraderError."""
    expected, text = _answer(task), artifact.decode("utf-8", "replace")
    data = {"answer": expected} | {
        name: task.data[name] for name in ("choices", "aliases", "tolerance") if name in task.data
    }
    answer_format = StemSettings.of(task).answer_format
    graded, why = await grading.ask(
        grading.RULES,
        ("science", data, task.prompt, text, answer_format),
        ("science", data, task.prompt, spell("0", answer_format), answer_format),
        deadline,
    )
    if graded is None:
        return Grade(0.0, f"the answer cannot be graded: {why}")
    right, path, answer, how = graded
    comparison = f"answer {answer!r} ({how}), reference {expected!r}"
    return Grade(float(right), f"{comparison}: {'equal' if right else 'different'} by {path}")


class StemEnv(BaseEnv):
    name = "stem"
    settings = StemSettings
    offers = (PYTHON,)
    rubric = Rubric((correct, 1.0))

    def check(self, task: Task) -> None:
        super().check(task)
        grading.check_installed(task)
        choices, aliases = task.data.get("choices", []), task.data.get("aliases", [])
        for name, value in (("choices", choices), ("aliases", aliases)):
            if not isinstance(value, list) or not all(
                isinstance(text, str) and text.strip() for text in value
            ):
                raise TaskError(
                    f"task {task.task_id!r}: data.{name} is {value!r}"[:300], "a list of texts"
                )
        if len(choices) == 1 or len(choices) > len(LETTERS):
            raise TaskError(f"task {task.task_id!r}: {len(choices)} choices", "2 to 26")
        if not 0 <= float(task.data.get("tolerance", TOLERANCE)) < 1:
            raise TaskError(f"task {task.task_id!r}: data.tolerance", "a share below 1")
        _answer(task)

    def system_message(self, task: Task) -> str:
        helped = "; use the python tool for arithmetic" if PYTHON in self.tools(task) else ""
        return (
            f"Answer the question. Reason step by step{helped}. End with the final answer"
            f" {_ENDS[StemSettings.of(task).answer_format]}: the letter of a choice, a number with"
            " its unit, or a few words."
        )

    def question(self, task: Task) -> str:
        """The prompt, and the choices below it."""
        choices = task.data.get("choices", [])
        lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False)]
        return "\n\n".join(filter(None, (task.prompt, "\n".join(lines))))

    def reference(self, task: Task) -> Solution:
        answer, tools = _answer(task), self.tools(task)
        calls = (ToolCall("python", {"code": f"print({answer!r})"}),) if PYTHON in tools else ()
        return Solution(calls, spell(answer, StemSettings.of(task).answer_format))


def _answer(task: Task) -> str:
    """The reference: a choice's letter, else the answer as text. Raises TaskError."""
    answer: Json = task.data.get("answer")
    choices: Sequence[str] = task.data.get("choices", [])
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        raise TaskError(f"task {task.task_id!r}: data.answer is {answer!r}", "a text or a number")
    if not choices:
        return str(answer).strip()
    letters = LETTERS[: len(choices)]
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return letters[answer]
    if isinstance(answer, str) and answer.strip().upper() in tuple(letters):
        return answer.strip().upper()
    if answer in choices:
        return letters[choices.index(str(answer))]
    raise TaskError(
        f"task {task.task_id!r}: data.answer is {answer!r}",
        f"one of {', '.join(letters)}, an index from 0, or the text of a choice",
    )
