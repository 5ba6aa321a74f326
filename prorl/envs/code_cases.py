"""Programs with cases, the second shape of the `code` env: an input and what must be printed for
it, arguments and what a function must give (Codeforces, APPS, TACO, LiveCodeBench ...), or an
interactor that talks with the program.
"""

from __future__ import annotations

import ast
import secrets
from functools import cache
from importlib.resources import files

import orjson

from prorl.envs.tools import text_field
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Json, Judgement, Task

CASE_S, TOTAL_S = 6.0, 60.0
START_S = 15.0
"""For the judge's own work, beside the cases' limit."""
MAX_LOG_CHARS = 4000


def check_cases(task: Task) -> None:
    """`data.cases` is what the judge reads. Raises TaskError."""
    cases: Json = task.data["cases"]
    function = task.data.get("function", "")
    if not isinstance(cases, list) or not cases:
        raise TaskError(f"task {task.task_id!r}: data.cases is {cases!r}"[:300], "a list of cases")
    if not isinstance(function, str) or (function and not function.isidentifier()):
        raise TaskError(
            f"task {task.task_id!r}: data.function is {function!r}"[:300],
            "the name of a function, or none for programs that read and print",
        )
    if "interactor" in task.data:
        check_interactor(task)
        return
    kind, expected = (list, "a list of arguments") if function else (str, "a text")
    for number, case in enumerate(cases):
        if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
            raise TaskError(
                f"task {task.task_id!r}: data.cases[{number}] is {case!r}"[:300],
                "an object with input and output",
            )
        if not isinstance(case["input"], kind) or not (function or isinstance(case["output"], str)):
            raise TaskError(
                f"task {task.task_id!r}: data.cases[{number}]: {case!r}"[:300],
                f"{expected} as input{'' if function else ' and as output'}",
            )


def check_interactor(task: Task) -> None:
    """It defines `interact`, and each case has an input. Raises TaskError."""
    source = text_field(task, "interactor")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as cause:
        raise TaskError(f"task {task.task_id!r}: data.interactor: {cause}", "Python") from cause
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    if "interact" not in defined or task.data.get("function"):
        raise TaskError(
            f"task {task.task_id!r}: data.interactor defines"
            f" {', '.join(sorted(defined)) or 'nothing'}",
            "a function `interact(case, talk)`, and no data.function",
        )
    for number, case in enumerate(task.data["cases"]):
        if not isinstance(case, dict) or "input" not in case:
            raise TaskError(
                f"task {task.task_id!r}: data.cases[{number}] is {case!r}"[:300],
                "an object with input, which the interactor gets",
            )


async def judge_cases(
    task: Task, artefact: bytes, sandbox: Sandbox, deadline: Deadline
) -> Judgement:
    """1 when every case passes, with `data.partial` the share that does.

    Raises GraderError, SandboxError.
    """
    nonce = secrets.token_hex(16)
    wanted_s = float(task.data.get("timeout_s", TOTAL_S))
    total_s = min(wanted_s, deadline.remaining_s)
    is_partial = bool(task.data.get("partial", False))
    job = {
        "program": artefact.decode("utf-8", "replace"),
        "cases": task.data["cases"],
        "function": task.data.get("function", ""),
        "interactor": task.data.get("interactor", ""),
        "case_s": float(task.data.get("case_s", CASE_S)),
        "total_s": total_s,
        "stop_early": not is_partial,
        "nonce": nonce,
    }
    judge = _judge_source("judge_talks.py" if job["interactor"] else "judge_cases.py")
    argv = ["python3", "-I", "-c", judge]
    done = await sandbox.exec(argv, total_s + START_S, orjson.dumps(job))
    log = done.output.replace(nonce, "judge")[-MAX_LOG_CHARS:]
    if f"{nonce} start" not in done.output:
        raise GraderError(FailureCode.GRADER_ERROR, f"the cases could not run: {log}")
    if "no time was left" in done.output and total_s < wanted_s:
        raise GraderError(
            FailureCode.GRADER_ERROR, "too little of EVAL's time was left for the cases"
        )
    if done.output.rstrip().endswith(f"\n{nonce} error"):
        raise GraderError(FailureCode.GRADER_ERROR, f"the task's interactor failed: {log}")
    words = done.output.rstrip().rsplit("\n", 1)[-1].split()
    if len(words) != 3 or words[0] != nonce:
        return Judgement(0.0, f"the program ended the judge\n{log}")
    passed, total = int(words[1]), int(words[2])
    return Judgement(passed / total if is_partial else float(passed == total), log)


@cache
def _judge_source(name: str) -> str:
    return files("prorl.envs").joinpath(name).read_text()
