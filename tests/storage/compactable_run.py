"""A run of many commits, and what of it no compaction may change."""

from __future__ import annotations

from pathlib import Path

from prorl.schema import TABLES
from prorl.schema.rows import row_hashes
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from prorl.storage.serve.replay import ReplayOrder, stored_index
from tests.storage.run_directories import add_events, add_rows, add_terminals, event, new_run
from tests.storage.scored_rows import scored, terminal

GROUPS = 6
ORDER = [4, 2, 5, 0]
"""As delivered; 1 and 3 are kept and were never handed out."""


def run_of_many_parts(root: Path, run_id: str = "demo") -> RunDir:
    """Groups of 4 whose members lie in several parts, decided, and delivered in another order."""
    run = new_run(root, run_id)
    for first in range(0, GROUPS * 4, 3):
        add_rows(run, [scored(i, width=50) for i in range(first, min(first + 3, GROUPS * 4))])
    add_terminals(run, terminal(GROUPS * 4))
    for group in range(GROUPS):
        add_events(run, event(group, group, "decided"))
    for seq, group in enumerate(ORDER):
        add_events(run, event(GROUPS + seq, group, "delivered", delivery_seq=seq))
    return run


def content(run: RunDir) -> dict[str, list[str]]:
    """Hashes of all rows of all tables, by value."""
    stored = StoredRun(run.where)
    return {
        table: sorted(
            digest
            for batch in stored.read(table).combine_chunks().to_batches()
            for digest in row_hashes(batch)
        )
        for table in TABLES
    }


def replayed(run: RunDir) -> list[tuple[int, list[str]]]:
    """Returns what a replay serves, in order."""
    stored = StoredRun(run.where)
    index = stored_index(stored)
    return [(group, row_hashes(index.read(group))) for group in ReplayOrder(stored).groups]


def files(run: RunDir) -> list[str]:
    """Everything in the directory but what every run has."""
    return sorted(
        str(path.relative_to(run.root))
        for path in Path(run.root).rglob("*")
        if path.is_file() and path.name not in ("empty.parquet", "manifest.json")
    )


def expected_files(run: RunDir) -> list[str]:
    """Returns the files of the run when nothing is left over."""
    (commit,) = run.commits()
    name = str(next(name for name in run.commit_names() if name.first))
    return sorted([f"commits/{name}", *(file.path for file in commit.files)])
