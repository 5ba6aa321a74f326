"""Compaction: many small parts become few large ones, while the run is written and read.

    small parts -> packs, sorted for their readers -> one commit that stands for commits 1 to N
                -> (after a while) the parts and commits that it replaced are removed

A range of compacted commits appears by one conditional put of its name, so readers see the old set
or the new one. Wherever compaction dies, what it leaves is a file that nothing names; a second one
at the same time wastes its work and breaks nothing. Before the range is published every pack is
read back and must hold the same rows, by value, as the parts that it replaces, and every file that
the range names must be there.

`sequences` lie as trainers read them: in delivery order, then what was never delivered by group.
The other tables lie by their ids, which is by task too, since ids are given in order of acceptance.
A pack holds up to `PACK_BYTES` of Arrow data. Full packs are never written again, small ones are
merged while they are no more than twice what is new: each row is written about log2 times.

What it replaced stays for readers who opened the run before, and is then removed by `collect`
(`StoredRun` and `GroupIndex` open a run again when a file is gone), with packs of compactions that
died; these go as well when a store opens the run, and when a compaction of its own was ended
(`remove_dead`). Neither touches a file that a current commit names, nor a part that no commit has
ever named: that one may be about to be committed.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import ConflictError, SchemaError, StorageError
from prorl.schema import APPENDED, TABLES
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.files.layout import COMMITS, Commit, CommitName, PartFile, RunDir
from prorl.storage.files.objects import remove
from prorl.storage.files.part_reader import raw_bytes, read_part
from prorl.storage.files.parts import BY_GROUP, conform, encode, part_file
from prorl.storage.files.runs import below, list_runs
from prorl.waits import wait_limit_s

PACK = "pack-"

PACK_BYTES = 192 << 20
"""Arrow bytes of one table in one pack, about; compaction has two or three times that in memory."""

FULL_BYTES = 64 << 20
"""A pack with so many Arrow bytes is never written again."""

SPENT_S = 1800.0
"""A compaction that took longer gives up: `collect` may take its packs for a dead one's."""


class Compacted(NamedTuple):
    commit: Commit
    num_before: int
    """Files that readers had to open before; now they open those of the commit."""


def compact(
    run: RunDir,
    *,
    everything: bool = False,
    pack_bytes: int = PACK_BYTES,
    write: WriteDurably = write_durably,
) -> Compacted | None:
    """Merge small parts; None when there is nothing to merge. `everything`: small packs too. Raises
    StorageError when a pack does not hold what it should, and ConflictError when another compaction
    of this run is under way on this host.
    """
    with alone(run):
        commits = _dense(run.commits())
        single = len(commits) == 1 and not (everything and commits[0].first_seq)
        if single or not commits:
            return None
        return _Work(run, commits, pack_bytes, write).publish(everything)


def _dense(commits: Sequence[Commit]) -> list[Commit]:
    """Returns the commits up to the first gap: what follows one is not settled."""
    dense: list[Commit] = []
    for commit in commits:
        if not commit.first_seq and commit.commit_seq != (dense[-1].commit_seq if dense else 0) + 1:
            break
        dense.append(commit)
    return dense


class _Work:
    """One compaction: which files of each table, in which order, and what was written so far."""

    def __init__(
        self,
        run: RunDir,
        commits: Sequence[Commit],
        pack_bytes: int,
        write: WriteDurably,
    ) -> None:
        self._started = time.monotonic()
        self._commits = commits
        self._files = [file for commit in commits for file in commit.files if file.rows]
        self._run, self._pack_bytes, self._write = run, pack_bytes, write
        self._run_id = commits[-1].run_id
        self._ranks = delivery_ranks(run, commits)
        self._written: list[PartFile] = []
        self._name = f"{PACK}{uuid.uuid4().hex[:16]}"

    def publish(self, everything: bool) -> Compacted | None:
        """Write the packs and the range that names them; None when every file stays as it is."""
        before = len(self._files)
        try:
            named = [file for table in TABLES for file in self._table(table, everything)]
            if len(self._commits) == 1 and len(named) == before:
                return None
            if time.monotonic() - self._started > SPENT_S:
                raise StorageError(f"compaction of {self._run.root} took more than {SPENT_S:g} s")
            for file in named:
                if self._run.size(file.path) != file.bytes:
                    raise StorageError(f"{self._run.path(file.path)} is not what its commit says")
        except BaseException:
            for file in self._written:  # nothing will name them
                remove(self._run.fs, self._run.path(file.path))
            raise
        last = self._commits[-1]
        commit = Commit(
            first_seq=1,
            commit_seq=last.commit_seq,
            again=last.again + 1 if last.first_seq else 0,
            part=self._name,
            files=tuple(named),
            run_id=last.run_id,
        )
        path = self._run.commit_path(commit.commit_seq, 1, commit.again)
        self._write(self._run.fs, path, commit.dumps())
        return Compacted(commit, before)

    def _table(self, table: str, everything: bool) -> list[PartFile]:
        """The files of a table afterwards, in the order of their oldest commit."""
        files = [file for file in self._files if file.table == table]
        start = self._first_to_merge(files, everything)
        merged = list(files[:start])
        together: list[tuple[PartFile, pa.Table]] = []
        num_bytes = 0
        for file in files[start:]:
            rows = conform(read_part(self._run, file, keep_unknown=True), table, self._run_id)
            size = rows.nbytes
            if together and num_bytes + size > self._pack_bytes:
                merged.append(self._pack(table, together))
                together, num_bytes = [], 0
            together.append((file, rows))
            num_bytes += size
        if together:
            merged.append(self._pack(table, together))
        return merged

    def _first_to_merge(self, files: Sequence[PartFile], everything: bool) -> int:
        start, new = len(files), 0
        while start:
            file = files[start - 1]
            if _is_pack(file.path) and (
                (file.bytes > 2 * new and not everything)
                or raw_bytes(self._run, file) >= min(FULL_BYTES, self._pack_bytes // 2)
            ):
                break
            new += file.bytes
            start -= 1
        return start

    def _pack(self, table: str, parts: list[tuple[PartFile, pa.Table]]) -> PartFile:
        """One file with the rows of these; the file itself when it is alone and sorted already."""
        first = parts[0][0].path
        if len(parts) == 1 and _is_pack(first):
            return parts[0][0]
        # Columns that only some have, of another prorl, are null in the others' rows.
        tables = [rows for _, rows in parts]
        rows = pa.concat_tables(tables, promote_options="default").combine_chunks()
        del tables
        parts.clear()
        expected = checksum(rows)
        rows = rows.take(pa.array(row_order(table, rows, self._ranks)))
        name = f"{self._name}-{len(self._written):04d}"
        content = encode(table, rows, self._run_id, name)
        file = part_file(table, name, rows, content)
        del rows
        self._written.append(file)
        self._write(self._run.fs, self._run.path(file.path), content)
        del content
        if checksum(read_part(self._run, file, keep_unknown=True)) != expected:
            raise StorageError(f"{self._run.path(file.path)} does not hold what it replaces")
        return file


def _is_pack(path: str) -> bool:
    return path.split("/")[-1].startswith(PACK)


@contextmanager
def alone(run: RunDir) -> Iterator[None]:
    """Keep other compactions of this run away on this host; for other hosts see `SPENT_S`."""
    try:
        with run.locked(COMMITS, wait=False):
            yield
    except BlockingIOError:
        raise ConflictError(
            f"{run.root} is being compacted", "one compaction at a time", "try again later"
        ) from None


_Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

ORDER: Mapping[str, tuple[str, ...]] = {
    "sequences": ("sample_index", "segment"),
    "rollouts": ("rollout_id",),
    "turns": ("rollout_id", "turn"),
    "messages": ("rollout_id", "index"),
    "groups": ("event_seq",),
    "tasks": ("group_id",),
    "routed_experts": ("sequence_id",),
    "attempts": ("rollout_id", "attempt"),
}
"""The columns by which the rows of a pack are sorted; those of `BY_GROUP` by the rank of their
group first.
"""


class Ranks(NamedTuple):
    group_ids: _Int64s
    seqs: _Int64s

    def of(self, group_ids: _Int64s) -> _Int64s:
        """Sort keys: delivery_seq, then whatever was not delivered by group."""
        undelivered = np.int64(1 << 40) + group_ids
        if not len(self.group_ids):
            return undelivered
        at = np.minimum(np.searchsorted(self.group_ids, group_ids), len(self.group_ids) - 1)
        return np.where(self.group_ids[at] == group_ids, self.seqs[at], undelivered)


def delivery_ranks(run: RunDir, commits: Sequence[Commit]) -> Ranks:
    columns = ["group_id", "event", "delivery_seq"]
    files = [f for commit in commits for f in commit.files if f.table == "groups" and f.rows]
    if not files:
        return Ranks(np.zeros(0, np.int64), np.zeros(0, np.int64))
    events = pa.concat_tables([read_part(run, file, columns) for file in files])
    delivered = events.filter(pc.equal(events.column("event"), "delivered")).sort_by("group_id")
    return Ranks(
        delivered.column("group_id").to_numpy(), delivered.column("delivery_seq").to_numpy()
    )


def row_order(table: str, rows: pa.Table, ranks: Ranks) -> _Int64s:
    keys = [rows.column(name).to_numpy() for name in reversed(ORDER[table])]
    if table in BY_GROUP:
        keys.append(ranks.of(rows.column("group_id").to_numpy()))
    order: _Int64s = np.lexsort(keys).astype(np.int64)
    return order


def checksum(rows: pa.Table) -> tuple[int, int]:
    """Equal for two tables with the same rows, in whatever order and layout."""
    from prorl.storage.read.sql import LockedDuckDB  # DuckDB takes long to import

    with LockedDuckDB(memory="1GB") as database:
        database.register("given", rows)
        row = database.query("select sum(hash(given))::varchar as h from given")
    return rows.num_rows, int(row.column("h")[0].as_py() or 0)


GRACE_S = wait_limit_s("store.readers")


def collect(
    run: RunDir,
    *,
    grace_s: float = GRACE_S,
    clock: Callable[[], float] = time.time,
    write: WriteDurably = write_durably,
) -> list[str]:
    """Remove what was replaced more than `grace_s` ago; the files, relative to the run. With 0
    nobody else may be writing to the run from another host: then age, which the clock of an object
    store tells, counts for nothing. A killed one is finished by the next.
    """
    before = clock() - grace_s if grace_s else math.inf
    with alone(run):
        removed = list(_remove_replaced(run, before))
        for table in APPENDED:
            removed += AppendedTable(run, table).merge(write)
        return [*removed, *_remove_strays(run, math.inf if not grace_s else _stray(run, clock))]


DYING_S = wait_limit_s("store.dying")


def remove_dead(run: RunDir) -> list[str]:
    """Remove what compactions that died have left; the files. Nothing while one is at work, whose
    end does the same. Blocks for up to `DYING_S`.
    """
    until = time.monotonic() + DYING_S
    while True:
        try:
            with alone(run):
                return list(_remove_strays(run, _stray(run, time.time)))
        except ConflictError:
            if time.monotonic() >= until:
                return []
            time.sleep(0.02)


def _stray(run: RunDir, clock: Callable[[], float]) -> float:
    """Returns until when a file was written whose compaction is dead, while we are alone on this
    host.
    """
    return math.inf if run.local else clock() - SPENT_S * 2


def _remove_replaced(run: RunDir, before: float) -> Iterator[str]:
    """Remove commits that a range published before `before` stands for, files before names."""
    names = run.commit_names()
    replaced = _replaced(run, names, before)
    current = run.read_commits([name for name in names if name not in set(replaced)])
    named = {file.path for commit in current for file in commit.files}
    for name in replaced:
        with suppress(FileNotFoundError):
            for commit in run.read_commits([name]):
                for file in commit.files:
                    if file.path not in named and remove(run.fs, run.path(file.path)):
                        yield file.path
        remove(run.fs, run.path(COMMITS, str(name)))
        yield f"{COMMITS}/{name}"


def _replaced(run: RunDir, names: Sequence[CommitName], before: float) -> list[CommitName]:
    """Commits and ranges that a range stands for which was published before `before`."""
    upto = 0
    for at, name in enumerate(names):
        if name.first and run.modified_at(f"{COMMITS}/{name}") <= before:
            upto = at
    return list(names[:upto])


def leftovers(root: str | Path) -> list[str]:
    """Names of the runs of a root that hold commits which a range stands for, or what compactions
    that died have left. Runs of another version are passed over.
    """
    run_ids = []
    for name in list_runs(root):
        run = RunDir(below(root, name))
        with suppress(SchemaError):
            run.manifest()
            names = run.commit_names()
            upto = max((each.last for each in names if each.first), default=0)
            if sum(each.last <= upto for each in names) > 1 or _strays(run):
                run_ids.append(name)
    return run_ids


def _remove_strays(run: RunDir, before: float) -> Iterator[str]:
    """Remove packs that no commit names, and what was half written: whoever wrote it is dead. We
    are alone; where we cannot know that, it is old.
    """
    for path in _strays(run):
        if run.modified_at(path) <= before:
            remove(run.fs, run.path(path))
            yield path


def _strays(run: RunDir) -> list[str]:
    """Packs that no commit names, and what was half written: of compactions that died, or of one
    that is at work. None while a commit is missing: a pack may be all that is left of it.
    """
    ours = [
        f"{folder}/{name}"
        for folder in (*TABLES, COMMITS)
        for name in run.names(folder)
        if _is_ours(name)
    ]
    # What follows is read after the files: whatever is published meanwhile is named.
    names = run.commit_names() if ours else []
    if not names or not run.whole(names[-1].last):
        return []
    named = run.ever_named()
    return [path for path in ours if path not in named]


def _is_ours(name: str) -> bool:
    """Returns whether only a compaction can have written it."""
    if not name.startswith(TEMP_MARK):
        return name.startswith(PACK)
    final = CommitName.parse(name.removeprefix(TEMP_MARK).partition("-")[2])
    return f"-{PACK}" in name or bool(final and final.first)
