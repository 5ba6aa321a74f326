"""Programming tasks; hidden tests decide. Two shapes: HumanEval's, complete a function (Chen et al.
2021), and programs with cases (Codeforces, APPS, TACO, LiveCodeBench ...): an input and what must
be printed for it, or arguments and what a function must give.

| `task.data` | |
|---|---|
| prompt, entry_point, test | HumanEval's: the source up to the body; defines `check(candidate)` |
| cases | list of {input, output}: texts; with `function` a list of arguments and a value |
| function | name, a method of `class Solution` too; none: programs that read and print |
| starter_code | shown after the prompt |
| case_s, timeout_s | limits of a case (6) and of all of them (60; of HumanEval's tests 30) |
| canonical_solution | a whole program, or HumanEval's body: for the oracle |

The setting `partial` pays the share of cases that pass (`CodeSettings`).

A program with cases runs after `PRELUDE`: LiveCodeBench's starter code says `List[int]` and imports
nothing.

Invariants: tests never enter the RUN sandbox; only the program's text crosses into a fresh EVAL
sandbox; HumanEval's verdict is the exit status of the test runner and a nonce that the program
never sees (`code_tests.py`); of cases the sandbox gets one input at a time, and what is expected
and who compares (`grader.py`) are outside, under another uid. What a program can cause scores 0; a
runner that cannot start or tests that do not load raise GraderError.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, ClassVar

from msgspec import Meta

from prorl import exact_json
from prorl.envs import grading
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.settings import EnvSettings, PromptSettings
from prorl.envs.tools import BASH, FILES, PYTHON, cut_short, field_error, text_field
from prorl.errors import GraderError, NoReferenceError, NotFoundError, SandboxError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import (
    FailureCode,
    Grade,
    Json,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

SOLUTION_FILE = "solution.py"
MAX_PROGRAM_BYTES = 200 << 10
TESTS_S = 30.0
"""Limit of all tests together when the task names none."""
MAX_LOG_CHARS = 4000
CASE_S, TOTAL_S = 6.0, 60.0
MAX_OUTPUT_BYTES = 16 << 20
MAX_ERROR_CHARS = 200

PRELUDE = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json
setrecursionlimit(50000)
if hasattr(sys, "set_int_max_str_digits"): sys.set_int_max_str_digits(50000)
"""
"""The lines that LiveCodeBench's harness puts before a program, with its limits of recursion and of
the digits of an integer. APPS, TACO and their kin supply nearly the same, so every program with
cases runs after them.
"""

# LiveCodeBench's limit of recursion needs more than the usual 8 MiB of stack
_START = 'ulimit -S -s "$(ulimit -H -s)" 2>/dev/null; rm -rf .output .errors; exec "$@"'
_PRINTS = f"{_START} >.output 2>.errors"
_GIVES = f"{_START} 3>.output >/dev/null 2>.errors"
_LOAD = """
program = compile(open("solution.py", "rb").read(), "solution.py", "exec", dont_inherit=True)
"""
_READER = f"""
import sys
sys.argv, __file__ = ["solution.py"], "solution.py"
{PRELUDE}{_LOAD}
exec(program)
"""
"""Runs a program that reads and prints, in `__main__`."""
_CALLER = f"""
import json, os, sys
scope = {{"__name__": "solution"}}
exec({PRELUDE!r}, scope)
job = json.load(sys.stdin)
supplied = scope.get(job["function"])  # `search` is a name of `re` and of many a class Solution
{_LOAD}
exec(program, scope)
found = scope.get(job["function"])
if found is supplied:
    found = None
if found is None and "Solution" in scope:
    found = getattr(scope["Solution"](), job["function"])
if found is None:
    raise NameError("no function " + job["function"])
value = found(*job["arguments"])
with os.fdopen(3, "w") as out:
    plain = lambda one: sorted(one) if isinstance(one, (set, frozenset)) else str(one)
    json.dump({{"value": value}}, out, default=plain)
"""
"""Calls the function of a program once."""

_FENCE = re.compile(r"^(```|~~~)[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:^\1|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"py(?:thon)?3?", re.IGNORECASE)
_PROGRAM_KINDS = {
    False: "function that the user asks for",
    True: (
        "program that the user asks for: one that reads standard input and writes standard output,"
        " or the function or class that is named"
    ),
}
"""The name that the system message gives the program, by whether the task has cases."""


@dataclass(frozen=True, kw_only=True)
class CodeSettings(PromptSettings):
    partial: Annotated[
        bool,
        Meta(description="the reward is the share of cases that pass; else all must pass"),
    ] = False


@reward("tests")
async def tests(task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline) -> Grade:
    """Returns 1 when every test passes, else 0. Raises GraderError or SandboxError."""
    if not artifact.strip():
        return Grade(0.0, "no program: neither a fenced block nor " + SOLUTION_FILE)
    if sandbox is None:
        raise GraderError(FailureCode.GRADER_ERROR, "the code env needs an EVAL sandbox")
    if "cases" in task.data:
        return await grade_cases(task, artifact, sandbox, deadline)
    nonce = secrets.token_hex(16)
    task_limit_s = float(task.data.get("timeout_s", TESTS_S))
    limit_s = min(task_limit_s, deadline.remaining_s)
    result = await sandbox.exec(
        ["python3", "-I", "-c", _test_runner_source()], limit_s, _job(task, artifact, nonce)
    )
    return _verdict(result, nonce, is_cut=limit_s < task_limit_s)


class CodeEnv(BaseEnv):
    name = "code"
    settings: ClassVar[type[EnvSettings]] = CodeSettings
    offers: tuple[ToolSpec, ...] = (BASH, PYTHON, FILES)
    rubric = Rubric((tests, 1.0))
    scores_in_sandbox = True

    def check(self, task: Task) -> None:
        super().check(task)
        if "cases" in task.data:
            check_cases(task)
        else:
            _check_tests(task)

    def system_message(self, task: Task) -> str:
        names = [tool.name for tool in self.tools(task)]
        ours = f"Write the Python {_PROGRAM_KINDS['cases' in task.data]}."
        if not names:
            return f"{ours} Finish with the whole program in one ```python block."
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        return (
            f"{ours} You have a workspace with {listed}; try your program out. Finish with the"
            f" whole program in one ```python block, or leave it in {SOLUTION_FILE} and say so."
        )

    def question(self, task: Task) -> str:
        """HumanEval's prompt as source; else the prompt, and the starter code below it."""
        if "cases" not in task.data:
            return f"```python\n{task.prompt.strip()}\n```"
        starter = str(task.data.get("starter_code") or "").rstrip()
        source = f"```python\n{starter}\n```" if starter else ""
        return "\n\n".join(filter(None, (task.prompt.strip(), source)))

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The program: the last block of Python in the final message, or of no language; else the
        file, else nothing.
        """
        fences = _FENCE.findall(final)
        blocks = [block for _, language, block in fences if _PYTHON.fullmatch(language)]
        blocks = blocks or [block for _, language, block in fences if not language]
        if blocks or sandbox is None:
            return blocks[-1].encode("utf-8", "replace")[:MAX_PROGRAM_BYTES] if blocks else b""
        try:
            return await sandbox.get(SOLUTION_FILE, MAX_PROGRAM_BYTES)
        except (NotFoundError, OSError):
            return b""

    def reference(self, task: Task) -> Solution:
        self.check(task)
        if "canonical_solution" not in task.data:
            raise NoReferenceError(f"task {task.task_id!r}: no canonical_solution", "a program")
        solution = text_field(task, "canonical_solution")
        if "cases" in task.data:
            test = "python3 -m py_compile solution.py && echo fine"
        else:
            solution = f"{text_field(task, 'prompt')}{solution}"
            name = task.data["entry_point"]
            test = f"python3 -c 'import solution; print(callable(solution.{name}))'"
        if not {BASH.name, FILES.name} <= {tool.name for tool in self.tools(task)}:
            return Solution((), f"```python\n{solution}\n```")
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
    """Returns the prompt before the function: imports and helpers that the tests may use too."""
    prompt, entry_point = text_field(task, "prompt"), text_field(task, "entry_point")
    match = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: match.start()] if match else ""


def _job(task: Task, artifact: bytes, nonce: str) -> bytes:
    """Returns the input of the test runner: the whole program, the tests and the nonce, as JSON.

    A text that defines the function follows the prompt's head; any other is the rest of its body.
    """
    text, entry_point = artifact.decode("utf-8", "replace"), task.data["entry_point"]
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
    return exact_json.dumps(job)


def _verdict(result: ToolResult, nonce: str, *, is_cut: bool) -> Grade:
    log = result.output.replace(nonce, "NONCE")[-MAX_LOG_CHARS:]
    if result.timed_out:
        if is_cut:
            raise cut_short("tests")
        return Grade(0.0, f"the tests did not end in time\n{log}")
    words = result.output.rstrip().rsplit("\n", 1)[-1].split()
    verdict = words[1] if len(words) == 2 and words[0] == nonce else ""
    if verdict == "error" or f"{nonce} start" not in result.output:
        raise GraderError(
            FailureCode.GRADER_ERROR,
            f"the tests could not run (exit status {result.exit_code}): {log}",
        )
    return Grade(float(verdict == "pass" and result.exit_code == 0), log)


@cache
def _test_runner_source() -> str:
    return files("prorl.envs").joinpath("code_tests.py").read_text()


# ---- programs with cases


def check_cases(task: Task) -> None:
    """`data.cases` is what the grader compares. Raises TaskError."""
    cases: Json = task.data["cases"]
    function = task.data.get("function", "")
    if not isinstance(cases, list) or not cases:
        raise field_error(task, f"data.cases is {cases!r}", "a list of cases")
    if not isinstance(function, str) or (function and not function.isidentifier()):
        raise field_error(
            task,
            f"data.function is {function!r}",
            "the name of a function, or none for programs that read and print",
        )
    for number, case in enumerate(cases):
        _check_case(task, number, case, has_function=bool(function))


def _check_case(task: Task, number: int, case: Json, *, has_function: bool) -> None:
    """Checks that a case has an input and an output of the right types. Raises TaskError."""
    needs = {"input"} if has_function else {"input", "output"}  # a table leaves out None
    if not isinstance(case, dict) or not needs <= case.keys():
        raise field_error(
            task, f"data.cases[{number}] is {case!r}", "an object with input and output"
        )
    if has_function and not isinstance(case["input"], list):
        raise field_error(task, f"data.cases[{number}]: {case!r}", "a list of arguments as input")
    if not has_function and not all(isinstance(case[key], str) for key in ("input", "output")):
        raise field_error(task, f"data.cases[{number}]: {case!r}", "a text as input and as output")


async def grade_cases(task: Task, artifact: bytes, sandbox: Sandbox, deadline: Deadline) -> Grade:
    """Returns 1 if all cases pass; with the setting `partial` the share that passes.

    Raises GraderError, SandboxError.
    """
    task_limit_s = float(task.data.get("timeout_s", TOTAL_S))
    total_s = min(task_limit_s, deadline.remaining_s)
    until, case_s = time.monotonic() + total_s, float(task.data.get("case_s", CASE_S))
    cases, partial = task.data["cases"], CodeSettings.of(task).partial
    await sandbox.put("solution.py", artifact)
    passed, log = 0, ""
    for number, case in enumerate(cases):
        remaining_s = until - time.monotonic()
        if remaining_s <= 0 and total_s < task_limit_s:
            raise cut_short("cases")
        problem = "no time was left"
        if remaining_s > 0:
            is_cut = remaining_s < case_s and total_s < task_limit_s
            limit_s = min(case_s, remaining_s)
            problem = await _problem(task, case, sandbox, limit_s, deadline, is_cut=is_cut)
        if not problem:
            passed += 1
            continue
        if passed + 3 > number:
            log += f"case {number}: {problem}\n"
        if remaining_s <= 0 or not partial:
            break
    share = passed / len(cases)
    log += f"{passed} of {len(cases)} cases passed"
    return Grade(share if partial else float(share == 1.0), log[-MAX_LOG_CHARS:])


async def _problem(
    task: Task, case: Json, sandbox: Sandbox, limit_s: float, deadline: Deadline, *, is_cut: bool
) -> str:
    """Returns why a case fails; empty when it passes. Raises GraderError, SandboxError."""
    function = task.data.get("function", "")
    if function:
        stdin = exact_json.dumps({"function": function, "arguments": case["input"]})
        shell, source = _GIVES, _CALLER
    else:
        stdin, shell, source = case["input"].encode(), _PRINTS, _READER
    run = ["sh", "-c", shell, "sh", "python3", "-I", "-B", "-c", source]
    try:
        done = await sandbox.exec(run, limit_s, stdin)
        if done.timed_out:
            if is_cut:
                raise cut_short("cases")
            return f"took more than {limit_s:g} s"
        if done.exit_code:
            errors = (await _read(sandbox, ".errors"))[-MAX_ERROR_CHARS:].strip()
            return f"ended with exit status {done.exit_code}: {errors}"
        output = await _read(sandbox, ".output")
    except SandboxError as error:
        if error.code is not FailureCode.SANDBOX_BROKEN:
            raise
        return f"the program broke its sandbox: {error.message}"
    expected = case.get("output")
    spelled = exact_json.dumps({"value": expected}).decode() if function else expected
    verdict, why = await grading.ask(
        grading.RULES,
        ("case", output, expected, bool(function)),
        ("case", spelled, expected, bool(function)),
        deadline,
    )
    return why if verdict is None else str(verdict)


async def _read(sandbox: Sandbox, name: str) -> str:
    try:
        data = await sandbox.get(name, MAX_OUTPUT_BYTES)
    except (NotFoundError, OSError):
        return ""
    return data.decode("utf-8", "replace")
