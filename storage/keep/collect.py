"""What a compaction leaves is removed, once readers had time to notice.

Parts and commits that a range stands for go after `grace_s` (`StoredRun` and `GroupIndex` open a
run again when a file is gone). Packs of compactions that died go, too.

It never touches a file that a current commit names, nor a part that no commit has ever named: that
one may be about to be committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from prorl.schema import APPENDED, TABLES
from prorl.storage.files.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.files.layout import COMMITS, CommitName, RunDir
from prorl.storage.files.objects import remove
from prorl.storage.keep.appended import AppendedTable
from prorl.storage.keep.compact import PACK, SPENT_S, alone

GRACE_S = 60.0
"""How long what was replaced stays for readers that know no better."""


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
    stray = math.inf if run.local or not grace_s else clock() - SPENT_S * 2
    with alone(run):
        removed = list(_remove_replaced(run, before))
        for table in APPENDED:
            removed += AppendedTable(run, table).merge(write)
        return [*removed, *_remove_strays(run, stray)]


def _remove_replaced(run: RunDir, before: float) -> Iterator[str]:
    """Remove commits that a range published before `before` stands for, files before names."""
    names = run.commit_names()
    gone = _replaced(run, names, before)
    kept = run.read_commits([name for name in names if name not in set(gone)])
    named = {file.path for commit in kept for file in commit.files}
    for name in gone:
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


def replaced(run: RunDir) -> set[str]:
    """Files that only replaced commits name: still there for readers of before."""
    return run.ever_named() - {file.path for commit in run.commits() for file in commit.files}


def _remove_strays(run: RunDir, before: float) -> Iterator[str]:
    """Remove packs that no commit names, and what was half written: whoever wrote it is dead. We
    are alone; where we cannot know that, it is old.
    """
    named = run.ever_named()
    for folder in (*TABLES, COMMITS):
        for name in list(run.names(folder)):
            path = f"{folder}/{name}"
            if _is_ours(name) and path not in named and run.modified_at(path) <= before:
                remove(run.fs, run.path(path))
                yield path


def _is_ours(name: str) -> bool:
    """Whether only a compaction can have written it."""
    if not name.startswith(TEMP_MARK):
        return name.startswith(PACK)
    final = CommitName.parse(name.removeprefix(TEMP_MARK).partition("-")[2])
    return f"-{PACK}" in name or bool(final and final.first)
