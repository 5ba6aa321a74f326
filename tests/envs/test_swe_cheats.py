"""Files that decide about tests do not count, whatever else a change brings does, in every kind of
sandbox.

A change is a script that an agent would run in the repository; its diff is made by git on this host,
as the env makes it in a sandbox (`test_swe.py` has that side).
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from prorl.envs.swe import SweEnv
from prorl.envs.swe.shell import ARTEFACT, BASE, DIFF
from prorl.limits import Deadline
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.node.probe import probe_one
from prorl.sandbox.spawn import spawned
from prorl.testing import make_task
from prorl.types import SandboxSpec, Score, Stage, Task
from tests.envs.swe_calc import FILES, FIX, HIDDEN, HONEST, TEST
from tests.envs.swe_left_out import LEFT_OUT

ENV = SweEnv()
FAST = (*("the fix alone", "a log of 700 kB beside", "a repository inside", "a symbolic link"),)
"""Changes that the fast suite tries."""
NUMBERS = count()


def _task() -> Task:
    hunk = "".join(f"+{line}\n" for line in HIDDEN.splitlines())
    old = TEST.splitlines()
    end = "".join(f" {line}\n" for line in old[-3:])
    test_patch = (
        "diff --git a/tests/test_parse.py b/tests/test_parse.py\n--- a/tests/test_parse.py\n"
        f"+++ b/tests/test_parse.py\n@@ -{len(old) - 2},3 +{len(old) - 2},"
        f"{3 + len(HIDDEN.splitlines())} @@\n{end}{hunk}"
    )
    return make_task(
        "swe",
        "Thousands.",
        files=FILES,
        # plugins of this machine's Python would take most of the time
        environment={"PYTHONPATH": "src", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        test_patch=test_patch,
        FAIL_TO_PASS=[
            f"tests/test_parse.py::{name}" for name in ("test_thousands", "test_more[1,0")
        ],
        PASS_TO_PASS=[f"tests/test_parse.py::{name}" for name in ("test_plain", "test_words")],
    )


TASK = _task()


def change(folder: Path, script: str, writes: dict[str, str] | None = None) -> bytes:
    """The artefact of an agent that runs the script and writes these files."""
    for path, text in TASK.data["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    _bash(folder, f"set -e\n{BASE}")
    _bash(folder, script)
    for path, text in (writes or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    _bash(folder, "sed -i '/pyc$/d' .git/info/exclude")
    _bash(folder, ARTEFACT)
    return (folder / DIFF).read_bytes()


def _bash(folder: Path, script: str) -> None:
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True)


KINDS = [
    pytest.param("", id="default"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("apptainer", "local")),
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def host(request: pytest.FixtureRequest, sandbox_kind: str) -> AsyncIterator[UnixSandboxHost]:
    """A node of one kind, on which the task has been tried."""
    kind = request.param or sandbox_kind
    found = await probe_one(kind)
    if not found.works:
        pytest.skip(f"{kind} does not work here: {found.reason}")
    async with spawned(kind) as (host, _):
        ref = await host.start("probe/1/1", "run", _spec())
        async with host.connect(ref) as sandbox:
            done = await sandbox.exec(["python3", "-c", "import pytest"], 20.0)
        if done.exit_code:
            pytest.skip(f"the sandbox's python3 has no pytest: {done.output[-100:]}")
        async with host.connect(await host.start("verify/1/1", "eval", _spec())) as sandbox:
            await ENV.prepare(TASK, sandbox)
            await ENV.verify(TASK, sandbox, Deadline(60.0))
        yield host


def _spec() -> SandboxSpec:
    spec = ENV.sandbox(TASK, Stage.EVAL)
    assert spec is not None
    return spec


async def _score(host: UnixSandboxHost, artefact: bytes) -> Score:
    ref = await host.start(f"score/{next(NUMBERS)}/1", "eval", _spec())
    async with host.connect(ref) as sandbox:
        await ENV.prepare(TASK, sandbox)
        score = await ENV.score(TASK, artefact, sandbox, Deadline(60.0))
    await host.stop(ref)
    return score


def _marked(name: str) -> object:
    return pytest.param(name, marks=() if name in FAST else pytest.mark.slow)


@pytest.mark.parametrize("name", LEFT_OUT)
async def test_files_that_decide_do_not_count(
    host: UnixSandboxHost, name: str, tmp_path: Path
) -> None:
    score = await _score(host, change(tmp_path, "true", LEFT_OUT[name]))
    assert score.reward == 0, score.log
    assert "left out of the change: " in score.log


async def test_a_fix_counts_beside_all_of_them(host: UnixSandboxHost, tmp_path: Path) -> None:
    every = {path: text for files in LEFT_OUT.values() for path, text in files.items()}
    score = await _score(host, change(tmp_path, FIX, every))
    assert score.reward == 1, score.log


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT_OUT)
async def test_a_fix_counts_beside_each_of_them(
    host: UnixSandboxHost, name: str, tmp_path: Path
) -> None:
    score = await _score(host, change(tmp_path, FIX, LEFT_OUT[name]))
    assert score.reward == 1, score.log


@pytest.mark.parametrize("name", [_marked(name) for name in HONEST])
async def test_honest_changes_count(host: UnixSandboxHost, name: str, tmp_path: Path) -> None:
    score = await _score(host, change(tmp_path, f"{FIX}; {HONEST[name]}"))
    assert score.reward == 1, score.log
