"""Decides which files of a change count: a solution may not change what decides about it.

Pure functions over paths that a policy may have chosen. A path is left out of a change when it is

- a graded file: of `test_patch`, or named by FAIL_TO_PASS or PASS_TO_PASS;
- below the graded files' own test folder (`tests/helpers.py`, `tests/__init__.py`);
- a file, folder or link that steers or shadows the runner wherever it lies: conftest.py,
  pyproject.toml, sitecustomize, *.pth, compiled Python, an installed package's entry points, in any
  case of letters;
- of the tests' side by its name, where the reference changes no such file: `pkg/testing.py`,
  `pkg/tests/helper.py`;
- a new top-level module or package with a name that the runner itself imports (`argparse.py`,
  `pluggy/`);
- a file that the test command starts (`bin/test`, `Makefile`).

Of the first three the tests get what the reference patch makes of them (`brought`), unless it
changes nothing else.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

PROTECTED = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "noxfile.py",
    "pyproject.toml",
    "setup.cfg",
    "package.json",
    ".coveragerc",
    "sitecustomize",
    "sitecustomize.*",
    "usercustomize",
    "usercustomize.*",
    "*.pth",
    "*.pyc",
    "*.pyo",
    "*.egg-link",
    "__pycache__",
    "*.dist-info",
    "*.egg-info",
    "jest.config.*",
    "vitest.config.*",
    ".mocharc*",
)
"""The names that steer or shadow a test runner, at any depth. A task whose solution must change one
of these has it in its reference patch.
"""

RUNNERS = frozenset(
    [
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "py",
        "attr",
        "attrs",
        "exceptiongroup",
        "tomli",
        "toml",
        "colorama",
        "more_itertools",
        "wcwidth",
        "atomicwrites",
        "six",
        "importlib_metadata",
        "zipp",
        "typing_extensions",
        "pathlib2",
        "funcsigs",
        "pygments",
        "coverage",
        "xdist",
        "execnet",
        "hypothesis",
        "anyio",
        "nose",
        "nose2",
        "mock",
        "asynctest",
        "prorl_witness",
        "prorl_pytest",
    ]
)
"""Packages that a Python test runner imports besides the standard library."""

TEST_FOLDERS = frozenset(["tests", "test", "__tests__", "spec", "specs", "unit_tests"])
SIDE = (
    *("tests", "test", "testing", "_testing", "*_testing", "testing_*"),
    *("test_utils", "test_tools", "test_helper*", "test_support", "testutil*", "testhelper*"),
)
"""Names of modules and folders, without their ends, that hold what tests are made with."""

_SHADOWS = frozenset(sys.stdlib_module_names) | RUNNERS
_IMPORTABLE = (".py", ".so", ".pyd", ".pyc", ".zip")
_MAKES = {
    "make": ("Makefile", "makefile", "GNUmakefile"),
    "gmake": ("Makefile", "makefile", "GNUmakefile"),
    "rake": ("Rakefile",),
    "mvn": ("pom.xml",),
    "gradle": ("build.gradle", "build.gradle.kts", "settings.gradle"),
    "just": ("justfile",),
}
_PATHS = re.compile(r"^(?:---|\+\+\+) (?:\"?[ab]/)([^\t\"\n]+)", re.MULTILINE)
_GIT = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_UNITTEST = re.compile(r"^\w+ \(([\w.]+)\)")
_RENAME = re.compile(rb"^(?:rename|copy) (?:from|to) ", re.MULTILINE)


def patch_paths(patch: str) -> tuple[str, ...]:
    """Returns files that a unified diff touches, in its order.

    >>> patch_paths("--- a/tests/test_a.py\\n+++ b/tests/test_a.py\\n--- /dev/null\\n+++ b/new.py\\n")
    ('tests/test_a.py', 'new.py')
    """
    paths = [*_PATHS.findall(patch), *(path for both in _GIT.findall(patch) for path in both)]
    return tuple(dict.fromkeys(paths))


def moves_files(change: bytes) -> bool:
    """Returns whether a diff says that files were renamed or copied: ours never does, so it is
    forged.
    """
    return _RENAME.search(change) is not None


class Rules(NamedTuple):
    graded: frozenset[str]
    """Paths, and for unittest ends of paths that begin with `/`."""
    reference: frozenset[str]
    """Paths of the reference patch."""
    command: str
    """The command that runs the tests."""

    @property
    def brought(self) -> frozenset[str]:
        """Paths of the reference that the tests get from it, whatever the change does there."""
        ours = {path for path in self.reference if self.decides(path)}
        return frozenset(ours if ours < self.reference else ())

    @property
    def is_about_tests(self) -> bool:
        """Returns whether the task is to mend what tests are made with."""
        return any(is_side(path) for path in self.reference - self.brought)

    def decides(self, path: str) -> str:
        """Returns why a path may not be written by the change; empty where it may be."""
        folders = {folder for graded in self.graded if (folder := test_folder(graded))}
        if is_graded(path, self.graded):
            return "graded"
        if any(f"{path}/".startswith(f"{folder}/") for folder in folders):
            return "in the graded tests' folder"
        return "steers the test runner" if is_protected(path) else ""


def make_rules(test_patch: str, names: Iterable[str], patch: str, command: str) -> Rules:
    """Make the rules from a task's fields; `names` are those of FAIL_TO_PASS and PASS_TO_PASS."""
    reference = frozenset(patch_paths(patch))
    # a doctest's file is code: what the reference changes there is no test's
    named = {path for name in names if (path := graded_file(name)) and path not in reference}
    return Rules(frozenset({*patch_paths(test_patch), *named}), reference, command)


def graded_file(name: str) -> str:
    """Returns the file that a test's name tells of, with `/` in front where only its end is known.

    >>> graded_file("tests/test_a.py::T::test_x[1]"), graded_file("test_x (tests.test_a.T)")
    ('tests/test_a.py', '/tests/test_a.py')
    >>> graded_file("TestParse/empty")
    ''
    """
    if "::" in name:
        return name.partition("::")[0]
    match = _UNITTEST.match(name)
    if match is None:
        return name if re.fullmatch(r"[\w./-]+\.\w{1,4}", name) and "/" in name else ""
    parts = match[1].split(".")
    if len(parts) > 1 and parts[-1] == name.split()[0]:
        del parts[-1]
    return f"/{'/'.join(parts[:-1])}.py" if len(parts) > 1 else ""


def exclusions(paths: Collection[str], rules: Rules, there: Collection[str]) -> dict[str, str]:
    """Returns paths of a change that do not count, with the reason.

    `there` are the ones of `questions` that the untouched repository has.
    """
    commands = command_files(rules.command)
    reference_paths = rules.reference - rules.brought
    reasons: dict[str, str] = {}
    for path in paths:
        if (why := rules.decides(path)) and (why == "graded" or path not in reference_paths):
            reasons[path] = why
        elif path in reference_paths:
            continue
        elif is_side(path) and not rules.is_about_tests:
            reasons[path] = "of the tests' side"
        elif path in commands:
            reasons[path] = "started by the test command"
        elif shadow(path, there):
            reasons[path] = f"shadows {shadow(path, there)}"
    return reasons


def test_folder(path: str) -> str:
    """The outermost folder of tests that a file lies in; empty: none.

    >>> test_folder("pkg/tests/unit/test_a.py"), test_folder("pkg/test_a.py")
    ('pkg/tests', '')
    """
    parts = path.split("/")[:-1]
    for index, part in enumerate(parts):
        if part in TEST_FOLDERS or part.endswith(("_tests", "-tests")):
            return "/".join(parts[: index + 1]) if path[0] != "/" else ""
    return ""


def is_side(path: str) -> bool:
    """Returns whether a name says that a Python file is there for tests.

    >>> is_side("pkg/_testing/asserters.py"), is_side("pkg/tests/helper.py"), is_side("pkg/latest.py")
    (True, True, False)
    """
    names = path.removesuffix(".py").split("/")
    return path.endswith(".py") and any(
        fnmatchcase(name, pattern) for name in names for pattern in SIDE
    )


def is_graded(path: str, graded: Collection[str]) -> bool:
    return path in graded or any(end.startswith("/") and f"/{path}".endswith(end) for end in graded)


def is_protected(path: str) -> bool:
    """Returns whether the path, or a folder of it, has a name of PROTECTED.

    >>> is_protected("src/conftest.py"), is_protected("a/X.Dist-Info/RECORD")
    (True, True)
    """
    return any(
        fnmatchcase(name, pattern) for name in path.lower().split("/") for pattern in PROTECTED
    )


def command_files(command: str) -> frozenset[str]:
    """Returns files of the repository that a command may start."""
    try:
        words = shlex.split(command.replace("\n", " ; "), comments=True)
    except ValueError:
        words = command.split()
    files = {word.removeprefix("./") for word in words if "/" in word or "." in word}
    for word in words:
        files.update(_MAKES.get(word, ()))
    return frozenset(files)


def questions(paths: Iterable[str]) -> list[str]:
    """Returns paths to look for in the untouched repository, which a change may shadow."""
    candidates: set[str] = set()
    for path in paths:
        for place, parent in _suspects(path):
            candidates |= {place, parent, f"{parent}/__init__.py"} if parent else {place}
    return sorted(candidates)


def shadow(path: str, there: Collection[str]) -> str:
    """The module that a new file would be taken for by the runner; empty: none.

    A module of a package is none, and a folder that is new cannot be where modules are sought.
    """
    for place, parent in _suspects(path):
        is_root = not parent or (parent in there and f"{parent}/__init__.py" not in there)
        if place not in there and is_root:
            return place.rpartition("/")[2]
    return ""


def _suspects(path: str) -> Iterable[tuple[str, str]]:
    """(path down to a name that the runner imports, folder that holds it)."""
    parts = path.split("/")
    for index, part in enumerate(parts):
        is_file = index == len(parts) - 1
        name = part.partition(".")[0]
        # a file without an end may be a link to a package
        if "." in part and not (is_file and part.endswith(_IMPORTABLE)):
            continue
        if name in _SHADOWS or name.startswith("pytest_"):
            yield "/".join(parts[: index + 1]), "/".join(parts[:index])
