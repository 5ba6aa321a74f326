"""Rewards that were given later: `RUN/scores/NAME.parquet`, one file per scoring.

They lie beside the tables and never stand instead of them.

A scoring is one put: it is there whole, with its provenance in the file's metadata, or not at all.
Names are given once. In SQL they are the table `scores`; a replay can serve one in place of the
reward that was given first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson
import pyarrow as pa

from prorl.errors import ConflictError, NotFoundError, StorageError, UserError
from prorl.schema.fields import REWARD_PART
from prorl.storage.files.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.files.objects import NameTakenError
from prorl.storage.files.part_reader import read_file
from prorl.storage.files.parts import encode_by_itself
from prorl.types import Json

SCORES = "scores"

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_PROVENANCE = b"prorl.provenance"

SCORE_ROWS = pa.schema(
    [
        ("score", pa.utf8()),
        ("run_id", pa.utf8()),
        ("rollout_id", pa.int64()),
        ("attempt", pa.int32()),
        ("reward", pa.float32()),
        ("reward_parts", pa.list_(REWARD_PART)),
        ("failure_code", pa.utf8()),
        ("failure_message", pa.utf8()),
        ("grader_log", pa.utf8()),
        ("eval_s", pa.float64()),
    ]
)
"""`score` is the scoring's name; `reward` is null where it came to no verdict, and why is in the
failure.
"""


def check_name(run: RunDir, name: str) -> None:
    """Raise UserError for what is no name, ConflictError for one that is taken."""
    if not _NAME.fullmatch(name) or name == "empty":
        raise UserError(f"score name {name!r}", "letters, digits, `_`, `.`, `-`, at most 64")
    if name in score_names(run):
        raise ConflictError(f"{run.where} has a scoring {name!r}", "a name that is not given yet")


def add_scores(
    run: RunDir,
    name: str,
    rows: pa.Table,
    provenance: Mapping[str, Json],
    write: WriteDurably = write_durably,
) -> str:
    """Store a scoring; its path. Raises as `check_name`, StorageError."""
    check_name(run, name)
    about = {
        _PROVENANCE: orjson.dumps(dict(provenance)),
        b"prorl.run_id": run.name.encode(),
    }
    content = encode_by_itself(rows.cast(SCORE_ROWS), about)
    run.fs.makedirs(run.path(SCORES), exist_ok=True)
    path = run.path(SCORES, f"{name}.parquet")
    with run.locked(SCORES, wait=True):
        check_name(run, name)  # another may have given it meanwhile
        try:
            write(run.fs, path, content)
        except NameTakenError:
            check_name(run, name)  # on another host: object stores know no lock
            raise
    return path


def clear_scores(run: RunDir) -> Iterator[str]:
    """Remove what a killed `add_scores` had half written."""
    names = [name for name in run.names(SCORES) if name.startswith(TEMP_MARK)]
    if names and run.local:
        with run.locked(SCORES, wait=True):
            for name in names:
                Path(run.path(SCORES, name)).unlink(missing_ok=True)
                yield f"{SCORES}/{name}"


def score_names(run: RunDir) -> list[str]:
    """The names of all scorings, sorted."""
    names = (name.removesuffix(".parquet") for name in run.names(SCORES))
    return sorted(name for name in names if _NAME.fullmatch(name))


def read_scores(run: RunDir, name: str) -> pa.Table:
    """One scoring. Raises NotFoundError, StorageError for a damaged file."""
    path = run.path(SCORES, f"{name}.parquet")
    try:
        return read_file(run, f"{SCORES}/{name}.parquet")
    except FileNotFoundError:
        known = ", ".join(score_names(run)) or "none"
        raise NotFoundError(f"{run.where} has no scoring {name!r}; there are: {known}") from None
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{path}: {error}") from None


def all_scores(run: RunDir) -> pa.Table:
    """The rows of all scorings."""
    found = [read_scores(run, name).replace_schema_metadata() for name in score_names(run)]
    return pa.concat_tables([SCORE_ROWS.empty_table(), *found])


def provenance(run: RunDir, name: str) -> dict[str, Json]:
    """What made a scoring: env, rubric, code."""
    metadata = read_scores(run, name).schema.metadata or {}
    return dict(orjson.loads(metadata.get(_PROVENANCE, b"{}")))
