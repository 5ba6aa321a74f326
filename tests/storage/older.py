"""A root that an older prorl left, with control log version 2 and files without the columns that
came later: its service was stopped with a run open, two groups waiting for a worker and two for the
trainer.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from prorl.rows import row_hashes
from prorl.storage.catalog import StoredRun
from prorl.storage.layout import RunDir

OLD = Path(__file__).parent / "golden_root" / "log-2"

COLUMNS = {
    "sequences": ["sequence_id", "rollout_id", "group_id", "reward", "token_ids", "logprobs"],
    "rollouts": ["rollout_id", "group_id", "task_id", "status", "reward", "artefact", "run_s"],
    "turns": ["rollout_id", "turn", "prompt_tokens", "backend", "llm_s"],
    "messages": ["rollout_id", "index", "role", "content", "turn"],
    "groups": ["event_seq", "group_id", "event", "kept", "delivery_seq"],
    "tasks": ["group_id", "task_id", "task"],
}
"""What its rows held."""


def old_root(root: Path) -> RunDir:
    """A copy of it; its run."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(OLD / "r", root / "r")
    with sqlite3.connect(root / "control.db") as log:
        log.executescript((OLD / "control.sql").read_text())
    log.close()
    return RunDir(root / "r")


def old_content(run: RunDir) -> dict[str, list[str]]:
    """Hashes of all rows by the values that they had then."""
    stored = StoredRun(run.where)
    return {
        table: sorted(
            digest
            for batch in stored.read(table, columns).combine_chunks().to_batches()
            for digest in row_hashes(batch)
        )
        for table, columns in COLUMNS.items()
    }
