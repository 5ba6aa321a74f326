"""The model that a run speaks, and how: `renderer` of a run's config, and of each of its leases."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from prorl.types import Json


class RendererSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        default="",
        description="directory of the run's model (tokenizer and chat template), or `bytes`; empty"
        " = the service's `tokenizer`",
    )
    name: str = Field(
        default="", description="`template`, `chatml` or an entry point of `prorl.renderers`"
    )
    family: str = Field(
        default="", description="model family; empty = recognised by the chat template"
    )
    variables: dict[str, Json] = Field(
        default_factory=dict,
        description="variables of the chat template: enable_thinking, reasoning_effort ...",
    )
    date: str = Field(
        default="",
        description="the date that a template writes, if it writes one, YYYY-MM-DD; empty = the day"
        " on which the run was made",
    )
    on_history_rewrite: Literal["append", "segment"] = Field(
        default="append",
        description=(
            "what happens at a new user message if the template would drop earlier"
            " thoughts: `append` keeps them, `segment` starts a new sequence"
        ),
    )
    allow_unrendered_tools: bool = Field(
        default=False,
        description="allow tools that the template does not render, because the env's messages"
        " describe them",
    )

    def settled(self, model: str, created_at: float) -> RendererSpec:
        """Fills in the service's model, and the day (UTC) on which the run is made, where none is
        given.
        """
        today = datetime.fromtimestamp(created_at, UTC).date().isoformat()
        return self.model_copy(update={"model": self.model or model, "date": self.date or today})

    def to_json(self) -> str:
        """Text for an edge; equal specs give equal text."""
        return orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS).decode()

    @classmethod
    def from_json(cls, text: str) -> RendererSpec:
        return cls.model_validate_json(text)
