"""The env `arith`: arithmetic in words with a real `python` tool, for small policies: short
messages, short tool output.

`task.data`: `expression` (the right Python expression), `answer` (its value as text);
`prorl.tasks.generated` makes such tasks. RUN needs a sandbox for the tool; EVAL needs none: the
reward is 1 for the exact answer, else 0.
"""

from __future__ import annotations

from dataclasses import replace

from prorl.envs.tools import BAD_CALL, PYTHON, Solution, run_call, text_field
from prorl.limits import Deadline
from prorl.protocols import Reference, Sandbox
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

SYSTEM = "Answer with a number."
_OUTPUT_CHARS = 40


class ArithEnv:
    """Implements `prorl.protocols.Env`."""

    name = "arith"

    def check(self, task: Task) -> None:
        """Raise TaskError if `task.data` lacks the expression or the answer."""
        text_field(task, "expression")
        text_field(task, "answer")

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """One for the tool in RUN, none in EVAL."""
        return SandboxSpec() if stage is Stage.RUN else None

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """`python`."""
        return (PYTHON,)

    def messages(self, task: Task) -> tuple[Message, ...]:
        """A system message of four words and the question."""
        return (Message(role="system", content=SYSTEM), Message(role="user", content=task.prompt))

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing: the task has no files."""

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Run `python` in the sandbox; only the value's last line comes back."""
        return await call_python(sandbox, call, timeout_s)

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The final answer's text."""
        return final.strip().encode()

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """1 for the exact answer."""
        return exact(task, artefact)

    def reference(self, task: Task) -> Reference:
        """One call of `python` with the right expression."""
        return Solution(
            (ToolCall(PYTHON.name, {"code": task.data["expression"]}),), task.data["answer"]
        )


async def call_python(sandbox: Sandbox | None, call: ToolCall, timeout_s: float) -> ToolResult:
    """Run a `python` call; its output cut to what a policy with a short context can read.

    Raises SandboxError.

    The text says what went wrong, so the exit status of code that failed is not kept: an agent
    would say it a second time.
    """
    result = await run_call((PYTHON,), sandbox, call, timeout_s)
    kept = result.exit_code if result.exit_code == BAD_CALL else 0
    return replace(result, output=short_output(result), exit_code=kept)


def short_output(result: ToolResult) -> str:
    """Last line of what was printed; for an exception its name.

    >>> short_output(ToolResult(output="42\\n")), short_output(ToolResult(output="Traceback ...\\nNameError: x", exit_code=1))
    ('42', 'error: NameError')
    """
    if result.exit_code == BAD_CALL:
        return f"error: {result.output}"[:_OUTPUT_CHARS]
    if result.timed_out:
        return "error: timeout"
    last = (result.output.strip().splitlines() or [""])[-1].strip()
    if result.exit_code:
        return f"error: {last.partition(':')[0]}"[:_OUTPUT_CHARS]
    return last[:_OUTPUT_CHARS]


def exact(task: Task, artefact: bytes) -> Score:
    """1 if the artefact is the task's answer, character for character."""
    given = artefact.decode("utf-8", "replace")
    right = given == task.data["answer"]
    log = "" if right else f"expected {task.data['answer']}, given {given[:_OUTPUT_CHARS]}"
    return Score(parts=(RewardPart(name="exact", value=float(right)),), log=log)
