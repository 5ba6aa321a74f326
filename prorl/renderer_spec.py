"""`RendererSpec`: which model a run speaks, and how; from the run's config to the RUN stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import orjson

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

    def to_json(self) -> str:
        """Text for an edge; equal specs give equal text."""
        return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS).decode()

    @classmethod
    def from_json(cls, text: str) -> RendererSpec:
        """Inverse of `to_json`."""
        return cls(**orjson.loads(text))
