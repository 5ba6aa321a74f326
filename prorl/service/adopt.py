"""A control log for a run directory that has none: copied from another root, or its log was lost.

Made from what the commits name and nothing else. An adopted run is read only: the service lists it
and serves it to trainers as a replay does, and no code path writes to its directory. Members that
no commit holds are cancelled in the log: what they were doing is lost with the log that knew it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
from msgspec.structs import astuple

from prorl.config import RunConfig, parse
from prorl.control import TrajectorySummary
from prorl.errors import ConflictError, SchemaError
from prorl.service import log_schema as sql
from prorl.service.candidates import digest, run_digest
from prorl.service.log import ControlLog
from prorl.service.state import ADOPTED
from prorl.storage.catalog import StoredRun
from prorl.storage.part_reader import read_part
from prorl.types import FailureCode, GroupState, Json, RolloutState

_ROLLOUT_FACTS = (
    "rollout_id",
    "group_id",
    "sample_index",
    "rollout_key",
    "status",
    "attempt",
    "failure_code",
    "failure_message",
    "reward",
    *sql.SUMMARY_COLUMNS,
)
_LOST = "not stored when the directory was adopted"


class Adopted(NamedTuple):
    """What the log knows now."""

    run_id: str
    groups: int
    rollouts: int
    commits: int
    missing: int
    """Members of stored tasks that no commit holds."""


class _Group(NamedTuple):
    task: dict[str, Json]
    first_rollout: int
    members: dict[int, dict[str, Json]]
    """Stored ones, by sample index."""


def adopt(stored: StoredRun, log: ControlLog) -> Adopted:
    """Make a stored run known to a log, in one transaction.

    Raises ConflictError when the log has a run of that name or a file is missing, SchemaError for
    a directory that is not whole.
    """
    if log.read("SELECT 1 FROM runs WHERE run_id = ?", (stored.run_id,)):
        raise ConflictError(f"run {stored.run_id!r} is known here", "a run that the log lacks")
    if stored.directory.name != stored.run_id:
        raise ConflictError(
            f"{stored.directory.root} holds run {stored.run_id!r}",
            "a directory with the name of its run",
            "rename it",
        )
    _check_files(stored)
    config = parse(RunConfig, stored.manifest.get("config"), f"manifest of {stored.run_id}")
    groups, events = _groups(stored), _events(stored)
    rollouts = list(_rollouts(stored.run_id, groups))
    log.write_now(
        [
            (sql.INSERT_RUN, [_run(stored, config, len(groups), events)]),
            (sql.INSERT_GROUP, list(_group_rows(stored.run_id, groups, events))),
            (sql.INSERT_ROLLOUT, rollouts),
            (sql.INSERT_PART, list(_parts(stored))),
            (sql.INSERT_EVENT, [_event(stored.run_id, event) for event in events]),
        ]
    )
    num_stored = sum(len(group.members) for group in groups)
    num_commits = stored.commits[-1].commit_seq if stored.commits else 0
    return Adopted(
        stored.run_id, len(groups), len(rollouts), num_commits, len(rollouts) - num_stored
    )


def _check_files(stored: StoredRun) -> None:
    """Whether every named file is there in its size; `prorl verify` checks what is in them."""
    run = stored.directory
    for file in (file for commit in stored.commits for file in commit.files):
        path = run.path(file.path)
        if not run.has(file.path) or run.size(file.path) != file.bytes:
            raise ConflictError(
                f"{path} is missing or cut",
                f"{file.bytes} bytes, as a commit says",
                "copy the directory again; `prorl verify` lists what is wrong",
            )


def _groups(stored: StoredRun) -> list[_Group]:
    members: dict[int, dict[int, dict[str, Json]]] = {}
    for part, row in _stored_rollouts(stored):
        members.setdefault(row["group_id"], {})[row["sample_index"]] = {**row, "part": part}
    found: list[_Group] = []
    first_rollout = 0
    for task in stored.read("tasks").sort_by("group_id").to_pylist():
        if task["group_id"] != len(found):
            raise SchemaError(
                f"{stored.directory.root} has no task for group {len(found)}",
                "a task for each group",
                "`prorl verify` lists what is wrong",
            )
        found.append(_Group(task, first_rollout, members.pop(task["group_id"], {})))
        first_rollout += task["n"]
    if members:
        raise SchemaError(
            f"{stored.directory.root} has rollouts of group {min(members)} and no task for it",
            "a task for each group",
        )
    return found


def _stored_rollouts(stored: StoredRun) -> Iterator[tuple[str, dict[str, Json]]]:
    for commit in stored.commits:
        for file in commit.files:
            if file.table == "rollouts" and file.rows:
                rows = read_part(stored.directory, file, list(_ROLLOUT_FACTS))
                yield from ((commit.part, row) for row in rows.to_pylist())


def _run(
    stored: StoredRun, config: RunConfig, num_groups: int, events: list[dict[str, Any]]
) -> tuple[Any, ...]:
    created = float(stored.manifest.get("created_at") or 0.0)
    ended = events[-1]["at"] / 1e6 if events else created
    text = orjson.dumps(config.model_dump(mode="json")).decode()
    name, num_events = run_digest(config), len(events)
    return (
        stored.run_id,
        text,
        name,
        ADOPTED,
        1,
        0,
        num_groups,
        num_events,
        created,
        created,
        ended,
        "",
    )


def _group_rows(
    run_id: str, groups: Iterable[_Group], events: Iterable[dict[str, Any]]
) -> Iterator[tuple[Any, ...]]:
    fates: dict[int, tuple[Any, ...]] = {}
    for event in events:
        state = GroupState.STALE if event["event"] == "stale" else GroupState.KEPT
        if event["event"] == "decided" and not event["kept"]:
            state = GroupState.DROPPED
        elif event["delivery_seq"] >= 0:
            state = GroupState.DELIVERED
        facts = (event[k] for k in ("reason", "num_valid", "mean_reward", "min_version"))
        fates[event["group_id"]] = (state.value, 1, *facts, event["delivery_seq"])
    for group in groups:
        task = group.task
        one = next(iter(group.members.values()), None)
        key = (
            str(one["rollout_key"]).removesuffix(f"/{one['sample_index']}")
            if one
            else digest(b"group", run_id.encode(), str(task["group_id"]).encode())
        )
        content = (task["task"].encode(), str(task["n"]).encode(), task["sampling"].encode())
        texts = (task[k] for k in ("task_id", "data_source", "env", "task", "sampling", "extra"))
        fate = fates.get(task["group_id"], (GroupState.OPEN.value, 0, "", 0, None, -1, -1))
        identity = (run_id, task["group_id"], key, digest(*content), task["n"])
        yield (*identity, group.first_rollout, *texts, 0.0, *fate)


def _rollouts(run_id: str, groups: Iterable[_Group]) -> Iterator[tuple[Any, ...]]:
    for group in groups:
        for index in range(group.task["n"]):
            rollout_id = group.first_rollout + index
            identity = (run_id, rollout_id, group.task["group_id"], index)
            row = group.members.get(index)
            if row is None:
                lost = RolloutState.CANCELLED.value, 0, 0, 0, FailureCode.CANCELLED.value
                yield (*identity, *lost, "", _LOST, "", None, "", *astuple(TrajectorySummary()))
                continue
            fate = (row["status"], row["attempt"], 0, 0, row["failure_code"], "")
            numbers = (row[k] for k in sql.SUMMARY_COLUMNS)
            ended = row["failure_message"], "", row["reward"], row["part"]
            yield (*identity, *fate, *ended, *numbers)


def _parts(stored: StoredRun) -> Iterator[tuple[Any, ...]]:
    for commit in stored.commits:
        # The log counts every commit, compacted ones too.
        for seq in range(commit.first_seq or commit.commit_seq, commit.commit_seq):
            yield (stored.run_id, seq, f"{commit.part}.{seq}", "[]", 1)
        files = [
            {name: getattr(file, name) for name in ("table", "path", "rows", "bytes", "sha256")}
            for file in commit.files
        ]
        yield (stored.run_id, commit.commit_seq, commit.part, orjson.dumps(files).decode(), 1)


def _events(stored: StoredRun) -> list[dict[str, Any]]:
    """Rows of the GROUPS table in order; `at` in microseconds, as the log has it."""
    rows = stored.read("groups").sort_by("event_seq")
    at = rows.column("at").cast(pa.int64())
    rows = rows.set_column(rows.schema.get_field_index("at"), "at", at)
    return list(rows.to_pylist())


def _event(run_id: str, event: dict[str, Any]) -> tuple[Any, ...]:
    return (run_id, *(event[name] for name in sql.EVENT_COLUMNS[1:]))
