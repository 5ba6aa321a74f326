"""A fork: a task that begins with turns which a stored rollout has recorded.

They travel in `task.data["fork"]`, which is ours and no env's: `{"from": "RUN/ROLLOUT/TURN",
"said": [Arrow record batches of `SAID`, base64], "texts": [[turn, number, text]]}`. RUN takes it
out of the task before the env and the agent see it.

What a fork promises: the ids and logprobs of its past are those of the record, and the policy reads
the recorded tool outputs. They are sampled and do not train: their versions are another run's. What
it does not: that the workspace is the one of then. It is made by running the recorded calls again,
so what depends on time, chance or the outside may differ; `diverged` counts calls whose output did.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from prorl.errors import SchemaError, TaskError
from prorl.journal.attempt import ForkOrigin
from prorl.journal.records import Said, check_said, one_row
from prorl.schema.fields import list_of, required
from prorl.types import (
    UNKNOWN_VERSION,
    Completion,
    FinishReason,
    Json,
    PolicyVersion,
    Task,
)

if TYPE_CHECKING:
    from prorl.types import Float32, Int32

FIELD = "fork"

SAID = pa.schema(
    [
        required("turn", pa.int32()),
        required("segment", pa.int32()),
        required("context", list_of(pa.int32())),
        required("token_ids", list_of(pa.int32())),
        required("logprobs", list_of(pa.float32())),
        required("version_end", list_of(pa.int32())),
        required("version", list_of(pa.int32())),
        required("finish_reason", pa.utf8()),
        required("temperature", pa.float64()),
        required("cached_tokens", pa.int32()),
        required("backend", pa.utf8()),
        required("llm_s", pa.float64()),
        required("spent_s", pa.float64()),
    ]
)
"""A model call, in one row; tasks with forks are files that users keep, so this form stays."""


class Text(NamedTuple):
    turn: int
    number: int
    text: str


def forked_task(task: Task, source: str, said: Iterable[Said], texts: Iterable[Text]) -> Task:
    """The task, to be continued after these turns."""
    past: Json = {
        "from": source,
        "said": [base64.b64encode(_written(one)).decode() for one in said],
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
    said = [_said(one_row("SAID", memoryview(body), SAID)) for body in bodies]
    if [one.turn for one in said] != list(range(len(said))):
        raise ValueError(f"turns {[one.turn for one in said]}")
    texts = {(int(turn), int(number)): str(text) for turn, number, text in past["texts"]}
    return ForkOrigin(str(past["from"]), {one.turn: _foreign(one) for one in said}, texts)


def _foreign(said: Said) -> Said:
    """Sampled by weights of another run: they are no version of this one, and do not train."""
    completion = said.completion
    unknown = (UNKNOWN_VERSION,) * len(completion.versions)
    return replace(said, completion=replace(completion, versions=unknown))


def _written(said: Said) -> bytes:
    completion = said.completion
    values = (
        said.turn,
        said.segment,
        said.context_ids,
        completion.token_ids_C,
        completion.logprobs_C,
        completion.version_ends,
        completion.versions,
        completion.finish_reason.value,
        said.temperature,
        completion.cached_tokens,
        completion.backend,
        said.llm_s,
        said.spent_s,
    )
    rows = pa.array([values], pa.struct(list(SAID)))
    return bytes(pa.RecordBatch.from_struct_array(rows).serialize())


def _said(batch: pa.RecordBatch) -> Said:
    value = {name: batch.column(name)[0] for name in SAID.names}
    completion = Completion(
        token_ids_C=_ids(value["token_ids"]),
        logprobs_C=_floats(value["logprobs"]),
        finish_reason=FinishReason(value["finish_reason"].as_py()),
        version_ends=tuple(value["version_end"].as_py()),
        versions=tuple(PolicyVersion(version) for version in value["version"].as_py()),
        cached_tokens=value["cached_tokens"].as_py(),
        llm_s=value["llm_s"].as_py(),
        backend=value["backend"].as_py(),
    )
    return check_said(
        Said(
            turn=value["turn"].as_py(),
            segment=value["segment"].as_py(),
            context_ids=_ids(value["context"]),
            completion=completion,
            temperature=value["temperature"].as_py(),
            llm_s=value["llm_s"].as_py(),
            spent_s=value["spent_s"].as_py(),
        )
    )


def _ids(scalar: pa.ListScalar) -> Int32:
    return np.asarray(scalar.values.to_numpy(), dtype=np.int32)


def _floats(scalar: pa.ListScalar) -> Float32:
    return np.asarray(scalar.values.to_numpy(), dtype=np.float32)
