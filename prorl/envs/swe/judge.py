"""Judges a change by its tests, and by the altered twin: the same tests, expecting something else.

    bring     tests and what the reference does on their side, into a fresh checkout
    keep      a snapshot outside of the sandbox: every run begins from it
    run       in random order: `real` (all tests as they are) and the twins (of FAIL_TO_PASS)
    suspect   a test that passed as it is and as a twin
    confirm   with fresh values: the reference must fail the twin, and the change pass it again

Honest work fails a twin, whoever passes both made the result independent of what was expected, by
whatever trick: nothing here looks at how a change is written. In doubt it is believed: a twin that
cannot be made or run, that the reference passes or never reaches, or for which no time is left, says
nothing. A change that fails its tests costs no twin that was not run before them.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import orjson

from prorl.envs.swe import fields, guard, shell
from prorl.envs.swe.tested import RUNNER_S, Harness, Tested, run_tests
from prorl.envs.swe.workspace import apply, guarded_apply, remark
from prorl.envs.tools import cut_short
from prorl.errors import RolloutError, SandboxError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Json, RewardPart, Score, Task

NOTHING = Tested(frozenset(), "")
LOG_CHARS = 4000
_SHOWN = 5
TESTS_S = 60.0
"""Limit of all tests together when the task names none."""
MIN_TWIN_S, REWRITE_S = 3.0, 30.0
MAX_SNAPSHOT_BYTES = 192 << 20
"""Of a larger workspace there is no twin: its snapshot passes through the sandbox's memory."""
MAX_BESIDE = 100
"""Of more PASS_TO_PASS tests none is run in a twin, which would cost too much: then code that forges
only what comes behind another test is not found out.
"""
REAL, RIGHT, LEFT = "real", "right", "left"


class Judge:
    """One change, in a prepared sandbox of its own."""

    def __init__(self, task: Task, sandbox: Sandbox, deadline: Deadline, artefact: bytes) -> None:
        self._task, self._sandbox = task, sandbox
        self._deadline, self._artefact = deadline, artefact
        self._snapshot = Path()
        self._is_fresh = True
        self._is_ambiguous = True
        self._real: Tested | None = None

    async def score(self) -> Score:
        """Bring everything, run, and say what it is worth. Raises GraderError, SandboxError."""
        await bring_tests(self._task, self._sandbox)
        with tempfile.TemporaryDirectory(prefix="prorl-swe-") as folder:
            self._snapshot, order = Path(folder, "fresh.tar"), [REAL]
            has_twin = fields.log_parser(self._task) in ("python", "sympy")
            if has_twin and fields.patch(self._task).strip():
                snapshot = self._sandbox.snapshot(str(self._snapshot), MAX_SNAPSHOT_BYTES)
                order = shuffled([REAL, RIGHT, LEFT]) if await snapshot else order
            problem, left = await self._change()
            said = remark(self._artefact)[0]
            if problem:
                problem = f"{said}the change does not apply: {problem}"
                return score_of(self._task, NOTHING, problem)
            return await self._runs(order, said + left)

    async def _runs(self, order: Sequence[str], left: str) -> Score:
        wanted = fields.test_names(self._task, "FAIL_TO_PASS")
        passed: dict[str, list[str]] = {}
        for mode in order:
            if mode == REAL:
                self._real = await self._run_real()
                score = score_of(self._task, self._real, left + self._real.log)
                if score.parts[0].value == 0:
                    return score
            elif self._is_ambiguous or not passed:
                twin = await self._twin(mode, secrets.token_hex(8), self._fresh)
                passed[mode] = twin.passing(wanted)
        assert self._real is not None
        forged: list[str] = []
        for mode, names in passed.items():
            forged = forged or await self._confirmed(mode, names)
        return score_of(self._task, self._real, left + self._real.log, forged)

    async def _change(self) -> tuple[str, str]:
        return await guarded_apply(self._sandbox, self._artefact, fields.rules(self._task))

    async def _run_real(self) -> Tested:
        try:
            if not self._is_fresh:
                await self._fresh()
            self._is_fresh = False
            return await run_task(self._task, self._sandbox, self._deadline)
        except SandboxError as error:
            if error.code is not FailureCode.SANDBOX_BROKEN:
                raise
            return NOTHING._replace(log=f"the tests broke their sandbox: {error.message}")

    async def _confirmed(self, mode: str, names: Sequence[str]) -> list[str]:
        """Those that the reference fails in such a twin, and the change passes once more."""
        seed = secrets.token_hex(8)
        if names:
            names = (await self._twin(mode, seed, self._with_reference)).failing(names)
        return (await self._twin(mode, seed, self._fresh)).passing(names) if names else []

    async def _twin(self, mode: str, seed: str, prepare: Callable[[], Json]) -> Tested:
        """Run a twin; nothing has passed or failed where there is none, or no time."""
        limit_s = self._deadline.remaining_s - 2 * RUNNER_S
        if self._real is None:
            limit_s -= float(self._task.data.get("timeout_s", TESTS_S))
        if limit_s < MIN_TWIN_S:
            return NOTHING
        try:
            await prepare()
            job = _job(self._task, seed, mode)
            argv = ["python3", "-I", "-c", program()]
            done = await self._sandbox.exec(argv, min(limit_s, REWRITE_S), job)
            if done.exit_code != 0 or done.timed_out:
                return NOTHING
            said = orjson.loads(done.output)
            self._is_ambiguous = said["ambiguous"]
            if not said["altered"]:
                return NOTHING
            return await run_task(self._task, self._sandbox, self._deadline, limit_s)
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


def shuffled(modes: list[str]) -> list[str]:
    """In an order that nobody can know."""
    return secrets.SystemRandom().sample(modes, len(modes))


def _job(task: Task, seed: str, mode: str) -> bytes:
    rules = fields.rules(task)
    folders = {folder for path in rules.graded if (folder := guard.test_folder(path))}
    return orjson.dumps(
        {
            "seed": seed,
            "right": mode == RIGHT,
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
    wanted_s = float(task.data.get("timeout_s", TESTS_S))
    limit_s = min(wanted_s, deadline.remaining_s if twin_s is None else twin_s)
    # compiled files of one source must not be taken for another's, of equal size and second
    ours = {"PYTHONDONTWRITEBYTECODE": "1"} if is_ours else {}
    harness = Harness(
        command=(shell.IMAGE_ENVIRONMENT if task.data.get("image") else "") + fields.command(task),
        limit_s=limit_s,
        environment={**fields.environment(task), **ours},
        parser=fields.log_parser(task),
    )
    found = await run_tests(sandbox, harness)
    if found.timed_out and limit_s < wanted_s and twin_s is None:
        raise cut_short("tests")
    return found


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
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        names = fields.test_names(task, key)
        value = tested.count(names) / len(names) if names else 1.0
        parts.append(RewardPart(name=key.lower(), value=value, weight=0.0))
    resolved = all(part.value == 1.0 for part in parts) and not forged
    if forged:
        share = len(forged) / len(fields.test_names(task, "FAIL_TO_PASS"))
        parts.append(RewardPart(name="forged", value=share, weight=0.0))
        said = f"forged: these tests pass whatever they expect: {', '.join(forged[:_SHOWN])}\n"
        log = said[:LOG_CHARS] + log[len(said) - LOG_CHARS :]
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
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        _check_all(task, tested, key, "with the reference patch")


def _check_all(task: Task, tested: Tested, key: str, when: str) -> None:
    names = fields.test_names(task, key)
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
