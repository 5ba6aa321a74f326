"""`prorl renderer DIR`: what is made of a model's directory, and what is proved of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.cli.options import JsonObject
from prorl.cli.output import answer, clean
from prorl.cli.settings import assignment
from prorl.renderer.check import check
from prorl.renderer_spec import RendererConfig, RendererSpec
from prorl.types import Json

MEANINGS = {
    "exact": "the template writes what prorl appends",
    "drops thoughts": "the template takes earlier thoughts out; on_rewrite: append or segment",
    "rewrites": "the template changes its past; what was sampled stays as it was",
    "differs": "what follows cannot be appended: a new segment",
    "refuses": "the template refuses such a turn",
}


def renderer(
    directory: Path,
    /,
    *,
    sets: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    json: JsonObject = False,
) -> int:
    """Make and prove the renderer of a model's directory; nothing is run.

    Exit code 2 when it is refused.

    Parameters
    ----------
    directory
        Holds tokenizer.json and a chat template.
    sets
        KEY=VALUE of `run.renderer`: `--set variables.enable_thinking=false`.
    """
    found = asyncio.run(check(spec_of(directory, sets)))
    answer(found, lines(found), json=json)
    return 0


def spec_of(directory: Path, sets: tuple[str, ...]) -> RendererSpec:
    """The spec that a run with these settings has. Raises ConfigError."""
    values: dict[str, Json] = {}
    for text in sets:
        nested = assignment(f"run.renderer.{text}")["run"]["renderer"]
        for key, value in nested.items():
            both = isinstance(value, dict) and isinstance(values.get(key), dict)
            values[key] = {**values[key], **value} if both else value
    config = RendererConfig.model_validate({**values, "model": str(directory.absolute())})
    return config.spec("", 0.0)


def lines(found: dict[str, Json]) -> Iterator[str]:
    """The table as lines for people."""
    yield f"{'renderer':<18}{found['renderer']}"
    for key in ("family", "how", "thinks", "switches", "stop_tokens", "vocab_size"):
        if key in found:
            yield f"{key.replace('_', ' '):<18}{clean(_text(found[key]))}"
    for key in ("template_sha256", "tokenizer_sha256"):
        if key in found:
            yield f"{key:<18}{found[key]}"
    if found.get("no_tools"):
        yield f"{'no tools':<18}{clean(found['no_tools'])}"
    for kind, verdict in found.get("proof", {}).items():
        yield f"  {kind:<16}{verdict:<16}{MEANINGS[verdict]}"


def _text(value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
