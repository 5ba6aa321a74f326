"""Math word problems with a Python tool: the policy ends with `#### answer`, which is compared with
the reference answer.

Reads `data.answer` (string or number) and, for the oracle, `data.solution` (GSM8K's text with
`<<48/2=24>>` calculator marks). `data.tools` names further tools (`prorl/tools`). RUN needs a
sandbox for the tools, EVAL none. Comparison is a number or text match first; what neither settles
goes to math-verify where it is installed. The grader log names the path taken. A failing grader
raises GraderError and never scores 0.
"""

from __future__ import annotations

import ast
import re

from prorl.envs import verify
from prorl.envs.answers import (
    MAX_ANSWER_CHARS,
    Answer,
    final_answer,
    last_number,
    normalise,
    number,
)
from prorl.envs.tools import PYTHON, Solution, run_call
from prorl.envs.user_tools import task_tools
from prorl.errors import TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import (
    Message,
    RewardPart,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

MAX_ARTEFACT_BYTES = 64 << 10
_CALCULATOR = re.compile(r"<<([\d\s.+\-*/()]+)=[^<>]*>>")
_SYSTEM = (
    "Solve the problem. Reason step by step; use the python tool for arithmetic. "
    "End with the final answer alone on a last line, in the form `#### answer`."
)


class MathEnv:
    """Implements `prorl.protocols.Env`."""

    name = "math"

    def check(self, task: Task) -> None:
        """`data.answer` is a string or a number, not too long to grade."""
        answer = task.data.get("answer")
        if (
            isinstance(answer, bool)
            or not isinstance(answer, str | int | float)
            or not 0 < len(str(answer)) <= MAX_ANSWER_CHARS
        ):
            raise TaskError(
                f"task {task.task_id!r}: data.answer is {answer!r}",
                "the reference answer",
                "give it as text or a number",
            )
        task_tools(task)

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """A Python tool and the task's own in RUN; nothing in EVAL."""
        return (
            SandboxSpec(tools=tuple(tool.name for tool in self.tools(task)))
            if stage is Stage.RUN
            else None
        )

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """python, and what `data.tools` names."""
        return (PYTHON, *task_tools(task))

    def messages(self, task: Task) -> tuple[Message, ...]:
        """How to answer, and the problem."""
        return (Message(role="system", content=_SYSTEM), Message(role="user", content=task.prompt))

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing: the problem is in the prompt."""

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run Python, or a tool of the task's."""
        return await run_call(self.tools(task), sandbox, call, timeout_s)

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The end of the final message, where the answer is; whole, so that another grader can
        score it again.
        """
        return final.encode("utf-8", "replace")[-MAX_ARTEFACT_BYTES:]

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """1 for the reference answer, else 0. Raises GraderError."""
        gold = str(task.data["answer"])
        answer = final_answer(artefact.decode("utf-8", "replace"))
        right, path = _quick(gold, answer)
        if right is None and verify.installed():
            right, path = (
                await verify.verify(gold, answer.text, deadline.remaining_s),
                "math-verify",
            )
        log = (
            f"answer {answer.text[:200]!r} ({answer.found}), reference {gold!r}:"
            f" {'equal' if right else 'different'} by {path}"
        )
        return Score(parts=(RewardPart(name="correct", value=float(bool(right))),), log=log)

    def reference(self, task: Task) -> Solution:
        """The calculator's expressions in one Python call, then the answer; without marks, the
        answer's own number is computed.
        """
        self.check(task)
        answer, solution = str(task.data["answer"]), task.data.get("solution")
        marks = _CALCULATOR.findall(solution) if isinstance(solution, str) else []
        lines = [f"print({mark.strip()})" for mark in marks if _is_python(mark.strip())]
        code = "\n".join(lines or [f"print({answer!r})"])
        return Solution(
            (ToolCall("python", {"code": code}),), f"The result is {answer}.\n#### {answer}"
        )


def _quick(gold: str, answer: Answer) -> tuple[bool | None, str]:
    """(verdict, path), by text and number alone; None where mathematics must decide."""
    if not answer.text or len(answer.text) > MAX_ANSWER_CHARS:
        return False, "no usable answer"
    if normalise(gold) == normalise(answer.text):
        return True, "text"
    gold_number = number(gold)
    if gold_number is None:
        return None, "text"
    answer_number = number(answer.text)
    if answer_number is not None:
        return gold_number == answer_number, "number"
    if "\\" in answer.text or "^" in answer.text:
        return None, "number"
    return gold_number == last_number(answer.text), "last number"


def _is_python(expression: str) -> bool:
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    return True
