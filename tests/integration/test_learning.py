"""The learning loop on the real service: a served checkpoint, evaluation, a demo from before to
after, interrupted and resumed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import orjson
import pytest

from prorl.cli.demo.recipe import newest_checkpoint, number_of
from prorl.cli.job import JobPlan
from prorl.cli.passk import evaluation
from prorl.cli.run_job import run_plan
from prorl.linux.procfs import descendants
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.types import Json
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.run_checks import check_complete, check_no_leftovers, rows

RECIPE = {"steps": 3, "groups_per_step": 3, "n": 4, "heldout": 4, "greedy": 2, "minutes": 20}


@SLOW_IN_A_SINGLE_PROCESS
async def test_a_checkpoint_is_evaluated_with_the_tasks_of_two_sets_and_greedily_too(
    tmp_path: Path, workers: int
) -> None:
    before = set(descendants(os.getpid()))
    flags = {"tasks": "arith:heldout?n=4,shop:heldout?n=3", "policy": "toy", "n": 2, "greedy": True}
    plan = JobPlan.make(None, flags, [f"service.workers={workers}"], root=tmp_path / "root")
    assert await run_plan(plan, json=True) == 0
    check_no_leftovers(plan.service.root, before)
    stored = check_complete(plan.directory, 3 * 7)
    by_source = {(scores.data_source, scores.mode): scores for scores in evaluation(plan.directory)}
    assert {key: (scores.tasks, scores.n) for key, scores in by_source.items()} == {
        ("arith", "sampled"): (4, 2),
        ("arith", "greedy"): (4, 1),
        ("shop", "sampled"): (3, 2),
        ("shop", "greedy"): (3, 1),
    }
    temperatures = rows(stored, "select distinct temperature from turns order by 1")
    assert [row["temperature"] for row in temperatures] == [0.0, 1.0]
    assert rows(stored, "select distinct max_version as v from rollouts") == [{"v": 0}]


def demo(root: Path, *more: str) -> subprocess.Popen[bytes]:
    """The real program."""
    argv = [sys.executable, "-m", "prorl.cli", "demo", "--root", str(root), "--json", *more]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def recipe(tmp_path: Path, **more: Json) -> str:
    """A recipe that takes seconds."""
    path = tmp_path / "recipe.json"
    path.write_bytes(orjson.dumps({**RECIPE, **more}))
    return str(path)


def check_trained(root: Path, summary: Json, steps: int) -> None:
    """Every promise that does not need a policy which learns."""
    stored = StoredRun(root / summary["run"])
    assert verify(root / summary["run"]) == []
    if summary["recipe"]["trainer"] == "own":
        trained_steps = [row["step"] for row in summary["steps"]]
        assert trained_steps == list(range(1, steps + 1)), "each step once"
        assert summary["times"]["logprob_diff_max"] < 1e-4
    shares = {row["set"]: row["exact_share"] for row in summary["sets"]}
    assert shares == {"arith": 1.0, "shop": 1.0, "repair": 1.0}
    delivered = rows(stored, "select delivery_seq as seq, group_id from deliveries order by 1")
    assert [row["seq"] for row in delivered] == list(range(steps * RECIPE["groups_per_step"]))
    assert len({row["group_id"] for row in delivered}) == len(delivered)
    spans = rows(stored, "select span_kind as kinds, span_version as versions from sequences")
    for row in spans:
        versions = [
            version for kind, version in zip(row["kinds"], row["versions"], strict=True) if kind
        ]
        assert all(first <= then for first, then in pairwise(versions)), (
            "a rollout never goes back to older weights"
        )
        assert 0 <= versions[0] <= versions[-1] <= steps
    after = StoredRun(root / f"{summary['run']}-after")
    assert rows(after, "select distinct min_version as v from rollouts") == [{"v": 1}], (
        "evaluated with what was published for it"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", ["own", "trl"])
async def test_an_interrupted_demo_goes_on_and_a_killed_model_server_gets_the_newest_weights_again(
    tmp_path: Path, trainer: str
) -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    if trainer == "trl":
        pytest.importorskip("trl", reason="TRL is not installed (make test-adapters)")
    root = tmp_path / "root"
    running = demo(root, "--config", recipe(tmp_path, steps=5, trainer=trainer))
    await reached(running, root, 1)
    running.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(running.wait, 60) == 130, running.communicate()
    check_no_leftovers(root, set())
    running.communicate()
    running = demo(root, "--resume")
    await reached(running, root, 3)
    (server,) = [
        pid
        for pid in descendants(running.pid)
        if b"prorl.backends.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(server, signal.SIGKILL)
    out, err = await asyncio.to_thread(running.communicate, timeout=400)
    assert running.returncode == 0, err.decode()
    check_trained(root, orjson.loads(out), 5)
    check_no_leftovers(root, set())


async def reached(running: subprocess.Popen[bytes], root: Path, step: int) -> None:
    """Wait until the trainer has a checkpoint of this step."""
    async with asyncio.timeout(300):
        while not (path := newest_checkpoint(root, "demo-1")) or step > number_of(path):
            assert running.poll() is None, running.communicate()[1].decode()
            await asyncio.sleep(0.1)
