"""Grades a change by its tests, and by the altered twin: the same tests, expecting something else.

    bring     tests and what the reference does on their side, into a fresh checkout
    keep      a snapshot outside of the sandbox: every run begins from it
    learn     once a task and process: with the reference and without, the rewritten tests say which
              of their assertions a solution has to make true (`Facts`)
    run       in random order: `real` (all tests, rewritten with their values) and the twins (of
              FAIL_TO_PASS): in each one assertion of a test expects something else
    suspect   a test that passes a twin
    confirm   with fresh values: the reference must fail the twin, and the change pass it again
    ask anew  a change that leaves no time for its twins: EVAL asks again (`GraderError`), and this
              time all of its time is the twins'; how the tests ended is kept meanwhile

Honest work fails a twin, whoever passes both made the result independent of what was expected, by
whatever trick: nothing here looks at how a change is written. In doubt it is believed: a twin that
cannot be made or run, or that the reference passes or never reaches, says nothing. No twin
is run for a change that failed its tests. No twin takes time from the run that counts: it gets what
is beyond `timeout_s`, or ends with the verdict unchanged.

The run that counts is rewritten as a twin is, so that there is nothing to tell them apart. Where the
reference fails under the rewritten files, the row keeps its own (the part `own_files`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import orjson

from prorl.envs.swe import fields, guard, shell
from prorl.envs.swe.tested import RUNNER_S, Harness, Tested, run_tests
from prorl.envs.swe.workspace import apply, guarded_apply, remark
from prorl.envs.tools import cut_short
from prorl.errors import GraderError, RolloutError, SandboxError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Json, RewardPart, Score, Task

NAMES = ("FAIL_TO_PASS", "PASS_TO_PASS")
NOTHING = Tested(frozenset(), "")
NO_TIME = NOTHING._replace(timed_out=True)
LOG_CHARS = 4000
_MAX_LISTED = 5
TESTS_S = 60.0
"""Limit of all tests together when the task names none."""
MIN_TWIN_S, REWRITE_S = 3.0, 30.0
MAX_SNAPSHOT_BYTES = 192 << 20
"""The limit of a snapshot; a larger workspace has no twin: its snapshot passes through the
sandbox's memory.
"""
MAX_BESIDE = 100
"""The limit of PASS_TO_PASS tests; of more none is run in a twin, which would cost too much: then
code that forges only what comes behind another test is not found out.
"""
REAL = -1
"""The turn of the run that counts; twins have the turns from 0 on."""
NUM_TWINS = 3
SLOWER, SLOWER_S = 3.0, 5.0
"""A change that takes so many times the reference's time, and so many seconds more, and leaves none
for a twin is graded in two askings: an honest one is rarely that slow, code that only waits always.
"""
COUNTS = ".git/prorl.held"
MAX_FACTS, MAX_UNGRADED, MAX_COUNTS_BYTES = 512, 64, 8 << 20


class Facts(NamedTuple):
    """The facts about a task that hold whatever a policy does."""

    closed: tuple[int, ...] = ()
    """Assertions that hold without a solution, or that the reference does not reach."""
    num_draws: int = NUM_TWINS
    has_own_files: bool = True
    """True if the tests run as they are: the reference fails under rewritten ones, or nobody had
    the time to try.
    """
    reference_s: float = 0.0
    """The seconds that the rewritten tests took with the reference; 0: nobody knows."""


class UngradedChange(NamedTuple):
    """The part of a change that is kept when it left no time for its twins."""

    real: Tested
    draw: str
    suspects: dict[int, list[str]]
    """The tests that passed a twin, by its turn, where that is still to be confirmed."""


_facts: OrderedDict[str, Facts] = OrderedDict()
"""The facts by the digest of a task; the ones used last, MAX_FACTS of them."""
_ungraded: OrderedDict[str, UngradedChange] = OrderedDict()
"""The changes by the digests of task and change; the last MAX_UNGRADED of them."""


class ChangeGrader:
    """One change, in a prepared sandbox of its own."""

    def __init__(self, task: Task, sandbox: Sandbox, deadline: Deadline, artifact: bytes) -> None:
        self._task, self._sandbox = task, sandbox
        self._deadline, self._artifact = deadline, artifact
        self._snapshot = Path()
        self._is_fresh = True
        self._draw = secrets.token_hex(8)
        self._facts = Facts()
        self._key = _digest(task)
        self._change_key = self._key + _digest(artifact)
        self._earlier = _ungraded.get(self._change_key)
        self._real: Tested | None = None
        self._real_s = 0.0
        self._has_twin, self._has_twin_result = False, False
        self._suspects: dict[int, list[str]] = {}
        self._is_late = False
        """True if there was no time to confirm one of them."""

    async def score(self) -> Score:
        """Bring everything, run, and say what it is worth. Raises GraderError, SandboxError."""
        await bring_tests(self._task, self._sandbox)
        with tempfile.TemporaryDirectory(prefix="prorl-swe-") as folder:
            self._snapshot, order = Path(folder, "fresh.tar"), [REAL]
            has_twin = fields.log_parser(self._task) in ("python", "sympy")
            if has_twin and fields.patch(self._task).strip():
                snapshot = self._sandbox.snapshot(str(self._snapshot), MAX_SNAPSHOT_BYTES)
                if await snapshot:
                    self._facts = await self._learn()
                    order = shuffled([REAL, *range(min(NUM_TWINS, self._facts.num_draws))])
                    if self._earlier is not None:
                        self._real, self._draw, suspects = self._earlier
                        self._suspects = dict(suspects)
                        order = [turn for turn in order if turn not in (REAL, *suspects)]
            problem, exclusions = await self._change()
            note = remark(self._artifact)[0]
            if problem:
                problem = f"{note}the change does not apply: {problem}"
                return score_of(self._task, NOTHING, problem)
            return await self._runs(order, note + exclusions)

    async def _runs(self, order: Sequence[int], note: str) -> Score:
        forged = await self._confirm()
        for turn in order:
            if turn == REAL:
                self._real = await self._run_real()
                score = self._score(note)
                if score.parts[0].value == 0:
                    return score
            elif not forged and not self._is_late:
                await self._run_twin(turn)
            forged = forged or await self._confirm()
        if not forged and (self._is_late or self._has_starved()):
            self._keep()
            raise cut_short("altered twin: the change is far slower than the reference")
        _ungraded.pop(self._change_key, None)
        return self._score(note, forged)

    def _score(self, note: str, forged: Sequence[str] = ()) -> Score:
        assert self._real is not None
        score = score_of(self._task, self._real, note + self._real.log, forged)
        if self._snapshot.exists() and self._facts.has_own_files:
            part = RewardPart(name="own_files", value=1.0, weight=0.0)
            score = replace(score, parts=(*score.parts, part))
        return score

    def _has_starved(self) -> bool:
        """Returns whether the change is slow and no twin had the time to end."""
        reference_s = self._facts.reference_s
        is_slow = reference_s > 0 and self._real_s > SLOWER * reference_s + SLOWER_S
        return (
            self._has_twin and not self._has_twin_result and (is_slow or self._earlier is not None)
        )

    def _keep(self) -> None:
        """Keep what is known, for the next asking."""
        assert self._real is not None
        real = self._real._replace(log=self._real.log[-LOG_CHARS:])
        _ungraded[self._change_key] = UngradedChange(real, self._draw, self._suspects)
        if len(_ungraded) > MAX_UNGRADED:
            _ungraded.popitem(last=False)

    # ---- what is true of the task

    async def _learn(self) -> Facts:
        """The task's facts, learnt where nobody has: no code of a policy runs meanwhile."""
        if self._key not in _facts:
            facts = await self._learnt()
            if facts is None:
                return Facts()
            _facts[self._key] = facts
            if len(_facts) > MAX_FACTS:
                _facts.popitem(last=False)
        _facts.move_to_end(self._key)
        return _facts[self._key]

    async def _learnt(self) -> Facts | None:
        """Returns None where there is no time for it beside the tests themselves."""
        with_it = await self._watched(self._with_reference)
        without = await self._watched(self._restore) if with_it else None
        if with_it is None or without is None:
            return None
        report, tested, met, reference_s = with_it
        names = [name for key in NAMES for name in fields.test_names(self._task, key)]
        if not self._is_beside():
            names = list(fields.test_names(self._task, "FAIL_TO_PASS"))
        failing = without[2]
        closed = [
            key
            for key in report["watched"]
            if not met.get(key, (0, 0))[1] or len(set(failing.get(key, (0, 1)))) == 1
        ]
        is_plain = not met or tested.count(names) < len(names)
        return Facts(tuple(closed), report["draws"], is_plain, reference_s)

    async def _watched(
        self, prepare: Callable[[], Json]
    ) -> tuple[Json, Tested, dict[int, list[int]], float] | None:
        """Run the rewritten tests: what the rewriting said, what passed, for each site how often it
        was reached and held, and the seconds that the tests took.
        """
        if self._beyond_s() < MIN_TWIN_S:
            return None
        await prepare()
        report = await self._rewrite(REAL, secrets.token_hex(8), COUNTS)
        before_s, limit_s = self._deadline.remaining_s, self._beyond_s()
        if report is None or limit_s < MIN_TWIN_S:
            return None
        tested = await run_task(self._task, self._sandbox, self._deadline, limit_s, is_ours=True)
        tests_s = before_s - self._deadline.remaining_s
        if tested.timed_out:
            return None
        try:
            lines = (await self._sandbox.get(COUNTS, MAX_COUNTS_BYTES)).splitlines()
        except (FileNotFoundError, SandboxError):
            lines = []
        met: dict[int, list[int]] = {}
        for line in lines:
            for key, numbers in json.loads(line).items():
                before = met.get(int(key), [0, 0])
                met[int(key)] = [
                    earlier + other for earlier, other in zip(before, numbers, strict=True)
                ]
        return report, tested, met, tests_s

    def _beyond_s(self) -> float:
        """The time that the run that counts does not need."""
        real_s = float(self._task.data.get("timeout_s", TESTS_S)) if self._real is None else 0.0
        return self._deadline.remaining_s - 2 * RUNNER_S - real_s

    def _is_beside(self) -> bool:
        return len(fields.test_names(self._task, "PASS_TO_PASS")) <= MAX_BESIDE

    # ---- runs

    async def _rewrite(self, turn: int, seed: str, watch: str = "") -> Json:
        """Rewrite the tests in the workspace; what was said, None where it cannot be."""
        job = _job(self._task, seed, self._draw, turn, self._facts.closed, watch)
        argv = ["python3", "-I", "-c", program()]
        done = await self._sandbox.exec(argv, min(self._deadline.remaining_s, REWRITE_S), job)
        if done.exit_code != 0 or done.timed_out:
            return None
        return orjson.loads(done.output)

    async def _change(self) -> tuple[str, str]:
        return await guarded_apply(self._sandbox, self._artifact, fields.rules(self._task))

    async def _run_real(self) -> Tested:
        try:
            if self._facts.has_own_files:
                return await self._run_tests()
            if self._is_beside():
                return await self._run_tests(rewritten=True)
            # a twin has lost the bodies of other tests, so what a solution has to pass runs so, too
            every, short = await self._run_tests(), await self._run_tests(rewritten=True)
            names = fields.test_names(self._task, "FAIL_TO_PASS")
            failing = frozenset(short.missing(names))
            return every._replace(
                passed=every.passed - failing, failed=every.failed | short.failed | failing
            )
        except SandboxError as error:
            if error.code is not FailureCode.SANDBOX_BROKEN:
                raise
            return NOTHING._replace(log=f"the tests broke their sandbox: {error.message}")

    async def _run_tests(self, *, rewritten: bool = False) -> Tested:
        if not self._is_fresh:
            await self._fresh()
        self._is_fresh = False
        if rewritten and await self._rewrite(REAL, secrets.token_hex(8)) is None:
            raise GraderError(FailureCode.GRADER_ERROR, "the tests cannot be rewritten")
        before_s = self._deadline.remaining_s
        tested = await run_task(self._task, self._sandbox, self._deadline)
        self._real_s = before_s - self._deadline.remaining_s
        return tested

    async def _run_twin(self, turn: int) -> None:
        """Run a twin of the change; whoever passes it is a suspect."""
        twin = await self._twin(turn, secrets.token_hex(8), self._fresh)
        self._has_twin = True
        self._has_twin_result = self._has_twin_result or not twin.timed_out
        if names := twin.passing(fields.test_names(self._task, "FAIL_TO_PASS")):
            self._suspects[turn] = names

    async def _confirm(self) -> list[str]:
        """The suspect tests that the reference fails in such a twin, and the change passes again,
        once the tests themselves have passed; of one twin.
        """
        while self._real is not None and self._suspects and not self._is_late:
            turn, names = next(iter(self._suspects.items()))
            seed = secrets.token_hex(8)
            reference = await self._twin(turn, seed, self._with_reference)
            names = reference.failing(names)
            again = await self._twin(turn, seed, self._fresh) if names else NOTHING
            self._is_late = again.timed_out or (reference.timed_out and self._earlier is None)
            if not self._is_late:
                del self._suspects[turn]
            if forged := again.passing(names):
                return forged
        return []

    async def _twin(self, turn: int, seed: str, prepare: Callable[[], Json]) -> Tested:
        """Run a twin; nothing has passed or failed where there is none, or no time."""
        if self._beyond_s() < MIN_TWIN_S:
            return NO_TIME
        try:
            async with asyncio.timeout(None if self._real is None else self._deadline.remaining_s):
                await prepare()
                report = await self._rewrite(turn, seed)
                if report is None or not report["altered"]:
                    return NOTHING
                limit_s = self._beyond_s()
                if limit_s < MIN_TWIN_S:
                    return NO_TIME
                tested = await run_task(self._task, self._sandbox, self._deadline, limit_s)
                return _of_tests(tested, report["tests"])
        except TimeoutError:  # the verdict of the run that counts is not lost to a twin
            return NO_TIME
        except SandboxError as error:
            if self._real is None or error.code is not FailureCode.SANDBOX_BROKEN:
                raise
            return NOTHING

    async def _fresh(self) -> None:
        """The checkout with the tests and the change, as nobody has run it."""
        await self._restore()
        await self._change()

    async def _with_reference(self) -> None:
        """The same with the reference in the place of the change."""
        await self._restore()
        await bring_reference(self._task, self._sandbox)

    async def _restore(self) -> None:
        done = await self._sandbox.exec(["bash", "-c", shell.CLEAR], REWRITE_S)
        if done.exit_code != 0:
            raise SandboxError(FailureCode.SANDBOX_BROKEN, f"not cleared: {done.output[-500:]}")
        await self._sandbox.restore(str(self._snapshot))
        self._is_fresh = False


def _digest(content: Task | bytes) -> str:
    data = content if isinstance(content, bytes) else orjson.dumps(dict(content.data))
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def shuffled(turns: list[int]) -> list[int]:
    """Returns them in an order that nobody can know."""
    return secrets.SystemRandom().sample(turns, len(turns))


def _of_tests(tested: Tested, tests: Sequence[str] | None) -> Tested:
    """Leaves out tests that passed although nothing of them was altered."""
    if tests is None:
        return tested
    names = frozenset(tests)
    passed = {name for name in tested.passed if names & set(re.findall(r"\w+", name))}
    return tested._replace(passed=frozenset(passed))


def _job(
    task: Task, seed: str, draw: str, turn: int, closed: Sequence[int], watch: str = ""
) -> bytes:
    rules = fields.rules(task)
    folders = {folder for path in rules.graded if (folder := guard.test_folder(path))}
    return orjson.dumps(
        {
            "seed": seed,
            "draw": draw,
            "turn": turn,
            "closed": closed,
            "watch": watch,
            "names": fields.test_names(task, "FAIL_TO_PASS"),
            "beside": len(fields.test_names(task, "PASS_TO_PASS")) <= MAX_BESIDE,
            "graded": sorted(rules.graded),
            "folders": sorted(folders),
            "side": [] if rules.is_about_tests else guard.SIDE,
            "without": sorted(rules.reference - rules.brought),
        }
    )


@cache
def program() -> str:
    """`twin.py`, with `altered.py` as a module."""
    altered, twin = (
        files("prorl.envs.swe").joinpath(name).read_text() for name in ("altered.py", "twin.py")
    )
    name = "prorl.envs.swe.altered"
    make = f"import sys, types\nsys.modules[{name!r}] = it = types.ModuleType({name!r})\n"
    return f"{make}exec({altered!r}, vars(it))\nexec({twin!r})"


async def run_task(
    task: Task,
    sandbox: Sandbox,
    deadline: Deadline,
    twin_s: float | None = None,
    *,
    is_ours: bool = False,
) -> Tested:
    """Run the tests, within `twin_s` as a twin; `is_ours` when no policy has had a hand in them."""
    task_limit_s = float(task.data.get("timeout_s", TESTS_S))
    limit_s = min(task_limit_s, deadline.remaining_s if twin_s is None else twin_s)
    # compiled files of one source must not be taken for another's, of equal size and second
    ours = {"PYTHONDONTWRITEBYTECODE": "1"} if is_ours else {}
    harness = Harness(
        command=(shell.IMAGE_ENVIRONMENT if task.data.get("image") else "") + fields.command(task),
        limit_s=limit_s,
        environment={**fields.environment(task), **ours},
        parser=fields.log_parser(task),
    )
    tested = await run_tests(sandbox, harness)
    if tested.timed_out and limit_s < task_limit_s and twin_s is None:
        raise cut_short("tests")
    return tested


async def bring_tests(task: Task, sandbox: Sandbox) -> None:
    """Apply the tests' patch to the untouched repository, and what the reference does on the tests'
    side. Raises RolloutError for the task.
    """
    patch = fields.test_patch(task)
    if patch.strip():
        applied = await apply(sandbox, patch.encode())
        if applied.exit_code != 0:
            raise bad_task(task, f"test_patch does not apply: {applied.output[-1000:]}")
    for path in sorted(fields.rules(task).brought):
        await apply(sandbox, fields.patch(task), only=path)


async def bring_reference(task: Task, sandbox: Sandbox) -> None:
    done = {*guard.patch_paths(fields.test_patch(task)), *fields.rules(task).brought}
    applied = await apply(sandbox, fields.patch(task), done)
    if applied.exit_code != 0:
        raise bad_task(task, f"the reference patch does not apply: {applied.output[-1000:]}")


def score_of(task: Task, tested: Tested, log: str, forged: Sequence[str] = ()) -> Score:
    """`resolved` counts; the shares of passed tests are kept for analysis, and `forged`: the share
    of FAIL_TO_PASS tests that pass whatever they expect, where there are any.
    """
    parts = []
    for key in NAMES:
        names = fields.test_names(task, key)
        value = tested.count(names) / len(names) if names else 1.0
        parts.append(RewardPart(name=key.lower(), value=value, weight=0.0))
    resolved = all(part.value == 1.0 for part in parts) and not forged
    if forged:
        share = len(forged) / len(fields.test_names(task, "FAIL_TO_PASS"))
        parts.append(RewardPart(name="forged", value=share, weight=0.0))
        warning = (
            f"forged: these tests pass whatever they expect: {', '.join(forged[:_MAX_LISTED])}\n"
        )
        log = warning[:LOG_CHARS] + log[len(warning) - LOG_CHARS :]
    return Score(
        parts=(RewardPart(name="resolved", value=float(resolved)), *parts), log=log[-LOG_CHARS:]
    )


def check_untouched(task: Task, tested: Tested) -> None:
    """PASS_TO_PASS holds without any change, FAIL_TO_PASS does not. Raises RolloutError."""
    _check_all(task, tested, "PASS_TO_PASS", "on the untouched repository")
    failing = fields.test_names(task, "FAIL_TO_PASS")
    if tested.count(failing) == len(failing):
        raise bad_task(task, "its FAIL_TO_PASS tests pass on the untouched repository")


def check_reference(task: Task, tested: Tested) -> None:
    """Check that all of the tests pass with the reference patch. Raises RolloutError."""
    for key in NAMES:
        _check_all(task, tested, key, "with the reference patch")


def _check_all(task: Task, tested: Tested, key: str, when: str) -> None:
    names = fields.test_names(task, key)
    missing = tested.missing(names)
    if missing:
        end = " ".join(tested.log.strip()[-600:].split())
        unrun = _never_ran(missing, tested)
        guess = "is a dependency or a path missing"
        if unrun:
            guess = f"no test of {', '.join(unrun[:_MAX_LISTED])} ran: does test_command name it"
        if tested.timed_out:
            guess = "is timeout_s too short"
        raise bad_task(
            task,
            f"{len(missing)} of {len(names)} {key} tests do not pass {when}, e.g. {missing[0]!r}:"
            f" {guess}? {end}",
        )


def _never_ran(missing: Sequence[str], tested: Tested) -> list[str]:
    """Returns the files of missing tests of which none is in the report."""
    names, unrun = tested.passed | tested.failed, []
    for path in sorted({guard.graded_file(name).removeprefix("/") for name in missing} - {""}):
        module = path.removesuffix(".py").replace("/", ".")
        if not any(test.startswith(path) or module in test for test in names):
            unrun.append(path)
    return unrun


def bad_task(task: Task, why: str) -> RolloutError:
    """The task's fault, not a policy's."""
    return RolloutError(FailureCode.BAD_TASK, f"task {task.task_id!r}: {why}")
