"""Programming tasks; hidden tests decide. Two shapes: HumanEval's, complete a function (Chen et al.
2021), and programs with cases (`code_cases.py`).

| `task.data` | |
|---|---|
| prompt, entry_point, test | HumanEval's: the source up to the body; defines `check(candidate)` |
| cases | list of {input, output}: texts; with `function` a list of arguments and a value |
| function | name, a method of `class Solution` too; none: programs that read and print |
| starter_code | shown after the prompt |
| case_s, timeout_s | limits of a case (6) and of all of them (60; of HumanEval's tests 30) |
| partial | true: the reward is the share of cases that pass; else all must |
| canonical_solution | a whole program, or HumanEval's body: for the oracle |

Invariants: tests never enter the RUN sandbox; only the program's text crosses into a fresh EVAL
sandbox; HumanEval's verdict is the judge's exit status and a nonce that the program never sees
(`judge.py`). What a program can cause scores 0; a judge that cannot start or tests that do not load
raise GraderError.
"""

from __future__ import annotations

import re
import secrets
from functools import cache
from importlib.resources import files

import orjson

from prorl.envs.base import BaseEnv, Solution
from prorl.envs.code_cases import check_cases, judge_cases
from prorl.envs.tools import BASH, FILES, PYTHON, cut_short, field_error, text_field
from prorl.errors import GraderError, NotFoundError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import FailureCode, Judgement, Message, Task, ToolCall, ToolResult

SOLUTION_FILE = "solution.py"
MAX_PROGRAM_BYTES = 200 << 10
TESTS_S = 30.0
"""Limit of all tests together when the task names none."""
MAX_LOG_CHARS = 4000

_FENCE = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SYSTEM = (
    "Write the Python function that the user asks for. You have a workspace with bash, python and"
    " files; try your program out. Finish with the whole program in one ```python block, or leave"
    f" it in {SOLUTION_FILE} and say so."
)
_SYSTEM_CASES = (
    "Write the Python program that the user asks for: one that reads standard input and writes"
    " standard output, or the function or class that is named. You have a workspace with bash,"
    " python and files; try your program out. Finish with the whole program in one ```python block,"
    f" or leave it in {SOLUTION_FILE} and say so."
)


@reward("tests")
async def tests(
    task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
) -> Judgement:
    """1 when every test passes, else 0. Raises GraderError or SandboxError."""
    if not artefact.strip():
        return Judgement(0.0, "no program: neither a fenced block nor " + SOLUTION_FILE)
    if sandbox is None:
        raise GraderError(FailureCode.GRADER_ERROR, "the code env needs an EVAL sandbox")
    if "cases" in task.data:
        return await judge_cases(task, artefact, sandbox, deadline)
    nonce = secrets.token_hex(16)
    wanted_s = float(task.data.get("timeout_s", TESTS_S))
    limit_s = min(wanted_s, deadline.remaining_s)
    result = await sandbox.exec(
        ["python3", "-I", "-c", _judge_source()], limit_s, _job(task, artefact, nonce)
    )
    return _verdict(result, nonce, is_cut=limit_s < wanted_s)


class CodeEnv(BaseEnv):
    name = "code"
    system = _SYSTEM
    offers = (BASH, PYTHON, FILES)
    rubric = Rubric((tests, 1.0))
    scores_in_sandbox = True

    def check(self, task: Task) -> None:
        super().check(task)
        if "cases" in task.data:
            check_cases(task)
        else:
            _check_tests(task)

    def messages(self, task: Task) -> tuple[Message, ...]:
        if "cases" not in task.data:
            asked, system = f"```python\n{task.prompt.strip()}\n```", _SYSTEM
        else:
            asked, system = task.prompt.strip(), _SYSTEM_CASES
            if starter := str(task.data.get("starter_code") or "").rstrip():
                asked = f"{asked}\n\n```python\n{starter}\n```"
        return (Message(role="system", content=system), Message(role="user", content=asked))

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The program: the last fenced block of the final message, else the file, else nothing."""
        blocks = _FENCE.findall(final)
        if blocks or sandbox is None:
            return blocks[-1].encode("utf-8", "replace")[:MAX_PROGRAM_BYTES] if blocks else b""
        try:
            return await sandbox.get(SOLUTION_FILE, MAX_PROGRAM_BYTES)
        except (NotFoundError, OSError):
            return b""

    def reference(self, task: Task) -> Solution:
        self.check(task)
        solution = text_field(task, "canonical_solution")
        if "cases" in task.data:
            test = "python3 -m py_compile solution.py && echo fine"
        else:
            solution = f"{text_field(task, 'prompt')}{solution}"
            name = task.data["entry_point"]
            test = f"python3 -c 'import solution; print(callable(solution.{name}))'"
        write = ToolCall(
            "files", {"command": "create", "path": SOLUTION_FILE, "file_text": solution}
        )
        return Solution(
            (write, ToolCall("bash", {"command": test})), f"The program is in {SOLUTION_FILE}."
        )


def _check_tests(task: Task) -> None:
    """The function has a name, and the tests are Python that checks it. Raises TaskError."""
    entry_point = text_field(task, "entry_point")
    if not entry_point.isidentifier():
        raise field_error(task, f"data.entry_point is {entry_point!r}", "the name of a function")
    try:
        compile(_head(task), "head.py", "exec")
        compile(text_field(task, "test"), "test.py", "exec")
    except (SyntaxError, ValueError) as cause:
        raise field_error(task, f"its tests do not compile: {cause}", "Python source") from cause
    if "def check" not in text_field(task, "test"):
        raise field_error(task, "data.test defines no check", "a function `check(candidate)`")


def _head(task: Task) -> str:
    """What precedes the function in the prompt: imports and helpers that the tests may use too."""
    prompt, entry_point = text_field(task, "prompt"), text_field(task, "entry_point")
    found = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""


def _job(task: Task, artefact: bytes, nonce: str) -> bytes:
    """What the judge reads: the whole program, the tests and the nonce, as JSON.

    A text that defines the function follows the prompt's head; any other is the rest of its body.
    """
    text, entry_point = artefact.decode("utf-8", "replace"), task.data["entry_point"]
    is_whole = (
        re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", text, re.MULTILINE)
        is not None
    )
    program = f"{_head(task)}\n{text}" if is_whole else f"{task.data['prompt']}{text}"
    job = {
        "program": program,
        "head": _head(task),
        "test": task.data["test"],
        "entry_point": entry_point,
        "nonce": nonce,
    }
    return orjson.dumps(job)


def _verdict(result: ToolResult, nonce: str, *, is_cut: bool) -> Judgement:
    log = result.output.replace(nonce, "judge")[-MAX_LOG_CHARS:]
    if result.timed_out:
        if is_cut:
            raise cut_short("tests")
        return Judgement(0.0, f"the tests did not end in time\n{log}")
    words = result.output.rstrip().rsplit("\n", 1)[-1].split()
    verdict = words[1] if len(words) == 2 and words[0] == nonce else ""
    if verdict == "error" or f"{nonce} start" not in result.output:
        raise GraderError(
            FailureCode.GRADER_ERROR,
            f"the tests could not run (exit status {result.exit_code}): {log}",
        )
    return Judgement(float(verdict == "pass" and result.exit_code == 0), log)


@cache
def _judge_source() -> str:
    return files("prorl.envs").joinpath("judge.py").read_text()
