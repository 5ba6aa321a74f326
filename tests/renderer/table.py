"""Prints the table of families of docs/models.md: python -m tests.renderer.table [--time]."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from prorl.errors import ConfigError
from prorl.renderer.family import find_family
from prorl.renderer.verdict import TurnKind, Verdict
from prorl.types import Message
from tests.renderer import families
from tests.renderer.families import MODELS, TEMPLATES, Model
from tests.renderer.judged import conversation

HEADER = "| template | family | ids checked | tool results | user message | why not exact |"
REFUSED = ("deepseek-v3.2", "kimi-k2-instruct", "kimi-k2-thinking")
WAYS = {
    Verdict.EXACT: "append, exact",
    Verdict.DROPS_THOUGHTS: "append or segment",
    Verdict.REWRITES: "segment",
    Verdict.DIFFERS: "segment",
    Verdict.REFUSES: "segment",
}
TURNS = 20


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
        return f"| {model.name} | - | - | refused | refused | {error.given.partition(': ')[2]} |"
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


def timings() -> Iterator[str]:
    """CPU milliseconds of a bridge beside a render of the whole conversation, after 20 turns."""
    yield "| template | bridge | whole render | ratio |"
    yield "|---|---|---|---|"
    for model in MODELS:
        if model.tools and model.vocabulary:
            yield timing(model)


def timing(model: Model) -> str:
    """Of one model; the first of several, with what is cached."""
    made = families.renderer(model)
    seed = next(s for s in range(99) if any(m.tool_calls for m in conversation(model, s)[0]))
    messages, tools = conversation(model, seed)
    call = next(message for message in messages if message.tool_calls)
    result = Message(role="tool", content="42\n" * 20, name=call.tool_calls[0].name)
    results = tuple(
        Message(role="tool", content=result.content, name=c.name, call_id=c.id)
        for c in call.tool_calls
    )
    history = [messages[0] if messages[0].role == "user" else messages[1]]
    history += [call, *results] * TURNS
    end = np.array([made.stop_token_ids[0]], dtype=np.int32)
    bridge_ms = _cpu_ms(lambda: made.bridge(end, results))
    whole_ms = _cpu_ms(lambda: made.prompt(history, tools))
    return f"| {model.name} | {bridge_ms:.2f} ms | {whole_ms:.2f} ms | {whole_ms / bridge_ms:.0f} |"


def _cpu_ms(work: Callable[[], object], repeats: int = 20) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return 1000.0 * sorted(times)[repeats // 2]


if __name__ == "__main__":
    if not TEMPLATES.exists():
        sys.exit(f"{TEMPLATES} is not here")
    for line in timings() if "--time" in sys.argv else rows():
        print(line)
