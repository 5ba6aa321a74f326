"""The promises that a root must keep over a power cut, checked from its files alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prorl.errors import ProrlError
from prorl.storage.files.layout import Commit, PartFile, RunDir
from tests.faults.power.recorder import Mark


def broken(root: Path, marks: Iterable[Mark]) -> Iterator[str]:
    """Each promise that a root does not keep, in words."""
    token = root / "token"
    if token.exists() and not token.read_text().strip():
        yield "the token is empty: no service starts here"
    if not (root / "control.db").exists():
        yield from (f"{mark.what} {mark.value}: there is no log" for mark in marks)
        return
    with contextlib.closing(sqlite3.connect(root / "control.db")) as log:
        try:
            if log.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                yield "the log is damaged"
            if log.execute("SELECT 1 FROM sqlite_master").fetchone():
                yield from _runs(root, log)
            for mark in marks:
                if not _PROMISES[mark.what](log, mark.value):
                    yield f"{mark.what} {mark.value}: the log does not know it"
        except sqlite3.Error as error:
            yield f"the log cannot be read: {error}"


def _runs(root: Path, log: sqlite3.Connection) -> Iterator[str]:
    """Every file that the log or a commit on disk names is whole; what counts as shown is shown."""
    for (run_id,) in log.execute("SELECT run_id FROM runs").fetchall():
        directory = RunDir(root / run_id)
        try:
            directory.manifest()
            commits = directory.commits()
        except ProrlError as error:
            yield f"{run_id}: {error}"
            continue
        for commit in commits:
            yield from (f"shown {commit.commit_seq}: {why}" for why in _files(commit, directory))
        visible = {commit.commit_seq for commit in commits}
        parts = "SELECT commit_seq, part, files, published FROM parts WHERE run_id = ?"
        for seq, part, files, published in log.execute(parts, (run_id,)).fetchall():
            if published and seq not in visible and seq > directory.compacted().last:
                yield f"commit {seq} counts as published and is not there"
            named = tuple(PartFile(**file) for file in json.loads(files))
            commit = Commit(commit_seq=seq, part=part, files=named, run_id=run_id)
            yield from (f"part of the log: {why}" for why in _files(commit, directory))


def _files(commit: Commit, directory: RunDir) -> Iterator[str]:
    for file in commit.files:
        path = Path(directory.path(file.path))
        if not path.exists():
            yield f"{file.path} is gone"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
            yield f"{file.path} is not what was written ({path.stat().st_size} bytes)"


def _accepted(log: sqlite3.Connection, key: str) -> bool:
    rows = "SELECT count(*) FROM groups JOIN rollouts USING (run_id, group_id) WHERE key = ?"
    return bool(log.execute(rows, (key,)).fetchone()[0])


def _handed(log: sqlite3.Connection, value: list[int]) -> bool:
    places = "SELECT group_id FROM groups WHERE delivery_seq = ?"
    return [row[0] for row in log.execute(places, (value[0],)).fetchall()] == value[1:]


def _cursor(log: sqlite3.Connection, seq: int) -> bool:
    last_seq = log.execute("SELECT max(seq) FROM cursors").fetchone()[0]
    return last_seq is not None and last_seq >= seq


def _finished(log: sqlite3.Connection, run_id: str) -> bool:
    state = "SELECT state FROM runs WHERE run_id = ?"
    return bool(log.execute(state, (run_id,)).fetchall() == [("finished",)])


_PROMISES: dict[str, Any] = {
    "accepted": _accepted,
    "handed out": _handed,
    "cursor": _cursor,
    "finished": _finished,
}
