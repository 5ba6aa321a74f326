"""Prints the table of families of docs/models.md: python -m tests.renderer.family_table."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prorl.errors import ConfigError
from prorl.renderer.family import find_family
from prorl.renderer.model import TurnKind, Verdict
from tests.renderer import families
from tests.renderer.families import MODELS, TEMPLATES, Model

HEADER = "| template | family | ids checked | tool results | user message | why not exact |"
REFUSED = ("deepseek-v3.2", "kimi-k2-instruct", "kimi-k2-thinking")
WAYS = {
    Verdict.EXACT: "append, exact",
    Verdict.DROPS_THOUGHTS: "append or segment",
    Verdict.REWRITES: "segment",
    Verdict.DIFFERS: "segment",
    Verdict.REFUSES: "segment",
}


def rows() -> Iterator[str]:
    yield HEADER
    yield "|" + "---|" * (HEADER.count("|") - 1)
    for model in sorted(MODELS, key=lambda model: model.name):
        yield row(model)
    for name in REFUSED:
        yield row(Model(template=name))


def row(model: Model) -> str:
    try:
        find_family(families.source(model), "", model.name)
        made = families.renderer(model)
    except ConfigError as error:
        return f"| {model.name} | - | - | refused | refused | {error.problem.partition(': ')[2]} |"
    proof = made.proof
    assert proof is not None
    result, user = (
        proof.worst(TurnKind.RESULT, TurnKind.SECOND_CALL),
        proof.worst(TurnKind.USER, TurnKind.USER_AFTER_CALL),
    )
    tools = "append, exact" if result is Verdict.EXACT else "append"
    tools += "" if proof.shows_tools else "; tools not shown"
    if proof.tools:
        tools, user = "refused", proof.findings[TurnKind.USER].verdict
    others = ", ".join(
        f"{kind}: {finding.verdict}"
        for kind, finding in proof.findings.items()
        if finding.verdict is not Verdict.EXACT and not proof.tools
    )
    vocabulary = model.vocabulary or "text"
    why = proof.tools.replace("|", "\\|") or others
    return f"| {model.name} | {made.family.name} | {vocabulary} | {tools} | {WAYS[user]} | {why} |"


if __name__ == "__main__":
    if not TEMPLATES.exists():
        sys.exit(f"{TEMPLATES} is not here")
    for line in rows():
        print(line)
