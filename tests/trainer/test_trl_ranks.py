"""TRL in two processes over gloo, as `accelerate launch` starts it: each trains rows of its own, in
the order of the feed, and both hear of the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prorl.analysis.synthetic import group
from prorl.analysis.synthetic_runs import write_run
from prorl.client.records import Feed
from prorl.trainer.adapters.trl import row_of
from tests.client.replay_process import served
from tests.integration.test_outside import three_ports
from tests.trainer.tiny_model import SHAPE, save_model

torch = pytest.importorskip("torch", reason="ranks train with torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

WORLD, ROWS = 2, 3
HERE = Path(__file__)

pytestmark = pytest.mark.timeout(600)


def in_ranks(argv: list[str]) -> list[int]:
    """Run in WORLD processes that find each other; their exit codes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(three_ports())}
    common = {**os.environ, **address, "WORLD_SIZE": str(WORLD), "TRL_EXPERIMENTAL_SILENCE": "1"}
    common["PYTHONPATH"] = f"{HERE.parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    processes = [
        subprocess.Popen(
            [sys.executable, *argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(WORLD)
    ]
    return [process.wait(300) for process in processes]


DEAL = """
import os, sys
from types import SimpleNamespace
import torch.distributed as dist
from prorl.errors import UserError
from prorl.trainer.adapters.trl import deal

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
place = SimpleNamespace(num_processes=dist.get_world_size(), process_index=rank)
rows = iter(range(10))

def take(count):
    taken = [row for _, row in zip(range(count), rows)]
    if len(taken) < count:
        raise UserError("the run has ended", "more groups")
    return taken

assert deal(place, take, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
assert (next(rows) == 8) == (rank == 0), "the first alone takes"
try:
    deal(place, take, 4)
except UserError as error:
    assert str(error) == "the run has ended; expected more groups"
    dist.barrier()
    dist.destroy_process_group()  # a thread of gloo that still runs would abort the process
    sys.exit(7)
"""


def test_the_first_process_deals_rows_and_errors_to_all() -> None:
    assert in_ranks(["-c", DEAL]) == [7, 7]


def test_two_processes_of_trl_train_each_row_once(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    groups = 4
    run = write_run(tmp_path / "demo", [group(i, SHAPE) for i in range(groups)], "demo")
    model = save_model(tmp_path / "model")
    script = str(HERE.with_name("trl_ranks_script.py"))
    with served(run) as location:
        argv = [script, location, str(model), str(tmp_path), "99", str(ROWS)]  # the run ends first
        assert in_ranks(argv) == [0, 0]
        feed = Feed(location, "demo", consumer="same")
        expected = [row for records in feed for row in map(row_of, records)]
    ranks: list[dict[str, Any]] = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(WORLD)
    ]
    steps = -(-len(expected) // (WORLD * ROWS))
    for report in ranks:
        assert not report["ended"], report
        assert len(report["steps"]) == steps
    assert len(expected) % (WORLD * ROWS), "the last step is not full"
    trained = sorted(ids for report in ranks for rows in report["steps"] for ids in rows)
    assert trained == sorted(row["completion_ids"] for row in expected if any(row["env_mask"]))
    state = json.loads((tmp_path / "out" / f"checkpoint-{steps}" / "prorl.json").read_bytes())
    assert state["cursor"], "the process without a feed does not write its place over ours"
