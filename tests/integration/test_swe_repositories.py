"""Real repositories' fixes through the real service, by archives and by images: the reference
resolves each of eight siblings, a policy that does nothing none, and preparation is done once.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prorl.cli.job import JobPlan, run_plan
from prorl.cli.progress import Show
from prorl.errors import StorageError
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.registry import Image, Registry
from prorl.storage.catalog import StoredRun
from prorl.types import Json
from tests.envs.real_repositories import FIXES, row
from tests.integration.checks import check_complete, rows
from tests.sandbox.conftest import why_not

Make = Callable[..., JobPlan]
Row = dict[str, Json]
SIBLINGS = 8
LIMITS = [
    f"run.limits.{one}"
    for one in ("eval_s=600", "init_s=600", "run_s=1200", "tool_s=120", "max_tokens=262144")
]

PACKAGES = "python3,python3-pytest,python3-six,python3-idna,git"
NOT_IN_IMAGES = ("parso/parso",)
"""Three of its tests tell micro versions of Python apart; Debian's is another one."""
LEFT = ("archive", "environment", "requirements")
"""What an image brings itself."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Every row that could be made, its setup marked so that preparations can be counted."""
    made: list[Row] = []
    for fix in FIXES:
        try:
            found = row(fix, tmp_path_factory.mktemp(fix.name))
        except (subprocess.SubprocessError, OSError) as cause:
            pytest.skip(f"{fix.name} cannot be had: {cause}")
        assert found["FAIL_TO_PASS"], fix
        found["setup"] = (
            "python3 -m compileall -q . || true\ncat /proc/sys/kernel/random/uuid > .mark"
        )
        tests = " ".join(re.findall(r"^\+\+\+ b/(\S+\.py)$", found["test_patch"], re.MULTILINE))
        tests = " ".join(path for path in tests.split() if re.search(r"(^|/)test", path))
        found["test_command"] = f"python3 -m pytest -rA -p no:cacheprovider {tests}; cat .mark"
        made.append(found)
    return made


@pytest.fixture(scope="module")
def images(archives: list[Row], tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The same in images as SWE-bench has them: /testbed and its Python in a conda environment."""
    if why_not("bwrap") or not shutil.which("mmdebstrap") or os.getuid() != 0:
        pytest.skip("needs bwrap, and mmdebstrap as root")
    root = tmp_path_factory.mktemp("images")
    job = {"do": "build", "name": "base", "source": "debian:bookworm", "include": PACKAGES}
    try:
        _alone(make_image(root, job, 1200.0))
    except StorageError as cause:
        pytest.skip(f"no Debian image can be made here: {cause}")
    base, made = Registry(root).find("base").path, []
    for one in archives:
        if one["repo"] in NOT_IN_IMAGES:
            continue
        image = root / f"image-{one['instance_id']}"
        subprocess.run(["cp", "-al", base, str(image)], check=True)  # shared inodes, read-only
        conda, testbed = image / "opt/miniconda3/envs/testbed/bin", image / "testbed"
        for folder in (conda, testbed):
            folder.mkdir(parents=True)
        (conda / "python").symlink_to("/usr/bin/python3")
        shutil.unpack_archive(one["archive"], testbed, filter="data")
        kept = {key: value for key, value in one.items() if key not in LEFT}
        made.append({**kept, "docker_image": str(image)})
    return made


def _alone(work: Coroutine[Any, Any, Image]) -> None:
    """Run in a loop of its own: the module's may be running."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


async def _rewards(make_plan: Make, tasks: list[Row], policy: str, *sets: str) -> StoredRun:
    sets = ("service.topology=inline", *sets, *LIMITS)
    began = time.monotonic()
    plan = make_plan(tasks, *sets, "run.sampling.max_tokens=131072", policy=policy, n=SIBLINGS)
    await run_plan(plan, show=Show.NOTHING, json=True)
    took_s = (time.monotonic() - began) / (SIBLINGS * len(tasks))
    stored = check_complete(plan.directory, SIBLINGS * len(tasks))
    print(f"{policy}: {took_s:.2f} s a rollout, {SIBLINGS} siblings of {len(tasks)} tasks")
    wanted = SIBLINGS if policy == "oracle" else 0
    found = rows(stored, "select task_id, sum(reward) as reward from rollouts group by 1")
    assert {each["task_id"]: each["reward"] for each in found} == {
        task["instance_id"]: wanted for task in tasks
    }
    return stored


def _num_setups(stored: StoredRun, tasks: list[Row]) -> int:
    query = "select content from messages where role = 'grader'"
    marks = [
        re.findall(r"^([0-9a-f-]{36})$", each["content"], re.M) for each in rows(stored, query)
    ]
    assert len(marks) == SIBLINGS * len(tasks)
    return len({mark for found in marks for mark in found})


@pytest.mark.parametrize("how", ["archives", "images"])
async def test_references_resolve_and_nothing_does_not(
    make_plan: Make, how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tasks: list[Row] = request.getfixturevalue(how)
    assert len(tasks) >= 10
    registry = tmp_path / "images"
    sets = [f"service.sandbox.images={registry}", "service.sandbox.snapshot_bytes=4294967296"]
    sets += ["service.sandbox.kind=bwrap"] if how == "images" else []
    stored = await _rewards(make_plan, tasks, "oracle", *sets)
    assert _num_setups(stored, tasks) == len(tasks), "each repository is prepared once a node"
    layers = [image.source for image in Registry(registry).list()]
    if how == "archives":
        assert sorted(layers) == [
            "packages pytest from host",
            "packages pytest, idna",
            "packages pytest, six",
        ]
    await _rewards(make_plan, tasks, "noop", *sets)
