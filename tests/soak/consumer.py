"""`python -m tests.soak.consumer ROOT FOLDER`: a trainer that may be killed at any moment.

Its checkpoint is FOLDER/trained.jsonl: a line holds what was trained and the cursor behind it, so
both are there or neither. FOLDER/read.jsonl has everything that ever came, also what was lost with
the process before it was trained.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import prorl
from prorl.client.packed import PackedBatch
from prorl.errors import ProrlError
from prorl.linux.calls import die_with_parent
from prorl.schema import SEQUENCES
from prorl.schema.rows import row_hashes
from tests.soak.history import lines, write


def _line(batch: PackedBatch) -> dict[str, object]:
    return {
        "group": int(batch.group_ids[0]),
        "seq": int(batch.delivery_seq[0]),
        "hashes": row_hashes(batch.arrow.select(SEQUENCES.names)),
        "cursor": batch.cursor,
    }


def _cursor(checkpoint: Path) -> str:
    """Returns the cursor of the last whole line; half of one is dropped."""
    text = checkpoint.read_bytes() if checkpoint.exists() else b""
    checkpoint.write_bytes(text[: text.rfind(b"\n") + 1])
    rows = lines(checkpoint)
    return str(rows[-1]["cursor"]) if rows else "r@0"


def main() -> None:
    """Read to the run's end, whatever happens on the way."""
    die_with_parent(signal.SIGKILL)
    root, folder = Path(sys.argv[1]), Path(sys.argv[2])
    checkpoint = folder / "trained.jsonl"
    cursor = _cursor(checkpoint)
    while True:
        try:
            with prorl.connect(root) as client:
                for batch in client.stream("r", cursor=cursor, groups_per_batch=1):
                    line = _line(batch)
                    write(folder / "read.jsonl", what="read", **line)
                    write(checkpoint, what="trained", **line)
                    cursor = batch.cursor
                    client.commit(batch)
            os._exit(0)
        except (ProrlError, OSError) as error:
            print(f"{time.monotonic():.1f} {error!r}", file=sys.stderr, flush=True)
            time.sleep(0.3)


if __name__ == "__main__":
    main()
