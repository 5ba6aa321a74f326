"""How an agent's loop ended: a stop reason, and the failure that says why."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import NamedTuple

from prorl.errors import ProrlError, RolloutError, TaskError, boundary
from prorl.types import Failure, FailureCode, Json, StopReason


class End(NamedTuple):
    """How the loop ended."""

    stop: StopReason
    failure: Failure = Failure(code=FailureCode.NONE)


_STOPS = {
    FailureCode.DEADLINE: StopReason.DEADLINE,
    FailureCode.MAX_TURNS: StopReason.MAX_TURNS,
    FailureCode.MAX_TOKENS: StopReason.MAX_TOKENS,
    FailureCode.SANDBOX_BROKEN: StopReason.SANDBOX_BROKEN,
    FailureCode.CANCELLED: StopReason.CANCELLED,
}


def end_with(code: FailureCode, message: str = "") -> End:
    """The end that a failure code means."""
    return End(_STOPS.get(code, StopReason.FAILED), Failure(code=code, message=message))


async def ended(loop: Coroutine[Json, Json, End]) -> End:
    """The loop's end; an error that passes out of it becomes one."""
    try:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, "agent loop"):
            return await loop
    except RolloutError as error:
        return end_with(error.code, error.message)
    except TaskError as error:
        return end_with(FailureCode.BAD_TASK, str(error))
    except ProrlError as error:
        return end_with(FailureCode.STAGE_ERROR, str(error))
