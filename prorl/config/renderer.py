"""Which model a run speaks, and how.

`renderer` of a run's config, and `RendererSpec`, which goes to the RUN stage with each lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from prorl.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererSpec:
    """What a run's renderer is made from."""

    model: str = "bytes"
    """Directory of the model (tokenizer.json, chat template), or `bytes`."""
    name: str = ""
    """`template`, `chatml`, or an entry point of the group `prorl.renderers`; empty = as the
    directory says.
    """
    family: str = ""
    """Empty = found from the template."""
    variables: Mapping[str, Json] = field(default_factory=dict)
    """Of the template: `enable_thinking`, `reasoning_effort` ..."""
    date: str = ""
    """Day that a template may write into prompts, YYYY-MM-DD; empty = today."""
    on_rewrite: str = "append"
    """What a new user message does where the template would take earlier thoughts out of the past:
    `append` keeps them, `segment` starts a new segment.
    """
    unshown_tools: bool = False
    """Tools may be offered though the template does not write them (DeepSeek): the env's messages
    say what there is.
    """

    def to_json(self) -> str:
        """Text for an edge; equal specs give equal text."""
        return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS).decode()

    @classmethod
    def from_json(cls, text: str) -> RendererSpec:
        return cls(**orjson.loads(text))


class RendererConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        default="",
        description="directory of the run's model; empty = the service's `tokenizer`",
    )
    name: str = Field(
        default="", description="`template`, `chatml` or an entry point of `prorl.renderers`"
    )
    family: str = Field(default="", description="empty = found from the chat template")
    variables: dict[str, Json] = Field(
        default_factory=dict,
        description="of the chat template: enable_thinking, reasoning_effort ...",
    )
    date: str = Field(
        default="", description="day that a template may write, YYYY-MM-DD; empty = the run's first"
    )
    on_rewrite: Literal["append", "segment"] = Field(
        default="append",
        description=(
            "a new user message where the template would drop earlier thoughts: `append` keeps"
            " them, `segment` starts a new segment"
        ),
    )
    unshown_tools: bool = Field(
        default=False,
        description="offer tools that the template does not write: the env's messages say them",
    )

    def spec(self, model: str, created_at: float) -> RendererSpec:
        """The spec with the service's model, and the run's day, where nothing else is said.

        The day (UTC) is that of the run's making, in seconds since 1970.
        """
        today = datetime.fromtimestamp(created_at, UTC).date().isoformat()
        values = self.model_dump()
        return RendererSpec(**{**values, "model": self.model or model, "date": self.date or today})
