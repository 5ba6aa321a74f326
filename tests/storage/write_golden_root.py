"""The golden root: a root as this version writes it, small, with a column less.

    python -m tests.storage.write_golden_root       writes it anew, with a run of today's format

That is for changes of the format before the first release: from then on such a change adds a root.
A new optional column is no such change: the root that is there lacks it, as stored runs do.
`served.json` holds what a replay of its run serves: groups in order, by the hashes of their rows.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from prorl.analysis.annotations import annotate
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from tests.service.running_gateway import group, running_gateway
from tests.storage.column_versions import rewrite, without_older
from tests.storage.compactable_run import replayed
from tests.storage.store_pipeline import client, pipeline, store

ROOT = Path(__file__).parent / "golden_root"


def restore(root: Path) -> None:
    """Makes a root of it. Folders without a file are not kept by git: they are made again here."""
    shutil.copytree(ROOT / "r", root / "r")
    (root / "r" / "partial").mkdir(exist_ok=True)
    with closing(sqlite3.connect(root / "control.db")) as log:
        log.executescript((ROOT / "control.sql").read_text())


async def live(where: Path) -> None:
    """Plays a run of four groups: two are kept and wait for a trainer, two teach nothing."""
    async with running_gateway(where) as w, store(w) as made, pipeline(w):
        await w.run(delivery="stream", filter="dapo")
        await w.submit(*(group(f"t{i}", n=2) for i in range(4)), last=True)
        await w.until(lambda view: view["state"] == "finished")
        with client(made.location) as trainer:
            await asyncio.to_thread(trainer.log, "r", 1, {"loss": 0.5})
    annotate(StoredRun(w.config.root / "r"), [{"rollout_id": 0, "label": "good"}], author="me")


def main() -> None:
    """Live it, leave out what an older prorl would not have known (`OLDER`), and copy the rest."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder)))
        root = Path(folder) / "root"
        shutil.rmtree(ROOT, ignore_errors=True)
        shutil.copytree(root / "r", ROOT / "r")
        with closing(sqlite3.connect(root / "control.db")) as log:
            (ROOT / "control.sql").write_text("\n".join(log.iterdump()) + "\n")
    run = RunDir(ROOT / "r")
    rewrite(run, without_older)
    (ROOT / "served.json").write_text(json.dumps(replayed(run), indent=1) + "\n")


if __name__ == "__main__":
    main()
