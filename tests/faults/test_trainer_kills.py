"""A trainer and its model servers killed at random in the middle of a live run, also between a
publication and its checkpoint: what is trained is trained once, and each label is true.

The training ends with the bits that an undisturbed one has over the stored run. 10 steps;
PRORL_TRAINER_STEPS=50 is the length that `make test-kills` gives it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from prorl.backends.embedded import TOY
from prorl.client import connect
from prorl.deploy.running import client_of, service, signals
from prorl.storage.read.catalog import StoredRun
from tests.client.replay_process import served
from tests.faults.test_weights import BOUND, embedded, worst_gap
from tests.integration.run_checks import rows
from tests.integration.services import Listening, settings
from tests.trainer import training_digest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
pytest.importorskip("transformers", reason="the extra `torch` is not installed")

from prorl.trainer.checkpoint import newest, read_progress
from prorl.trainer.config import TrainerConfig
from prorl.trainer.lineage import weights_digest
from prorl.trainer.loop import train

STEPS = int(os.environ.get("PRORL_TRAINER_STEPS", "10"))
GROUPS, N = 2, 4
CHECKPOINT_STEPS = 3

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300 + 60 * STEPS)]

ENV = """
from prorl.envs.base import BaseEnv
from prorl.rubric import Rubric, reward


@reward("odd")
def odd(task, artifact):
    return float(sum(artifact) % 2)


class Odd(BaseEnv):
    name = "odd"
    rubric = Rubric((odd, 1.0))
"""


async def lines(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[str, dict[str, float]]]:
    """Yields the lines of a trainer: a word and its values."""
    assert process.stdout is not None
    async for line in process.stdout:
        word, _, values = line.decode().partition(" ")
        yield word, json.loads(values)


async def train_under_fire(config: TrainerConfig, file: Path, pool: list[Listening]) -> int:
    """Train to the end over any number of lives, each of 1 to 5 steps. Returns how many lives
    ended behind a publication that no checkpoint had yet.
    """
    chance = random.Random(os.environ.get("PRORL_TEST_SEED", "7"))
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "prorl.trainer", "--config", str(file)]
    unsaved = 0
    while True:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        num_steps, most_steps = 0, chance.randint(1, 5)
        async for word, values in lines(process):
            num_steps += word == "step"
            if word != "step" or num_steps < most_steps or values["step"] > STEPS - 2:
                continue
            unsaved += values["step"] % CHECKPOINT_STEPS != 0
            await asyncio.sleep(chance.choice([0.0, chance.uniform(0, 0.5)]))
            process.kill()
            server = chance.choice(pool)
            await server.kill()
            await server.start()
            break
        code = await process.wait()
        if code >= 0:
            assert code == 0
            return unsaved


async def test_what_is_trained_is_trained_once_and_each_label_is_true(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root, env = tmp_path / "root", tmp_path / "odd.py"
    env.write_text(ENV)
    tasks = [
        {"task_id": f"t{i}", "env": f"{env}:Odd", "prompt": f"Say {i}.", "data": {}}
        for i in range(7)
    ]
    (tmp_path / "tasks.jsonl").write_bytes(b"\n".join(map(orjson.dumps, tasks)))
    config = TrainerConfig(
        service=str(root),
        run="r",
        model=TOY,
        output=tmp_path / "out",
        steps=STEPS,
        groups_per_step=GROUPS,
        n=N,
        tasks=tmp_path / "tasks.jsonl",
        checkpoint_steps=CHECKPOINT_STEPS,
        keep_checkpoints=10 * STEPS,
        learning_rate=3e-3,
        wait_s=1.0,
    )
    async with embedded(2) as pool:
        urls, more = [server.url for server in pool], {"tokenizer": str(TOY), "load_code": True}
        async with (
            signals() as stop,
            service(settings(root, sandbox_kind, *urls, **more), stop) as running,
        ):
            client = client_of(running)
            await asyncio.to_thread(
                client.create_run,
                run_id="r",
                filter="none",
                delivery="stream",
                epochs=1000,
                groups_per_step=GROUPS,
                max_uncommitted_groups=8,
                sampling={"max_tokens": 24},
            )
            unsaved = await train_under_fire(config, tmp_path / "trainer.json", pool)
            await asyncio.to_thread(client.close)
    stored = StoredRun(root / "r")
    check_trained_once(stored, unsaved)
    final = newest(config.output / "checkpoints")
    assert final is not None
    assert read_progress(final).cursor == f"r@{STEPS * GROUPS}"
    again = await asyncio.to_thread(undisturbed, config, root / "r", tmp_path / "again")
    assert weights_digest(final) == weights_digest(again), "trained on other tokens, or twice"
    paths = {row["version"]: row["path"] for row in rows(stored, "select * from versions")}
    models = {version: Path(path or TOY) for version, path in paths.items()}
    worst, trained, unknown = await asyncio.to_thread(worst_gap, stored, models)
    wrong, *_ = await asyncio.to_thread(worst_gap, stored, models, 1)
    (labels,) = rows(stored, "select count(distinct max_version) as n from rollouts")
    print(
        f"\n{STEPS} steps, {len(paths)} versions of which {labels['n']} sampled, {unsaved} lives"
        f" ended behind a publication without a checkpoint; {trained} spans, {unknown} unknown,"
        f" worst {worst:.1e} (with each label one too low {wrong:.1e})"
    )
    assert worst < BOUND
    assert wrong > BOUND, "it would show"


def check_trained_once(stored: StoredRun, unsaved: int) -> None:
    """The rows of the trainer's steps are the delivered groups in order, each sequence once, with
    the hash of the tokens that are stored of it.
    """
    trained = rows(stored, "select * from trained order by step, delivery_seq, rollout_id")
    assert {row["step"] for row in trained} == set(range(1, STEPS + 1))
    by_step = {row["delivery_seq"]: row["step"] for row in trained}
    assert by_step == {seq: 1 + seq // GROUPS for seq in range(STEPS * GROUPS)}
    assert len(trained) == len({row["rollout_id"] for row in trained}) == STEPS * GROUPS * N
    groups = {row["group_id"] for row in trained}
    mine = training_digest.stored(Path(stored.directory.root), groups)
    assert sum(mine.values()) == sum(row["trained_tokens"] > 0 for row in trained)
    versions = [row["version"] for row in trained]
    assert versions == sorted(versions)
    assert unsaved > 0, "no life ended behind a publication that no checkpoint had"
    assert max(versions) > STEPS, "weights of lost steps keep their ids"


def undisturbed(config: TrainerConfig, run_dir: Path, output: Path) -> Path:
    """A training over the stored run; its last checkpoint."""
    with served(run_dir) as location, connect(location) as client:
        changes = {"service": location, "output": output, "publish": False, "tasks": None}
        train(config.model_copy(update=changes), client)
    final = newest(output / "checkpoints")
    assert final is not None
    return final
