"""Verdicts read from what tests printed: a failure wins over every `ok` beside it."""

from __future__ import annotations

import pytest

from prorl.envs.swe.report import passed_tests


@pytest.mark.parametrize(
    ("report", "passed"),
    [
        (
            (
                "PASSED t.py::a[x - y]\nFAILED t.py::b - assert 1\nERROR t.py::c\nXFAIL t.py::d -"
                " later\nSKIPPED [1] t.py:3: no"
            ),
            {"t.py::a[x - y]", "t.py::d"},
        ),
        ("PASSED t.py::a\nFAILED t.py::a - teardown", set()),
        (
            "test_a (m.T)\nWhat it does ... ok\ntest_b (m.T) ... FAIL",
            {"test_a (m.T)", "test_a (m.T.test_a)"},
        ),
        ("test_a (m.T.test_a) ... printed\nok", {"test_a (m.T)", "test_a (m.T.test_a)"}),
        ("test_a (m.T.test_a) ... ok\nFAIL\n====\nFAIL: test_a (m.T.test_a)\n", set()),
        ("ok\nok\n... ok\nPASSED\nPASSED ", set()),
        (
            "test_a (m.T) ... skipped 'no'\ntest_b (m.T) ... expected failure",
            {"test_b (m.T)", "test_b (m.T.test_b)"},
        ),
    ],
)
def test_verdicts(report: str, passed: set[str]) -> None:
    assert passed_tests(report) == passed
