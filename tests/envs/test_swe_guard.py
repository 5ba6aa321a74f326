"""Tests of which files of a change count, decided from paths alone."""

from __future__ import annotations

import pytest

from prorl.envs.swe.guard import exclusions, graded_file, make_rules, questions

TEST_PATCH = "--- a/pkg/tests/test_a.py\n+++ b/pkg/tests/test_a.py\n"
PATCH = "--- a/pkg/a.py\n+++ b/pkg/a.py\n--- a/conftest.py\n+++ b/conftest.py\n"
NAMES = ("pkg/tests/test_a.py::test_x", "pkg/a.py::pkg.a.f", "test_y (pkg.more.tests.T)", "Go/x")
RULES = make_rules(TEST_PATCH, NAMES, PATCH, "make check && ./bin/test -v")
BASE = {"pkg", "pkg/__init__.py", "src", "scripts", "src/logging", "src/logging/__init__.py"}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("pkg/a.py", ""),
        ("pkg/b.py", ""),
        ("pkg/tests/test_a.py", "graded"),
        ("pkg/more/tests.py", "graded"),
        ("other/pkg/more/tests.py", "graded"),
        ("pkg/tests/data.json", "in the graded tests' folder"),
        ("pkg/testing/tool.py", "of the tests' side"),
        ("pkg/_testing.py", "of the tests' side"),
        ("other/tests/helper.py", "of the tests' side"),
        ("pkg/latest.py", ""),
        ("pkg/testing.txt", ""),
        ("src/sitecustomize", "steers the test runner"),
        ("sitecustomize/__init__.py", "steers the test runner"),
        ("src/UserCustomize.py", "steers the test runner"),
        ("src/x.DIST-INFO", "steers the test runner"),
        ("src/argparse", "shadows argparse"),
        ("conftest.py", "steers the test runner"),
        ("setup.cfg", "steers the test runner"),
        ("deep/conftest.py", "steers the test runner"),
        ("src/x.egg-info/entry_points.txt", "steers the test runner"),
        ("Makefile", "started by the test command"),
        ("bin/test", "started by the test command"),
        ("argparse.py", "shadows argparse.py"),
        ("scripts/argparse.py", "shadows argparse.py"),
        ("src/pluggy/__init__.py", "shadows pluggy"),
        ("src/_bisect.cpython-311-x86_64-linux-gnu.so", "shadows _bisect.cpython"),
        ("pytest_evil.py", "shadows pytest_evil.py"),
        ("pkg/argparse.py", ""),
        ("src/logging/handlers.py", ""),
        ("new/argparse.py", ""),
        ("types.txt", ""),
    ],
)
def test_which_files_are_excluded_and_why(path: str, why: str) -> None:
    excluded = exclusions([path], RULES, BASE & set(questions([path])))
    assert excluded.get(path, "").startswith(why)
    assert bool(excluded) == bool(why)


def test_what_the_reference_does_on_the_tests_side_is_the_tests() -> None:
    assert RULES.brought == {"conftest.py"}
    alone = make_rules(TEST_PATCH, (), "--- a/conftest.py\n+++ b/conftest.py\n", "pytest")
    assert alone.brought == frozenset()
    assert not exclusions(["conftest.py"], alone, ())


def test_a_task_about_assertions_lets_them_be_changed() -> None:
    patch = "--- a/pkg/testing/tool.py\n+++ b/pkg/testing/tool.py\n"
    rules = make_rules(TEST_PATCH, (), patch, "pytest")
    assert rules.is_about_tests
    assert set(exclusions(["pkg/testing/tool.py", "pkg/_testing.py"], rules, ())) == set()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tests/a.py::T::test[a::b]", "tests/a.py"),
        ("test_a (m.T.test_a)", "/m.py"),
        ("test_a (m.T)", "/m.py"),
        ("src/app.test.js", "src/app.test.js"),
        ("it adds numbers", ""),
        ("TestAdd/negative", ""),
    ],
)
def test_files_that_tests_names_tell_of(name: str, path: str) -> None:
    assert graded_file(name) == path
