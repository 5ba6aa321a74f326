"""Rows and records for tests of the journal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from prorl.journal import AttemptEnd, RecordedCall, Recovered, ToolAnswer, frames
from prorl.journal.records import JournalRecord, parse_journal
from prorl.schema.rows import Row
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    Message,
    PolicyVersion,
    SandboxRef,
    StopReason,
    ToolSpec,
)
from tests.edge_rows import leased_batch, only, ready_row
from tests.flight.work_rows import lease


def row(
    number: int = 1,
    on_lost_tool_call: str = "report",
    tools: bool = True,
    responds: bool = False,
) -> Row:
    """A READY row of an attempt that has tools."""
    leased = leased_batch([dataclasses.replace(lease(number), on_lost_tool_call=on_lost_tool_call)])
    ready = ready_row(
        leased,
        sandbox=SandboxRef(node_id="n", sandbox_id=f"s{number}", socket_path="/s"),
        prompt=(Message(role="user", content="Go on."),),
        tools=(ToolSpec("bash", "A shell.", {}),) if tools else (),
        init_s=0.1,
        responds=responds,
    )
    return only(ready)


def recorded_call(turn: int, finish: FinishReason = FinishReason.STOP) -> RecordedCall:
    """A turn of three ids by two versions of the weights."""
    return RecordedCall(
        turn=turn,
        segment=0,
        context_ids=np.arange(turn, turn + 5, dtype=np.int32),
        completion=Completion(
            token_ids_C=np.array([7, 8, 9 + turn], np.int32),
            logprobs_C=np.array([-0.5, -0.25, -1.0], np.float32),
            finish_reason=finish,
            version_ends=(2, 3),
            versions=(PolicyVersion(1), PolicyVersion(2)),
            cached_tokens=4,
            llm_s=0.5,
            backend="scripted:x",
        ),
        temperature=0.7,
        llm_s=0.5,
        spent_s=1.0 + turn,
    )


def answer(turn: int, index: int = 0) -> ToolAnswer:
    """Returns the result of a call; half a surrogate pair included."""
    return ToolAnswer(
        turn=turn, index=index, text=f"out {turn}.{index} \ud800", tool_s=0.1, spent_s=2.0
    )


ENDED = AttemptEnd(
    stop=StopReason.DONE, code=FailureCode.NONE, message="", artifact=b"\x00answer", spent_s=3.0
)


def look(path: Path) -> Recovered | None:
    """Reads a file that another process may be writing; None while it holds no whole row."""
    try:
        prefix = frames.read(path.read_bytes())
    except FileNotFoundError:
        return None
    return parse_journal(path, prefix) if prefix.frames else None


def same(record: JournalRecord, other: JournalRecord) -> bool:
    """Returns whether two records hold the same, arrays by value."""
    try:
        np.testing.assert_equal(dataclasses.asdict(record), dataclasses.asdict(other))
    except AssertionError:
        return False
    return type(record) is type(other)
