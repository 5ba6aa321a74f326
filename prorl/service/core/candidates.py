"""Candidates for groups: bodies of `POST /v1/runs/{run}/groups`, checked and digested. No state is
asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import NamedTuple, Self

import orjson
from pydantic import Field, model_validator

from prorl import exact_json
from prorl.config import WHOLE_DISTRIBUTION, RunConfig, Sampling, StrictModel
from prorl.errors import TaskError
from prorl.filters import find_filter, is_named
from prorl.protocols import Env
from prorl.task_json import check_values, task_to_json
from prorl.types import Json, Message, Task, ToolSpec

CheckPrompt = Callable[[Env, Sequence[Message], Sequence[ToolSpec]], None]
"""Raises TaskError for a prompt that no sequence of the run can hold, for tools that its model
cannot be offered, and for an env whose turns its agent does not show.
"""
CheckTask = Callable[[Task, CheckPrompt], Awaitable[None] | None]


MAX_TASK_BYTES = 4 << 20
"""The limit of a task as JSON: each of its rollouts carries it through every stage."""


MAX_EXTRA_BYTES = 256 << 10


class GroupBody(StrictModel):
    """One group of `POST /v1/runs/{run}/groups`: n sibling rollouts of one task."""

    task: Task
    n: int = Field(default=1, ge=1, le=1024)
    key: str = Field(
        default="", max_length=512, description="idempotency key; empty = hash of run and position"
    )
    sampling: Sampling | None = None
    extra: dict[str, Json] = Field(
        default_factory=dict, description="kept as a JSON column of `rollouts`"
    )


class GroupsBody(StrictModel):
    groups: list[GroupBody] = Field(max_length=10000, description="at least one, or `last`")
    last: bool = Field(default=False, description="no more groups will come: the run may finish")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.groups and not self.last:
            raise ValueError("at least one group, or `last`")
        return self


class Candidate(NamedTuple):
    """Holds what a group is made of, as the log keeps it of a dataset's task."""

    key: str
    digest: str
    n: int
    task_id: str
    data_source: str
    env: str
    task: str
    sampling: str
    extra: str


def digest(*parts: bytes) -> str:
    """BLAKE2b-128 of the parts, hex: the same name for the same content."""
    return blake2b(b"\0".join(parts), digest_size=16).hexdigest()


async def check_envs(
    bodies: Sequence[GroupBody], check: CheckTask, fits: CheckPrompt, first: int
) -> None:
    """Raise TaskError that names the row of a task that its env cannot run, or that cannot fit."""
    for index, body in enumerate(bodies, first):
        try:
            checking = check(body.task, fits)
            if checking is not None:
                await checking
        except TaskError as error:
            where = f"groups[{index}] (task {body.task.task_id!r})"
            raise TaskError(f"{where}: {error.problem}", error.expected, error.hint) from None


def candidate_of(body: GroupBody, run: RunConfig, default: str, where: str) -> Candidate:
    """A group of a run, whose task was checked; `default`: the run's own sampling, as JSON. Raises
    TaskError that names the row.
    """
    try:
        if run.delivery == "stream" and body.sampling:
            check_trains(body.sampling, run.sampling)
        check_group_size(body.n, run.filter)
        check_values(body.task.task_id, body.task.data, body.extra)
        try:
            extra = exact_json.dumps(body.extra)
        except TypeError as error:
            raise TaskError(f"`extra`: {error}", "JSON of at most 254 levels") from None
        text = task_to_json(body.task).encode()
        _check_size("the task with its prompt and data", text, MAX_TASK_BYTES)
        _check_size("`extra`", extra, MAX_EXTRA_BYTES)
    except TaskError as error:
        raise TaskError(f"{where}: {error.problem}", error.expected, error.hint) from None
    sampling = orjson.dumps(asdict(body.sampling.params())).decode() if body.sampling else default
    name = digest(text, str(body.n).encode(), sampling.encode())
    task = body.task
    about = (task.task_id, task.data_source, task.env)
    return Candidate(body.key, name, body.n, *about, text.decode(), sampling, extra.decode())


def check_group_size(n: int, text: str) -> None:
    """Raise TaskError for groups that this filter drops whatever their rollouts do."""
    fewest, name = find_filter(text).min_valid, text if is_named(text) else "of the run's SQL"
    if n < fewest:
        raise TaskError(
            f"{n} rollout of a task under the filter {name}",
            f"at least {fewest}: it compares rollouts of one task",
            "raise n (num_samples), or take the filter none",
        )


def check_trains(sampling: Sampling, run: Sampling) -> None:
    """Raise TaskError for a group whose tokens a trainer cannot weigh as those of its run.

    Trainers of others take one temperature for all rows: at another one their ratios would be those
    of another distribution.
    """
    if sampling.is_cut_off:
        raise TaskError(
            f"sampling {sampling.model_dump()} in a run that trains", WHOLE_DISTRIBUTION
        )
    if sampling.temperature != run.temperature:
        raise TaskError(
            f"sampling at temperature {sampling.temperature:g} in a run that trains",
            f"the run's {run.temperature:g}: trainers take one temperature for all rows",
            "submit the group to a run of that temperature, or of delivery `store`",
        )


def _check_size(label: str, content: bytes, limit: int) -> None:
    if len(content) > limit:
        raise TaskError(
            f"{label} takes {len(content):,} bytes",
            f"at most {limit:,}",
            "put what is large into an image or a file that the env reads",
        )
