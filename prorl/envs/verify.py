"""math-verify in a process that can be killed: sympy may take minutes on a hostile expression and
holds the GIL while it does.

The verdict has three values: right, wrong, or GraderError when the grader itself failed, hung or
died. Importing this module imports nothing of math-verify; `_verify` runs in the helper alone.
"""

from __future__ import annotations

from importlib.util import find_spec

import anyio
import anyio.to_process

from prorl.errors import GraderError, boundary
from prorl.types import FailureCode

HELPER_S = 20.0
"""Longest comparison, the helper's start and imports (about 2 s) included."""


def installed() -> bool:
    """Whether math-verify can be imported."""
    return find_spec("math_verify") is not None


async def verify(gold: str, answer: str, budget_s: float) -> bool:
    """Whether two LaTeX or plain answers are equal as mathematics.

    Not symmetric: gold comes first. Raises GraderError.
    """
    with (
        boundary(GraderError, FailureCode.GRADER_ERROR, "math-verify"),
        anyio.fail_after(min(budget_s, HELPER_S)),
    ):
        return await anyio.to_process.run_sync(_verify, gold, answer, cancellable=True)


def _verify(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    golds = parse(f"${gold}$")
    if not golds:
        raise ValueError(f"the reference answer {gold!r} does not parse")
    return bool(verify(golds, parse(f"${answer}$")))
