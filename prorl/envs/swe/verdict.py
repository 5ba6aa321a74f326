"""Judging a run of the tests: what it is worth, whether it is believed, whether the task holds."""

from __future__ import annotations

from collections.abc import Sequence

from prorl.envs.swe import guard
from prorl.envs.swe.fields import test_names
from prorl.envs.swe.tested import Tested
from prorl.errors import RolloutError
from prorl.types import FailureCode, RewardPart, Score, Task

NOTHING = Tested(frozenset(), "")
LOG_CHARS = 4000
_SHOWN = 5


def score_of(task: Task, tested: Tested, log: str, forged: Sequence[str] = ()) -> Score:
    """`resolved` counts; the shares of passed tests are kept for analysis, and `forged`: the share
    of FAIL_TO_PASS tests that pass whatever they expect, where there are any.
    """
    parts = []
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        names = test_names(task, key)
        value = tested.count(names) / len(names) if names else 1.0
        parts.append(RewardPart(name=key.lower(), value=value, weight=0.0))
    resolved = all(part.value == 1.0 for part in parts) and not forged
    if forged:
        share = len(forged) / len(test_names(task, "FAIL_TO_PASS"))
        parts.append(RewardPart(name="forged", value=share, weight=0.0))
        said = f"forged: these tests pass whatever they expect: {', '.join(forged[:_SHOWN])}\n"
        log = said[:LOG_CHARS] + log[len(said) - LOG_CHARS :]
    return Score(
        parts=(RewardPart(name="resolved", value=float(resolved)), *parts), log=log[-LOG_CHARS:]
    )


def check_untouched(task: Task, tested: Tested) -> None:
    """PASS_TO_PASS holds without any change, FAIL_TO_PASS does not. Raises RolloutError."""
    _check_all(task, tested, "PASS_TO_PASS", "on the untouched repository")
    failing = test_names(task, "FAIL_TO_PASS")
    if tested.count(failing) == len(failing):
        raise bad_task(task, "its FAIL_TO_PASS tests pass on the untouched repository")


def check_reference(task: Task, tested: Tested) -> None:
    """Check that all of the tests pass with the reference patch. Raises RolloutError."""
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        _check_all(task, tested, key, "with the reference patch")


def _check_all(task: Task, tested: Tested, key: str, when: str) -> None:
    names = test_names(task, key)
    missing = [name for name in names if not tested.count([name])]
    if missing:
        end = " ".join(tested.log.strip()[-600:].split())
        unrun = sorted({path for name in missing if (path := _never_ran(name, tested))})
        guess = "is a dependency or a path missing"
        if unrun:
            guess = f"no test of {', '.join(unrun[:_SHOWN])} ran: does test_command name it"
        if tested.timed_out:
            guess = "is timeout_s too short"
        raise bad_task(
            task,
            f"{len(missing)} of {len(names)} {key} tests do not pass {when}, e.g. {missing[0]!r}:"
            f" {guess}? {end}",
        )


def _never_ran(name: str, tested: Tested) -> str:
    """The file of a test, where none of its tests was told of; empty: it ran, or is not known."""
    path = guard.graded_file(name).removeprefix("/")
    module = path.removesuffix(".py").replace("/", ".")
    told = tested.passed | tested.failed
    return "" if any(one.startswith(path) or module in one for one in told) else path


def bad_task(task: Task, why: str) -> RolloutError:
    """The task's fault, not a policy's."""
    return RolloutError(FailureCode.BAD_TASK, f"task {task.task_id!r}: {why}")
