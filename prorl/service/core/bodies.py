"""Bodies of `POST /v1/runs/{run}/groups`, as pydantic models that refuse what they do not know."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from prorl.config import Sampling, StrictModel
from prorl.types import Json


class TaskBody(StrictModel):
    """A task as HTTP takes it."""

    task_id: str = Field(min_length=1, max_length=512)
    env: str
    prompt: str
    data: dict[str, Json] = Field(default_factory=dict)
    data_source: str = ""


class GroupBody(StrictModel):
    """One group of `POST /v1/runs/{run}/groups`: n sibling rollouts of one task."""

    task: TaskBody
    n: int = Field(default=1, ge=1, le=1024)
    key: str = Field(
        default="", max_length=512, description="idempotency key; empty = hash of run and position"
    )
    sampling: Sampling | None = None
    extra: dict[str, Json] = Field(
        default_factory=dict, description="kept as a JSON column of `rollouts`"
    )


class GroupsBody(StrictModel):
    """Body of `POST /v1/runs/{run}/groups`."""

    groups: list[GroupBody] = Field(max_length=10000, description="at least one, or `last`")
    last: bool = Field(default=False, description="no more groups will come: the run may finish")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.groups and not self.last:
            raise ValueError("at least one group, or `last`")
        return self
