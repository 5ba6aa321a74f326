"""The three runs of `prorl demo` over one service.

They are a held-out evaluation, the training, and a held-out evaluation with what was learned:

    NAME-before --> NAME (trainer: stream -> update -> checkpoint -> commit -> publish) -->
    NAME-after

Each step says what is already there when it is done again: runs by name, groups by key, the trainer
by its checkpoint. So a demo that was interrupted anywhere goes on with the same code.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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
from prorl.deploy.running import client_of, in_thread
from prorl.errors import UnavailableError
from prorl.supervisor.child import ChildSpec
from prorl.types import GroupState, Json, RolloutState

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.supervisor.service import Supervisor

BEFORE, AFTER = "-before", "-after"
LOOK_S = 0.5
POOL_STEPS = 3
"""Steps' groups that wait to be started."""
AFTER_SHARE = 0.12
"""Of the minutes, kept for the second evaluation."""


class Watch(Protocol):
    """Is shown each answer of the gateway about the run in hand."""

    def __call__(self, phase: str, run: Json) -> None: ...


class Learning:
    """One demo on a running service."""

    def __init__(
        self, recipe: Recipe, name: str, model: Path, service: Supervisor, watch: Watch
    ) -> None:
        self._recipe, self._name, self._model, self._service, self._watch = (
            recipe,
            name,
            model,
            service,
            watch,
        )
        self._client: Client = client_of(service)
        self._root = service.config.root

    async def run(self) -> None:
        """All three runs, to their end."""
        stop_at_s = time.monotonic() + self._recipe.minutes * 60 * (1 - AFTER_SHARE)
        training: asyncio.Future[None] | None = None
        try:
            await self._make()
            if not trained(self._recipe, self._root, self._name):
                # It loads torch and the model meanwhile, then waits for the first groups.
                training = asyncio.ensure_future(self._service.run(self._trainer_spec()))
            await self._evaluate(self._name + BEFORE, None)
            await self._train(training, stop_at_s)
            await self._evaluate(
                self._name + AFTER, newest_checkpoint(training_dir(self._root, self._name))
            )
        finally:
            if training is not None:
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)
            self._client.close()

    async def _evaluate(self, name: str, weights: Path | None) -> None:
        if weights is not None:
            await in_thread(self._client.publish, name, 1, weights)
        tasks, cold = heldout_tasks(self._recipe), sampling(self._recipe, temperature=0.0).params()
        greedy = tasks[: 2 * self._recipe.greedy]
        if greedy:
            await in_thread(
                lambda: self._client.submit(
                    name, greedy, 1, key="greedy", sampling=cold, extra={"mode": "greedy"}
                )
            )
        sampled = tasks[: 2 * self._recipe.heldout]
        await in_thread(
            lambda: self._client.submit(
                name, sampled, 1, key="sampled", extra={"mode": "sampled"}, last=True
            )
        )
        await self._follow(name)

    async def _train(self, training: asyncio.Future[None] | None, stop_at_s: float) -> None:
        """Feed the trainer until it has ended.

        It is asked to stop after the step in hand when the time is over.
        """
        following = asyncio.ensure_future(
            self._follow(self._name, TaskPool(self._client, self._recipe, self._name))
        )
        try:
            if training is not None:
                done, _ = await asyncio.wait(
                    {training}, timeout=max(1.0, stop_at_s - time.monotonic())
                )
                if not done:
                    self._service.children["trainer"].signal(signal.SIGTERM)
                await training
            await in_thread(self._client.cancel, self._name)
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def _trainer_spec(self) -> Json:
        file = self._root / self._name / "trainer.json"
        file.write_text(
            json.dumps(trainer_config(self._recipe, self._root, self._name, self._model), indent=1)
        )
        return ChildSpec(
            name="trainer",
            module="prorl.trainer",
            args=("--config", str(file), "--die-with-parent"),
            stop_rank=-1,
        )

    async def _make(self) -> None:
        """The runs, then the file that a resumed demo reads."""
        configs = [
            eval_run(self._recipe, self._name + BEFORE),
            train_run(self._recipe, self._name),
            eval_run(self._recipe, self._name + AFTER),
        ]
        for config in configs:
            await in_thread(
                lambda config=config: self._client.create_run(**config.model_dump(mode="json"))
            )
        (self._root / self._name / DEMO_FILE).write_text(self._recipe.model_dump_json(indent=1))

    async def _follow(self, name: str, pool: TaskPool | None = None) -> None:
        while True:
            try:
                answer = await in_thread(self._client.run, name)
            except UnavailableError:
                await asyncio.sleep(LOOK_S)
                continue
            self._service.note_commits(int(answer["commits"]))
            self._watch(name.removeprefix(self._name).removeprefix("-") or "train", answer)
            if answer["state"] != "open":
                return
            if pool is not None:
                await in_thread(pool.fill, answer)
            await asyncio.sleep(LOOK_S)


class TaskPool:
    """Training tasks that wait in the gateway, which starts one for each group that DAPO drops.

    Task i has the key `tasks/i`.
    """

    def __init__(self, client: Client, recipe: Recipe, name: str) -> None:
        self._client, self._recipe, self._name = client, recipe, name
        self._tasks = train_tasks(recipe)

    def fill(self, run: Json) -> None:
        """Submit what is missing, given the run as it is; nothing once it has its groups."""
        groups, step = run["groups"], self._recipe.groups_per_step
        kept = groups["kept"] + groups["delivered"] + groups["acked"]
        missing = POOL_STEPS * step - groups["pool"]
        if run["last"] or kept >= run["config"]["target_groups"] or missing < step:
            return
        first = sum(groups[state] for state in GroupState)
        tasks = [self._tasks[i % len(self._tasks)] for i in range(first, first + missing)]
        self._client.submit(self._name, tasks, self._recipe.n, key="tasks", first=first)


def newest_checkpoint(training: Path) -> Path | None:
    """The trainer's last complete checkpoint, or None."""
    return max((training / "checkpoints").glob("step-*"), default=None)


def trained(recipe: Recipe, root: Path, name: str) -> bool:
    """Whether the trainer has done all its steps."""
    newest = newest_checkpoint(training_dir(root, name))
    return newest is not None and int(newest.name.removeprefix("step-")) >= recipe.steps


def ended(run: Json) -> int:
    """Rollouts of a run whose fate is decided."""
    return sum(count for state, count in run["counts"].items() if RolloutState(state).terminal)
