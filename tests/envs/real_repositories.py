"""Real fixes of real packages as rows in SWE-bench's shape, made when a test asks for them.

Each comes from the package index that pip is configured for: two versions between which a fault was
mended, or one version into which a fault is put that its own tests catch. What tests are in the
newer one is the tests' patch, what else changed is the reference.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from prorl.types import Json

FETCH_S, TESTS_S = 180.0, 300.0
TESTS = re.compile(r"(^|/)tests?/|(^|/)tests?(_[^/]*)?\.py$")
GRADED = re.compile(r"(^|/)(tests?|test_[^/]*|[^/]*_test)\.py$")
SOURCES = re.compile(r"\.(py|pyi|txt|cfg)$")
NO_SOURCES = re.compile(r"(^|/)(docs?|examples|requirements)/|egg-info|(^|/)setup\.(py|cfg)$")


class Fix(NamedTuple):
    """A package, the version with the fault (or the fault itself), and the version without."""

    name: str
    before: str
    """A version, or `FILE: right -> wrong`."""
    after: str
    needs: tuple[str, ...] = ()
    """Packages that its tests import beside pytest."""


FIXES = (
    Fix("xmltodict", "0.12.0", "0.13.0"),
    Fix("parse", "1.19.1", "1.20.0"),
    Fix("isodate", "0.6.0", "0.6.1", ("six",)),
    Fix("click", "8.1.3", "8.1.4"),
    Fix("h11", "0.13.0", "0.14.0"),
    Fix("parso", "0.8.3", "0.8.4"),
    Fix("rfc3986", "1.5.0", "2.0.0", ("idna",)),
    Fix("boltons", "23.0.0", "23.1.0"),
    Fix("inflection", "inflection/__init__.py: (11, 12, 13) -> (11, 12)", "0.5.1"),
    Fix("toolz", "toolz/itertoolz.py: chain((item,), iterator) -> chain(iterator)", "0.12.1"),
    Fix("uritemplate", 'uritemplate/variable.py: ";", "?", "&" -> ";", "?"', "4.1.1"),
)


def row(fix: Fix, folder: Path) -> dict[str, Json]:
    """The row, its repository as `archive`, a .tar.gz in the folder. Raises CalledProcessError when
    the package cannot be had.
    """
    after = _source(fix.name, fix.after, folder)
    before = _before(fix, after, folder)
    tree = folder / f"{fix.name}-tree"
    changed = [
        path for path in sorted({*_files(before), *_files(after)}) if _differs(path, before, after)
    ]
    tests = [path for path in changed if TESTS.search(path)]
    graded = [path for path in tests if GRADED.search(path)]
    if not graded:
        graded = [path for path in _files(after) if GRADED.search(path) and TESTS.search(path)]
    tests = sorted({*tests, *graded})
    sources = [path for path in changed if path not in tests and SOURCES.search(path)]
    sources = [path for path in sources if not NO_SOURCES.search(path)]
    shutil.copytree(before, tree, ignore=shutil.ignore_patterns("*.pyc"))
    for path in graded:
        (tree / path).unlink(missing_ok=True)
    _git(tree, "init", "-q")
    base = _commit(tree)
    test_patch = _take(tree, after, tests)
    failing = _tests(tree, graded)
    patch = _take(tree, after, sources)
    passing = _tests(tree, graded)
    _git(tree, "reset", "-q", "--hard", base)
    archive = folder / f"{fix.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, arcname=".", filter=lambda member: None if "/.git" in member.name else member)
    needs = {"requirements": ["pytest", *fix.needs]} if fix.needs else {}
    return {
        **needs,
        "instance_id": f"{fix.name}__{fix.name}-{fix.after}",
        "repo": f"{fix.name}/{fix.name}",
        "base_commit": "",
        "problem_statement": f"{fix.name} has a fault that version {fix.after} mends.",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": sorted(passing - failing),
        "PASS_TO_PASS": sorted(passing & failing),
        "archive": str(archive),
        "timeout_s": 300.0,
        "environment": {"PYTHONPATH": "src:.", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    }


def _source(name: str, version: str, folder: Path) -> Path:
    place = folder / "sdists" / f"{name}-{version}"
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    argv += ["--no-binary", ":all:", f"{name}=={version}", "--dest", str(place)]
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=FETCH_S)
    shutil.unpack_archive(next(path for path in place.iterdir() if path.is_file()), place / "all")
    return next((place / "all").iterdir())


def _before(fix: Fix, after: Path, folder: Path) -> Path:
    if ": " not in fix.before:
        return _source(fix.name, fix.before, folder)
    path, _, change = fix.before.partition(": ")
    right, wrong = change.split(" -> ")
    tree = folder / f"{fix.name}-fault"
    shutil.copytree(after, tree)
    text = (tree / path).read_text()
    assert right in text, f"{fix.name} has no {right}"
    (tree / path).write_text(text.replace(right, wrong, 1))
    return tree


def _files(tree: Path) -> list[str]:
    paths = [path for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return [str(path.relative_to(tree)) for path in paths]


def _differs(path: str, before: Path, after: Path) -> bool:
    both = [(tree / path).read_bytes() for tree in (before, after) if (tree / path).is_file()]
    return len(both) < 2 or both[0] != both[1]


def _take(tree: Path, after: Path, paths: list[str]) -> str:
    """Bring these files of the newer version and commit them; the diff."""
    for path in paths:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        if (after / path).is_file():
            shutil.copyfile(after / path, tree / path)
        else:
            (tree / path).unlink(missing_ok=True)
    _commit(tree)
    return _git(tree, "diff", "--no-renames", "HEAD~1", "HEAD")


def _commit(tree: Path) -> str:
    _git(tree, "add", "-A", "-f")
    _git(
        tree,
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "x",
    )
    return _git(tree, "rev-parse", "HEAD").strip()


def _git(tree: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=tree, check=True, capture_output=True)
    return done.stdout.decode("utf-8", "surrogateescape")


def _tests(tree: Path, paths: list[str]) -> set[str]:
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("PYTEST")},
        "PYTHONPATH": f"{tree}/src:{tree}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    there = [path for path in paths if (tree / path).is_file()]
    argv = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--tb=no", *there]
    done = subprocess.run(
        argv,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    return set(re.findall(r"^PASSED (.*)$", done.stdout, re.MULTILINE))
