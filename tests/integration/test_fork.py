"""Forks of a stored run: equal ids until where they begin, the same verdict when undisturbed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prorl.analysis.fork import fork_tasks
from prorl.cli.commands.replay import replay
from prorl.cli.progress import follow
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread, service, signals
from prorl.errors import TaskError, UserError
from prorl.journal.fork import FIELD, plain_task, read_fork
from prorl.storage.read.catalog import StoredRun
from prorl.tasks import load_tasks
from prorl.types import Task
from tests.integration.checks import check_complete, rows
from tests.integration.counting import said

TURNS = 4
ENV = str(Path(__file__).with_name("counting.py")) + ":Counting"


async def _run(
    root: Path, kind: str, tasks: list[Task], policy: str = "scripted:oracle", n: int = 1
) -> None:
    values = {"root": root, "backends": (policy,), "sandbox": {"kind": kind}, "load_code": True}
    config = ServiceConfig.model_validate({**values, "topology": "inline"})
    async with signals() as stop, service(config, stop) as running:
        client = client_of(running)
        await in_thread(lambda: client.create_run(run_id="r"))
        await in_thread(lambda: client.submit("r", tasks, n, key="k", last=True))
        await follow(client, running, "r", 0, quiet=True)


def _ids(stored: StoredRun) -> dict[str, np.ndarray]:
    query = "select task_id, token_ids from sequences join rollouts using (rollout_id)"
    return {row["task_id"]: np.array(row["token_ids"]) for row in rows(stored, query)}


@pytest.mark.timeout(300)
async def test_a_fork_goes_on_from_the_stored_turn(tmp_path: Path, sandbox_kind: str) -> None:
    data = {"turns": TURNS, "pause": 0}
    wrong = {**data, "expected": TURNS + 1}
    tasks = [
        Task(task_id=f"c/{i}", env=ENV, prompt=f"Count {i}.", data=wrong if i == 1 else data)
        for i in range(3)
    ]
    await _run(tmp_path / "one", sandbox_kind, tasks)
    first = check_complete(tmp_path / "one" / "r", 3)
    whole = _ids(first)
    path = tmp_path / "forks.jsonl"
    assert replay(str(tmp_path / "one" / "r"), fork=path, turn=2) == 0
    forks = list(load_tasks(str(path)))

    await _run(tmp_path / "same", sandbox_kind, forks)
    same = check_complete(tmp_path / "same" / "r", 3)
    assert {name: ids.tolist() for name, ids in _ids(same).items()} == {
        name: ids.tolist() for name, ids in whole.items()
    }
    verdicts = "select task_id, reward, num_turns from rollouts order by 1"
    assert rows(same, verdicts) == rows(first, verdicts)
    assert [row["reward"] for row in rows(same, verdicts)] == [1.0, 0.0, 1.0]
    assert rows(same, "select distinct diverged from rollouts") == [{"diverged": 0}]
    assert {row["forked_from"] for row in rows(same, "select forked_from from rollouts")} == {
        f"r/{row['rollout_id']}/2" for row in rows(first, "select rollout_id from rollouts")
    }
    for row in rows(same, "select turn, content from messages where role = 'tool'"):
        assert row["content"] == said(row["turn"]), "the workspace was not made again"

    await _run(tmp_path / "other", sandbox_kind, forks, "scripted:noop")
    other = check_complete(tmp_path / "other" / "r", 3)
    ours, bounds = _ids(other), "select task_id, span_end, span_turn"
    for row in rows(first, f"{bounds} from sequences join rollouts using (rollout_id)"):
        kept = np.array(row["span_end"])[np.array(row["span_turn"]) < 2].max()
        np.testing.assert_array_equal(ours[row["task_id"]][:kept], whole[row["task_id"]][:kept])
    assert rows(other, "select distinct num_turns, reward from rollouts") == [
        {"num_turns": 3, "reward": 0.0}
    ]


def test_a_past_that_makes_no_sense_is_a_bad_task() -> None:
    task = Task(task_id="t", env="noop", prompt="", data={FIELD: {"from": "r/1/1", "said": ["x"]}})
    with pytest.raises(TaskError, match="its fork cannot be read"):
        read_fork(task)
    assert plain_task(task).data == {}
    assert read_fork(plain_task(task)) is None


async def test_forks_of_siblings_are_tasks_of_their_own(tmp_path: Path, sandbox_kind: str) -> None:
    task = Task(task_id="c", env=ENV, prompt="Count.", data={"turns": 1, "pause": 0})
    await _run(tmp_path, sandbox_kind, [task], n=2)
    path = tmp_path / "forks.jsonl"
    assert replay(str(tmp_path / "r"), fork=path, turn=1) == 0
    assert [fork.task_id for fork in load_tasks(str(path))] == ["c~0", "c~1"]


def test_a_fork_begins_at_a_turn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="turn -1"):
        next(fork_tasks(StoredRun.__new__(StoredRun), -1))
