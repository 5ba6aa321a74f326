"""Programs with cases, the second shape of the `code` env.

A case is an input and what must be printed for it, or arguments and what a function must give
(Codeforces, APPS, TACO, LiveCodeBench ...), or an interactor talks with the program.
"""

from __future__ import annotations

import ast
import secrets
from functools import cache
from importlib.resources import files

import orjson

from prorl.envs.tools import cut_short, field_error, text_field
from prorl.errors import GraderError
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
        raise field_error(task, f"data.cases is {cases!r}", "a list of cases")
    if not isinstance(function, str) or (function and not function.isidentifier()):
        raise field_error(
            task,
            f"data.function is {function!r}",
            "the name of a function, or none for programs that read and print",
        )
    if "interactor" in task.data:
        check_interactor(task)
        return
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


def check_interactor(task: Task) -> None:
    """It defines `interact`, and each case has an input. Raises TaskError."""
    source = text_field(task, "interactor")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as cause:
        raise field_error(task, f"data.interactor: {cause}", "Python") from cause
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    if "interact" not in defined or task.data.get("function"):
        raise field_error(
            task,
            f"data.interactor defines {', '.join(sorted(defined)) or 'nothing'}",
            "a function `interact(case, talk)`, and no data.function",
        )
    for number, case in enumerate(task.data["cases"]):
        if not isinstance(case, dict) or "input" not in case:
            expected = "an object with input, which the interactor gets"
            raise field_error(task, f"data.cases[{number}] is {case!r}", expected)


async def judge_cases(
    task: Task, artefact: bytes, sandbox: Sandbox, deadline: Deadline
) -> Judgement:
    """1 if every case passes, with `data.partial` the share. Raises GraderError, SandboxError."""
    nonce = secrets.token_hex(16)
    wanted_s = float(task.data.get("timeout_s", TOTAL_S))
    total_s = min(wanted_s, deadline.remaining_s)
    job = _job(task, artefact, total_s) | {"nonce": nonce}
    argv = ["python3", "-I", "-c", _judge_source(talks=bool(job["interactor"]))]
    done = await sandbox.exec(argv, total_s + START_S, orjson.dumps(job))
    log = done.output.replace(nonce, "judge")[-MAX_LOG_CHARS:]
    if f"{nonce} start" not in done.output:
        raise GraderError(FailureCode.GRADER_ERROR, f"the cases could not run: {log}")
    if "no time was left" in done.output and total_s < wanted_s:
        raise cut_short("cases")
    if done.output.rstrip().endswith(f"\n{nonce} error"):
        raise GraderError(FailureCode.GRADER_ERROR, f"the task's interactor failed: {log}")
    share = _share(done.output, nonce)
    if share is None:
        return Judgement(0.0, f"the program ended the judge\n{log}")
    return Judgement(share if task.data.get("partial") else float(share == 1.0), log)


def _job(task: Task, artefact: bytes, total_s: float) -> dict[str, Json]:
    """What the judge reads, but for its nonce."""
    return {
        "program": artefact.decode("utf-8", "replace"),
        "cases": task.data["cases"],
        "function": task.data.get("function", ""),
        "interactor": task.data.get("interactor", ""),
        "case_s": float(task.data.get("case_s", CASE_S)),
        "total_s": total_s,
        "stop_early": not task.data.get("partial", False),
    }


def _share(output: str, nonce: str) -> float | None:
    """The share of cases that passed, by the judge's last line; None where it wrote none."""
    words = output.rstrip().rsplit("\n", 1)[-1].split()
    if len(words) != 3 or words[0] != nonce:
        return None
    passed, total = int(words[1]), int(words[2])
    return passed / total


@cache
def _judge_source(*, talks: bool) -> str:
    name = "judge_talks.py" if talks else "judge_cases.py"
    return files("prorl.envs").joinpath(name).read_text()
