"""The outbox: what the store must write or decide, in the order in which it happened.

    change + row of the outbox     one transaction of the log
    row, by seq                    told to the store's session from its cursor on
    `commit` up to a seq, decision the row goes, in the transaction that makes it so

A session of a store begins at 0 and goes on to the end: after a restart of either side rows are
sent as they were first sent, and what is sent again is known by its seq. Seqs are one row of
numbers for all runs and are never given twice, since a store may outlive the gateway that named
one.

A task's text lies in `groups` and is read from there; every other row holds its payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from prorl.control import ControlRow, Kind, PartFile, Rows, RunNews, TaskRow, Unpublished
from prorl.service.core.state import RunRecord
from prorl.service.log.log import ControlLog

TASK = "task"
"""Kind of a row that stands for the text of group `ref`."""

PAGE = 500
"""Rows of one read: a few milliseconds of the log's thread, which commits wait for."""

MAX_ROWS_BYTES = 1 << 20

_ROWS = "SELECT seq, run_id, kind, ref, payload FROM outbox WHERE seq > ? ORDER BY seq LIMIT ?"
_TASK_COLUMNS = TaskRow.__struct_fields__
_TASKS = (
    f"SELECT {', '.join(_TASK_COLUMNS)} FROM groups"
    " WHERE run_id = ? AND group_id >= ? AND group_id <= ? ORDER BY group_id"
)
_UNPUBLISHED = (
    "SELECT commit_seq, part, files FROM parts INDEXED BY parts_unpublished"
    " WHERE run_id = ? AND published = 0 ORDER BY commit_seq"
)


def last_seq(log: ControlLog) -> int:
    rows = log.read("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'")
    return int(rows[0][0]) if rows else 0


def run_news(log: ControlLog, run: RunRecord) -> list[ControlRow]:
    """A run as the log has it; nothing while it is not durable."""
    of_run = (run.run_id,)
    state = log.read("SELECT state FROM runs WHERE run_id = ?", of_run)
    if not state:
        return []
    commits = log.read("SELECT coalesce(max(commit_seq), 0) FROM parts WHERE run_id = ?", of_run)
    news = RunNews(
        filter=run.config.filter,
        delivery=run.config.delivery,
        group_size=run.accepted.group_size,
        state=state[0][0],
        cursors=dict(log.read("SELECT consumer, seq FROM cursors WHERE run_id = ?", of_run)),
        unpublished=tuple(
            Unpublished(
                commit_seq=seq,
                part=part,
                files=msgspec.json.decode(files, type=tuple[PartFile, ...]),
            )
            for seq, part, files in log.read(_UNPUBLISHED, of_run)
        ),
        num_commits=commits[0][0],
    )
    return [ControlRow.of(news, run_id=run.run_id)]


class Page(NamedTuple):
    rows: list[ControlRow]
    upto: int
    more: bool


def read_page(log: ControlLog, after: int) -> Page:
    records = log.read(_ROWS, (after, PAGE))
    rows: list[ControlRow] = []
    for (run_id, is_task), stretch in groupby(records, key=lambda row: (row[1], row[2] == TASK)):
        if is_task:
            rows += _tasks(log, run_id, list(stretch))
            continue
        for seq, _, kind, ref, payload in stretch:
            rows.append(
                ControlRow(kind=Kind(kind), seq=seq, run_id=run_id, group_id=ref, payload=payload)
            )
    return Page(rows, records[-1][0] if records else after, len(records) == PAGE)


def _tasks(log: ControlLog, run_id: str, stretch: Sequence[Any]) -> Iterator[ControlRow]:
    """New rows of `tasks` in messages of bounded size."""
    # Not every number between two of them is a group's: other rows were dropped from between.
    seqs = {group: seq for seq, _, _, group, _ in stretch}
    chunk: list[TaskRow] = []
    size = 0
    for values in log.read(_TASKS, (run_id, min(seqs), max(seqs))):
        row = TaskRow(**dict(zip(_TASK_COLUMNS, values, strict=True)))
        if row.group_id not in seqs:
            continue
        size += len(row.task) + 256
        if size > MAX_ROWS_BYTES and chunk:
            yield _rows_of(run_id, seqs[chunk[-1].group_id], chunk)
            chunk, size = [], len(row.task) + 256
        chunk.append(row)
    if chunk:
        yield _rows_of(run_id, seqs[chunk[-1].group_id], chunk)


def _rows_of(run_id: str, seq: int, tasks: Sequence[TaskRow]) -> ControlRow:
    return ControlRow.of(Rows(tasks=tuple(tasks)), seq=seq, run_id=run_id)
