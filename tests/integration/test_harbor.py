"""A Harbor folder on an image of its name, through the real service: the solution earns 1, doing
nothing 0.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.sandbox.images.child import make_image
from tests.integration.checks import check_complete, rows
from tests.sandbox import small_image
from tests.sandbox.conftest import why_not

pytestmark = [pytest.mark.apptainer, pytest.mark.slow, pytest.mark.timeout(1200)]
PROGRAMS = (
    *("basename", "chmod", "comm", "cp", "dirname", "env", "find", "grep", "gzip", "head", "ln"),
    *("mkdir", "mktemp", "mv", "sort", "stat", "tail", "tar", "tr", "uname", "wc"),
)
FILES = {
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n'
    "[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n[environment]\nmemory_mb = 512\n",
    "instruction.md": "Write how many lines /app/words has into /app/count.\n",
    "solution/solve.sh": "#!/bin/bash\ngrep -c . /app/words > /app/count\n",
    "tests/test.sh": "#!/bin/bash\nif bash /tests/check.sh; then echo 1; else echo 0; fi"
    " > /logs/verifier/reward.txt\n",
    "tests/check.sh": '[ "$(cat /app/count)" = 3 ]\n',
}


IN_IMAGE = {
    ".prorl-workdir": "/app\n",
    "app/words": "one\ntwo\nthree\n",
    "logs/verifier/reward.txt": "1\n",
    "tests/check.sh": "exit 1\n",
}
"""With leftovers where the env puts its own: neither decides."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The task's folder, its image in the registry `images` beside it."""
    if why_not("apptainer"):
        pytest.skip(why_not("apptainer"))
    with tempfile.TemporaryDirectory(prefix="prorl-t-", dir="/tmp") as name:
        root = Path(name)
        root.chmod(0o755)
        for path, text in FILES.items():
            (root / "tasks/count" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "tasks/count" / path).write_text(text)
        base = small_image.make_image(root, (*small_image.PROGRAMS, *PROGRAMS))
        for path, text in IN_IMAGE.items():
            (base / path).parent.mkdir(parents=True, exist_ok=True)
            (base / path).write_text(text)
        job = {"do": "build", "name": "count", "source": str(base)}
        with ThreadPoolExecutor(1) as pool:  # a loop of its own: the module's may be running
            pool.submit(asyncio.run, make_image(root / "images", job, 600.0)).result()
        yield root
        shutil.rmtree(root / "images", ignore_errors=True)


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 2.0), ("noop", 0.0)])
async def test_the_solution_earns_1_and_nothing_0(
    folder: Path, make_plan: Callable[..., JobPlan], policy: str, reward: float
) -> None:
    sets = [f"service.sandbox.images={folder / 'images'}", "service.sandbox.kind=apptainer"]
    sets += ["service.topology=inline", "run.limits.init_s=300", "run.limits.eval_s=300"]
    plan = make_plan([], *sets, tasks=str(folder / "tasks"), policy=policy, n=2)
    assert await run_plan(plan, json=True) == 0
    stored = check_complete(plan.directory, 2)
    query = "select sum(reward) as reward, count(distinct failure_code) as codes from rollouts"
    assert rows(stored, query) == [{"reward": reward, "codes": 1}]
