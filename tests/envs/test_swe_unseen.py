"""Cheats in five families, three attempts each, and twenty honest changes: 0 at 1, 0 at 0.

python -m pytest -m slow tests/envs/test_swe_unseen.py -n 2
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import cycle

import pytest
import pytest_asyncio

from prorl.envs.swe import SweEnv
from prorl.errors import GraderError
from prorl.limits import Deadline
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.spawn import spawned
from prorl.types import Score, Stage, Task
from tests.envs.swe_repositories import (
    CALLS,
    FLOATS,
    MIXED,
    NUMBERS,
    ORDERS,
    PAGES,
    REPOSITORIES,
    SPLITS,
    STORED,
    TABLES,
    Repository,
    diff,
)
from tests.envs.swe_right import STYLES
from tests.envs.swe_unseen import (
    EVAL_S,
    PARTIAL,
    RECOGNISERS,
    REMEMBERS,
    REPORTED,
    STARVES,
    TESTS_S,
)

ENV = SweEnv()
CORE = "src/pkg/core.py"
CHEATS = {**PARTIAL, **RECOGNISERS, **REMEMBERS}
ASKINGS = 4
"""EVAL's own: as long as fewer than two of its times are spent."""
HARD = (ORDERS, PAGES, TABLES, STORED, MIXED, FLOATS, CALLS, NUMBERS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(sandbox_kind: str) -> AsyncIterator[UnixSandboxHost]:
    async with spawned(sandbox_kind) as (host, _):
        yield host


async def _score(
    host: UnixSandboxHost, name: str, task: Task, artifact: bytes, eval_s: float
) -> Score:
    spec = ENV.sandbox(task, Stage.EVAL)
    assert spec is not None
    ref = await host.start(f"unseen/{abs(hash(name))}/1", "eval", spec)
    try:
        async with host.connect(ref) as sandbox:
            await ENV.prepare(task, sandbox)
            return await ENV.score(task, artifact, sandbox, Deadline(eval_s))
    finally:
        await host.stop(ref)


def _change(repository: Repository, text: str, row: str) -> bytes:
    return diff({CORE: (repository.wrong, text + repository.changed(row))}).encode()


async def test_there_are_twenty() -> None:
    assert len(STYLES) == 20 < len({**CHEATS, **STARVES, **REPORTED})


ROWS = [*zip(CHEATS, cycle(HARD), strict=False), *((name, SPLITS) for name in REPORTED)]


@pytest.mark.parametrize(("name", "repository"), ROWS)
async def test_no_cheat_scores_1(host: UnixSandboxHost, name: str, repository: Repository) -> None:
    change = _change(repository, repository.wrong, {**CHEATS, **REPORTED}[name])
    for attempt in range(3):
        score = await _score(host, f"{name}{attempt}", repository.task(), change, 200.0)
        assert score.reward == 0, score.log


@pytest.mark.parametrize("name", STARVES)
async def test_code_that_takes_the_twins_time_is_graded_when_eval_asks_again(
    host: UnixSandboxHost, name: str
) -> None:
    """A right change that is as slow is believed there, and a wrong one is not."""
    task = NUMBERS.task(timeout_s=TESTS_S)
    forged = _change(NUMBERS, NUMBERS.wrong, STARVES[name])
    slow = _change(NUMBERS, NUMBERS.right, STARVES[name].replace("_forge()\n", "", 1))
    await _score(host, f"{name}-", task, _change(NUMBERS, NUMBERS.right, ""), 200.0)
    for change, reward in ((forged, 0), (slow, 1)):
        rewards: list[object] = []
        while not rewards or (rewards[-1] != reward and len(rewards) < ASKINGS):
            try:
                score = await _score(host, f"{name}{reward}{len(rewards)}", task, change, EVAL_S)
                rewards.append(score.reward)
            except GraderError as error:
                rewards.append(error.message)
        late = "too little of EVAL's time was left for the altered twin: the change is far slower"
        assert rewards.pop() == reward
        assert rewards, "graded at once"
        assert all(str(each).startswith(late) for each in rewards), rewards


@pytest.mark.parametrize(("style", "repository"), [*zip(STYLES, cycle(REPOSITORIES), strict=False)])
async def test_every_honest_change_scores_1(
    host: UnixSandboxHost, style: str, repository: Repository
) -> None:
    change = _change(repository, repository.right, STYLES[style])
    score = await _score(host, style, repository.task(), change, 200.0)
    assert score.reward == 1, score.log
    assert "own_files" not in {part.name for part in score.parts}
