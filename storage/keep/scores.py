"""Rewards that were given later: the table `scores`, where a scoring is one append under its name.

They lie beside the tables and never stand instead of them: in SQL they are `scores`, and a replay
can serve one in place of the reward that was given first. A scoring is there whole or not at all.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.storage.files.durable import WriteDurably, write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.appended import AppendedTable

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


def check_name(run: RunDir, name: str) -> None:
    """Raise UserError for what is no name, ConflictError for one that is taken."""
    if not _NAME.fullmatch(name):
        raise UserError(f"score name {name!r}", "letters, digits, `_`, `.`, `-`, at most 64")
    if name in AppendedTable(run, "scores").all_keys():
        raise _taken(run, name)


def add_scores(run: RunDir, name: str, rows: pa.Table, write: WriteDurably = write_durably) -> None:
    """Store a scoring, rows of SCORES. Raises as `check_name`, StorageError."""
    check_name(run, name)
    if not AppendedTable(run, "scores").append(rows, name, write):
        raise _taken(run, name)


def read_scores(run: RunDir, name: str) -> pa.Table:
    """One scoring. Raises NotFoundError, StorageError for a damaged file."""
    table = AppendedTable(run, "scores")
    names = table.all_keys()
    if name not in names:
        known = ", ".join(sorted(names)) or "none"
        raise NotFoundError(f"{run.where} has no scoring {name!r}; there are: {known}")
    return table.read().filter(pc.field("score") == name)


def _taken(run: RunDir, name: str) -> ConflictError:
    return ConflictError(f"{run.where} has a scoring {name!r}", "a name that is not given yet")
