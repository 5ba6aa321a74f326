"""Which files of a change count: what decides about a solution is not the solution's to change.

Pure functions over paths that a policy may have chosen. A path is left out of a change when it is

- a graded file: of `test_patch`, or named by FAIL_TO_PASS or PASS_TO_PASS;
- below the graded files' own test folder (`tests/helpers.py`, `tests/__init__.py`);
- a file that steers or shadows the runner wherever it lies: conftest.py, pytest.ini, tox.ini,
  sitecustomize.py, *.pth, compiled Python, an installed package's entry points; or what
  `data.protected` names instead;
- a new top-level module or package with a name that the runner itself imports (`argparse.py`,
  `pluggy/`);
- a file that the test command starts (`bin/test`, `Makefile`).

What the reference patch changes is let through, but never a graded file. Settings files that hold
more than the runner's settings (pyproject.toml, setup.cfg, package.json) count unless the runner's
part of them is another one than before (`settings.py`).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from prorl.envs.swe.kept import test_folder

PROTECTED = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "noxfile.py",
    ".coveragerc",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "*.pyc",
    "*.pyo",
    "*.egg-link",
    "__pycache__/*",
    "*.dist-info/*",
    "*.egg-info/*",
    "jest.config.*",
    "vitest.config.*",
    ".mocharc*",
)
"""What steers or shadows a test runner, at any depth. A task whose solution must change one of
these has it in its reference patch, or names its own `protected`.
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
        "prorl_suspects",
        "prorl_kept",
    ]
)
"""Packages that a Python test runner imports besides the standard library."""

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
    """Files that a unified diff touches, in its order.

    >>> patch_paths("--- a/tests/test_a.py\\n+++ b/tests/test_a.py\\n--- /dev/null\\n+++ b/new.py\\n")
    ('tests/test_a.py', 'new.py')
    """
    found = [*_PATHS.findall(patch), *(path for both in _GIT.findall(patch) for path in both)]
    return tuple(dict.fromkeys(found))


def moves_files(change: bytes) -> bool:
    """Whether a diff says that files were renamed or copied: ours never does, so it is forged."""
    return _RENAME.search(change) is not None


class Rules(NamedTuple):
    """What is known about a task's tests."""

    graded: frozenset[str]
    """Paths, and for unittest ends of paths that begin with `/`."""
    reference: frozenset[str]
    """Paths of the reference patch."""
    protected: tuple[str, ...]
    command: str
    """That runs the tests."""


def make_rules(
    test_patch: str,
    names: Iterable[str],
    patch: str,
    command: str,
    protected: Sequence[str] | None = None,
) -> Rules:
    """Make the rules from a task's fields; `names` are those of FAIL_TO_PASS and PASS_TO_PASS."""
    reference = frozenset(patch_paths(patch))
    # a doctest's file is code: what the reference changes there is no test's
    named = {path for name in names if (path := graded_file(name)) and path not in reference}
    kept = PROTECTED if protected is None else tuple(protected)
    return Rules(frozenset({*patch_paths(test_patch), *named}), reference, kept, command)


def graded_file(name: str) -> str:
    """The file that a test's name tells of; `/` in front where only its end is known.

    >>> graded_file("tests/test_a.py::T::test_x[1]"), graded_file("test_x (tests.test_a.T)")
    ('tests/test_a.py', '/tests/test_a.py')
    >>> graded_file("TestParse/empty")
    ''
    """
    if "::" in name:
        return name.partition("::")[0]
    found = _UNITTEST.match(name)
    if found is None:
        return name if re.fullmatch(r"[\w./-]+\.\w{1,4}", name) and "/" in name else ""
    parts = found[1].split(".")
    if len(parts) > 1 and parts[-1] == name.split()[0]:
        del parts[-1]
    return f"/{'/'.join(parts[:-1])}.py" if len(parts) > 1 else ""


def left_out(paths: Collection[str], rules: Rules, there: Collection[str]) -> dict[str, str]:
    """Paths of a change that do not count, with the reason.

    `there` are the ones of `questions` that the untouched repository has.
    """
    folders = {folder for path in rules.graded if (folder := test_folder(path))}
    commands = command_files(rules.command)
    reasons: dict[str, str] = {}
    for path in paths:
        if is_graded(path, rules.graded):
            reasons[path] = "graded"
        elif path in rules.reference:
            continue
        elif any(f"{path}/".startswith(f"{folder}/") for folder in folders):
            reasons[path] = "in the graded tests' folder"
        elif is_protected(path, rules.protected):
            reasons[path] = "steers the test runner"
        elif path in commands:
            reasons[path] = "started by the test command"
        elif shadow(path, there):
            reasons[path] = f"shadows {shadow(path, there)}"
    return reasons


def watched(rules: Rules) -> list[str]:
    """Files and folders that do not change while tests run: the graded ones, and their folders."""
    known = {path for path in rules.graded if not path.startswith("/")}
    return sorted(known | {folder for path in known if (folder := test_folder(path))})


def is_graded(path: str, graded: Collection[str]) -> bool:
    """Whether a test's name or the tests' patch tells of this file."""
    return path in graded or any(end.startswith("/") and f"/{path}".endswith(end) for end in graded)


def is_protected(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the path from some folder of it on.

    >>> is_protected("src/conftest.py", ["conftest.py"]), is_protected("a/x.dist-info/RECORD", ["*.dist-info/*"])
    (True, True)
    """
    parts = path.split("/")
    ends = ["/".join(parts[index:]) for index in range(len(parts))]
    return any(fnmatchcase(end, pattern) for end in ends for pattern in patterns)


def command_files(command: str) -> frozenset[str]:
    """Files of the repository that a command may start."""
    try:
        words = shlex.split(command.replace("\n", " ; "), comments=True)
    except ValueError:
        words = command.split()
    found = {word.removeprefix("./") for word in words if "/" in word or "." in word}
    for word in words:
        found.update(_MAKES.get(word, ()))
    return frozenset(found)


def questions(paths: Iterable[str]) -> list[str]:
    """What must be known of the untouched repository to tell shadows: paths that may be there."""
    asked: set[str] = set()
    for path in paths:
        for place, parent in _suspects(path):
            asked |= {place, parent, f"{parent}/__init__.py"} if parent else {place}
    return sorted(asked)


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
        if (is_file and not part.endswith(_IMPORTABLE)) or (not is_file and "." in part):
            continue
        if name in _SHADOWS or name.startswith("pytest_"):
            yield "/".join(parts[: index + 1]), "/".join(parts[:index])
