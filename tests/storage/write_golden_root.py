"""Run as a program: write the golden root anew, with a run of today's format.

    python -m tests.storage.write_golden_root

Only before the first release: from then on a change of the format adds a root.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from prorl.storage.files.layout import RunDir
from tests.service.running_gateway import group, running_gateway
from tests.storage.column_versions import rewrite, without_older
from tests.storage.store_pipeline import pipeline, store

ROOT = Path(__file__).parent / "golden_root"


async def live(where: Path) -> None:
    """A run of four groups: two are kept and wait for a trainer, two teach nothing."""
    async with running_gateway(where) as w, store(w), pipeline(w):
        await w.run(delivery="stream", filter="dapo")
        await w.submit(*(group(f"t{i}", n=2) for i in range(4)), last=True)
        await w.until(lambda view: view["state"] == "finished")


def main() -> None:
    """Live it, leave out what an older prorl would not have known (`OLDER`), and copy the rest."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder)))
        root = Path(folder) / "root"
        shutil.rmtree(ROOT, ignore_errors=True)
        shutil.copytree(root / "r", ROOT / "r")
        with closing(sqlite3.connect(root / "control.db")) as log:
            (ROOT / "control.sql").write_text("\n".join(log.iterdump()) + "\n")
    rewrite(RunDir(ROOT / "r"), without_older)


if __name__ == "__main__":
    main()
