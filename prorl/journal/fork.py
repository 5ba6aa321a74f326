"""A fork: a task that begins with turns which a stored rollout has recorded.

They travel in `task.data["fork"]`, which is ours and no env's: `{"from": "RUN/ROLLOUT/TURN",
"said": [SAID records, base64], "texts": [[turn, number, text]]}`. RUN takes it out of the task
before the env and the agent see it.

What a fork promises: the ids, logprobs and versions of its past are those of the record, and the
policy reads the recorded tool outputs. What it does not: that the workspace is the one of then. It
is made by running the recorded calls again, so what depends on time, chance or the outside may
differ; `diverged` counts calls whose output did.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from prorl.errors import SchemaError, TaskError
from prorl.journal.attempt import ForkOrigin
from prorl.journal.records import FrameKind, Said, read_said, row_of, said_body
from prorl.types import Json, Task

FIELD = "fork"


class Text(NamedTuple):
    """What a recorded tool call said."""

    turn: int
    number: int
    text: str


def forked_task(task: Task, source: str, said: Iterable[Said], texts: Iterable[Text]) -> Task:
    """The task, to be continued after these turns."""
    past: Json = {
        "from": source,
        "said": [base64.b64encode(said_body(one)).decode() for one in said],
        "texts": [list(text) for text in texts],
    }
    return replace(task, data={**plain_task(task).data, FIELD: past})


def plain_task(task: Task) -> Task:
    """The task without a past."""
    if FIELD not in task.data:
        return task
    return replace(task, data={name: value for name, value in task.data.items() if name != FIELD})


def read_fork(task: Task) -> ForkOrigin | None:
    """The past that a task brings, if it does. Raises TaskError for one that cannot be read."""
    past = task.data.get(FIELD)
    if past is None:
        return None
    try:
        return _read(past)
    except (KeyError, TypeError, ValueError, binascii.Error, SchemaError) as error:
        raise TaskError(
            f"task {task.task_id!r}: its fork cannot be read ({error})",
            "what `prorl replay --fork` writes",
        ) from None


def _read(past: Mapping[str, Json]) -> ForkOrigin:
    bodies = [base64.b64decode(text, validate=True) for text in past["said"]]
    said = [read_said(row_of(FrameKind.SAID, memoryview(body))) for body in bodies]
    if [one.turn for one in said] != list(range(len(said))):
        raise ValueError(f"turns {[one.turn for one in said]}")
    texts = {(int(turn), int(number)): str(text) for turn, number, text in past["texts"]}
    return ForkOrigin(str(past["from"]), {one.turn: one for one in said}, texts)
