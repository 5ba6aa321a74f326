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

from prorl.analysis.foreign import Line, Row, sequence_rows
from prorl.errors import ConflictError, UserError
from prorl.schema import GROUPS, ROLLOUTS, SEQUENCES
from prorl.schema.fields import SCHEMA_VERSION
from prorl.schema.sequences import validate_sequences
from prorl.storage.files.commit_files import Commit
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import MANIFEST, PartFile, RunDir
from prorl.storage.files.parts import empties, encode, part_file
from prorl.types import Json, RolloutState


def import_rows(lines: Iterable[Line], directory: Path, source: str) -> int:
    """Make a run directory of these rows; how many there were.

    Raises UserError for the first row that is refused, ConflictError when something is there.
    """
    if directory.exists():
        raise ConflictError(f"{directory} exists", "the name of a run that is not there")
    given = list(lines)
    rows = sequence_rows(given)
    if not rows:
        raise UserError(f"{source} holds no row", "one row a sequence")
    batch = pa.RecordBatch.from_pylist(rows, schema=SEQUENCES)
    # Raises UserError for the first row that is no sequence, or that comes twice.
    problems, keys = validate_sequences(batch), batch.column("sequence_id").to_pylist()
    seen: set[int] = set()
    for line, problem, key in zip(given, problems, keys, strict=True):
        if problem or key in seen:
            raise UserError(
                f"{line.where}: {problem or f'sequence {key} comes twice'}", "a sound sequence"
            )
        seen.add(key)
    _write(directory, batch, given, source)
    return len(rows)


def _write(directory: Path, batch: pa.RecordBatch, given: list[Line], source: str) -> None:
    """Beside its place first: a run directory appears whole."""
    aside = directory.with_name(f".importing-{directory.name}")
    run = RunDir(aside)
    run.create(empties(directory.name).items())
    manifest = {"run_id": directory.name, "schema_version": SCHEMA_VERSION, "imported": source}
    write_durably(run.fs, run.path(MANIFEST), orjson.dumps(manifest))
    tables = {
        "sequences": pa.Table.from_batches([batch]),
        "rollouts": _rollouts(batch, [line.row for line in given]),
        "groups": _groups(batch),
    }
    files: list[PartFile] = []
    for table, rows in tables.items():
        content = encode(table, rows, directory.name, "part-imported")
        files.append(part_file(table, "part-imported", rows, content))
        write_durably(run.fs, run.path(files[-1].path), content)
    commit = Commit(commit_seq=1, part="part-imported", files=tuple(files), run_id=directory.name)
    write_durably(run.fs, run.commit_path(1), commit.dumps())
    aside.rename(directory)


def _rollouts(batch: pa.RecordBatch, rows: list[Row]) -> pa.Table:
    made: dict[int, dict[str, Json]] = {}
    now = datetime.now(UTC)
    for i, (sequence, row) in enumerate(zip(batch.to_pylist(), rows, strict=True)):
        versions = [v for v in sequence["span_version"] if v >= 0] or [0]
        about = made.setdefault(sequence["rollout_id"], _blank(sequence, row, now, i))
        about["num_sequences"] += 1
        about["num_tokens"] += len(sequence["token_ids"])
        about["num_sampled"] += len(sequence["logprobs"])
        about["num_trained"] += len(sequence["logprobs"])
        about["logprob_sum"] += float(np.sum(sequence["logprobs"], dtype=np.float64))
        about["min_version"] = min(about["min_version"], *versions)
        about["max_version"] = max(about["max_version"], *versions)
    return pa.Table.from_pylist(list(made.values()), ROLLOUTS)


def _blank(sequence: Mapping[str, Any], row: Row, now: datetime, number: int) -> dict[str, Json]:
    copied = {
        n: sequence[n] for n in ("rollout_id", "group_id", "sample_index", "attempt", "reward")
    }
    said = {n: str(row.get(n) or "") for n in ("task_id", "data_source")}
    fixed = {
        "rollout_key": f"imported/{number}",
        "status": RolloutState.COMPLETED.value,
        "valid": True,
        "reward_parts": [],
        "artefact": b"",
        "extra": "{}",
        "committed_at": now,
        "min_version": 2**31 - 1,
        "max_version": -1,
        "logprob_sum": 0.0,
    }
    return {**_ZEROS, **copied, **said, **fixed}


_ZEROS: Mapping[str, Json] = {
    field.name: None if field.nullable else "" if pa.types.is_string(field.type) else 0
    for field in ROLLOUTS
}
"""A row of `rollouts` of which nothing is known."""


def _groups(batch: pa.RecordBatch) -> pa.Table:
    """Every group decided and delivered, in the order of the file."""
    members: dict[int, dict[int, float]] = {}
    keys = (batch.column(name).to_pylist() for name in ("group_id", "rollout_id", "reward"))
    for group, rollout, reward in zip(*keys, strict=True):
        members.setdefault(group, {})[rollout] = reward
    rows: list[Json] = []
    now = datetime.now(UTC)
    for seq, (group, rewards) in enumerate(members.items()):
        shared = _decision(group, list(rewards.values()), now)
        for i, (event, place) in enumerate((("decided", -1), ("delivered", seq))):
            rows.append({**shared, "event_seq": 2 * seq + i, "event": event, "delivery_seq": place})
    return pa.Table.from_pylist(rows, GROUPS)


def _decision(group: int, rewards: list[float], now: datetime) -> dict[str, Json]:
    """What both events of an imported group say: kept, with every member valid."""
    return {
        "group_id": group,
        "kept": True,
        "reason": "imported",
        "num_members": len(rewards),
        "num_valid": len(rewards),
        "min_version": 0,
        "mean_reward": float(np.mean(rewards)),
        "at": now,
    }
