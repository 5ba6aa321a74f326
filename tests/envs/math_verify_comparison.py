r"""Our grader of mathematics beside math-verify, on the same rows, as verl's reward calls it.

`python -m tests.envs.math_verify_comparison` prints one line for each table:
how many of the right and of the wrong answers each grader pays. math-verify is the extra `math`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prorl.envs.grader import prepare

HERE = Path(__file__).parent


class Row(NamedTuple):
    question: str
    reference: str
    text: str
    right: bool


def written() -> Iterator[Row]:
    """Answers as policies write them, and wrong ones, which were written before the rules of the
    day they were added were read.
    """
    for group in _lines("math_written.jsonl"):
        for key in ("right", "wrong"):
            for text in group[key]:
                yield Row(group["question"], group["reference"], text, key == "right")


def aimed() -> Iterator[Row]:
    """Answers that were aimed at the rules."""
    for group in _lines("math_aimed.jsonl"):
        for key in ("right", "answers", "closed"):
            for text in group.get(key, ()):
                boxed = f"\\boxed{{{text}}}"
                yield Row(group["question"], group["reference"], boxed, key != "answers")


def _lines(name: str) -> Iterator[dict[str, Any]]:
    for line in (HERE / name).read_text().splitlines():
        yield json.loads(line)


def ours(row: Row, grading: str = "closed_form") -> bool:
    verdict, *_ = _GRADE(("math", row.reference, row.text, row.question, grading))
    return bool(verdict)


def theirs(row: Row) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    try:
        reference = parse(f"\\boxed{{{row.reference}}}", [LatexExtractionConfig()])
        answer = parse(row.text, [ExprExtractionConfig(), LatexExtractionConfig()])
        return bool(verify(reference, answer))
    except Exception:  # noqa: BLE001  what it cannot grade pays nothing there
        return False


_GRADE = prepare("rules")


def main() -> None:
    # math-verify takes minutes of processor time for all that were aimed
    tables = {"math_written": list(written()), "math_aimed": list(aimed())[::10]}
    graders = {
        "closed_form": ours,
        "strict": lambda row: ours(row, "strict"),
        "value": lambda row: ours(row, "value"),
        "math-verify": theirs,
    }
    for name, rows in tables.items():
        totals = Counter(row.right for row in rows)
        for kind, grade in graders.items():
            paid = Counter(row.right for row in rows if grade(row))
            print(
                f"{name:<13} {kind:<12} right ones paid {paid[True]:4} of {totals[True]:4}"
                f" ({paid[True] / totals[True]:.3f}), wrong ones paid {paid[False]:4}"
                f" of {totals[False]:4} ({paid[False] / totals[False]:.3f})"
            )


if __name__ == "__main__":
    main()
