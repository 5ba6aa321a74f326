"""`prorl check PATH`: whether a set of tasks can be trusted to train on."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

from prorl.cli.built import build_images, missing, recipes_of
from prorl.cli.options import Flag, JsonList
from prorl.cli.output import answer, clean, note
from prorl.cli.settings import absolute_env, registry_root, sandbox_environment
from prorl.envs.base import BaseEnv
from prorl.envs.tools import call_problem
from prorl.envs.users import GetEnv, env_by_name, open_env, reference_of
from prorl.errors import NoReferenceError, RolloutError, UserError
from prorl.network_policy import ungranted_network
from prorl.pluralize import pluralize
from prorl.protocols import Env, Sandbox, SandboxHost
from prorl.sandbox.node.probe import choose
from prorl.sandbox.spawn import spawned
from prorl.tasks import read_tasks
from prorl.testing import Boxes, play, scripted, verify
from prorl.types import Message, RolloutLimits, SandboxSpec, Score, Task, ToolSpec

LIMITS = RolloutLimits(
    init_s=900, run_s=1200, eval_s=1200, tool_s=900, max_turns=64, max_tokens=1 << 24
)


PROGRESS_S = 10.0
"""Between two lines about how far a check has come."""
LISTED_ALIKE = 3
"""Tasks with the same problem that have a line each. A wrong setting is the problem of every task
of a file, and its lines would hide the others.
"""


class CheckStep(NamedTuple):
    """One thing that is done to one task."""

    began: float
    task_id: str
    work: str


class TaskCheck(NamedTuple):
    """The scores of one task for an oracle, twice, and for a policy that says nothing useful."""

    task_id: str
    oracle: tuple[float, ...] = ()
    """Empty where the task has no reference solution: the useless answer is tried twice then."""
    noop: float | None = None
    problem: str = ""
    """Empty when all is well."""


def check(
    path: str,
    /,
    *,
    env: str = "auto",
    limit: int | None = None,
    skip_invalid: Flag = False,
    sandbox: str = "auto",
    json: JsonList = False,
) -> int:
    """Check tasks: the reference solution scores 1, a useless answer 0, twice the same.

    An env's `reward_range` may name another best and worst reward. Of a task without a reference
    solution only the useless answer is tried, twice. Exit code 1 when a task fails.

    Parameters
    ----------
    path
        File of tasks, or a generated set, as `prorl run --tasks` takes it.
    env
        Env of every task, with settings as `prorl run --env` has them; auto = as the file's
        format says.
    limit
        Only the first tasks.
    skip_invalid
        Leave out rows that cannot be read, and count them.
    sandbox
        Kind of sandbox; auto = pyns where it works, else apptainer.
    """
    task_set = read_tasks(path, absolute_env(env), limit, skip_invalid=skip_invalid)
    most = sandbox_environment().network.most
    for line in (
        *(task_set.about, *task_set.bad_rows, *task_set.deviations),
        *ungranted_network(task_set.tasks, most),
    ):
        note(line)
    findings = asyncio.run(_check_built(task_set.tasks, sandbox))
    answer([finding._asdict() for finding in findings], _lines(path, findings), json=json)
    return 1 if any(finding.problem for finding in findings) else 0


def _lines(path: str, findings: Sequence[TaskCheck]) -> Iterator[str]:
    bad = [finding for finding in findings if finding.problem]
    groups = dict[str, list[TaskCheck]]()
    for finding in bad:
        groups.setdefault(finding.problem.replace(repr(finding.task_id), ""), []).append(finding)
    for group in groups.values():
        for finding in group[:LISTED_ALIKE]:
            yield clean(f"{finding.task_id}: {finding.problem}")
        if (rest := len(group) - LISTED_ALIKE) > 0:
            tasks = pluralize(rest, "further task has", "further tasks have")
            yield f"{tasks} the same problem; `--json` lists all"
    if bad:
        yield f"{path}: {len(bad)} of {pluralize(len(findings), 'task fails', 'tasks fail')}"
        return
    without = sum(not finding.oracle for finding in findings)
    if without < len(findings):
        tasks = pluralize(len(findings) - without, "task")
        yield f"{path}: {tasks}: reference right, twice the same; useless answer wrong"
    if without:
        tasks = pluralize(without, "task")
        text = "without a reference solution: useless answer wrong, twice the same"
        yield f"{path}: {tasks} {text}"


async def _check_built(tasks: Sequence[Task], kind: str) -> list[TaskCheck]:
    """Build the images that are missing, then check; one that cannot be built is its tasks' problem
    there.
    """
    settings = sandbox_environment()
    root = registry_root(None)
    if lacking := missing(recipes_of(tasks), root, settings.build):
        note(f"to build: {pluralize(len(lacking), 'image')}")
        num_jobs = os.cpu_count() or 1
        await build_images(lacking, root, settings.build, num_jobs, lambda built: note(built.about))
    return await _check_all(tasks, kind)


async def _check_all(tasks: Sequence[Task], kind: str) -> list[TaskCheck]:
    find = cache(env_by_name)
    async with AsyncExitStack() as stack:
        kind = await choose(kind)
        host, _ = await stack.enter_async_context(spawned(kind, **sandbox_settings()))
        boxes, room = boxes_of(host), asyncio.Semaphore(os.cpu_count() or 1)

        findings: dict[int, TaskCheck] = {}
        steps: dict[int, CheckStep] = {}

        async def check_task(place: int, task: Task) -> None:
            async with room:
                findings[place] = await _check_task(find, task, boxes, partial(enter, place, task))
                del steps[place]

        def enter(place: int, task: Task, work: str) -> None:
            steps[place] = CheckStep(time.monotonic(), task.task_id, work)

        async def report_progress() -> None:
            while True:
                await asyncio.sleep(PROGRESS_S)
                done = f"checking: {len(findings)} of {pluralize(len(tasks), 'task')} done"
                note(clean("; ".join([done, *_slowest(steps.values())])))

        progress = asyncio.create_task(report_progress())
        try:
            await asyncio.gather(*(check_task(*numbered) for numbered in enumerate(tasks)))
        finally:
            progress.cancel()
        return [findings[place] for place in range(len(tasks))]


def sandbox_settings() -> dict[str, Any]:
    """Returns the settings of images and of their builds that the environment gives a service."""
    sandbox = sandbox_environment()
    return {
        "images": str(sandbox.images.absolute()) if sandbox.images else "",
        "mirrors": sandbox.mirrors if sandbox.pull else None,
        "build": sandbox.build.model_dump(exclude_defaults=True),
        "network": {**sandbox.network.settings(()), "upstream": sandbox.network.upstream},
    }


def boxes_of(host: SandboxHost) -> Boxes:
    numbers = count(1)

    @asynccontextmanager
    async def box(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        ref = await host.start(f"check/{next(numbers)}/1", "run", spec)
        try:
            async with host.connect(ref) as sandbox:
                yield sandbox
        finally:
            await host.stop(ref)

    return box


def _slowest(steps: Iterable[CheckStep]) -> Iterator[str]:
    """Yields the words for the step that has taken longest, where it takes long."""
    step = min(steps, default=None)
    if step and (seconds := time.monotonic() - step.began) > PROGRESS_S:
        limit = f"at most {LIMITS.eval_s / 60:.0f} minutes for the grader"
        yield f"{step.task_id}: {step.work} has taken {seconds:.0f} s ({limit}; Ctrl-C ends it)"


async def _check_task(
    find: GetEnv, task: Task, boxes: Boxes, enter: Callable[[str], None]
) -> TaskCheck:
    """Never raises for what is wrong with the task, or with the code of a user's env. `enter` is
    called with each step as it begins.
    """
    plays = []
    try:
        enter("opening its env")
        env = await open_env(find, task, LIMITS.init_s)
        await verify(env, task, boxes=boxes, limit_s=2 * LIMITS.eval_s)
        policy = "oracle" if await _has_reference(env, task) else "noop"
        for name in (policy, policy, "noop"):
            solution = "the reference solution" if name == "oracle" else "a useless answer"
            enter(f"playing and grading {solution}")
            plays.append(await play(env, task, scripted(name, env), boxes=boxes, limits=LIMITS))
        first, again, useless = plays
        refused = _refused_calls(env.tools(task), first.trajectory.messages)
    except (UserError, RolloutError) as error:
        return TaskCheck(task.task_id, problem=" ".join(str(error).split()))
    problem = "; ".join(refused)
    problem = problem or _reference_problem(env, first.score, again.score, policy)
    problem = problem or _useless_problem(env, useless.score)
    rewards = (first.reward, again.reward) if policy == "oracle" else ()
    return TaskCheck(task.task_id, rewards, useless.reward, " ".join(problem.split()))


async def _has_reference(env: Env, task: Task) -> bool:
    """Raises TaskError for a reference that is wrong."""
    try:
        await reference_of(env, task)
    except NoReferenceError:
        return False
    return True


def _refused_calls(tools: Sequence[ToolSpec], messages: Iterable[Message]) -> list[str]:
    """Calls of the reference solution that no tool takes, each with why: it says nothing then."""
    calls = [call for message in messages for call in message.tool_calls]
    problems = ((call.name, call_problem(tools, call)) for call in calls)
    refusals = (f"the reference solution calls {name!r}: {why}" for name, why in problems if why)
    return list(dict.fromkeys(refusals))


def _reference_problem(env: Env, first: Score, again: Score, policy: str) -> str:
    """Returns the problem with the two scores of the reference, or of a useless answer where there
    is no reference.
    """
    name = "the reference solution" if policy == "oracle" else "a useless answer"
    if first.reward != again.reward:
        return f"{name} scores {first.reward:g}, then {again.reward:g}"
    worst, best = _reward_range(env)
    is_right = first.reward > worst if best == math.inf else first.reward == best
    if policy == "oracle" and not is_right:
        log = first.log[-500:] or "the env's rubric has no parts"
        expected = f"more than {worst:g}" if best == math.inf else f"{best:g}"
        hint = f"; expected {expected} (an env may say reward_range = (worst, best))"
        return f"{name} scores {first.reward:g}{hint}: {log}"
    return ""


def _reward_range(env: Env) -> tuple[float, float]:
    reward_range: tuple[float, float] = getattr(env, "reward_range", BaseEnv.reward_range)
    return reward_range


def _useless_problem(env: Env, useless: Score) -> str:
    worst, best = _reward_range(env)
    is_partial = getattr(env, "partial_credit", False)
    if useless.reward == worst or (is_partial and useless.reward < best):
        return ""
    hint = "" if is_partial else " (an env may say partial_credit = True)"
    expected = f"; expected {worst:g}" if worst else ""
    return f"a useless answer scores {useless.reward:g}{expected}{hint}: {useless.log[-500:]}"
