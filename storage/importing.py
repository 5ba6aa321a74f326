"""Token-carrying rows of others as a run: JSON lines or Parquet in TRL's shape (`prompt_ids`,
`completion_ids`, `logprobs`, and `completion_mask` or `env_mask`), verl's (`prompts`, `responses`,
`rollout_log_probs`, `response_mask`), or a whole sequence (`token_ids`, `loss_mask`, `logprobs`).

Logprobs are as long as the completion, 0 where nothing was sampled. Keys and spans are taken when
they are there, as `prorl export` writes them; else every row is a rollout, rows are grouped by
`group_id`, `uid` or `prompt`, each run of the model's tokens is a turn of version 0 at temperature
1. A row that is not sound is refused by its line, and then nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from prorl.errors import ConflictError, UserError
from prorl.schema import GROUPS, MAX_SEGMENTS, ROLLOUTS, SEQUENCES
from prorl.schema_fields import SCHEMA_VERSION, SPANS
from prorl.sequences import validate_sequences
from prorl.storage.durable import write_durably
from prorl.storage.layout import MANIFEST, Commit, PartFile, RunDir
from prorl.storage.parts import empties, encode, part_file
from prorl.types import Json, RolloutState

Row = Mapping[str, Json]

SHAPES = (
    ("prompt_ids", "completion_ids", ("completion_mask", "env_mask"), "logprobs"),
    ("prompts", "responses", ("response_mask",), "rollout_log_probs"),
    (None, "token_ids", ("loss_mask",), "logprobs"),
)
"""(prompt, completion, mask, logprobs) as they are called."""


class Line(NamedTuple):
    """A row and where it stands, for who has to mend it."""

    where: str
    row: Row


def read_lines(path: Path) -> Iterator[Line]:
    """Rows of a `.jsonl` or `.parquet` file. Raises UserError."""
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: {error}", "a Parquet file") from None
        yield from (Line(f"{path}:{i}", row) for i, row in enumerate(table.to_pylist(), 1))
        return
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}", "one object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is no object", "one object a line")
        yield Line(f"{path}:{number}", row)


def import_rows(lines: Iterable[Line], directory: Path, source: str) -> int:
    """Make a run directory of these rows; how many there were.

    Raises UserError for the first row that is refused, ConflictError when something is there.
    """
    if directory.exists():
        raise ConflictError(f"{directory} exists", "the name of a run that is not there")
    given = list(lines)
    groups = _ids(given)
    rows = [_sequence(line, number, groups) for number, line in enumerate(given)]
    if not rows:
        raise UserError(f"{source} holds no row", "one row a sequence")
    batch = pa.RecordBatch.from_pylist(rows, schema=SEQUENCES)
    seen: set[int] = set()
    for line, problem, key in zip(
        given, validate_sequences(batch), batch.column("sequence_id").to_pylist(), strict=True
    ):
        if problem or key in seen:
            raise UserError(
                f"{line.where}: {problem or f'sequence {key} comes twice'}", "a sound sequence"
            )
        seen.add(key)
    _write(directory, batch, given, source)
    return len(rows)


def _ids(given: list[Line]) -> dict[str, int]:
    """Dense ids of what rows are grouped by, when they carry no numbers."""
    found: dict[str, int] = {}
    for line in given:
        found.setdefault(_group_name(line.row), len(found))
    return found


def _group_name(row: Row) -> str:
    return str(next((row[n] for n in ("group_id", "uid", "prompt") if row.get(n) is not None), ""))


def _sequence(line: Line, number: int, groups: Mapping[str, int]) -> dict[str, Json]:
    row, where = line.row, line.where
    shape = next((shape for shape in SHAPES if shape[1] in row), None)
    if shape is None:
        wanted = " or ".join(str(shape[1]) for shape in SHAPES)
        raise UserError(f"{where} has {', '.join(row) or 'nothing'}", wanted)
    prompt_name, ids_name, masks, logprobs_name = shape
    prompt = _numbers(line, prompt_name, np.int32) if prompt_name else np.zeros(0, np.int32)
    completion = _numbers(line, ids_name, np.int32)
    mask_name = next((name for name in masks if row.get(name) is not None), "")
    mask = _numbers(line, mask_name, np.uint8) if mask_name else np.ones(len(completion), np.uint8)
    if mask.max(initial=0) > 1:
        raise UserError(f"{where}: {mask.max()} in {mask_name}", "0 and 1")
    logprobs = _numbers(line, logprobs_name, np.float32)
    for name, values in ((mask_name or masks[0], mask), (logprobs_name, logprobs)):
        if len(values) != len(completion):
            given = f"{where}: {len(values)} of {name} for {len(completion)} of {ids_name}"
            raise UserError(given, "lists of one length")
    spans = _spans(line, len(prompt), mask)
    kinds, ends = np.array(spans["span_kind"]), np.array(spans["span_end"])
    if not len(ends) or len(kinds) != len(ends) or (np.diff(ends, prepend=0) <= 0).any():
        raise UserError(f"{where}: spans that do not tile the tokens", "span_end that grows")
    if ends[-1] != len(prompt) + len(completion):
        given = f"{where}: spans up to {ends[-1]} of {len(prompt) + len(completion)} tokens"
        raise UserError(given, "spans of all tokens")
    sampled = np.repeat(kinds >= 1, np.diff(ends, prepend=0))[len(prompt) :]
    rollout = _integer(line, "rollout_id", number)
    segment = _integer(line, "segment", 0)
    return {
        "sequence_id": rollout * MAX_SEGMENTS + segment,
        "rollout_id": rollout,
        "group_id": _integer(line, "group_id", groups[_group_name(row)]),
        "sample_index": _integer(line, "sample_index", 0),
        "attempt": _integer(line, "attempt", 1),
        "segment": segment,
        "reward": _reward(line),
        "token_ids": np.concatenate([prompt, completion]),
        "logprobs": logprobs[sampled],
        **spans,
    }


def _numbers(line: Line, name: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    values = line.row.get(name)
    if not isinstance(values, list):
        raise UserError(f"{line.where}: no list {name}", "a list of numbers")
    try:
        return np.asarray(pa.array(values, pa.from_numpy_dtype(dtype)).to_numpy())
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{line.where}: {name}: {error}", f"a list of {dtype.__name__}") from None


def _integer(line: Line, name: str, default: int) -> int:
    value = line.row.get(name)
    if value is None or (isinstance(value, str) and name == "group_id"):
        return default
    limit = 1 << SEQUENCES.field(name).type.bit_width - 1
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise UserError(f"{line.where}: {name} {value!r}", f"a whole number from 0 to {limit - 1}")
    return value


def _reward(line: Line) -> float:
    value = line.row.get("reward", line.row.get("reward_score"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{line.where}: reward {value!r}", "a number")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{line.where}: a reward above all floats", "a number") from None


def _spans(line: Line, prompt: int, mask: np.ndarray[Any, Any]) -> dict[str, Json]:
    """The spans as they were given, or what the mask says."""
    if all(isinstance(line.row.get(name), list) for name in SPANS):
        return {
            name: _numbers(line, name, SEQUENCES.field(name).type.value_type.to_pandas_dtype())
            for name in SPANS
        }
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    parts = [(stop, int(mask[start])) for start, stop in pairwise(borders) if stop > start]
    turns = np.cumsum([kind for _, kind in parts]) - 1
    head = [(prompt, 0, 0)] if prompt else []
    tail = [
        (prompt + stop, kind, max(int(turn), 0))
        for (stop, kind), turn in zip(parts, turns, strict=True)
    ]
    if head and tail and not tail[0][1]:
        head = []
    spans = [*head, *tail]
    return {
        "span_end": [end for end, _, _ in spans],
        "span_kind": [kind for _, kind, _ in spans],
        "span_version": [0 if kind else -1 for _, kind, _ in spans],
        "span_turn": [turn for _, _, turn in spans],
        "span_temperature": [1.0] * len(spans),
    }


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
        about["logprob_sum"] += float(np.sum(sequence["logprobs"], dtype=np.float64))
        about["min_version"] = min(about["min_version"], *versions)
        about["max_version"] = max(about["max_version"], *versions)
    return pa.Table.from_pylist(list(made.values()), ROLLOUTS)


def _blank(sequence: Mapping[str, Any], row: Row, now: datetime, number: int) -> dict[str, Json]:
    zeros: dict[str, Json] = {}
    for field in ROLLOUTS:
        text = pa.types.is_string(field.type)
        zeros[field.name] = None if field.nullable else "" if text else 0
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
    return {**zeros, **copied, **said, **fixed}


def _groups(batch: pa.RecordBatch) -> pa.Table:
    """Every group decided and delivered, in the order of the file."""
    members: dict[int, dict[int, float]] = {}
    keys = (batch.column(name).to_pylist() for name in ("group_id", "rollout_id", "reward"))
    for group, rollout, reward in zip(*keys, strict=True):
        members.setdefault(group, {})[rollout] = reward
    rows: list[Json] = []
    now = datetime.now(UTC)
    for seq, (group, rewards) in enumerate(members.items()):
        shared = {
            "group_id": group,
            "kept": True,
            "reason": "imported",
            "num_members": len(rewards),
            "num_valid": len(rewards),
            "min_version": 0,
            "mean_reward": float(np.mean(list(rewards.values()))),
            "at": now,
        }
        for i, (event, place) in enumerate((("decided", -1), ("delivered", seq))):
            rows.append({**shared, "event_seq": 2 * seq + i, "event": event, "delivery_seq": place})
    return pa.Table.from_pylist(rows, GROUPS)
