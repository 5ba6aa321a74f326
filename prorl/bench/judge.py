"""`prorl bench judge`: a judge against answers that people have scored.

PRORL_JUDGE_URL, PRORL_JUDGE_MODEL and PRORL_JUDGE_KEY name it.

| row | what |
|---|---|
| judge_accuracy | share of the cases on the right side of one half; one without a score is wrong |
| judge_false_positives | answers of no worth that it takes for good ones |
| judge_errors | cases to which it gave no score |
| judge_mean_error | mean distance of the scores |
| judge_ms | a judgement, from outside |

PRORL_JUDGE_TABLE is a table of your own: JSON Lines with prompt, answer, score (0 to 1), and
optionally reference and rubric. Half of the built-in one's rows are wrong answers that look right.
"""

from __future__ import annotations

import os
import time
from importlib.resources import files
from pathlib import Path

import orjson

from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.envs.llm_judge import Case, JudgeConfig, LlmJudge, calibrate
from prorl.errors import UserError
from prorl.types import Task

QUICK = 12
"""Cases of `--quick`, evenly out of the table."""


async def run(quick: bool = False) -> Report:
    """Judge the table. Raises UserError where no judge is configured, or the table is none."""
    judge = _configured()
    table = cases(os.environ.get("PRORL_JUDGE_TABLE", ""))
    if quick:
        table = table[:: max(1, len(table) // QUICK)]
    began = time.perf_counter()
    found = await calibrate(LlmJudge(judge), table)
    each_ms = 1000 * (time.perf_counter() - began) / len(table)
    right = found.agreement * (found.num_cases - found.errors) / found.num_cases
    note = f"{found.num_cases} cases, {judge.model}"
    rows = (
        Figure(what="judge_accuracy", value=right, unit="share", note=note),
        Figure(what="judge_false_positives", value=found.false_positives, unit="cases"),
        Figure(what="judge_errors", value=found.errors, unit="cases"),
        Figure(what="judge_mean_error", value=found.mean_error, unit="score"),
        Figure(what="judge_ms", value=each_ms, unit="ms"),
    )
    return Report(bench="judge", machine=machine(), rows=rows)


def _configured() -> JudgeConfig:
    url, model, key = (
        os.environ.get(f"PRORL_JUDGE_{name}", "") for name in ("URL", "MODEL", "KEY")
    )
    if not url or not model:
        raise UserError(
            "no judge is configured",
            "PRORL_JUDGE_URL and PRORL_JUDGE_MODEL",
            "name a server that speaks OpenAI's /v1/chat/completions",
        )
    return JudgeConfig(url=url, model=model, api_key=key)


def cases(path: str = "") -> list[Case]:
    """The labelled answers of a file; none: of the built-in table. Raises UserError."""
    where = Path(path) if path else files("prorl.bench").joinpath("judge_table.jsonl")
    try:
        lines = where.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise UserError(f"cannot read {path}: {cause}", "a table as PRORL_JUDGE_TABLE") from cause
    found = [_case(path, number, line) for number, line in enumerate(lines, start=1) if line]
    if not found:
        raise UserError(f"{path} has no row", "at least one labelled answer")
    return found


def _case(path: str, number: int, line: str) -> Case:
    try:
        row = orjson.loads(line)
        score = float(row["score"])
        data = {"answer": str(row.get("reference") or "(none)")}
        if row.get("rubric"):
            data["judge_rubric"] = str(row["rubric"])
        task = Task(task_id=f"judge/{number}", env="stem", prompt=str(row["prompt"]), data=data)
        answer = str(row["answer"]).encode()
    except (ValueError, LookupError, TypeError, AttributeError) as cause:
        raise UserError(
            f"{path}, line {number}: {line[:100]!r}", "an object with prompt, answer and score"
        ) from cause
    if not 0 <= score <= 1:
        raise UserError(f"{path}, line {number}: score {score:g}", "0 to 1")
    return Case(task, answer, score)
