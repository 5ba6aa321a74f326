"""Integers of any size are exact wherever JSON of others is read, and answers keep their text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest

from prorl import exact_json
from prorl.agents.capture.canonical import argument_text, read_call
from prorl.dropin.rollouts import answered, calls_of
from prorl.envs.tools import call_problem, make_spec
from prorl.helper.child import _encode, read_extension
from prorl.renderer.grammar.common import json_arguments, json_call, typed_call
from prorl.schema.columns import _message_values, read_message
from prorl.schema.fields import MESSAGE
from prorl.service.core.images import _named
from prorl.task_json import task_from_json, task_to_json
from prorl.tasks import load_tasks
from prorl.testing import make_task
from prorl.types import Json, Message, ToolCall

BIG = 15511210043330985984000000
SPEC = make_spec("modulo", "n mod 7", ("n",), n={"type": "integer"})
TEXT = f'{{"n": {BIG}}}'
CALL = ToolCall("modulo", {"n": BIG})


def _stored(call: ToolCall) -> Json:
    """Returns what a message with the call says after its way through a column."""
    message = Message(role="assistant", content="", tool_calls=(call,))
    names = [field.name for field in MESSAGE]
    values = dict(zip(names, _message_values(message), strict=True))
    return read_message(values).tool_calls[0].arguments["n"]


def _crossed(value: Json) -> Json:
    return msgspec.msgpack.decode(_encode(value), ext_hook=read_extension)


@pytest.mark.parametrize(
    "way",
    [
        lambda: json_arguments("modulo", TEXT).arguments["n"],
        lambda: json_call(f'{{"name": "modulo", "arguments": {TEXT}}}').arguments["n"],
        lambda: typed_call("modulo", {"n": str(BIG)}, "", {"modulo": SPEC}).arguments["n"],
        lambda: read_call("modulo", TEXT, "1").arguments["n"],
        lambda: json.loads(argument_text(CALL))["n"],
        lambda: _stored(CALL),
        lambda: task_from_json(task_to_json(make_task("math", "?", answer=BIG))).data["answer"],
        lambda: calls_of({"turn": 0, "tool_calls": f'[{{"id": "", "n": {BIG}}}]'})[0]["n"],
        lambda: json.loads(bytes(answered({"n": BIG, "a": np.arange(2)}).body or b""))["n"],  # type: ignore[arg-type]
        lambda: _crossed({"calls": [CALL, -BIG, "half \ud83d"]})["calls"][0][1]["n"],
        lambda: BIG if _named(f'{{"data": {{"image": "a", "n": {BIG}}}}}') == "a" else 0,
    ],
)
def test_an_integer_beyond_64_bits_is_exact_everywhere(way: Callable[[], Json]) -> None:
    assert way() == BIG
    assert isinstance(way(), int)


def test_a_call_with_such_an_integer_is_a_right_call() -> None:
    assert call_problem((SPEC,), json_arguments("modulo", TEXT)) == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (str(BIG), str(BIG)),
        (str(-(2**63) - 1), str(-(2**63) - 1)),
        ("9" * 400, "9" * 400),
        ("0.50", "0.50"),
        ("1e25", "1e25"),
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("7", "7"),
    ],
)
def test_a_number_as_an_answer_keeps_its_text(tmp_path: Path, text: str, answer: str) -> None:
    rows = [
        f'{{"problem": "?", "answer": {text}}}',
        f'{{"task_id": "a", "env": "math", "prompt": "?", "data": {{"answer": {text}, "x": 0.5}}}}',
        f'{{"prompt": "?", "reward_model": {{"ground_truth": {text}}}}}',
    ]
    for row in rows:
        for content in (row, f"[\n{row}\n]"):
            path = tmp_path / "rows"
            path.write_text(content)
            (task,) = load_tasks(path)
            assert str(task.data["answer"]) == answer
            assert task.data.get("x", 0.5) == 0.5
    own = rows[1].replace('"math"', '"capitals"')
    path.write_text(own)
    assert load_tasks(path)[0].data["answer"] == json.loads(text), "another env's number"


@pytest.mark.parametrize("text", ["NaN", '"\\ud83d"', "[1", "[" * 2000, "1" * 5000, "{} {}"])
def test_what_is_no_json_is_refused_beside_long_integers_too(text: str) -> None:
    for whole in (text, f"[{2**70}, {text}]"):
        with pytest.raises(orjson.JSONDecodeError):
            exact_json.loads(whole)
        with pytest.raises(orjson.JSONDecodeError):
            exact_json.loads(whole.encode())


def test_what_cannot_be_written_is_a_type_error() -> None:
    for value in ([2**70, float("inf")], [2**70, "\ud83d"], [2**70, object()]):
        with pytest.raises(TypeError):
            exact_json.dumps(value)
