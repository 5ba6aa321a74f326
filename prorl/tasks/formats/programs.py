"""Programming problems: HumanEval; APPS, TACO, LiveCodeBench, code_contests, Codeforces.

APPS and TACO have `question` and `input_output`, LiveCodeBench `question_content` and test cases as
JSON, code_contests `description`, `public_tests` ..., Codeforces rows `description`,
`official_tests` or `examples`.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping

from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row, name_of, text
from prorl.types import Json, Task

MAX_UNPACKED_BYTES = 256 << 20
_PYTHON = re.compile(r"python|pypy", re.IGNORECASE)


def program_data(value: Json) -> dict[str, Json]:
    """`{inputs, outputs [, fn_name]}`, or its JSON text, as the env's data; empty when it is none.

    >>> program_data({"inputs": ["1"], "outputs": ["2"]})
    {'cases': [{'input': '1', 'output': '2'}]}
    >>> program_data('{"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}')["cases"]
    [{'input': [1, 2], 'output': 3}]
    """
    value = _parsed(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    if not isinstance(value, dict) or not {"inputs", "outputs"} <= value.keys():
        return {}
    inputs, outputs, function = value["inputs"], value["outputs"], value.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise TaskError("inputs and outputs differ in number", "one output for each input")
    if not function:
        pairs = zip(map(_lines, inputs), map(_lines, outputs), strict=True)
        return {"cases": [{"input": stdin, "output": stdout} for stdin, stdout in pairs]}
    is_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    expected = [output[0] for output in outputs] if is_wrapped else outputs
    cases = [{"input": g, "output": w} for g, w in zip(inputs, expected, strict=True)]
    return {"cases": cases, "function": function}


def _lines(value: Json) -> str:
    """A program's input or output: a text, or a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(value: Json) -> Json:
    """The value of JSON text; anything else as it is. Raises TaskError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as cause:
        raise TaskError(
            f"{value[:60]!r} is not valid JSON ({cause})", "the tests as JSON"
        ) from cause


def _task(row: Row, source: str, index: int, prompt: str, data: Mapping[str, Json]) -> Task:
    if not data.get("cases"):
        raise TaskError("it has no test cases", "at least one input with its output")
    keys = ("question_id", "problem_id", "id", "name", "task_id")
    return Task(
        task_id=name_of(row, source, index, *keys),
        env="code",
        prompt=prompt,
        data={key: value for key, value in data.items() if value not in ("", None)},
        data_source=source,
    )


def read_humaneval(row: Row, index: int) -> Task:
    """task_id, prompt, entry_point, test [, canonical_solution]."""
    data = {name: text(row, name) for name in ("prompt", "entry_point", "test")}
    if "canonical_solution" in row:
        data["canonical_solution"] = text(row, "canonical_solution")
    return Task(
        task_id=text(row, "task_id"),
        env="code",
        prompt=data["prompt"],
        data=data,
        data_source="humaneval",
    )


HUMANEVAL = Format("humaneval", ("task_id", "prompt", "entry_point", "test"), read_humaneval)


# ---- APPS, TACO


def read_apps(row: Row, index: int) -> Task:
    """question, input_output [, solutions, starter_code, time_limit]."""
    data = program_data(_parsed(row["input_output"]))
    solutions = _parsed(row.get("solutions") or "[]")
    if isinstance(solutions, list) and solutions and isinstance(solutions[0], str):
        data["canonical_solution"] = solutions[0]
    data["starter_code"] = row.get("starter_code") or ""
    limit = re.match(r"\s*([\d.]+)", str(row.get("time_limit") or ""))
    data["case_s"] = float(limit[1]) if limit else None
    return _task(row, "apps", index, text(row, "question"), data)


# ---- LiveCodeBench


def read_livecodebench(row: Row, index: int) -> Task:
    """question_content, public_test_cases [, private_test_cases, metadata, starter_code]."""
    cases = _parsed(row["public_test_cases"])
    private = row.get("private_test_cases")
    cases = [*cases, *(_private(private) if private else [])]
    metadata = _parsed(row.get("metadata") or "{}")
    function = metadata.get("func_name") or "" if isinstance(metadata, dict) else ""
    data: dict[str, Json] = {"starter_code": row.get("starter_code") or "", "function": function}
    data["cases"] = [_livecodebench_case(case, function) for case in cases]
    return _task(row, "livecodebench", index, text(row, "question_content"), data)


def _livecodebench_case(case: Json, function: str) -> dict[str, Json]:
    if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
        raise TaskError(f"a test case is {str(case)[:100]}", "an object with input and output")
    if not function:
        return {"input": case["input"], "output": case["output"]}
    arguments = [_parsed(line) for line in str(case["input"]).splitlines() if line.strip()]
    return {"input": arguments, "output": _parsed(case["output"])}


class _TextOnly(pickle.Unpickler):
    """Private cases are a pickled text: nothing but plain values is made of it."""

    def find_class(self, module: str, name: str) -> Json:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _private(value: Json) -> list[Json]:
    """Returns the private cases, which come as JSON, or packed. Raises TaskError."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
    if isinstance(value, list):
        return value
    try:
        cases = _parsed(_unpacked(str(value)))
    except UNPACKING_ERRORS as cause:
        problem = f"private_test_cases cannot be read ({cause})"
        raise TaskError(problem, "what was published") from None
    if not isinstance(cases, list):
        raise TaskError("private_test_cases are no list", "what was published")
    return cases


UNPACKING_ERRORS = (ValueError, EOFError, LookupError, zlib.error, pickle.UnpicklingError)


def _unpacked(value: str) -> Json:
    """Returns what base64 of zlib of a pickled text holds. Raises one of `UNPACKING_ERRORS`."""
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(base64.b64decode(value), MAX_UNPACKED_BYTES)
    return _TextOnly(io.BytesIO(content)).load()


# ---- code_contests, Codeforces


def read_contest(row: Row, index: int) -> Task:
    """A task of a description and cases.

    Cases are public_tests, private_tests, generated_tests {input, output}, or official_tests or
    examples, lists of {input, output}. solutions and time_limit are read where they are there.
    """
    parts = [text(row, "description")]
    for name in ("input_format", "output_format", "note"):
        if isinstance(row.get(name), str) and row[name].strip():
            parts.append(f"{name.replace('_', ' ').capitalize()}\n\n{row[name].strip()}")
    data: dict[str, Json] = {
        "cases": _cases(row),
        "canonical_solution": _python_of(row.get("solutions")),
    }
    limit = row.get("time_limit")
    limit = limit.get("seconds") if isinstance(limit, dict) else limit
    data["case_s"] = float(limit) if isinstance(limit, int | float) and limit > 0 else None
    return _task(row, "contest", index, "\n\n".join(parts), data)


def _cases(row: Row) -> list[Json]:
    cases: list[Json] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        tests = row.get(name)
        if isinstance(tests, dict):
            parsed = program_data({"inputs": tests.get("input"), "outputs": tests.get("output")})
            cases += parsed["cases"] if parsed else []
    for name in ("official_tests", "examples"):
        tests = row.get(name)
        if not cases and isinstance(tests, list):
            cases = [{"input": test["input"], "output": test["output"]} for test in _pairs(tests)]
    return cases


def _pairs(tests: Iterable[Json]) -> Iterable[dict[str, str]]:
    for test in tests:
        if not isinstance(test, dict) or not all(
            isinstance(test.get(key), str) for key in ("input", "output")
        ):
            raise TaskError(f"a test is {str(test)[:100]}", "an object with input and output")
        yield test


def _python_of(solutions: Json) -> str:
    """Returns the first Python solution; code_contests lists languages (3 = Python 3)."""
    if not isinstance(solutions, dict):
        return ""
    pairs = zip(solutions.get("language", []), solutions.get("solution", []), strict=False)
    return next(
        (str(code) for language, code in pairs if language == 3 or _PYTHON.match(str(language))),
        "",
    )


APPS = Format("apps", ("question", "input_output"), read_apps)
LIVECODEBENCH = Format(
    "livecodebench", ("question_content", "public_test_cases"), read_livecodebench
)
CONTEST = Format("contest", ("description", "public_tests|official_tests|examples"), read_contest)
