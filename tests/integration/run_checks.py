"""The invariants of every finished run, whatever happened to it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from prorl.config import RESERVED_NAMES
from prorl.linux.procfs import descendants
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.supervisor.root import box_dir
from prorl.types import Json

ONCE = """
select count(*) as rows, count(distinct rollout_id) as rollouts,
    count(distinct rollout_key) as keys,
    count(*) filter (status not in ('completed', 'failed', 'cancelled')) as undecided
from rollouts
"""


def check_complete(directory: str | Path, expected: int) -> StoredRun:
    """Every rollout asked for is stored in exactly one terminal state, and the directory keeps its
    own word.
    """
    findings = verify(directory)
    assert findings == [], "\n".join(map(str, findings))
    stored = StoredRun(directory)
    assert rows(stored, ONCE) == [
        {"rows": expected, "rollouts": expected, "keys": expected, "undecided": 0}
    ]
    return stored


def rows(stored: StoredRun, sql: str) -> list[dict[str, Json]]:
    """A query's rows."""
    return list(stored.sql(sql).to_pylist())


def check_no_leftovers(root: Path, before: set[int], *, killed: bool = False) -> None:
    """No process of ours, no socket folder, no sandbox folder, no published address.

    Also no temporary file, unless the store was `killed` at the end: the next one on the root
    sweeps them. What is there besides runs has a name that no run can take.
    """
    assert set(descendants(os.getpid())) <= before
    prefix = box_dir(root).name.removesuffix("box")
    leftovers = [
        path
        for parent in {tempfile.gettempdir(), "/tmp"}
        for path in Path(parent).glob(f"{prefix}*")
    ]
    assert not leftovers
    assert not (root / "service.json").exists()
    ours = {path.name for path in root.iterdir() if not (path / "manifest.json").exists()}
    ours = {name for name in ours if not name.startswith(".")}  # as no run's does
    assert ours <= RESERVED_NAMES, sorted(ours - RESERVED_NAMES)
    assert killed or not [
        path
        for path in root.rglob("*")
        if path.name.startswith((".tmp-", ".service.json", ".token"))
    ]
