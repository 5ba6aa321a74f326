"""Regular expressions that read text of others: a megabyte takes a tenth of a second at most.

Those of the call grammars are in `tests/renderer/test_grammars.py`.
"""

from __future__ import annotations

import re
import time

import pytest

from prorl.envs import code
from prorl.envs.swe import logs
from prorl.renderer import guard
from prorl.sandbox.images import maker

NUM_LETTERS = 1_000_000
MARKS: tuple[str, ...] = (
    *(" ", "\n", "\t", "a", "1", "-", "`", "```", "~~~", "ok 1", "not ok", "# SKIP", " > ", "--- "),
    *("1/1 Test #1: ", ".", "from:", "\ufdd0", "\ufdd1", "PASSED", "```py\n", "a > "),
)


def texts() -> list[str]:
    pairs = [(one, other) for one in MARKS for other in (" ", "\n", "a")]
    return [
        *(mark * (NUM_LETTERS // len(mark)) for mark in MARKS),
        *((one + other) * (NUM_LETTERS // len(one + other)) for one, other in pairs),
        *(one + other * NUM_LETTERS for one, other in pairs),
    ]


@pytest.mark.parametrize(
    "pattern",
    [code._FENCE, logs._TAP, maker.FROM],
    ids=["fence", "tap", "from"],
)
def test_a_pattern_reads_a_megabyte_in_a_tenth_of_a_second(pattern: re.Pattern[str]) -> None:
    _check(lambda text: sum(1 for _ in pattern.finditer(text)))


def test_fences_are_taken_out_of_a_megabyte_in_a_tenth_of_a_second() -> None:
    _check(guard.bare)


@pytest.mark.parametrize("harness", ["go", "gradle", "ctest", "sympy", "tap"])
def test_a_log_of_a_megabyte_is_read_in_a_tenth_of_a_second(harness: str) -> None:
    _check(logs.PARSERS[harness])


def _check(read: object) -> None:
    assert callable(read)
    worst_s, worst = 0.0, ""
    for text in texts():
        began = time.process_time()
        read(text)
        if (took_s := time.process_time() - began) > worst_s:
            worst_s, worst = took_s, text[:40]
    assert worst_s < 0.1, (worst_s, worst)
