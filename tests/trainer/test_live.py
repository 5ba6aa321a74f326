"""The trainer against a whole live service: it submits, streams, checkpoints, commits and
publishes, and goes on after a stop.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from prorl.client import connect
from prorl.errors import ConfigError
from prorl.storage.read.catalog import query
from prorl.trainer.checkpoint import TrainingState, newest, read_progress
from prorl.trainer.config import TrainerConfig
from prorl.trainer.loop import train
from tests.trainer.tiny_model import save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    command = [
        sys.executable,
        "-m",
        "prorl.cli",
        "serve",
        "--root",
        str(tmp_path / "root"),
        "--policy",
        "flaky",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving"), "the service did not start"
        yield tmp_path / "root"
        process.send_signal(signal.SIGINT)
        process.stdout.read()


@pytest.mark.parametrize(
    ("max_uncommitted_groups", "checkpoint_steps", "max_staleness"),
    [
        pytest.param(2, 0, -1, id="each step sampled after the commit before"),
        pytest.param(4, 0, -1, id="one step ahead"),
        pytest.param(4, 2, 0, id="on policy, a commit every second step"),
    ],
)
def test_live_training_consumes_each_kept_group_once(
    root: Path,
    tmp_path: Path,
    max_uncommitted_groups: int,
    checkpoint_steps: int,
    max_staleness: int,
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {
            "task_id": f"t{i}",
            "env": "math",
            "prompt": f"What is {i} + 1?",
            "data": {"answer": str(i + 1)},
        }
        for i in range(7)
    ]
    tasks.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))

    def go(steps: int, checkpoint_steps: int = checkpoint_steps) -> TrainingState:
        config = TrainerConfig(
            service=str(root),
            run="live",
            model=save_model(tmp_path / "model", vocab_size=512, max_tokens=4096),
            output=tmp_path / "out",
            steps=steps,
            groups_per_step=2,
            n=4,
            tasks=tasks,
            wait_s=1.0,
            checkpoint_steps=checkpoint_steps,
        )
        with connect(root) as client:
            client.create_run(
                run_id="live",
                filter="dapo",
                delivery="stream",
                epochs=1000,
                groups_per_step=2,
                max_uncommitted_groups=max_uncommitted_groups,
                max_staleness=max_staleness,
            )
            return train(config, client)

    with pytest.raises(ConfigError, match="groups without a commit"):
        go(2, checkpoint_steps=3)
    go(2)
    progress = go(4)
    assert progress == TrainingState(step=4, version=4, cursor="live@8")
    path = newest(tmp_path / "out" / "checkpoints")
    assert path is not None
    assert read_progress(path) == progress
    with connect(root) as client:
        run = client.run("live")
        assert (run["version"], run["cursors"]) == (4, {"primary": 8})
        assert run["groups"]["committed"] == run["delivered"] == 8, (
            "nothing is handed out before its step"
        )
        assert (run["tasks"], run["fed"] >= 8) == (7, True), "the run fed itself"
        stream = client.stream("live", "check", "live@0", groups_per_batch=2)
        again = [next(stream) for _ in range(4)]
    delivered = [np.unique(batch.delivery_seq).tolist() for batch in again]
    assert delivered == [[0, 1], [2, 3], [4, 5], [6, 7]]
    names = ("loss", "entropy", "grad_norm", "kl", "idle_share")
    logged = query(root / "live", f"select step, version, name from metrics where name in {names}")
    assert sorted(tuple(row.values()) for row in logged.to_pylist()) == sorted(
        (step, step, name) for step in range(1, 5) for name in names
    )


def test_an_evaluation_is_a_run_of_its_own_that_is_waited_for(root: Path) -> None:
    tasks = [
        {"task_id": f"t{i}", "env": "math", "prompt": f"{i} + 1?", "data": {"answer": str(i + 1)}}
        for i in range(12)
    ]
    with connect(root) as client:
        status = client.evaluate("eval-0", tasks, n=4)
        assert status["state"] == "finished"
        assert status["counts"]["completed"] == 48
        assert 0 < status["mean_reward"] < 1
        assert client.evaluate("eval-0", tasks, n=4) == status, "nothing is asked twice"
