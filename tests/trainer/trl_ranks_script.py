"""One process of a TRL training over a feed, for `tests/trainer/test_trl_ranks.py`.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python trl_ranks_script.py \\
        LOCATION MODEL FOLDER STEPS ROWS

Writes the ids of the rows that its loss trains into FOLDER/rank-N.json, and what ended it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from prorl.client.records import Feed
from prorl.errors import UserError
from tests.trainer.trl_script import make


def main(location: str, model: str, folder: str, steps: str, rows: str) -> None:
    seen: list[dict[str, Any]] = []
    feed = Feed(location, "demo", consumer="ranks")
    trainer = make(feed, Path(model), Path(folder, "out"), int(steps), int(rows), seen)
    ended = ""
    try:
        trainer.train()
    except UserError as error:
        ended = str(error)
    trained_steps = [
        [
            ids[mask.bool()].tolist()
            for ids, mask, ours in zip(
                batch["completion_ids"], batch["completion_mask"], batch["tool_mask"], strict=True
            )
            if (mask * ours).any()  # the last batch is filled up with copies that train nothing
        ]
        for batch in seen
    ]
    report = json.dumps({"steps": trained_steps, "ended": ended})
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # pyarrow.flight may wait for ever for its threads when the interpreter ends
