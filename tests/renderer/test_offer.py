"""Tests of the check, when a run is created, that a model's template can show its tasks; a rollout
never decides it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prorl.errors import TaskError, UserError
from prorl.renderer.apart import check_offer
from prorl.renderer.proof import TOOL
from prorl.types import Json, Message
from tests.renderer import families
from tests.renderer.families import MODELS, Model, needs_data

pytestmark = needs_data

WHOLLY = {"deepseek-v3.2", "hermes-3"}
"""Refused as a whole: prompts of a Python encoder; a template for tools alone."""
NO_TOOLS = {"gemma-2", "gemma-3", "phi-4", "phi-3.5-mini", "kimi-k2-instruct", "kimi-k2-thinking"}
NO_SYSTEM = {"gemma-2"}
THINKS = {
    *("deepseek-r1", "deepseek-r1-distill", "gpt-oss", "minimax-m2", "nemotron-3-nano"),
    *("glm-4.5", "glm-4.6", "glm-4.7-flash", "qwen3", "qwen3-2025-04"),
    *("qwen3.5", "qwen3.6", "qwen3.8"),
}
MORE = tuple(
    Model(template=name)
    for name in (
        *sorted(WHOLLY),
        *("gemma-2", "kimi-k2-instruct", "kimi-k2-thinking", "deepseek-r1-distill"),
    )
)
ALL = {model.name: replace(model, vocabulary="") for model in (*MODELS, *MORE)}
"""Over bytes and markers: templates are what counts here, and vocabularies take minutes."""

USER = Message(role="user", content="zquestion")
SYSTEM = Message(role="system", content="zsystem")
RESULT = Message(role="tool", content="zresult", name="look", call_id="call00000")


@pytest.mark.parametrize("name", ALL)
def test_what_a_template_cannot_show_is_refused_at_creation_and_all_else_renders(name: str) -> None:
    try:
        made = families.renderer(ALL[name])
    except UserError:
        assert name in WHOLLY
        return
    facts: dict[str, Json] = made.facts()
    outcome, refusals = {}, list[str]()
    for use, messages, tools in (
        ("none", [USER], ()),
        ("system", [SYSTEM, USER], ()),
        ("tools", [USER], (TOOL,)),
    ):
        try:
            check_offer("run 'r'", facts, [tool.name for tool in tools], has_system=use == "system")
        except TaskError as error:
            refusals.append(str(error))
            outcome[use] = False
            continue
        outcome[use] = True
        ids = made.prompt(messages, tools)
        if tools:
            ended = np.append(ids, np.int32(made.stop_token_ids[0]))
            assert len(made.bridge(ended, [RESULT]))
    assert all("run 'r'" in text and "use another model" in text for text in refusals)
    assert outcome == {
        "none": True,
        "system": name not in NO_SYSTEM,
        "tools": name not in NO_TOOLS,
    }
    assert facts["thinks"] == (name in THINKS)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-r1", "deepseek-v3.1", "phi-4-mini"])
def test_tools_that_a_template_does_not_name_need_a_word_of_the_user(name: str) -> None:
    proof = families.renderer(ALL[name]).proof
    assert proof is not None
    assert (proof.shows_tools, proof.tools) == (False, "")
