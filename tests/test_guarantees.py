"""`docs/guarantees.md` names lines and tests that are there, so that `make test-guards-all` can
switch the lines off and run the tests.
"""

from __future__ import annotations

import ast
import doctest

import pytest

from tests import promises
from tests.faults.all_guards import BY_HAND, switched_off
from tests.faults.guarantees import PAGE, ROOT, Row, places, pytest_arguments, rows

ROWS = rows(PAGE.read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row.guarantee[:60] for row in ROWS])
def test_a_row_names_lines_and_tests_that_are_there(row: Row) -> None:
    matches = places(row)
    assert matches
    assert not [words for words, there in matches if not there]
    tests = pytest_arguments(row)
    assert tests, row.tests
    for path, _, name in (argument[0].partition("::") for argument in tests):
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize("row", ROWS, ids=[row.guarantee[:60] for row in ROWS])
def test_a_line_that_is_off_leaves_a_program_that_runs(row: Row) -> None:
    for words, there in places(row):
        texts = {place.file: (ROOT / place.file).read_text() for place in there}
        off = switched_off(dict(texts), there)
        assert off != texts
        for text in off.values():
            ast.parse(text)
        assert words in BY_HAND or not any(place.unbinds for place in there), words


def test_the_promises_of_the_readme_are_its_words_and_name_tests_that_are_there() -> None:
    page = " ".join((ROOT / "README.md").read_text().split())
    for words, tests in promises.README.items():
        assert words in page
        for path, _, name in (argument.partition("::") for argument in tests):
            assert (ROOT / path).exists(), path
            assert not name or f"def {name}(" in (ROOT / path).read_text(), name


def test_a_result_says_what_did_not_run() -> None:
    assert doctest.testmod(promises).failed == 0
