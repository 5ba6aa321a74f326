"""`docs/guarantees.md` names lines and tests that are there, so that `make test-guards-all` can
switch the lines off and run the tests.
"""

from __future__ import annotations

import pytest

from tests.faults.guarantees import PAGE, ROOT, Row, places, pytest_arguments, rows

ROWS = rows(PAGE.read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row.guarantee[:60] for row in ROWS])
def test_a_row_names_lines_and_tests_that_are_there(row: Row) -> None:
    found = list(places(row))
    assert found
    assert not [words for words, there in found if not there]
    tests = pytest_arguments(row)
    assert tests, row.tests
    for path, _, name in (argument[0].partition("::") for argument in tests):
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(), name
