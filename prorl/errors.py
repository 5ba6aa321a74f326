"""Every error that prorl raises, and the one place where a foreign exception becomes ours.

    ProrlError
    |-- UserError (ValueError)            the caller can mend it: what was given, what was
    |   |                                 expected, how to mend it
    |   |-- ConfigError                   a config file, flag or environment variable
    |   |-- TaskError                     a task file or row
    |   |-- UnauthorizedError             no token, or one that does not count (HTTP 401)
    |   |-- ForbiddenError                the caller's certificate or token may not do this (403)
    |   |-- SchemaError                   a record, batch or directory of another shape or version
    |   `-- ConflictError                 same key with another content, cursor ahead of the log,
    |       |                             name taken (HTTP 409)
    |       `-- ForeignDirectoryError     a run's directory is another one than the log tells of
    |-- NotFoundError (LookupError)       an unknown run, group, rollout, sandbox (HTTP 404)
    |-- FencedError                       a write for a superseded attempt (HTTP 409)
    |-- UnavailableError (ConnectionError)  a process, socket or service that is not there now;
    |   |                                 trying again may help
    |   `-- QueueFullError                more rollouts wait than the service takes (HTTP 429)
    |-- StorageError (OSError)            the store could not make something durable
    |   `-- DiskRefusedError              the disk says no, perhaps for a while
    `-- RolloutError                      a rollout failed; becomes a row, never a crash
        |-- SandboxError                  the sandbox could not be made, reached or kept
        |-- ToolError                     the tool server broke its protocol
        |-- BackendError                  the inference backend failed or lied
        |-- GraderError                   a grader crashed: masks the rollout, never scores it 0
        `-- BudgetError (TimeoutError)    a time or token budget is used up

A bad rollout is data, not a crash: inside a stage every exception ends as a row with a failure
class and code. `boundary()` is the only `except Exception` in the package; it names what was
crossed and keeps the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl.states import BackendFault, FailureCode


class ProrlError(Exception):
    """Base of every error that prorl raises on purpose."""


class UserError(ProrlError, ValueError):
    """A mistake of the caller: what was given, what was expected, how to mend it. The message says
    all three.
    """

    def __init__(self, problem: str, expected: str = "", hint: str = "") -> None:
        super().__init__(problem, expected, hint)
        self.problem, self.expected, self.hint = problem, expected, hint

    def __str__(self) -> str:
        parts = [self.problem]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.hint:
            parts.append(self.hint)
        return "; ".join(parts)


class ConfigError(UserError):
    """A config file, flag or environment variable is wrong."""


class TaskError(UserError):
    """A task file or task row is wrong."""


class PromptTooLongError(TaskError):
    """`limits.max_tokens` cannot hold the first prompt of a task."""


class NoReferenceError(TaskError):
    """A task has no reference solution; it may be played and graded all the same."""


class UnauthorizedError(UserError):
    """The request has no bearer token, or an invalid one (HTTP 401)."""


class ForbiddenError(UserError):
    """The role of the caller's certificate or token may not do this (HTTP 403)."""


class SchemaError(UserError):
    """A record, batch or directory does not have the shape or version that this code reads."""


class ConflictError(UserError):
    """The request contradicts what the log holds."""


class ForeignDirectoryError(ConflictError):
    """A run's directory is another one than the log tells of."""


class NotFoundError(ProrlError, LookupError):
    """The named run, group, rollout or sandbox does not exist."""


class FencedError(ProrlError):
    """A write carried an attempt that the log has superseded."""


class UnavailableError(ProrlError, ConnectionError):
    """A process or service cannot be reached now."""


class QueueFullError(UnavailableError):
    """More rollouts wait than the service takes (HTTP 429): send it again when some have ended."""


class StorageError(ProrlError, OSError):
    """Something could not be made durable."""


class DiskRefusedError(StorageError):
    """The disk says no (full, over quota, read-only) and may say yes later; nothing was written."""


class RolloutError(ProrlError):
    """A rollout failed. `code` decides the failure class (`prorl.types.FAILURE_CLASS`)."""

    code: FailureCode

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class SandboxError(RolloutError):
    """The sandbox could not be made, reached or kept."""


class ToolError(RolloutError):
    """The tool server broke its protocol or died."""


class BackendError(RolloutError):
    """The inference backend failed or sent something impossible. `trouble` is evidence about its
    health, where the code alone does not say it. One that is busy may say how long
    (`retry_after_s`).
    """

    def __init__(
        self,
        code: FailureCode,
        message: str,
        trouble: BackendFault | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(code, message)
        self.trouble, self.retry_after_s = trouble, retry_after_s


class GraderError(RolloutError):
    """The grader crashed: the rollout is masked, never scored 0. EVAL asks it again with the same
    artifact; nothing is sampled anew. `log`: the traceback, if there is one.
    """

    def __init__(self, code: FailureCode, message: str, log: str = "") -> None:
        super().__init__(code, message)
        self.args, self.log = (code, message, log), log


class BudgetError(RolloutError, TimeoutError):
    """A time or token budget is used up."""


_THEIRS: set[str] = set()
"""Modules of users' parts that this process has imported (`prorl.plugins`)."""


def is_users(module: str) -> None:
    """Counts what this module or one below it raises as its user's, named with its place."""
    if not module.startswith("prorl."):
        _THEIRS.add(module)


def _place(cause: BaseException) -> str:
    """The last line of users' code that an exception has passed; empty where it passed none."""
    place = ""
    for frame, line in walk_tb(cause.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if any(module == package or module.startswith(f"{package}.") for package in _THEIRS):
            place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
    return place


def placed(text: str, place: str) -> str:
    """Append `file:line in function` to what an error says, unless it says the line already.

    >>> once = placed("KeyError: 7", "env.py:6 in score")
    >>> once, placed(once, "env.py:6 in Env.score") == once
    ('KeyError: 7 (env.py:6 in score)', True)
    """
    is_there = not place or f"({place.partition(' in ')[0]} in " in text
    return text if is_there else f"{text} ({place})"


@contextmanager
def boundary(error: type[RolloutError], code: FailureCode, label: str) -> Iterator[None]:
    """Turn any foreign exception that crosses this line into `error(code, "what: ...")`.

    Ours pass unchanged. Where users' code raised it, its place is said, and a `stage_error`, which
    is a failure of ours, is a `bad_task`.

    >>> from prorl.types import FailureCode
    >>> with boundary(ToolError, FailureCode.TOOL_PROTOCOL, "bash"):
    ...     raise KeyError("status")
    Traceback (most recent call last):
    prorl.errors.ToolError: tool_protocol: bash: KeyError: 'status'
    """
    try:
        yield
    except ProrlError:
        raise
    except Exception as cause:
        place = _place(cause)
        if place and code == "stage_error":
            code = code.BAD_TASK
        raise error(code, placed(f"{label}: {type(cause).__name__}: {cause}", place)) from cause
