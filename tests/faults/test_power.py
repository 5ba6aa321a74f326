"""A power cut at any moment: what was promised is there, and the service goes on from it.

A real service runs under a recorder; the disk is made again as it may look after a cut behind each
fsync and each answer, keeping nothing, names only, random blocks, or all of what was not synced.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import prorl
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, service, signals
from prorl.errors import ProrlError
from prorl.types import Task
from tests.faults.power.disk import Disk, Kept
from tests.faults.power.promises import broken
from tests.faults.power.recorder import Change, Mark, Recorder, available
from tests.integration.run_checks import check_complete

N, WAVES, WAVE = 2, 4, 5
SEED = int(os.environ.get("PRORL_POWER_SEED", "1"))
CUTS = int(os.environ.get("PRORL_POWER_CUTS", "150"))
RESUMED = 3
RUN = {
    "run_id": "r",
    "delivery": "stream",
    "max_uncommitted_groups": 64,
    "limits": {"max_attempts": 40, "max_worker_losses": 40},
}
"""Every group is kept, on however slow a machine: the client waits for each."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def _task(number: int) -> Task:
    return Task(task_id=f"t{number}", env="noop", prompt=f"say something about {number}")


def _wave(client: prorl.Client, wave: int) -> list[str]:
    tasks = [_task(wave * WAVE + i) for i in range(WAVE)]
    client.submit("r", tasks, N, key=f"w{wave}", last=wave == WAVES - 1)
    return [f"w{wave}/{i}" for i in range(WAVE)]


def _work(root: Path, recorder: Recorder) -> None:
    """A small run with a consumer; each answer is a mark."""
    client = _connect(root, recorder)
    client.create_run(**RUN)
    stream = client.stream("r", groups_per_batch=1)
    seq = 0
    for wave in range(WAVES):
        for key in _wave(client, wave):
            recorder.mark("accepted", key)
        for _ in range(WAVE):
            batch = next(stream)
            recorder.mark("handed out", [seq, int(batch.group_ids[0])])
            seq += 1
        client.commit(batch)
        recorder.mark("cursor", seq)
    assert next(stream, None) is None
    while client.run("r")["state"] != "finished":
        time.sleep(0.05)
    recorder.mark("finished", "r")
    client.close()


def _connect(root: Path, recorder: Recorder) -> prorl.Client:
    while True:
        assert recorder.process.poll() is None, "the service ended"
        try:
            client = prorl.connect(root)
            client.status()
            return client
        except (ProrlError, OSError):
            time.sleep(0.1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Change | Mark]:
    """Returns the changes that a service made to its root, from the first file on."""
    if problem := available():
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("disk")
    root = folder / "data" / "root"
    argv = [sys.executable, "-P", "-m", "prorl.cli", "serve", "--root", str(root)]
    argv += ["--policy", "scripted:random"]
    env = {**os.environ, "PYTHONPATH": str(Path(prorl.__file__).absolute().parent.parent)}
    with Recorder(folder, argv, env=env) as recorder:
        _work(root, recorder)
        recorder.process.terminate()
        recorder.process.wait(60)
    assert recorder.problem is None, recorder.problem
    return recorder.steps


def _moments(steps: list[Change | Mark], chance: random.Random) -> list[int]:
    """Indices behind which the power fails: around what is synced and what was promised."""
    marked = [i for i, step in enumerate(steps) if isinstance(step, Mark)]
    synced = [i for i, step in enumerate(steps) if isinstance(step, Change) and step.syncs]
    near = {i + by for i in (*synced, *marked) for by in (-1, 0, 1) if 0 <= i + by < len(steps)}
    others = sorted(near - set(marked))
    return sorted({*marked, *chance.sample(others, min(CUTS, len(others)))})


def test_what_was_promised_survives_a_power_cut(
    recorded: list[Change | Mark], tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    moments = set(_moments(recorded, chance))
    disk, marks, problem_counts = Disk(), list[Mark](), Counter[str]()
    for index, step in enumerate(recorded):
        if isinstance(step, Mark):
            marks.append(step)
        else:
            step.do(disk)
        for kept in Kept if index in moments else ():
            target = tmp_path / f"{index}-{kept.name}"
            disk.after_a_cut(target, kept, chance)
            for problem in broken(target / "data" / "root", marks):
                problem_counts[f"{kept.name}: {problem}"] += 1
            _remove(target)
    assert not problem_counts, "\n".join(
        f"{n:4} x {problem}" for problem, n in problem_counts.most_common(20)
    )
    assert len(marks) == WAVES * (2 * WAVE + 1) + 1


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("number", range(RESUMED))
async def test_the_service_goes_on_after_a_power_cut(
    recorded: list[Change | Mark], tmp_path: Path, number: int
) -> None:
    chance = random.Random(f"{SEED}/{number}")
    first = next(i for i, step in enumerate(recorded) if isinstance(step, Mark))
    moment = chance.choice([i for i in _moments(recorded, chance) if i > first])
    kept = chance.choice(list(Kept))
    print(f"cut behind step {moment} of {len(recorded)}, kept {kept.name}", file=sys.stderr)
    disk, marks = Disk(), list[Mark]()
    for step in recorded[: moment + 1]:
        if isinstance(step, Mark):
            marks.append(step)
        else:
            step.do(disk)
    disk.after_a_cut(tmp_path / "disk", kept, chance)
    root = tmp_path / "disk" / "data" / "root"
    config = ServiceConfig.model_validate({"root": root, "backends": ("scripted:random",)})
    async with signals() as stop, service(config, stop) as running:
        client = client_of(running)
        order = await asyncio.wait_for(asyncio.to_thread(_finish, client), 240)
        client.close()
    check_complete(root / "r", WAVES * WAVE * N)
    handed = {mark.value[0]: mark.value[1] for mark in marks if mark.what == "handed out"}
    again = {seq: order[seq] for seq in handed}
    assert json.dumps(again, sort_keys=True) == json.dumps(handed, sort_keys=True)


def _finish(client: prorl.Client) -> list[int]:
    """Acts as a client that saw none of its answers: it does everything again. The delivery
    order.
    """
    client.create_run(**RUN)
    for wave in range(WAVES):
        _wave(client, wave)
    order = []
    for batch in client.stream("r", cursor="r@0", groups_per_batch=1):
        order.append(int(batch.group_ids[0]))
        client.commit(batch)
    while client.run("r")["state"] != "finished":
        time.sleep(0.05)
    return order
