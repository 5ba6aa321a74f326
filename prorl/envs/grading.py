"""Our graders, each question in a helper (`prorl/helper`) with a limit of processor time.

An answer is whatever a policy wrote, so whatever it causes there is its own: where a grader raises,
runs out of time or memory, or dies, it is asked to grade a harmless answer by that reference. If it
can, the answer is wrong; else the grader has failed, which is never a reward.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

from prorl.errors import GraderError, ProrlError, TaskError, boundary
from prorl.helper.pool import pool
from prorl.helper.process import Died, HelperError, HelperProgram
from prorl.limits import Deadline
from prorl.types import FailureCode, Json, Task

RULES = HelperProgram("prorl.envs.grader", ("rules",), wall_s=20.0, cpu_s=2.5, most=2)
MATH_VERIFY = HelperProgram("prorl.envs.grader", ("math-verify",), wall_s=20.0, cpu_s=2.5, most=2)


async def ask(
    program: HelperProgram, question: tuple[Json, ...], alone: tuple[Json, ...], deadline: Deadline
) -> tuple[Json, str]:
    """(the grader's answer, ""), or (None, why) where the policy's answer is to blame.

    `alone` is the question with a harmless answer. Raises GraderError.
    """
    with boundary(GraderError, FailureCode.GRADER_ERROR, "the grader"):
        async with asyncio.timeout(deadline.remaining_s):
            helpers = await pool(program)
            try:
                return await helpers.ask(question, label="the answer"), ""
            except (HelperError, ProrlError) as error:
                is_ours = isinstance(error, Died) and error.was_killed
                if is_ours or str(error).startswith("ModuleNotFoundError"):
                    raise
                why = str(error)
            await helpers.ask(alone, label="the reference alone")
    return None, why


def check_installed(task: Task) -> None:
    """Units need pint. Raises TaskError."""
    if find_spec("pint") is None:
        raise TaskError(
            f"task {task.task_id!r}: the env {task.env!r} needs pint",
            "it, for units",
            "install prorl's extra `math`",
        )
