"""Each promise of README.md and docs/guarantees.md with the result of its tests, as a page.

    make promises                               # runs the suites, then this
    python -m tests.promises REPORT.xml [...]   # of suites that ran already (pytest --junitxml);
                                                # the last report that has a test counts
    python -m tests.promises --tests            # what the promises name, as arguments of pytest

A promise is kept where its tests ran and none failed, broken where one failed, and open where one
of its files or functions did not run, or all were skipped. The table counts what was skipped.
Exits with 1 where a promise is broken.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.faults.guarantees import PAGE, ROOT, pytest_arguments, rows

README: dict[str, tuple[str, ...]] = {
    "no finished group is lost, and none is trained on twice": (
        "tests/faults/test_kill.py",
        "tests/faults/test_trainer_kills.py",
    ),
    "Every accepted rollout ends once": (
        "tests/faults/test_kill.py",
        "tests/faults/test_storms.py",
    ),
    "is retried and never becomes a reward of 0": (
        "tests/integration/test_misbehaving.py",
        "tests/service/test_lifecycle.py",
    ),
    "Each failed attempt is stored": ("tests/storage/test_attempts.py",),
    "The ids that the model server sampled reach the trainer as they are": (
        "tests/agents/test_native.py",
        "tests/capture/test_model_endpoint.py",
    ),
    "each carries the version of the weights that sampled it": (
        "tests/faults/test_announced.py",
        "tests/faults/test_weights.py",
    ),
    "Adapters for TRL, verl, slime, prime-rl, SkyRL and Tinker": (
        "tests/trainer/test_adapters.py",
        "tests/trainer/test_trl_adapter.py",
    ),
    "Codex, Claude Code, mini-swe-agent and other programs run unmodified": (
        "tests/agents/test_real_programs.py",
        "tests/agents/test_harbor_programs.py",
    ),
    "[Harbor's task folders](docs/harbor.md)": (
        "tests/tasks/test_harbor.py",
        "tests/envs/test_harbor.py",
        "tests/cli/test_harbor_run.py",
    ),
    "SWE-bench rows": ("tests/envs/test_swe.py", "tests/integration/test_swe.py"),
    "A stored run can be replayed into any trainer": (
        "tests/storage/test_replay_transform.py",
        "tests/client/test_stream.py",
    ),
    "This is a whole trainer": (
        "tests/integration/test_readme.py::test_your_trainer_in_ten_lines",
    ),
    "writes an environment with a test and two tasks": (
        "tests/integration/test_readme.py::test_each_new_part_works_as_it_stands",
    ),
    "any of them, again and again": (
        "tests/integration/test_readme.py::test_the_commands_of_crash_safety_and_inspection_work",
    ),
    "Calls that were finished, and the tools' answers, are in a journal": (
        "tests/agents/test_resume.py",
        "tests/integration/test_resume.py",
    ),
    "`prorl run --resume train-flaky-1` goes on": ("tests/integration/test_interrupt.py",),
    "The sandbox has no other network": ("tests/security/test_network.py",),
    "fetches them without Docker or root": ("tests/sandbox/test_image_pull.py",),
    "A model whose chat template fails the checks is refused": (
        "tests/integration/test_renderer.py",
    ),
    "in the browser: charts, rollouts, tokens with logprobs": ("tests/view",),
    "seven dependencies": ("tests/client/test_slim.py",),
}
"""Words of README.md that promise something, and the tests that show it."""


class Promise(NamedTuple):
    words: str
    page: str
    arguments: tuple[str, ...]
    """The arguments for pytest: files, folders, or `file::function`."""


class Case(NamedTuple):
    """One test of a report."""

    file: str
    name: str
    outcome: str


def promises() -> list[Promise]:
    quoted = [Promise(words, "README.md", tests) for words, tests in README.items()]
    tabled = [
        Promise(
            row.guarantee, "docs/guarantees.md", tuple(part[0] for part in pytest_arguments(row))
        )
        for row in rows(PAGE.read_text())
    ]
    return quoted + tabled


def cases(report: Path) -> list[Case]:
    """Every test of a report of pytest; its class names are modules with dots."""
    collected = []
    for element in ElementTree.parse(report).iter("testcase"):
        parts = element.get("classname", "").split(".")
        module = next(
            (
                n
                for n in range(len(parts), 0, -1)
                if ROOT.joinpath(*parts[:n]).with_suffix(".py").is_file()
            ),
            0,
        )
        kinds = {child.tag for child in element}
        outcome = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        collected.append(
            Case(
                "/".join(parts[:module]) + ".py",
                element.get("name", ""),
                outcome,
            )
        )
    return collected


def is_of(case: Case, argument: str) -> bool:
    path, _, function = argument.partition("::")
    is_below = case.file == path or case.file.startswith(path.rstrip("/") + "/")
    return is_below and function in ("", case.name.partition("[")[0])


def result(promise: Promise, all_cases: list[Case]) -> str:
    """
    >>> promise = Promise("", "", ("tests/a.py", "tests/b.py::test_c"))
    >>> ran = [Case("tests/a.py", "test_x", "passed"), Case("tests/a.py", "test_y", "skipped")]
    >>> result(promise, ran)
    'open: 1 passed, 1 skipped; not run: tests/b.py::test_c'
    >>> result(promise, [*ran, Case("tests/b.py", "test_c", "passed")])
    'kept: 2 passed, 1 skipped'
    >>> result(promise, [*ran, Case("tests/b.py", "test_c", "failed")])
    'BROKEN: 1 failed, 1 passed, 1 skipped'
    """
    ran = [case for case in all_cases if any(is_of(case, each) for each in promise.arguments)]
    missing = [each for each in promise.arguments if not any(is_of(case, each) for case in ran)]
    counts = Counter(case.outcome for case in ran)
    is_whole = counts["passed"] and not missing
    state = "BROKEN" if counts["failed"] else "kept" if is_whole else "open"
    parts = [", ".join(f"{counts[outcome]} {outcome}" for outcome in sorted(counts))] if ran else []
    if missing:
        parts.append(f"not run: {', '.join(missing)}")
    return f"{state}: {'; '.join(parts)}"


def main(reports: list[Path]) -> int:
    """Print the page. Returns the exit status."""
    by_test = {(case.file, case.name): case for report in reports for case in cases(report)}
    all_cases = list(by_test.values())
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    outcomes = Counter(case.outcome for case in all_cases)
    counts = ", ".join(f"{outcomes[name]:,} {name}" for name in sorted(outcomes))
    is_kept = True
    print(
        "# Test results\n\n"
        "Each promise of the README and of [Guarantees](guarantees.md), the command that shows it,"
        " and its result.\n`make promises` runs the suites and prints this page. A promise is open"
        " where a test of it did not run, or\nall were skipped.\n\n"
        f"Commit {commit}, Python {platform.python_version()}, {os.cpu_count()} cores,"
        f" {platform.system()} {platform.release()} on {platform.machine()}: {counts}."
    )
    for page, of_page in groupby(promises(), lambda promise: promise.page):
        print(f"\n## {page}\n\n| promise | command | result |\n|---|---|---|")
        for promise in of_page:
            outcome = result(promise, all_cases)
            is_kept &= not outcome.startswith("BROKEN")
            arguments = " ".join(promise.arguments)
            print(f"| {promise.words} | `pytest -m '' {arguments}` | {outcome} |")
    return 0 if is_kept else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--tests"]:
        print(*sorted({argument for promise in promises() for argument in promise.arguments}))
        sys.exit()
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
