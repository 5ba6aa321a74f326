"""Programs with cases, the second shape of the `code` env.

A case is an input and what must be printed for it, or arguments and what a function must give
(Codeforces, APPS, TACO, LiveCodeBench ...).

The sandbox gets the program and one case's input at a time. What is expected and who compares
(`grader.py`) are here, outside, under another uid: there is no judge inside that a program
could read, stop or kill. What it does to its sandbox is its own failure.
"""

from __future__ import annotations

import time

import orjson

from prorl.envs import grading
from prorl.envs.tools import cut_short, field_error
from prorl.errors import NotFoundError, SandboxError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Json, Judgement, Task

CASE_S, TOTAL_S = 6.0, 60.0
MAX_OUTPUT_BYTES = 16 << 20
MAX_SHOWN = 200
MAX_LOG_CHARS = 4000

_PRINTS = 'rm -rf .output .errors; exec "$@" >.output 2>.errors'
_GIVES = 'rm -rf .output .errors; exec "$@" 3>.output >/dev/null 2>.errors'
_CALLER = """
import json, os, sys
job = json.load(sys.stdin)
scope = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), scope)
found = scope.get(job["function"])
if found is None and "Solution" in scope:
    found = getattr(scope["Solution"](), job["function"])
if found is None:
    raise NameError("no function " + job["function"])
value = found(*job["arguments"])
with os.fdopen(3, "w") as out:
    plain = lambda one: sorted(one) if isinstance(one, (set, frozenset)) else str(one)
    json.dump({"value": value}, out, default=plain)
"""
"""Calls the function of a program once."""


def check_cases(task: Task) -> None:
    """`data.cases` is what the judge reads. Raises TaskError."""
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
    """A case has an input and an output of the right types. Raises TaskError."""
    if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
        raise field_error(
            task, f"data.cases[{number}] is {case!r}", "an object with input and output"
        )
    if has_function and not isinstance(case["input"], list):
        raise field_error(task, f"data.cases[{number}]: {case!r}", "a list of arguments as input")
    if not has_function and not all(isinstance(case[one], str) for one in ("input", "output")):
        raise field_error(task, f"data.cases[{number}]: {case!r}", "a text as input and as output")


async def judge_cases(
    task: Task, artefact: bytes, sandbox: Sandbox, deadline: Deadline
) -> Judgement:
    """1 if every case passes, with `data.partial` the share. Raises GraderError, SandboxError."""
    wanted_s = float(task.data.get("timeout_s", TOTAL_S))
    total_s = min(wanted_s, deadline.remaining_s)
    until, case_s = time.monotonic() + total_s, float(task.data.get("case_s", CASE_S))
    cases, partial = task.data["cases"], bool(task.data.get("partial", False))
    await sandbox.put("solution.py", artefact)
    passed, log = 0, ""
    for number, case in enumerate(cases):
        left_s = until - time.monotonic()
        if left_s <= 0 and total_s < wanted_s:
            raise cut_short("cases")
        problem = "no time was left"
        if left_s > 0:
            is_cut = left_s < case_s and total_s < wanted_s
            limit_s = min(case_s, left_s)
            problem = await _problem(task, case, sandbox, limit_s, deadline, is_cut=is_cut)
        if not problem:
            passed += 1
            continue
        if passed + 3 > number:
            log += f"case {number}: {problem}\n"
        if left_s <= 0 or not partial:
            break
    share = passed / len(cases)
    log += f"{passed} of {len(cases)} cases passed"
    return Judgement(share if partial else float(share == 1.0), log[-MAX_LOG_CHARS:])


async def _problem(
    task: Task, case: Json, sandbox: Sandbox, limit_s: float, deadline: Deadline, *, is_cut: bool
) -> str:
    """Why a program fails a case; empty when it passes. Raises GraderError, SandboxError."""
    function = task.data.get("function", "")
    argv, given = ["solution.py"], case["input"]
    if function:
        argv, given = ["-c", _CALLER], {"function": function, "arguments": given}
    stdin = orjson.dumps(given) if function else given.encode()
    run = ["sh", "-c", _GIVES if function else _PRINTS, "sh", "python3", "-I", "-B", *argv]
    try:
        done = await sandbox.exec(run, limit_s, stdin)
        if done.timed_out:
            if is_cut:
                raise cut_short("cases")
            return f"took more than {limit_s:g} s"
        if done.exit_code:
            errors = (await _read(sandbox, ".errors"))[-MAX_SHOWN:].strip()
            return f"ended with exit status {done.exit_code}: {errors}"
        output = await _read(sandbox, ".output")
    except SandboxError as error:
        if error.code is not FailureCode.SANDBOX_BROKEN:
            raise
        return f"the program broke its sandbox: {error.message}"
    expected = case["output"]
    spelled = orjson.dumps({"value": expected}).decode() if function else expected
    found, why = await grading.ask(
        grading.RULES,
        ("case", output, expected, bool(function)),
        ("case", spelled, expected, bool(function)),
        deadline,
    )
    return why if found is None else str(found)


async def _read(sandbox: Sandbox, name: str) -> str:
    try:
        data = await sandbox.get(name, MAX_OUTPUT_BYTES)
    except (NotFoundError, OSError):
        return ""
    return data.decode("utf-8", "replace")
