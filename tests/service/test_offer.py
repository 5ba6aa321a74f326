"""A run whose model cannot be shown what its tasks have is refused before a rollout exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.cli.commands.doctor import lines, spec_of
from prorl.renderer import describe, make_renderer
from prorl.types import Json
from tests.renderer.small_model import write_model
from tests.service.running_gateway import running_gateway

PLAIN = """\
{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As SmolLM2's: turns, and no word of tools."""
NO_SYSTEM = "{%- if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + PLAIN


def task(env: str, **data: Json) -> Json:
    return {"task": {"task_id": "t", "env": env, "prompt": "?", "data": {"answer": "1", **data}}}


@pytest.mark.parametrize(
    ("template", "run", "words"),
    [
        (PLAIN, {"tools": ["python"]}, "run 'r' offers the policy python, and"),
        (PLAIN, {"tools": ["python"]}, "does not show tool calls"),
        (NO_SYSTEM, {"system_message": True}, "run 'r' begins with a system message, and"),
    ],
)
async def test_what_tasks_have_is_refused_when_the_run_is_created(
    tmp_path: Path, template: str, run: Json, words: str
) -> None:
    model = str(write_model(tmp_path / "model", template))
    async with running_gateway(tmp_path) as w:
        body = {"run_id": "r", "renderer": {"model": model}, **run}
        status, answer = await w.http("POST", "/v1/runs", body)
        assert (status, words in answer["message"]) == (422, True), answer
        assert not (tmp_path / "root" / "r").exists()
        # A program talks to the model in words of its own.
        other = {**body, "agent": "command: sh -c true"}
        assert (await w.http("POST", "/v1/runs", other))[0] == 201


async def test_a_task_with_tools_is_refused_when_it_is_submitted(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", PLAIN))
    async with running_gateway(tmp_path) as w:
        assert (await w.http("POST", "/v1/runs", {"run_id": "r", "renderer": {"model": model}}))[
            0
        ] == 201
        body = {"groups": [task("noop"), task("math")]}
        status, answer = await w.http("POST", "/v1/runs/r/groups", body)
        assert status == 422
        assert "groups[1]" in answer["message"]
        assert "offers the policy python" in answer["message"]
        assert not any((await w.view())["groups"].values())


def test_doctor_says_what_such_a_template_lacks(tmp_path: Path) -> None:
    spec = spec_of(write_model(tmp_path, PLAIN), ())
    text = "\n".join(lines(describe(make_renderer(spec), spec)))
    assert "does not show tool calls" in text
    assert "ends no turn" not in text
