"""`prorl sandbox open`: a terminal in the sandbox of a task, as INIT prepares it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from cyclopts import App

from prorl.cli.commands.check import boxes_of, sandbox_settings
from prorl.cli.options import Flag
from prorl.cli.output import clean, note, say
from prorl.cli.terminal import open_terminal
from prorl.env_state import EnvState, bound
from prorl.envs.users import env_by_name, open_env, reference_of
from prorl.errors import TaskError, UserError
from prorl.limits import Deadline
from prorl.network_policy import sandbox_spec
from prorl.protocols import Env, Sandbox
from prorl.sandbox.node.probe import choose
from prorl.sandbox.spawn import spawned
from prorl.tasks import read_tasks
from prorl.testing import Boxes, prepared_box
from prorl.types import RolloutLimits, Stage, Task

LIMITS = RolloutLimits(init_s=900, eval_s=1200, tool_s=900)

sandbox = App(
    name="sandbox",
    help="Look around in the sandbox of a task.",
    help_format="plaintext",
)


@sandbox.command(name="open")
def open_(
    path: str,
    task_id: str = "",
    /,
    *,
    env: str = "auto",
    reference: Flag = False,
    tests: Flag = False,
    sandbox: str = "auto",
) -> int:
    """Open a terminal in a task's sandbox, with its files, image, tools and network as in a run.

    `exit` or Ctrl-D ends it, and nothing of it stays.

    Example: prorl sandbox open tasks.jsonl

    Example: prorl sandbox open swe.jsonl astropy__astropy-12907 --reference --tests

    Parameters
    ----------
    path
        File of tasks, or a generated set, as `prorl run --tasks` takes it.
    task_id
        Which of its tasks. Default: the first.
    env
        Env of the task; auto = as the file's format says.
    reference
        First make the tool calls of the reference solution, and print what they answer.
    tests
        After the shell has ended, grade what it left, as EVAL would, and print the reward.
    sandbox
        Kind of sandbox; auto = pyns where it works, else apptainer.
    """
    task = _chosen(read_tasks(path, env, None if task_id else 1).tasks, task_id, path)
    return asyncio.run(_open(task, sandbox, reference=reference, tests=tests))


def _chosen(tasks: Sequence[Task], task_id: str, path: str) -> Task:
    matches = [task for task in tasks if not task_id or task.task_id == task_id]
    if not matches:
        some = ", ".join(task.task_id for task in tasks[:3])
        raise UserError(f"no task {task_id!r} in {path}", f"one of its {len(tasks)}: {some} ...")
    return matches[0]


async def _open(task: Task, kind: str, *, reference: bool, tests: bool) -> int:
    """Raises TaskError, RolloutError, UserError."""
    own = asyncio.current_task()
    assert own is not None
    for number in (signal.SIGHUP, signal.SIGTERM):  # nothing may stay when its window is closed
        asyncio.get_running_loop().add_signal_handler(number, own.cancel)
    env = await open_env(env_by_name, task, LIMITS.init_s)
    env.check(task)
    if sandbox_spec(env, task, Stage.RUN) is None:
        raise UserError(
            f"task {task.task_id!r} of env {task.env!r}, which needs no sandbox",
            "a task whose policy has tools",
        )
    kind = await choose(kind)
    async with spawned(kind, **sandbox_settings()) as (host, _):
        boxes, state = boxes_of(host), EnvState()
        async with prepared_box(env, task, Stage.RUN, boxes) as box:
            assert box is not None
            with bound(state):
                answer = await _play_reference(env, task, box) if reference else ""
            tools = ", ".join(tool.name for tool in env.tools(task)) or "none"
            note(
                clean(f"{task.task_id}: env {task.env}, sandbox {kind}, the policy's tools {tools}")
            )
            note("`exit` or Ctrl-D ends this shell; nothing of it stays")
            code = await open_terminal(box)
            artifact = await env.artifact(task, answer, box) if tests else b""
        with bound(state):
            return await _grade(env, task, artifact, boxes) if tests else code


async def _play_reference(env: Env, task: Task, box: Sandbox) -> str:
    """The calls of the reference solution, in order; its final answer. Raises TaskError."""
    reference = await reference_of(env, task)
    for call in reference.calls:
        result = await env.call(task, box, call, LIMITS.tool_s)
        note(clean(f"reference: {call.name} -> exit {result.exit_code}"))
        if output := result.output.strip():
            note(clean(output[-2000:]))
    if not reference.calls:
        note(clean(f"reference: no tool calls, the answer {reference.answer[:200]!r}"))
    return reference.answer


async def _grade(env: Env, task: Task, artifact: bytes, boxes: Boxes) -> int:
    async with prepared_box(env, task, Stage.EVAL, boxes) as box:
        try:
            score = await env.score(task, artifact, box, Deadline(LIMITS.eval_s))
        except TaskError as error:
            raise UserError(str(error)) from None
    say(f"reward {score.reward:g}")
    for part in score.parts:
        say(f"  {part.name} {part.value:g} x {part.weight:g}")
    if score.log.strip():
        say(clean(score.log.strip()[-4000:]))
    return 0
