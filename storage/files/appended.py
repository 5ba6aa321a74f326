"""Tables that grow beside the commits: `trained`, `annotations`, `versions`, `scores`, `metrics`.

    RUN/<table>/0000000007.parquet               one append: one put of the next free number
    RUN/<table>/0000000001-0000000064.parquet    appends 1 to 64 merged

Whoever appends takes the next number by a conditional put, so several processes may append to one
run, also in an object store, and none overwrites another's. Each append has a key; one whose key is
there adds nothing, so that a caller who never heard the answer says it again. Readers take, from
each number on, the longest range that begins there. A file's footer carries its keys and a digest
of its rows by value, which `prorl verify` compares.

Small files are merged as compaction merges parts: what is merged is no more than twice what is new,
so that there are about log2 of them and each row is written about log2 times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import ConflictError, NotFoundError, SchemaError, StorageError, UserError
from prorl.schema import APPENDED, ARROW_ERRORS, check_schema, check_version
from prorl.storage.files.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.files.objects import NameConflictError, remove
from prorl.storage.files.part_reader import read_file
from prorl.storage.files.parts import ROWS_DIGEST, aligned, encode_by_itself, rows_digest

MANY = 64
"""So many files are merged."""

FULL_BYTES = 64 << 20
"""Files that together exceed it are not merged: what a merge holds in memory is bounded."""

_TRIES = 100
_KEYS = b"prorl.keys"
_NAME = re.compile(r"(\d{10})(?:-(\d{10}))?\.parquet")


class PieceName(NamedTuple):
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first:010d}{'' if self.first == self.last else f'-{self.last:010d}'}.parquet"

    @classmethod
    def parse(cls, name: str) -> PieceName | None:
        """Parses a file's name; returns None when it is not ours."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2] or match[1])) if match else None


def cover(pieces: Sequence[PieceName]) -> list[PieceName]:
    """Returns what a reader opens.

    >>> cover([PieceName(1, 1), PieceName(2, 2), PieceName(1, 2), PieceName(3, 3)])
    [PieceName(first=1, last=2), PieceName(first=3, last=3)]
    """
    chosen: list[PieceName] = []
    for piece in sorted(pieces, key=lambda piece: (piece.first, -piece.last)):
        if not chosen or piece.first > chosen[-1].last:
            chosen.append(piece)
    return chosen


class _Footer(NamedTuple):
    keys: list[str]
    digest: str
    """The digest of the rows, by value."""


class AppendedTable:
    def __init__(self, run: RunDir, table: str) -> None:
        self.run, self.table = run, table
        self.schema = APPENDED[table]

    def pieces(self) -> list[PieceName]:
        return cover(self._all())

    def _all(self) -> list[PieceName]:
        return [piece for name in self.run.names(self.table) if (piece := PieceName.parse(name))]

    def path(self, piece: PieceName) -> str:
        return self.run.path(self.table, str(piece))

    def append(self, rows: pa.Table, key: str, write: WriteDurably = write_durably) -> bool:
        """False when this key is there already. Raises SchemaError, StorageError."""
        check_schema(rows.schema, self.schema, f"rows for {self.table}")
        content = self._encode(rows, [key])
        self.run.fs.makedirs(self.run.path(self.table), exist_ok=True)
        for _ in range(_TRIES):
            # On a local disk a rename would take a name that is taken.
            with self.run.locked(self.table, wait=True):
                pieces = self._all()
                if any(key in self._keys(piece) for piece in cover(pieces)):
                    return False
                seq = max((piece.last for piece in pieces), default=0) + 1
                with suppress(NameConflictError):
                    write(self.run.fs, self.path(PieceName(seq, seq)), content)
                    return True
        raise StorageError(f"{self.run.path(self.table)}: others append too fast")

    def all_keys(self) -> list[str]:
        """Returns all keys in order. Raises StorageError."""
        return [key for piece in self.pieces() for key in self._keys(piece)]

    def _keys(self, piece: PieceName) -> list[str]:
        try:
            with self.run.open(self.table, str(piece)) as source:
                return self._about(piece, pq.read_schema(source)).keys
        except ARROW_ERRORS as error:
            raise StorageError(f"{self.path(piece)}: {error}") from None

    def _about(self, piece: PieceName, schema: pa.Schema) -> _Footer:
        metadata = schema.metadata or {}
        check_version(metadata.get(b"prorl.schema_version", b"").decode() or None, self.path(piece))
        return _Footer(
            orjson.loads(metadata.get(_KEYS, b"[]")), metadata.get(ROWS_DIGEST, b"").decode()
        )

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """Returns all rows in order. Raises StorageError."""
        schema = self.schema if columns is None else pa.schema(map(self.schema.field, columns))
        schema = schema.remove_metadata()
        tables = [
            aligned(self._read(piece, columns), schema, self.path(piece)) for piece in self.pieces()
        ]
        return pa.concat_tables([schema.empty_table(), *tables])

    def _read(self, piece: PieceName, columns: list[str] | None = None) -> pa.Table:
        """The rows in the columns in which they were written."""
        try:
            return read_file(self.run, f"{self.table}/{piece}", columns)
        except ARROW_ERRORS as error:
            raise StorageError(f"{self.path(piece)}: {error}") from None

    def _encode(self, rows: pa.Table, keys: Sequence[str]) -> pa.Buffer:
        about = {**(self.schema.metadata or {}), _KEYS: orjson.dumps(list(keys))}
        unknown = [field for field in rows.schema if field.name not in self.schema.names]
        return encode_by_itself(rows.cast(pa.schema([*self.schema, *unknown])), about)

    def merge(self, write: WriteDurably = write_durably) -> list[str]:
        """Merges when there are many small files, and removes what a range stands for; returns
        the removed files. What it writes is read back before anything goes. Raises StorageError.
        """
        if not self.run.has(self.table):
            return []
        pieces = self.pieces()
        start = self._first_to_merge(pieces)
        if len(pieces) - start >= MANY:
            merged = pieces[start:]
            tables = [self._read(piece) for piece in merged]
            keys = [
                key
                for piece, rows in zip(merged, tables, strict=True)
                for key in self._about(piece, rows.schema).keys
            ]
            schema = self.schema.remove_metadata()
            rows = pa.concat_tables(
                [aligned(rows, schema, self.table, keep_unknown=True) for rows in tables],
                promote_options="default",
            )
            whole = PieceName(merged[0].first, merged[-1].last)
            with suppress(NameConflictError):
                write(self.run.fs, self.path(whole), self._encode(rows, keys))
            if rows_digest(self._read(whole)) != rows_digest(rows):
                raise StorageError(f"{self.path(whole)} does not hold what it replaces")
        # A reader that finds a file gone looks again.
        with self.run.locked(self.table, wait=True):
            names = list(self.run.names(self.table)) if self.run.local else []
            obsolete = [name for name in names if name.startswith(TEMP_MARK)]
            obsolete += [str(piece) for piece in sorted({*self._all()} - {*self.pieces()})]
            for name in obsolete:
                remove(self.run.fs, self.run.path(self.table, name))
        return [f"{self.table}/{name}" for name in obsolete]

    def _first_to_merge(self, pieces: Sequence[PieceName]) -> int:
        start, new = len(pieces), 0
        while start:
            size = self.run.size(self.table, str(pieces[start - 1]))
            if new + size > FULL_BYTES or (
                pieces[start - 1].first != pieces[start - 1].last and size > 2 * new
            ):
                break
            new += size
            start -= 1
        return start

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields (file, what is wrong with it) for each damaged or missing file."""
        after = 0
        for piece in self.pieces():
            where = f"{self.table}/{piece}"
            if piece.first != after + 1:
                yield where, f"follows {after}: what lay between is missing"
            after = piece.last
            try:
                rows = self._read(piece)
                aligned(rows, self.schema, self.path(piece))
                if rows_digest(rows) != self._about(piece, rows.schema).digest:
                    yield where, "does not hold the rows that its footer says"
            except (StorageError, SchemaError) as error:
                yield where, f"cannot be read: {str(error).replace(self.run.root + '/', '')}"
            except (pa.ArrowException, ValueError, ArithmeticError) as error:
                # Bytes that are still Parquet, and values that no longer are any.
                yield where, f"holds what is no value: {error}"
        for name in sorted(self.run.names(self.table)):
            if PieceName.parse(name) is None:
                is_temporary = name.startswith(TEMP_MARK)
                yield (
                    f"{self.table}/{name}",
                    "was left by a crash" if is_temporary else "is not ours",
                )


# Rewards that were given later: a scoring is one append under its name, whole or not at all. They
# never stand instead of the first ones.

_SCORE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


def check_name(run: RunDir, name: str) -> None:
    """Raise UserError for what is no name, ConflictError for one that is taken."""
    if not _SCORE_NAME.fullmatch(name):
        raise UserError(f"score name {name!r}", "letters, digits, `_`, `.`, `-`, at most 64")
    if name in AppendedTable(run, "scores").all_keys():
        raise _name_conflict(run, name)


def add_scores(run: RunDir, name: str, rows: pa.Table, write: WriteDurably = write_durably) -> None:
    """Store a scoring, rows of SCORES. Raises as `check_name`, StorageError."""
    check_name(run, name)
    if not AppendedTable(run, "scores").append(rows, name, write):
        raise _name_conflict(run, name)


def read_scores(run: RunDir, name: str) -> pa.Table:
    """Returns one scoring. Raises NotFoundError, StorageError for a damaged file."""
    table = AppendedTable(run, "scores")
    names = table.all_keys()
    if name not in names:
        existing = ", ".join(sorted(names)) or "none"
        raise NotFoundError(f"{run.where} has no scoring {name!r}; there are: {existing}")
    return table.read().filter(pc.field("score") == name)


def _name_conflict(run: RunDir, name: str) -> ConflictError:
    return ConflictError(f"{run.where} has a scoring {name!r}", "a name that is not given yet")
