"""Verdicts read from what tests printed: a failure wins over every `ok` beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.envs.swe.logs import PARSERS, choose, read_log
from prorl.envs.swe.tested import Tested as Outcome
from tests.growth import is_quadratic

LOGS = Path(__file__).with_name("logs")


def test_of_many_tests_the_missing_are_found_in_linear_time() -> None:
    def missing(text: str) -> list[str]:
        names = text.split()
        return Outcome(frozenset(names[::2]), "").missing(names)

    def names(num_chars: int) -> str:
        return " ".join(f"t.py::test[{n:05}]" for n in range(num_chars // 18))

    assert missing(names(18 * 4)) == ["t.py::test[00001]", "t.py::test[00003]"]
    assert not is_quadratic(missing, names, 18 * 4_000)


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
    result = read_log(report, "python")
    assert result.passed - result.failed == passed


def test_the_harness_of_sympy() -> None:
    result = read_log("test_a ok\ntest_b F\ntest_c E\n", "sympy")
    assert result == (frozenset({"test_a"}), frozenset({"test_b", "test_c"}))


PYTEST = (
    {"test_adds", "test_many[one]", "TestBox::test_opens", "test_known", "TestBox::test_rust"},
    {"test_errors", "test_many[two words]", "TestBox::test_closes"},
)


@pytest.mark.parametrize(
    ("name", "parser", "passed", "failed"),
    [
        *((f"pytest-{age}", "python", *PYTEST) for age in ("6.2.5", "7.4.4", "8.3.5")),
        (
            "unittest-3.11",
            "python",
            {f"test_{name} (test_u.TestBox)" for name in ("opens", "prints", "rust")},
            {f"test_{name} (test_u.TestBox)" for name in ("closes", "raises", "lid")},
        ),
        (
            "cargo",
            "cargo",
            {"tests::adds", "tests::panics - should panic"},
            {"tests::later", "tests::carries"},
        ),
        ("jest", "jest", {"opens", "Box > when wet > rusts"}, {"closes", "lid"}),
        ("mocha", "jest", {"opens", "Box > when wet > rusts"}, {"closes"}),
        ("tap", "tap", {"opens"}, {"closes", "lid"}),
        (
            "django-5.2",
            "python",
            {
                *(f"test_{name} (app.tests.BoxTests)" for name in ("opens", "prints", "rust")),
                "test_stored (app.tests.StoredTests.test_stored)",
            },
            {
                *(f"test_{name} (app.tests.BoxTests)" for name in ("closes", "raises", "lid")),
                "test_many (app.tests.BoxTests.test_many)",
            },
        ),
        (
            "tox-4",
            "python",
            {f"tests/test_a.py::{name}" for name in ("TestBox::test_opens", "test_many[one]")},
            {
                f"tests/test_a.py::{name}"
                for name in ("TestBox::test_closes", "test_errors", "test_many[two words]")
            },
        ),
        (
            "cargo-nocapture",
            "cargo",
            {"tests::adds", "tests::panics - should panic", "src/lib.rs - twice (line 3)"},
            {"tests::carries", "tests::errs", "tests::later"},
        ),
        ("ctest", "ctest", {"opens", "rusts"}, {"closes", "lid", "raises", "hangs"}),
        (
            "go",
            "go",
            {"TestBox/opens", "TestAdds", "TestWaits"},
            {"TestBox", "TestBox/closes", "TestBox/lid", "TestRaises"},
        ),
        (
            "maven",
            "maven",
            {"a.LidTest"},
            {"a.BoxTest", "BoxTest.closes", "BoxTest.raises", "a.LaterTest"},
        ),
        (
            "gradle",
            "gradle",
            {"BoxTest > opens()", "LidTest > adds(int, int) > [1] 1, 1"},
            {"BoxTest > closes()", "BoxTest > lid()", "BoxTest > raises()"},
        ),
    ],
)
def test_logs_of_real_runs(name: str, parser: str, passed: set[str], failed: set[str]) -> None:
    """The same handful of tests by each harness; the logs are as they were printed."""
    result = read_log((LOGS / f"{name}.txt").read_text(), parser)
    if name.startswith("pytest"):
        passed = {f"tests/test_a.py::{case}" for case in passed}
        failed = {f"tests/test_a.py::{case}" for case in failed}
    assert passed <= result.passed - result.failed
    assert failed <= result.failed
    assert not failed & (result.passed - result.failed)


PASSES = {
    "python": "PASSED {0}\n{0} ... ok",
    "cargo": "test {0} ... ok",
    "go": "--- PASS: {0} (0.00s)",
    "jest": "  ✓ {0} (1 ms)",
    "tap": "ok 1 - {0}",
    "ctest": "1/3 Test #1: {0} ............   Passed    0.01 sec",
    "maven": "[INFO] Tests run: 1, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0 s -- in {0}",
    "gradle": "{0} PASSED",
}


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.txt")), ids=lambda path: path.stem)
def test_no_test_prints_itself_a_pass(path: Path) -> None:
    """Whatever line of the log a forged pass of a failed test follows, it has failed."""
    parser = path.stem.partition("-")[0]
    parser = parser if parser in PARSERS else {"mocha": "jest"}.get(parser, "python")
    log = path.read_text()
    honest = read_log(log, parser)
    lines = log.splitlines(keepends=True)
    for name in honest.failed:
        for place in range(len(lines)):
            text = "".join([*lines[:place], PASSES[parser].format(name) + "\n", *lines[place:]])
            result = read_log(text, parser)
            assert name not in result.passed - result.failed, (name, place)


@pytest.mark.parametrize("parser", PARSERS)
@given(log=st.text())
def test_no_log_breaks_a_parser(parser: str, log: str) -> None:
    read_log(log, parser)


@pytest.mark.parametrize(
    ("command", "parser"),
    [
        ("bin/test -C --verbose sympy/core", "sympy"),
        ("./tests/runtests.py --verbosity 2", "python"),
        ("tox -epy39 -v --", "python"),
        ("npm test -- --verbose", "jest"),
        ("./mvnw test", "maven"),
    ],
)
def test_parsers_are_chosen_by_the_command(command: str, parser: str) -> None:
    assert choose(command) == parser
