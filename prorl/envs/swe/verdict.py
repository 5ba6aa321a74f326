"""Judging a run of the tests: what it is worth, whether it is believed, whether the task holds."""

from __future__ import annotations

from prorl.envs.swe import guard
from prorl.envs.swe.fields import test_names
from prorl.envs.swe.suspects import CORE
from prorl.envs.swe.tested import Tested
from prorl.errors import RolloutError
from prorl.types import FailureCode, RewardPart, Score, Task

NOTHING = Tested(frozenset(), "")
LOG_CHARS = 4000
_SHOWN = 5
_ALWAYS = ("wrote ", *(f"replaced {module}." for module in CORE))
"""What no repository of its own does."""


def score_of(task: Task, tested: Tested, log: str) -> Score:
    """`resolved` counts; the shares of passed tests are kept for analysis."""
    parts = []
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        names = test_names(task, key)
        value = tested.count(names) / len(names) if names else 1.0
        parts.append(RewardPart(name=key.lower(), value=value, weight=0.0))
    resolved = all(part.value == 1.0 for part in parts)
    return Score(
        parts=(RewardPart(name="resolved", value=float(resolved)), *parts), log=log[-LOG_CHARS:]
    )


def forged(tested: Tested, before: Tested) -> str:
    """Why a run's verdicts are not believed, given one without the change; empty when they are."""
    if before.is_witnessed and not tested.is_witnessed and not tested.timed_out:
        return "the tests did not report as they do on the untouched repository"
    new = tested.suspects - before.suspects
    if not before.is_witnessed:  # what the repository does itself is not known
        new = frozenset(one for one in new if one.startswith(_ALWAYS))
    if new:
        return f"the change reaches into the judgement: {'; '.join(sorted(new)[:_SHOWN])}"
    return ""


def without_excuses(tested: Tested, before: Tested) -> Tested:
    """The run, with tests that fail as expected only since the change counted as failed.

    Code can call `pytest.xfail`, or mark the tests.
    """
    if not before.is_witnessed or not (excused := tested.expected - before.expected):
        return tested
    log = f"{tested.log}\nexpected to fail only with the change: {', '.join(sorted(excused)[:3])}"
    return tested._replace(passed=tested.passed - excused, failed=tested.failed | excused, log=log)


def check_untouched(task: Task, tested: Tested) -> None:
    """PASS_TO_PASS holds without any change, FAIL_TO_PASS does not. Raises RolloutError."""
    _check_all(task, tested, "PASS_TO_PASS", "on the untouched repository")
    failing = test_names(task, "FAIL_TO_PASS")
    if tested.count(failing) == len(failing):
        raise bad_task(
            task, f"its FAIL_TO_PASS tests pass on the untouched repository{_strange(task, tested)}"
        )


def check_reference(task: Task, tested: Tested) -> None:
    """Check that all of the tests pass with the reference patch. Raises RolloutError."""
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        _check_all(task, tested, key, "with the reference patch")


def _check_all(task: Task, tested: Tested, key: str, when: str) -> None:
    names = test_names(task, key)
    missing = [name for name in names if not tested.count([name])]
    if missing:
        end = " ".join(tested.log.strip()[-600:].split())
        guess = (
            "is timeout_s too short" if tested.timed_out else "is a dependency or a path missing"
        )
        raise bad_task(
            task,
            f"{len(missing)} of {len(names)} {key} tests do not pass {when}, e.g. {missing[0]!r}:"
            f" {guess}?{_strange(task, tested)} {end}",
        )


def _strange(task: Task, tested: Tested) -> str:
    """Which module under test came from elsewhere, for people; empty: none."""
    for path in guard.patch_paths(str(task.data.get("patch") or "")):
        parts = path.split("/")
        parts = parts[1:] if len(parts) > 1 and parts[0] in ("src", "lib") else parts
        name = parts[0].removesuffix(".py")
        origin = tested.modules.get(name, "")
        if path.endswith(".py") and origin and not origin.startswith(f"{tested.workspace}/"):
            return f" ({name} is imported from {origin}, not from the repository)"
    return ""


def bad_task(task: Task, why: str) -> RolloutError:
    """The task's fault, not a policy's."""
    return RolloutError(FailureCode.BAD_TASK, f"task {task.task_id!r}: {why}")
