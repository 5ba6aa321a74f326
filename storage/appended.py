"""Tables that grow beside the commits: `trained`, `annotations`, `versions`.

What a trainer did with the rollouts, what people and scripts say of them, and weights that were
published.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from prorl.errors import SchemaError, StorageError
from prorl.schema import APPENDED, check_schema, check_version
from prorl.storage.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.layout import RunDir
from prorl.storage.locks import locked
from prorl.storage.objects import NameTakenError, remove
from prorl.storage.part_reader import read_file
from prorl.storage.parts import ROWS_DIGEST, rows_digest

MANY = 64
"""So many files are merged."""

FULL_BYTES = 64 << 20
"""Files that together exceed it are not merged: what a merge holds in memory is bounded."""

_TRIES = 100
_KEYS = b"prorl.keys"
_NAME = re.compile(r"(\d{10})(?:-(\d{10}))?\.parquet")


class Piece(NamedTuple):
    """What a file is called."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first:010d}{'' if self.first == self.last else f'-{self.last:010d}'}.parquet"

    @classmethod
    def parse(cls, name: str) -> Piece | None:
        """None for what is no file of ours."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2] or found[1])) if found else None


def cover(pieces: Sequence[Piece]) -> list[Piece]:
    """What a reader opens.

    >>> cover([Piece(1, 1), Piece(2, 2), Piece(1, 2), Piece(3, 3)])
    [Piece(first=1, last=2), Piece(first=3, last=3)]
    """
    chosen: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.first, -piece.last)):
        if not chosen or piece.first > chosen[-1].last:
            chosen.append(piece)
    return chosen


class AppendedTable:
    """One such table of one run. Remembers keys that it has read, holds no open file."""

    def __init__(self, run: RunDir, table: str) -> None:
        self.run, self.table = run, table
        self.schema = APPENDED[table]
        self._keys: dict[Piece, frozenset[str]] = {}

    def pieces(self) -> list[Piece]:
        """What readers open now."""
        return cover(self._all())

    def _all(self) -> list[Piece]:
        return [piece for name in self.run.names(self.table) if (piece := Piece.parse(name))]

    def path(self, piece: Piece) -> str:
        """Where a piece lies."""
        return self.run.path(self.table, str(piece))

    def append(self, rows: pa.Table, key: str, write: WriteDurably = write_durably) -> bool:
        """Make rows durable; False when this key is there already.

        Raises SchemaError for other columns, StorageError.
        """
        check_schema(rows.schema, self.schema, f"rows for {self.table}")
        content = self._encode(rows, [key])
        self.run.fs.makedirs(self.run.path(self.table), exist_ok=True)
        for _ in range(_TRIES):
            with self._alone():
                pieces = self._all()
                if self._knows(key, cover(pieces)):
                    return False
                seq = max((piece.last for piece in pieces), default=0) + 1
                with suppress(NameTakenError):
                    write(self.run.fs, self.path(Piece(seq, seq)), content)
                    return True
        raise StorageError(f"{self.run.path(self.table)}: others append too fast")

    def _alone(self) -> AbstractContextManager[None]:
        """No other append on this host: there a rename would take a name that is taken.

        An object store's conditional put needs no lock.
        """
        return locked(self.run, self.table, wait=True)

    def _knows(self, key: str, pieces: Sequence[Piece]) -> bool:
        known = self._keys
        self._keys = {p: known.get(p) or frozenset(_said(self._footer(p))) for p in pieces}
        return any(key in keys for keys in self._keys.values())

    def dataset(self) -> ds.Dataset:
        """All rows, lazily."""
        paths = [self.path(piece) for piece in self.pieces()]
        if not paths:
            return ds.dataset(self.schema.empty_table())
        return ds.dataset(
            paths,
            schema=self.schema,
            filesystem=self.run.arrow_filesystem,
            format=ds.ParquetFileFormat(
                default_fragment_scan_options=ds.ParquetFragmentScanOptions(
                    page_checksum_verification=True
                )
            ),
        )

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """All rows in the order in which they were appended. Raises StorageError."""
        found = [self._read(piece, columns) for piece in self.pieces()]
        wanted = self.schema if columns is None else pa.schema(map(self.schema.field, columns))
        return pa.concat_tables([wanted.remove_metadata().empty_table(), *found])

    def _read(self, piece: Piece, columns: list[str] | None = None) -> pa.Table:
        try:
            rows = read_file(self.run, f"{self.table}/{piece}", columns)
        except (pa.ArrowException, OSError) as error:
            raise StorageError(f"{self.path(piece)}: {error}") from None
        if columns is None:
            check_schema(rows.schema, self.schema, self.path(piece))
        return rows.replace_schema_metadata()

    def _footer(self, piece: Piece) -> Mapping[bytes, bytes]:
        try:
            with self.run.open(self.table, str(piece)) as source:
                found = pq.read_schema(source).metadata or {}
        except (pa.ArrowException, OSError) as error:
            raise StorageError(f"{self.path(piece)}: {error}") from None
        check_version(found.get(b"prorl.schema_version", b"").decode() or None, self.path(piece))
        return dict(found)

    def _encode(self, rows: pa.Table, keys: Sequence[str]) -> pa.Buffer:
        about = {_KEYS: orjson.dumps(list(keys)), ROWS_DIGEST: rows_digest(rows).encode()}
        metadata = {**(self.schema.metadata or {}), **about}
        sink = pa.BufferOutputStream()
        pq.write_table(
            rows.cast(self.schema).replace_schema_metadata(metadata),
            sink,
            compression="zstd",
            write_page_checksum=True,
        )
        return sink.getvalue()

    def merge(self, write: WriteDurably = write_durably) -> list[str]:
        """Merge when there are many small files, and remove what a range stands for; what went.

        What it writes is read back before anything goes. Raises StorageError.
        """
        if not self.run.has(self.table):
            return []
        pieces = self.pieces()
        start = self._first_to_merge(pieces)
        if len(pieces) - start >= MANY:
            merged = pieces[start:]
            keys = [key for piece in merged for key in _said(self._footer(piece))]
            rows = pa.concat_tables([self._read(piece) for piece in merged])
            whole = Piece(merged[0].first, merged[-1].last)
            with suppress(NameTakenError):
                write(self.run.fs, self.path(whole), self._encode(rows, keys))
            if rows_digest(self._read(whole)) != rows_digest(rows):
                raise StorageError(f"{self.path(whole)} does not hold what it replaces")
        with self._alone():
            return list(self.clear())

    def _first_to_merge(self, pieces: Sequence[Piece]) -> int:
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

    def clear(self) -> Iterator[str]:
        """Remove what a range stands for, and what was half written: nobody else is at it.

        A reader that finds a file gone looks again.
        """
        for name in list(self.run.names(self.table)) if self.run.local else []:
            if name.startswith(TEMP_MARK):
                remove(self.run.fs, self.run.path(self.table, name))
                yield f"{self.table}/{name}"
        pieces = self._all()
        current = set(cover(pieces))
        for piece in pieces:
            if piece not in current:
                remove(self.run.fs, self.path(piece))
                yield f"{self.table}/{piece}"

    def problems(self) -> Iterator[tuple[str, str]]:
        """(file, what is wrong with it) of what is damaged or missing."""
        after = 0
        for piece in self.pieces():
            where = f"{self.table}/{piece}"
            if piece.first != after + 1:
                yield where, f"follows {after}: what lay between is missing"
            after = piece.last
            try:
                said = self._footer(piece).get(ROWS_DIGEST, b"").decode()
                if rows_digest(self._read(piece)) != said:
                    yield where, "does not hold the rows that its footer says"
            except (StorageError, SchemaError) as error:
                yield where, f"cannot be read: {str(error).replace(self.run.root + '/', '')}"
            except (pa.ArrowException, ValueError, ArithmeticError) as error:
                # Bytes that are still Parquet, and values that no longer are any.
                yield where, f"holds what is no value: {error}"
        for name in sorted(self.run.names(self.table)):
            if Piece.parse(name) is None:
                left = name.startswith(TEMP_MARK)
                yield f"{self.table}/{name}", "was left by a crash" if left else "is not ours"


def _said(footer: Mapping[bytes, bytes]) -> list[str]:
    return list(orjson.loads(footer.get(_KEYS, b"[]")))
