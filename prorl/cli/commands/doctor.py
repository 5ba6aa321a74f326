"""`prorl doctor`: probes of this machine, each with its fix; or of a model's directory.

A failed probe makes the exit code 1; a warning does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prorl.cli.options import JsonOut, ModelSettings
from prorl.cli.output import answer, clean, say, say_json
from prorl.cli.probes import probes
from prorl.cli.settings import assignment, merge
from prorl.config import ServiceConfig
from prorl.config.renderer import RendererSpec
from prorl.errors import UserError
from prorl.types import Json

PROOFS = {
    "exact": "the template writes what prorl appends",
    "drops thoughts": "the template removes earlier thoughts; see on_history_rewrite",
    "rewrites": "the template changes its past; what was sampled stays as it was",
    "differs": "what follows cannot be appended: a new segment",
    "refuses": "the template refuses such a turn",
}


def doctor(
    *,
    model: Path | None = None,
    set_: ModelSettings = None,
    server: str = "",
    max_tokens: int = 16384,
    root: Path = Path("prorl-runs"),
    json: JsonOut = False,
) -> int:
    """Probe this machine: packages, sandboxes, disk, sockets, limits; each finding with its fix.

    With --model: check a model's directory: family, stop tokens, and what holds for its chat
    template. Exit code 2 when it is refused.

    Example: prorl doctor --model Qwen3-4B --set variables.enable_thinking=false

    Parameters
    ----------
    model
        Directory with tokenizer.json and a chat template; no code in it is run.
    server
        URL of a model server: how many rollouts its KV cache holds, and the settings for them.
    max_tokens
        With --server: tokens of the longest rollout, as `run.limits.max_tokens`.
    root
        Where runs would be stored: its disk is probed.
    """
    if server:
        from prorl.cli.server_size import read_cache_tokens, size_lines

        config = ServiceConfig()
        tokens = asyncio.run(read_cache_tokens(server))
        for line in size_lines(server, tokens, max_tokens, config.run.slots, tokens):
            say(line)
        return 0 if tokens else 1
    if model is not None:
        from prorl.renderer.check import check

        proved = asyncio.run(check(spec_of(model, set_ or ())))
        answer(proved, lines(proved), json=json)
        return 0
    if set_:
        raise UserError("--set without --model", "settings of a model's renderer")
    findings = []
    for finding in probes(root):
        findings.append(finding)
        if not json:
            names = f"{finding.level:<5} {finding.subject:<17} "
            fix = f"  -> {finding.fix}" if finding.fix else ""
            say(f"{names}{clean(finding.detail)}{fix}", indent=len(names))
    if json:
        say_json([finding._asdict() for finding in findings])
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def spec_of(directory: Path, sets: tuple[str, ...] | list[str]) -> RendererSpec:
    """The spec that a run with these settings has. Raises ConfigError."""
    values: dict[str, Json] = {}
    for text in sets:
        merge(values, assignment(f"run.renderer.{text}")["run"]["renderer"])
    spec = RendererSpec.model_validate({**values, "model": str(directory.absolute())})
    return spec.settled("", 0.0)


def lines(proved: dict[str, Json]) -> Iterator[str]:
    """Yields the facts about a model's directory, for people."""
    yield f"{'renderer':<18}{proved['renderer']}"
    for key in ("family", "how", "thinks", "switches", "stop_tokens", "vocab_size"):
        if key in proved:
            yield f"{key.replace('_', ' '):<18}{clean(_text(proved[key]))}"
    for key in ("template_sha256", "tokenizer_sha256"):
        if key in proved:
            yield f"{key:<18}{proved[key]}"
    if proved.get("no_tools"):
        yield f"{'no tools':<18}{clean(proved['no_tools'])}"
    for kind, verdict in proved.get("proof", {}).items():
        yield f"  {kind:<16}{verdict:<16}{PROOFS[verdict]}"


def _text(value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
