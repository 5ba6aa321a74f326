"""Twenty cheats in four families, three attempts each, and twenty honest changes: 0 at 1, 0 at 0.

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
    STORED,
    TABLES,
    Repository,
    diff,
)
from tests.envs.swe_right import STYLES
from tests.envs.swe_unseen import PARTIAL, RECOGNISERS, REMEMBERS, STARVES

ENV = SweEnv()
CORE = "src/pkg/core.py"
HONEST = (*STYLES.items(), *(("plain", STYLES["plain"]) for _ in range(20 - len(STYLES))))
CHEATS = {**PARTIAL, **RECOGNISERS, **REMEMBERS, **STARVES}
FAST = (
    "forges equalities alone",
    "forges where a file is not its own unparsed text",
    "remembers in System V memory",
)
HARD = (ORDERS, PAGES, TABLES, STORED, MIXED, FLOATS, CALLS, NUMBERS)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(sandbox_kind: str) -> AsyncIterator[UnixSandboxHost]:
    async with spawned(sandbox_kind) as (host, _):
        yield host


async def _score(
    host: UnixSandboxHost, name: str, task: Task, artefact: bytes, eval_s: float
) -> Score:
    spec = ENV.sandbox(task, Stage.EVAL)
    assert spec is not None
    ref = await host.start(f"unseen/{abs(hash(name))}/1", "eval", spec)
    try:
        async with host.connect(ref) as sandbox:
            await ENV.prepare(task, sandbox)
            return await ENV.score(task, artefact, sandbox, Deadline(eval_s))
    finally:
        await host.stop(ref)


def _change(repository: Repository, text: str, row: str) -> bytes:
    return diff({CORE: (repository.wrong, text + repository.changed(row))}).encode()


async def test_there_are_twenty() -> None:
    assert len(CHEATS) == len(HONEST) == 20


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        pytest.param(name, one, marks=() if name in FAST else pytest.mark.slow)
        for name, one in zip(CHEATS, cycle(HARD), strict=False)
    ],
)
async def test_no_cheat_scores_1(host: UnixSandboxHost, name: str, repository: Repository) -> None:
    starves = name in STARVES
    task = repository.task(**({"timeout_s": 12.0} if starves else {}))
    rewards: list[object] = []
    for attempt in range(3):
        change = _change(repository, repository.wrong, CHEATS[name])
        try:
            score = await _score(host, f"{name}{attempt}", task, change, 54.0 if starves else 200.0)
            rewards.append(score.reward)
        except GraderError as error:  # no verdict is no reward
            rewards.append(str(error))
    assert 1.0 not in rewards, rewards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "repository"), [*zip(range(20), cycle(REPOSITORIES), strict=False)]
)
async def test_every_honest_change_scores_1(
    host: UnixSandboxHost, number: int, repository: Repository
) -> None:
    change = _change(repository, repository.right, HONEST[number][1])
    score = await _score(host, f"honest{number}", repository.task(), change, 200.0)
    assert score.reward == 1, score.log
    assert "own_files" not in {part.name for part in score.parts}
