"""Rows of others, one a sequence, read into rows of SEQUENCES.

Known are TRL's shape (`prompt_ids`, `completion_ids`, `logprobs`, and `completion_mask` or
`env_mask`), verl's (`prompts`, `responses`, `rollout_log_probs`, `response_mask`), and a whole
sequence (`token_ids`, `loss_mask`, `logprobs`).

Logprobs are as long as the completion, 0 where nothing was sampled. Keys and spans are taken when
they are there, as `prorl export` writes them; else every row is a rollout, rows are grouped by
`group_id`, `uid` or `prompt`, each run of the model's tokens is a turn of version 0 at temperature
1. What does not fit together is refused by its line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from prorl import exact_json
from prorl.errors import UserError
from prorl.schema import ARROW_ERRORS, MAX_SEGMENTS, SEQUENCES
from prorl.schema.fields import SPANS
from prorl.types import Json, Lineage

Row = Mapping[str, Json]


class Shape(NamedTuple):
    """How the columns of a row are called; a whole sequence has no prompt of its own."""

    prompt: str | None
    completion: str
    masks: tuple[str, ...]
    logprobs: str


SHAPES = (
    Shape("prompt_ids", "completion_ids", ("completion_mask", "env_mask"), "logprobs"),
    Shape("prompts", "responses", ("response_mask",), "rollout_log_probs"),
    Shape(None, "token_ids", ("loss_mask",), "logprobs"),
)


class Line(NamedTuple):
    where: str
    row: Row


def read_lines(path: Path) -> Iterator[Line]:
    """Rows of a `.jsonl` or `.parquet` file, or a `.json` document or a list. Raises UserError."""
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except ARROW_ERRORS as error:
            raise UserError(f"{path}: {error}", "a Parquet file") from None
        yield from (Line(f"{path}:{i}", row) for i, row in enumerate(table.to_pylist(), 1))
        return
    content = path.read_bytes()
    for number, text in enumerate([content] if path.suffix == ".json" else content.splitlines(), 1):
        try:
            row = exact_json.loads(text)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}", "one object a line") from None
        rows = row if isinstance(row, list) and path.suffix == ".json" else [row]
        if not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{path}:{number} is no object", "one object a line")
        yield from (Line(f"{path}:{number}", row) for row in rows)


def has_ids(row: Row) -> bool:
    return any(shape.completion in row for shape in SHAPES)


def sequence_rows(given: list[Line], keys: list[dict[str, Json]]) -> list[dict[str, Json]]:
    siblings = Counter(key["rollout_id"] for key in keys)
    return [
        key
        # `sequences` has no word for one that nobody graded: its rollout is not valid.
        | {"weight": 1.0 / siblings[key["rollout_id"]], "reward": np.nan_to_num(key["reward"])}
        | _sequence(line)
        for line, key in zip(given, keys, strict=True)
    ]


def keys_of(given: list[Line]) -> list[dict[str, Json]]:
    """Who each row belongs to; one that does not say is a rollout of its own. Raises UserError."""
    groups: dict[str, int] = {}
    rollouts: dict[Json, int] = {}
    members: dict[int, list[int]] = {}
    made = []
    for number, line in enumerate(given):
        row = line.row
        name = next((row[n] for n in _GROUPED if row.get(n) is not None), "")
        group = _integer(line, "group_id", groups.setdefault(str(name), len(groups)))
        place = rollouts.setdefault(row.get("rollout", f"row {number}"), len(rollouts))
        rollout, segment = _integer(line, "rollout_id", place), _integer(line, "segment", 0)
        siblings = members.setdefault(group, [])
        if rollout not in siblings:
            siblings.append(rollout)
        made.append(
            {
                "sequence_id": rollout * MAX_SEGMENTS + segment,
                "rollout_id": rollout,
                "group_id": group,
                "sample_index": _integer(line, "sample_index", siblings.index(rollout)),
                "attempt": _integer(line, "attempt", 1),
                "segment": segment,
                "lineage": Lineage.COMPACT if segment else Lineage.MAIN,
                "parent": segment - 1,
                "reward": _reward(line),
            }
        )
    return made


_GROUPED = ("group_id", "uid", "prompt", "task_id")
"""What siblings have in common, the first that a row has."""


def _sequence(line: Line) -> dict[str, Json]:
    shape = next((shape for shape in SHAPES if shape.completion in line.row), None)
    if shape is None:
        wanted = " or ".join(shape.completion for shape in SHAPES)
        raise UserError(f"{line.where} has {', '.join(line.row) or 'nothing'}", wanted)
    prompt = _numbers(line, shape.prompt, np.int32) if shape.prompt else np.zeros(0, np.int32)
    completion = _numbers(line, shape.completion, np.int32)
    mask = _mask(line, shape, len(completion))
    logprobs = _numbers(line, shape.logprobs, np.float32)
    _check_length(line, shape, shape.logprobs, logprobs, len(completion))
    spans = _spans(line, len(prompt), mask)
    kinds, ends = np.array(spans["span_kind"]), np.array(spans["span_end"])
    if not len(ends) or len(kinds) != len(ends) or (np.diff(ends, prepend=0) <= 0).any():
        raise UserError(f"{line.where}: spans that do not tile the tokens", "span_end that grows")
    if ends[-1] != len(prompt) + len(completion):
        given = f"{line.where}: spans up to {ends[-1]} of {len(prompt) + len(completion)} tokens"
        raise UserError(given, "spans of all tokens")
    sampled = np.repeat(kinds >= 1, np.diff(ends, prepend=0))[len(prompt) :]
    return {
        "token_ids": np.concatenate([prompt, completion]),
        "logprobs": logprobs[sampled],
        **spans,
    }


def _mask(line: Line, shape: Shape, length: int) -> np.ndarray[Any, Any]:
    """1 for each token of the completion that the model sampled: all, where no mask is given."""
    name = next((name for name in shape.masks if line.row.get(name) is not None), "")
    mask = _numbers(line, name, np.uint8) if name else np.ones(length, np.uint8)
    if mask.max(initial=0) > 1:
        raise UserError(f"{line.where}: {mask.max()} in {name}", "0 and 1")
    _check_length(line, shape, name, mask, length)
    return mask


def _check_length(
    line: Line, shape: Shape, name: str, values: np.ndarray[Any, Any], length: int
) -> None:
    if len(values) != length:
        given = f"{line.where}: {len(values)} of {name} for {length} of {shape.completion}"
        raise UserError(given, "lists of one length")


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
    if value is None and "rollout" in line.row:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{line.where}: reward {value!r}", "a number")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{line.where}: a reward above all floats", "a number") from None


def _spans(line: Line, prompt: int, mask: np.ndarray[Any, Any]) -> dict[str, Json]:
    if all(isinstance(line.row.get(name), list) for name in SPANS):
        return {
            name: _numbers(line, name, SEQUENCES.field(name).type.value_type.to_pandas_dtype())
            for name in SPANS
        }
    spans = _masked_spans(prompt, mask)
    return {
        "span_end": [end for end, _, _ in spans],
        "span_kind": [kind for _, kind, _ in spans],
        "span_version": [0 if kind else -1 for _, kind, _ in spans],
        "span_turn": [turn for _, _, turn in spans],
        "span_temperature": [1.0] * len(spans),
    }


def _masked_spans(prompt: int, mask: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """(end, kind, turn) of each span: every run of the model's tokens is a turn."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    parts = [(stop, int(mask[start])) for start, stop in pairwise(borders) if stop > start]
    turns = np.cumsum([kind for _, kind in parts]) - 1
    tail = [
        (prompt + stop, kind, max(int(turn), 0))
        for (stop, kind), turn in zip(parts, turns, strict=True)
    ]
    joined = bool(tail) and not tail[0][1]  # context goes on behind the prompt
    return [(prompt, 0, 0), *tail] if prompt and not joined else tail
