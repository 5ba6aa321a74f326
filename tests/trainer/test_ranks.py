"""Four real ranks over gloo, one of them killed in the middle and all resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prorl.analysis.synthetic import SyntheticShape, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import connect
from tests.client.replay_process import served
from tests.integration.test_outside import three_ports

torch = pytest.importorskip("torch", reason="ranks train with torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

WORLD, STEPS, STEP = 4, 12, 16
SHAPE = SyntheticShape(n=8, num_tokens=400, rewritten_share=0.2)
SCRIPT = Path(__file__).with_name("rank_script.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(url: str, cursor: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    common = {
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(three_ports()),
    }
    argv = [sys.executable, str(SCRIPT), url, cursor, str(folder)]
    return [
        subprocess.Popen(argv, env={**os.environ, **common, "RANK": str(rank)})
        for rank in range(WORLD)
    ]


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def test_four_ranks_share_each_step_and_resume_after_the_kill_of_a_rank(tmp_path: Path) -> None:
    groups = [group(i, SHAPE) for i in range(STEPS * STEP)]
    with served(write_run(tmp_path / "demo", groups, "demo")) as url:
        with connect(url) as client:
            whole = list(client.stream("demo", cursor="demo@0", groups_per_batch=STEP))
        full = start(url, "demo@0", tmp_path / "full")
        assert [rank.wait(300) for rank in full] == [0] * WORLD

        killed = start(url, "demo@0", tmp_path / "killed")
        while len(lines(tmp_path / "killed", 2)) < 3:
            assert killed[2].poll() is None
            time.sleep(0.01)
        killed[2].kill()
        for process in killed:
            process.wait(120)  # gloo tells them that their neighbour has gone
        last = min(len(lines(tmp_path / "killed", rank)) for rank in range(WORLD))
        saved = whole[last - 1].cursor
        resumed = start(url, saved, tmp_path / "resumed")
        assert [rank.wait(300) for rank in resumed] == [0] * WORLD

    for number, batch in enumerate(whole):
        of_rank = [lines(tmp_path / "full", rank)[number] for rank in range(WORLD)]
        read = [i for line in of_rank for i in line["ids"]]
        assert sorted(read) == sorted(batch.arrow.column("sequence_id").to_pylist())
        assert len({line["passes"] for line in of_rank}) == 1
        tokens = [line["tokens"] for line in of_rank]
        assert max(tokens) <= 1.05 * np.mean(tokens)
        assert batch.advantages is not None
        per_token = np.repeat(batch.advantages, np.diff(batch.cu_seqlens)) * batch.loss_mask()
        expected = per_token.sum(dtype=np.float64) / batch.loss_mask().sum()
        for line in of_rank:
            assert line["gradient"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for rank in range(WORLD):
        again = [line["ids"] for line in lines(tmp_path / "resumed", rank)]
        assert again == [line["ids"] for line in lines(tmp_path / "full", rank)[last:]]
