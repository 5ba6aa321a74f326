"""A copy of a root, taken while its service works, from which another service goes on.

The control log is copied first, by SQLite's own backup; then of each run what this copy names.
Commits that the copied log does not know are left out: what they hold is sampled again. Parts are
immutable, so that it does not matter when they are copied, as long as compaction leaves replaced
ones in place meanwhile (`store.keep_replaced_s`). Journals of turns are left out too: attempts in
flight begin anew.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from prorl.storage.files.layout import COMMITS, CommitName
from prorl.storage.files.runs import list_runs

LOG = "control.db"
SECRETS = ("signing.key", "token", "tls", "join")
"""The files by which trainers and nodes know a service; a new root makes its own otherwise."""


def back_up(root: Path, copy: Path) -> Iterator[tuple[str, int]]:
    """Copies a root; yields each run with its number of commits, when it is copied.

    Raises OSError, also FileExistsError for a folder that is there.
    """
    copy.mkdir(parents=True, mode=0o700)
    with (
        closing(sqlite3.connect(f"{(root / LOG).absolute().as_uri()}?mode=ro", uri=True)) as log,
        closing(sqlite3.connect(copy / LOG)) as copied,
    ):
        log.backup(copied)
        counters = dict(copied.execute("SELECT run_id, counters FROM runs"))
    for name in SECRETS:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name)
        elif (root / name).exists():
            shutil.copy2(root / name, copy / name)
    for run_id in list_runs(root):
        if run_id in counters:
            num_commits = json.loads(counters[run_id])["commits"]["next_commit"] - 1
            _copy_run(root / run_id, copy / run_id, num_commits)
            yield run_id, num_commits


def _copy_run(run: Path, copy: Path, num_commits: int) -> None:
    def excluded(folder: str, names: list[str]) -> list[str]:
        unfinished = [name for name in names if name.startswith(".")]
        if Path(folder) != run / COMMITS:
            return unfinished
        commits = {name: CommitName.parse(name) for name in names}
        later = [name for name, commit in commits.items() if commit and commit.last > num_commits]
        return unfinished + later

    shutil.copytree(run, copy, ignore=excluded)
