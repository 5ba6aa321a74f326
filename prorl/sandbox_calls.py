"""A sandbox as users' code in a helper process has it: whoever asked the helper makes the calls.

helper                                              INIT, RUN, EVAL
SandboxProxy.exec(...) -- ("exec", arguments) ----> call_sandbox(sandbox, "exec", arguments)
                       <- the result, or its error
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prorl.errors import RolloutError, UserError, boundary
from prorl.helper.child import HelperChannel
from prorl.protocols import Sandbox
from prorl.types import FailureCode, SandboxRef

SANDBOX_OPS = ("call", "exec", "put", "get", "snapshot", "restore")
"""The operations that users' code may do with a sandbox."""


class SandboxProxy:
    """The helper's side; implements `prorl.protocols.Sandbox`."""

    def __init__(self, ref: SandboxRef, channel: HelperChannel) -> None:
        self.ref, self._channel, self._number = ref, channel, channel.number

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in SANDBOX_OPS:
            raise AttributeError(op)
        return partial(self._ask, op)

    async def _ask(self, op: str, *arguments: Any, **named: Any) -> Any:
        plain = [dict(each) if isinstance(each, Mapping) else each for each in arguments]
        return await asking(self._channel, self._number, op, plain, named)

    async def close(self) -> None:
        """Nothing: the connection belongs to the process that asked."""


async def asking(channel: HelperChannel, number: int, *op: Any) -> Any:
    """Returns what a call back gives. Raises what it raised there, or CancelledError."""
    verdict, answer = await asyncio.to_thread(channel.call_back, number, *op)
    if verdict == "raised":
        raise answer
    if verdict == "cancelled":
        raise asyncio.CancelledError
    return answer


async def call_sandbox(
    sandbox: Sandbox, op: str, arguments: Sequence[Any], named: Mapping[str, Any]
) -> tuple[str, Any]:
    """The sandbox's side: the reply to a call back."""
    try:
        with boundary(RolloutError, FailureCode.BAD_TASK, f"sandbox.{op}"):
            if op not in SANDBOX_OPS:
                raise AttributeError(op)
            try:
                return "gave", await getattr(sandbox, op)(*arguments, **named)
            except OSError as error:
                return "raised", _alone(error)
    except (RolloutError, UserError) as error:  # also what makes no sense as its arguments
        return "raised", _alone(error)


def _alone(error: Exception) -> Exception:
    """Returns the error without its cause, by which the helper knows what its own code raised:
    pickle leaves it out, but not where Dask has been imported.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
