"""No lease goes to a node that lacks its image, or ahead of guests that do not come, and what waits
for one holds up nobody else.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from prorl.control import Stats
from prorl.service.core.candidates import GroupBody
from prorl.service.core.images import waiting_for_guests
from prorl.service.core.leases import GUESTS_AHEAD
from prorl.service.core.watchdog import reason
from prorl.types import RolloutState, Task
from tests.service.running_gateway import Worker, group, running_gateway

PY, OTHER_PY = "py=sha256:a", "py=sha256:b"


def with_image(name: str, image: str = "py") -> GroupBody:
    """A group of one rollout whose task names an image."""
    task = Task(task_id=name, env="noop", prompt="?", data={"image": image})
    return GroupBody(task=task, n=1)


async def take(worker: Worker, count: int) -> None:
    num_leases = 0
    while num_leases < count:
        num_leases += len(await worker.take())


@pytest.mark.parametrize("other", [(), (OTHER_PY,)])
async def test_a_lease_goes_to_the_node_that_has_its_image(
    tmp_path: Path, other: tuple[str, ...]
) -> None:
    """Another image under the same name does not count."""
    async with (
        running_gateway(tmp_path) as w,
        w.worker("init", "a/init-0", images=(PY,)) as has,
        w.worker("init", "b/init-0", images=other) as lacks,
    ):
        await w.run()
        await w.submit(*(with_image(f"t{i}") for i in range(20)))
        await take(has, 20)
        assert lacks.inlet is not None
        assert lacks.inlet.in_hand == 0


async def test_what_no_node_has_waits_and_holds_up_no_other_run(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init", "a/init-0", images=()) as first:
        await w.run()
        await w.run("other")
        await w.submit(*(with_image(f"t{i}") for i in range(40)))
        await w.submit(*(group(f"plain{i}") for i in range(20)), run_id="other")
        await take(first, 20)
        assert (await w.view())["counts"]["queued"] == 40
        async with w.worker("init", "b/init-0", images=(PY,)) as has:
            await take(has, 40)


async def test_a_task_without_a_node_delays_no_sibling_and_ends_alone(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path) as w,
        w.worker("init", "a/init-0", images=(PY,)) as has,
    ):
        await w.run(limits={"queue_s": 4})
        await w.submit(
            with_image("first", "absent"),
            *(with_image(f"t{i}") for i in range(40)),
            with_image("last", "nowhere"),
        )
        await take(has, 40)
        await w.until(lambda view: view["counts"].get("failed") == 2)
        lives = [r.life for r in w.core.run("r").rollouts.values()]
        assert Counter(life.state for life in lives)[RolloutState.FAILED] == 2


async def test_leases_of_a_departed_node_wait_for_another(tmp_path: Path) -> None:
    """Leases that were granted and not sent return to the queue, charged to nobody."""
    async with running_gateway(tmp_path) as w, w.worker("init", "a/init-0", images=()):
        await w.run()
        async with w.worker("init", "b/init-0", images=(PY,)):
            await w.submit(*(with_image(f"t{i}") for i in range(20)))
            await w.until(lambda view: view["counts"]["leased"] > 8)
        async with w.worker("init", "c/init-0", images=(PY,)) as other:
            await take(other, 20)
            charged = [r.life for r in w.core.run("r").rollouts.values()]
            assert max(life.infra_failures for life in charged) == 0


async def test_a_path_asks_for_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("init", "a/init-0", images=()) as lacks:
        await w.run()
        await w.submit(with_image("t", "/shared/py.sif"))
        await lacks.take(1)


@pytest.mark.parametrize("image", ["", "py"])
async def test_a_run_that_no_node_can_serve_says_so(tmp_path: Path, image: str) -> None:
    async with running_gateway(tmp_path) as w:
        await w.run()
        await w.submit(with_image("t"))
        workers = dict.fromkeys(("init", "run", "eval", "store"), 1)
        line = reason(w.core.run("r"), workers, True, image, {}, "", "")
        assert ("no node has the image 'py'" in line) == bool(image)


async def test_only_so_many_leases_go_ahead_of_guests_that_do_not_come(tmp_path: Path) -> None:
    """Rows that wait at RUN have no slot there, so that nothing else would bound them."""
    data = {"guest": "lake"}
    async with running_gateway(tmp_path) as w, w.worker("init") as init, w.worker("run"):
        await w.run()
        await w.run("other")
        tasks = [Task(task_id=f"g{i}", env="guest", prompt="?", data=data) for i in range(200)]
        await w.submit(*(GroupBody(task=task, n=1) for task in tasks))
        num_leases = 0
        while num_leases < GUESTS_AHEAD:
            num_leases += len(await init.take())
        await w.submit(*(group(f"plain{i}") for i in range(20)), run_id="other")
        assert {key.run_id for key in await init.take()} == {"other"}
        assert (await w.view())["counts"]["queued"] == 200 - GUESTS_AHEAD
        (run,) = w.core.state.of_role("run")
        run.status.stats["run"] = Stats(waits_for={"r": {"lake": 3}, "other": {"lake": 4}})
        assert waiting_for_guests(w.core.state, "r") == {"lake": 3}
        record, workers = w.core.run("r"), dict.fromkeys(("init", "run", "eval", "store"), 1)
        line = reason(record, workers, True, "", {"lake": 3}, "", "")
        assert line == "rollouts wait for guests from elsewhere, and none has come: 3 for 'lake'"
