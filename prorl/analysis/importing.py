"""Token-carrying rows of others become a run: its parts, its groups, its manifest.

`foreign.py` reads the rows. One that is not sound is refused by its line, and then nothing is
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.analysis.foreign import Line, Row, has_ids, keys_of, sequence_rows
from prorl.analysis.traces import message_rows, rows_of
from prorl.errors import ConflictError, UserError
from prorl.schema import GROUPS, MESSAGES, ROLLOUTS, SEQUENCES
from prorl.schema.fields import SCHEMA_VERSION
from prorl.schema.sequences import validate_sequences
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import MANIFEST, Commit, PartFile, RunDir
from prorl.storage.files.parts import empties, encode, part_file
from prorl.types import Json, RolloutState


def import_rows(lines: Iterable[Line], directory: Path, source: str) -> int:
    """Make a run directory of these rows; how many rollouts there were. Raises UserError for the
    first row that is refused, ConflictError when something is there.
    """
    if directory.exists():
        raise ConflictError(f"{directory} exists", "the name of a run that is not there")
    given = [
        Line(line.where, row)
        for number, line in enumerate(lines)
        for row in rows_of(line.row, number)
    ]
    if not given:
        raise UserError(f"{source} holds no row", "one row a sequence")
    keys = keys_of(given)
    spoken = [  # all are sequences but those that came as words alone
        (line, key)
        for line, key in zip(given, keys, strict=True)
        if has_ids(line.row) or "rollout" not in line.row
    ]
    rows = sequence_rows([line for line, _ in spoken], [key for _, key in spoken])
    batch = pa.RecordBatch.from_pylist(rows, schema=SEQUENCES)
    problems, seen = validate_sequences(batch) if rows else [], set[int]()
    for (line, key), problem in zip(spoken, problems, strict=True):
        if problem or key["sequence_id"] in seen:
            twice = f"sequence {key['sequence_id']} comes twice"
            raise UserError(f"{line.where}: {problem or twice}", "a sound sequence")
        seen.add(key["sequence_id"])
    _write(directory, batch, given, keys, source)
    return len({key["rollout_id"] for key in keys})


def _write(
    directory: Path,
    batch: pa.RecordBatch,
    given: list[Line],
    keys: list[dict[str, Json]],
    source: str,
) -> None:
    """Beside its place first: a run directory appears whole."""
    aside = directory.with_name(f".importing-{directory.name}")
    run = RunDir(aside)
    run.create(empties(directory.name).items())
    manifest = {"run_id": directory.name, "schema_version": SCHEMA_VERSION, "imported": source}
    write_durably(run.fs, run.path(MANIFEST), orjson.dumps(manifest))
    tables = {
        "sequences": pa.Table.from_batches([batch]),
        "rollouts": _rollouts(batch, given, keys),
        "messages": _messages(given, keys),
        "groups": _groups(keys),
    }
    files: list[PartFile] = []
    for table, rows in tables.items():
        content = encode(table, rows, directory.name, "part-imported")
        files.append(part_file(table, "part-imported", rows, content))
        write_durably(run.fs, run.path(files[-1].path), content)
    commit = Commit(commit_seq=1, part="part-imported", files=tuple(files), run_id=directory.name)
    write_durably(run.fs, run.commit_path(1), commit.dumps())
    aside.rename(directory)


def _rollouts(batch: pa.RecordBatch, given: list[Line], keys: list[dict[str, Json]]) -> pa.Table:
    made: dict[int, dict[str, Json]] = {}
    now = datetime.now(UTC)
    for number, (line, key) in enumerate(zip(given, keys, strict=True)):
        made.setdefault(key["rollout_id"], _blank(key, line.row, now, number))
    for sequence in batch.to_pylist():
        versions = [v for v in sequence["span_version"] if v >= 0]
        about = made[sequence["rollout_id"]]
        about["num_sequences"] += 1
        about["num_tokens"] += len(sequence["token_ids"])
        about["num_sampled"] += len(sequence["logprobs"])
        about["num_trained"] += len(sequence["logprobs"])
        about["logprob_sum"] = (about["logprob_sum"] or 0.0) + float(
            np.sum(sequence["logprobs"], dtype=np.float64)
        )
        low = about["min_version"]
        about["min_version"] = min([low] * (low >= 0) + versions, default=-1)
        about["max_version"] = max([about["max_version"], *versions])
    return pa.Table.from_pylist(list(made.values()), ROLLOUTS)


def _messages(given: list[Line], keys: list[dict[str, Json]]) -> pa.Table:
    """What was said in each rollout, where a row has it."""
    said = {
        key["rollout_id"]: line.row["messages"]
        for line, key in zip(given, keys, strict=True)
        if isinstance(line.row.get("messages"), list)
    }
    rows = [row for rollout_id, told in said.items() for row in message_rows(told, rollout_id)]
    return pa.Table.from_pylist(rows, MESSAGES)


def _blank(key: Mapping[str, Any], row: Row, now: datetime, number: int) -> dict[str, Json]:
    copied = {n: key[n] for n in ("rollout_id", "group_id", "sample_index", "attempt")}
    graded = not np.isnan(key["reward"])
    said = [m for m in row.get("messages") or () if m.get("role") == "assistant"]
    told = {n: str(row.get(n) or "") for n in ("task_id", "data_source", "agent", "stop_reason")}
    fixed: dict[str, Json] = {
        "rollout_key": f"imported/{number}",
        "status": RolloutState.COMPLETED.value,
        "valid": graded,
        "reward": key["reward"] if graded else None,
        "num_tool_calls": sum(len(message.get("tool_calls") or ()) for message in said),
        "reward_parts": [],
        "artefact": b"",
        "extra": "{}",
        "committed_at": now,
        "min_version": -1,
        "max_version": -1,
    }
    return {**_ZEROS, **copied, **told, **fixed}


_ZEROS: Mapping[str, Json] = {
    field.name: None if field.nullable else "" if pa.types.is_string(field.type) else 0
    for field in ROLLOUTS
}


def _groups(keys: list[dict[str, Json]]) -> pa.Table:
    """Every group decided and, if it is graded, delivered, in the order of the file."""
    members: dict[int, dict[int, float]] = {}
    for key in keys:
        members.setdefault(key["group_id"], {})[key["rollout_id"]] = key["reward"]
    rows: list[Json] = []
    now = datetime.now(UTC)
    delivered = 0
    for group, rewards in members.items():
        graded = [reward for reward in rewards.values() if not np.isnan(reward)]
        kept = len(graded) == len(rewards)
        shared = {
            "group_id": group,
            "kept": kept,
            "reason": "imported" if kept else "not graded",
            "num_members": len(rewards),
            "num_valid": len(graded),
            "min_version": 0,
            "mean_reward": float(np.mean(graded)) if graded else 0.0,
            "at": now,
        }
        for event in ("decided", "delivered") if kept else ("decided",):
            place = delivered if event == "delivered" else -1
            numbered = {"event_seq": len(rows), "event": event, "delivery_seq": place}
            rows.append({**shared, **numbered})
        delivered += kept
    return pa.Table.from_pylist(rows, GROUPS)
