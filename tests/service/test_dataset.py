"""Runs that feed themselves: every task once an epoch, in the seed's order, whatever dies."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from prorl.control import Decision, Failed, Propose
from prorl.errors import ConflictError
from prorl.service.core.dataset import order
from prorl.service.log.log import ControlLog
from prorl.types import Json
from tests.service.running_gateway import group, run_config, running_gateway
from tests.service.stepped_core import SteppedCore

TASKS, EPOCHS = 30, 3
ORDER = [f"t{place}" for epoch in range(EPOCHS) for place in order(5, epoch, TASKS).tolist()]


class Life(SteppedCore):
    def restart(self) -> None:
        super().restart()
        self.come("init")

    def feed(self, tasks: int = TASKS, **more: Json) -> None:
        self.core.create_run(run_config(epochs=EPOCHS, seed=5, max_open_groups=999, **more))
        self.write()
        bodies = [group(f"t{place}", n=2, key=f"k{place}") for place in range(tasks)]
        checked = self.core.acceptance.check(self.run, bodies, {})
        self.core.datasets.add(self.run, checked)
        self.write()

    def fed(self) -> list[str]:
        """Tasks of the groups that the log has, in the order of their ids."""
        rows = self.log.read("SELECT task_id FROM groups ORDER BY group_id")
        return [task for (task,) in rows]


@pytest.fixture
def life(log: ControlLog) -> Life:
    return Life(log, now=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_gateway_neither_skips_nor_repeats_a_task(seed: int, life: Life) -> None:
    draw = random.Random(seed)
    life.feed()
    life.core.runs.end_of_groups(life.run)
    life.write()
    while len(life.fed()) < len(ORDER):
        life.core.pump(draw.randrange(1, 20))
        if draw.random() < 0.7:
            life.write()
        if draw.random() < 0.3:
            life.restart()
    life.core.pump(50)
    life.write()
    assert life.fed() == ORDER
    assert not life.run.feeds


def test_nothing_is_sampled_before_the_dataset_is_whole(life: Life) -> None:
    life.feed()
    life.core.pump(50)
    life.write()
    assert life.fed() == []
    life.core.runs.end_of_groups(life.run)
    life.core.pump(50)
    life.write()
    assert life.fed() == ORDER, "so few that are left are made at once"


def test_a_paused_run_resumes_after_a_restart_only_on_request(life: Life) -> None:
    life.feed()
    life.core.runs.end_of_groups(life.run)
    life.core.runs.pause(life.run, True)
    life.write()
    life.restart()
    life.core.pump(50)
    life.write()
    assert life.fed() == []
    life.core.runs.pause(life.run, False)
    life.core.pump(50)
    life.write()
    assert life.fed()


def test_only_as_many_groups_are_made_as_the_sampler_wants(life: Life) -> None:
    life.feed(target_groups=7)
    life.core.runs.end_of_groups(life.run)
    life.core.pump(50)
    life.write()
    assert life.fed() == ORDER[:7]


def test_a_dataset_is_identified_by_its_keys(life: Life) -> None:
    life.feed()

    def again(task: str, key: str) -> int:
        checked = life.core.acceptance.check(life.run, [group(task, n=2, key=key)], {})
        before = life.run.dataset.num_tasks
        life.core.datasets.add(life.run, checked)
        return life.run.dataset.num_tasks - before

    assert again("t3", "k3") == 0
    assert (again("new", "new"), again("new", "new")) == (1, 0), "before it is durable too"
    with pytest.raises(ConflictError, match="k3"):
        again("other", "k3")
    life.core.runs.end_of_groups(life.run)
    assert again("t3", "k3") == 0
    with pytest.raises(ConflictError, match="no more groups"):
        again("t99", "k99")


async def test_over_http(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run(epochs=2, target_groups=3)
        body: Json = {"groups": [group("a", n=2, key="a").model_dump(mode="json")]}
        status, answer = await w.http("POST", "/v1/runs/r/groups", body)
        assert (status, answer["tasks"], answer["groups"]) == (202, 1, [])
        status, answer = await w.http("POST", "/v1/runs/r/groups", {**body, "last": True})
        assert (status, answer["tasks"], answer["groups"]) == (200, 1, [])
        for word, paused in (("pause", True), ("resume", False)):
            status, answer = await w.http("POST", f"/v1/runs/r/{word}", {})
            assert (status, answer["paused"]) == (200, paused)
        async with w.worker("init") as init:
            await init.take(4)
        assert (await w.view())["fed"] == 2


async def test_a_filter_has_a_task_sit_out_and_says_how_many_siblings_it_gets(
    tmp_path: Path,
) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        await w.run(epochs=4, max_open_groups=1)
        bodies = [group("a", n=2, key="a").model_dump(mode="json")]
        await w.http("POST", "/v1/runs/r/groups", {"groups": bodies, "last": True})
        for group_id, n, more in ((0, 2, {"rest": 2, "siblings": 3}), (1, 3, {})):
            keys = await init.take(n)
            await store.commit("r", f"p{group_id}", keys)
            decision = Decision(group_id=group_id, kept=False, reason="curated", **more)
            await store.ask(Propose(decisions=(decision,)), "r")
        status = await w.until(lambda v: v["groups"]["dropped"] == 2)
        assert (status["fed"], status["skipped"]) == (4, 2), "of epochs 0 to 3: 1 and 2"


async def test_of_the_tasks_in_turn_the_longest_goes_first(tmp_path: Path) -> None:
    """The order is by the duration of their rollouts an epoch ago; the mean, where none was
    stored.
    """
    tokens = {"a": 10, "b": 900, "c": 500, "d": 0}
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("store") as store:
        await w.run(epochs=2, max_open_groups=4, server_priority=True)
        bodies = [group(name, key=name).model_dump(mode="json") for name in tokens]
        await w.http("POST", "/v1/runs/r/groups", {"groups": bodies, "last": True})
        for key in await init.take(4):
            task = w.core.rollout("r", key.rollout_id).group.task_id
            if tokens[task]:
                await store.commit("r", task, [key], num_sampled=tokens[task])
            else:
                store.say(Failed(message="none"), key, code="bad_task")
        await store.decide("r", 0, 1, 2, 3)
        groups = [w.core.rollout("r", key.rollout_id).group for key in await init.take(4)]
        assert [task_group.task_id for task_group in groups] == ["b", "c", "d", "a"]
        priorities = [json.loads(task_group.sampling)["priority"] for task_group in groups]
        assert priorities == [-900, -500, -470, -10]
