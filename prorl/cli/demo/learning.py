"""The three runs of `prorl demo` over one service.

They are a held-out evaluation, the training, and a held-out evaluation with what was learned:

    NAME-before --> NAME (trainer: stream -> update -> checkpoint -> commit -> publish) -->
    NAME-after

Each step says what is already there when it is done again: runs by name, groups by key, the trainer
by its checkpoint. So a demo that was interrupted anywhere goes on with the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prorl.cli.demo.recipe import (
    DEMO_FILE,
    Recipe,
    eval_run,
    heldout_tasks,
    sampling,
    train_run,
    train_tasks,
    trainer_config,
    training_dir,
)
from prorl.cli.progress import Progress, snapshot
from prorl.deploy.running import client_of, in_thread
from prorl.errors import UnavailableError
from prorl.supervisor.child import ChildSpec
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.supervisor.service import Supervisor

BEFORE, AFTER = "-before", "-after"
LOOK_S = 0.5
AFTER_SHARE = 0.12
"""Of the minutes, kept for the second evaluation."""


RECENT = 256
"""Rewards that the shown reward is the mean of, about."""


class Learning:
    def __init__(
        self, recipe: Recipe, name: str, model: Path, service: Supervisor, progress: Progress
    ) -> None:
        self._recipe, self._name, self._model = recipe, name, model
        self._service, self._progress = service, progress
        self._client: Client = client_of(service)
        self._root, self._tasks = service.config.root, train_tasks(recipe)

    async def run(self) -> None:
        recipe, name, folder = self._recipe, self._name, self._root / self._name
        stop_at_s = time.monotonic() + recipe.minutes * 60 * (1 - AFTER_SHARE)
        training: asyncio.Future[None] | None = None
        try:
            for config in (
                eval_run(recipe, name + BEFORE),
                train_run(recipe, name),
                eval_run(recipe, name + AFTER),
            ):
                values = config.model_dump(mode="json")
                await in_thread(partial(self._client.create_run, **values))
            # A resumed demo reads this file: the runs are there.
            (folder / DEMO_FILE).write_text(recipe.model_dump_json(indent=1))
            newest = self._newest_checkpoint()
            if newest is None or int(newest.name.removeprefix("step-")) < recipe.steps:
                file = folder / "trainer.json"
                written = trainer_config(recipe, self._root, name, self._model)
                file.write_text(json.dumps(written, indent=1))
                trainer = ChildSpec(
                    name="trainer",
                    module="prorl.trainer",
                    args=("--config", str(file), "--die-with-parent"),
                    stop_rank=-1,
                )
                # It loads torch and the model meanwhile, then waits for the first groups.
                training = asyncio.ensure_future(self._service.run(trainer))
            await self._evaluate(name + BEFORE)
            await self._train(training, stop_at_s)
            if newest := self._newest_checkpoint():
                await in_thread(self._client.publish, name + AFTER, 1, newest)
            await self._evaluate(name + AFTER)
        finally:
            if training is not None:
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)
            self._client.close()

    def _newest_checkpoint(self) -> Path | None:
        checkpoints = training_dir(self._root, self._name) / "checkpoints"
        return max(checkpoints.glob("step-*"), default=None)

    async def _evaluate(self, name: str) -> None:
        recipe, tasks = self._recipe, heldout_tasks(self._recipe)
        submit = partial(self._client.submit, name)
        if greedy := tasks[: 2 * recipe.greedy]:
            cold = sampling(recipe, temperature=0.0).params()
            how = {"key": "greedy", "sampling": cold, "extra": {"mode": "greedy"}}
            await in_thread(partial(submit, **how), greedy, 1)
        how = {"key": "sampled", "last": True, "extra": {"mode": "sampled"}}
        await in_thread(partial(submit, **how), tasks[: 2 * recipe.heldout], 1)
        await self._follow(name)

    async def _train(self, training: asyncio.Future[None] | None, stop_at_s: float) -> None:
        """Give the run its tasks, of which it feeds itself, and wait until the trainer has ended.

        It is asked to stop after the step in hand when the time is over.
        """
        submit = partial(self._client.submit, self._name, key="tasks", last=True)
        await in_thread(submit, self._tasks, self._recipe.n)
        following = asyncio.ensure_future(self._follow(self._name))
        try:
            if training is not None:
                left_s = max(1.0, stop_at_s - time.monotonic())
                done, _ = await asyncio.wait({training}, timeout=left_s)
                if not done:
                    self._service.children["trainer"].signal(signal.SIGTERM)
                await training
            await in_thread(self._client.cancel, self._name)
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, name: str) -> None:
        recipe, recent, training = self._recipe, RecentReward(), name == self._name
        total = recipe.steps * recipe.groups_per_step * recipe.n
        if not training:
            total = 2 * (recipe.heldout + recipe.greedy)
        while True:
            with contextlib.suppress(UnavailableError):
                answer = await in_thread(self._client.run, name)
                self._service.note_commits(int(answer["commits"]))
                now = snapshot(answer, total, time.monotonic())
                phase = "training" if training else f"held-out, {name.rpartition('-')[2]}"
                more = (phase, *(training_figures(recipe, answer) if training else ()))
                self._progress.update(replace(now, mean_reward=recent.add(answer)), more)
                if answer["state"] != "open":
                    return
            await asyncio.sleep(LOOK_S)


class RecentReward:
    """Mean of about the last `RECENT` rewards of a run."""

    def __init__(self) -> None:
        self._looks = deque[tuple[int, float]](maxlen=400)
        """How many rewards there were, and their sum."""

    def add(self, run: Json) -> float | None:
        """What it is by one more answer of the gateway; None without a reward."""
        count = run["num_rewards"]
        total = count * (run["reward_mean"] or 0.0)
        now = count, total
        for before, sum_before in reversed(self._looks):
            if count - before >= RECENT:
                total, count = total - sum_before, count - before
                break
        self._looks.append(now)
        return total / count if count else None


def training_figures(recipe: Recipe, run: Json) -> list[str]:
    """The trainer's step and DAPO's decisions, in words."""
    groups, version = run["groups"], run["version"]
    kept = groups["kept"] + groups["delivered"] + groups["acked"]
    dapo = f"DAPO kept {kept} dropped {groups['dropped'] + groups['stale']}"
    return [f"step {min(version, recipe.steps)}/{recipe.steps}", dapo, f"policy v{version}"]
