"""Real repositories' fixes through the real service, by archives and by images: the reference
resolves each of eight siblings, a policy that does nothing none, and preparation is done once.

`-k boltons`, `-k images` run pieces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.images.stack import merge
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json
from tests.envs.real_repositories import FIXES, Fix, row
from tests.integration.run_checks import check_complete, rows
from tests.sandbox.conftest import why_not

Make = Callable[..., JobPlan]
Row = dict[str, Json]
SIBLINGS = 8
LIMITS = [
    f"run.limits.{limit}"
    for limit in ("eval_s=600", "init_s=600", "run_s=1200", "tool_s=120", "max_tokens=262144")
]

PACKAGES = "python3,python3-pytest,python3-six,python3-idna,git"
NOT_IN_IMAGES = {"parso": "its tests tell micro versions of Python apart; Debian's is another one"}
MADE_UP = re.compile(r"\[(?:.*-)?[a-z_]+\d+(?:-.*)?\]$|_\d+\]$")
"""Ids that pytest makes of long or equal parameters since its version 8, and Debian's does not."""
LEFT = ("archive", "environment", "requirements")
"""What an image brings itself."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Rows:
    """Rows by the fix they come from, each made when it is first asked for."""

    def __init__(self, make: Callable[[Fix], Row]) -> None:
        self._make = make
        self._made: dict[str, Row] = {}

    def __call__(self, fix: Fix) -> Row:
        if fix.name not in self._made:
            self._made[fix.name] = self._make(fix)
        return self._made[fix.name]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows with an archive, their setup marked so that preparations can be counted."""

    def make(fix: Fix) -> Row:
        try:
            task_row = row(fix, tmp_path_factory.mktemp(fix.name))
        except (subprocess.SubprocessError, OSError) as cause:
            pytest.skip(f"{fix.name} cannot be had: {cause}")
        assert task_row["FAIL_TO_PASS"], fix
        task_row["setup"] = (
            "python3 -m compileall -q . || true\ncat /proc/sys/kernel/random/uuid > .mark"
        )
        tests = " ".join(re.findall(r"^\+\+\+ b/(\S+\.py)$", task_row["test_patch"], re.MULTILINE))
        tests = " ".join(path for path in tests.split() if re.search(r"(^|/)test", path))
        task_row["test_command"] = f"python3 -m pytest -rA -p no:cacheprovider {tests}; cat .mark"
        return task_row

    return Rows(make)


@pytest.fixture(scope="module")
def images(archives: Rows, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The same in images as SWE-bench has them: /testbed and its Python in a conda environment."""
    if why_not("apptainer") or not shutil.which("mmdebstrap") or os.getuid() != 0:
        pytest.skip("needs apptainer, and mmdebstrap as root")
    root = tmp_path_factory.mktemp("images")
    mirrors = [*Path("/etc/apt").glob("sources.list*"), *Path("/etc/apt").glob("*/*.sources")]
    words = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm"]
    words += [f"{root}/base.tar", *(str(path) for path in mirrors if path.is_file())]
    if subprocess.run(words, check=False, timeout=1200).returncode:
        pytest.skip("no Debian image can be made here")
    registry, base = Registry(root / "store"), root / "base"
    pulled = Pull(registry, {}).pull("base", f"tarball:{root}/base.tar")
    merge(registry.stack(pulled.digest)[::-1], base)

    def make(fix: Fix) -> Row:
        task_row = archives(fix)
        image = root / f"image-{task_row['instance_id']}"
        subprocess.run(["cp", "-al", str(base), str(image)], check=True)  # shared inodes, read-only
        conda, testbed = image / "opt/miniconda3/envs/testbed/bin", image / "testbed"
        for folder in (conda, testbed):
            folder.mkdir(parents=True)
        (conda / "python").symlink_to("/usr/bin/python3")
        shutil.unpack_archive(task_row["archive"], testbed)
        kept = {key: value for key, value in task_row.items() if key not in LEFT}
        names = [name for name in task_row["PASS_TO_PASS"] if not MADE_UP.search(name)]
        return {**kept, "PASS_TO_PASS": names, "docker_image": str(image)}

    return Rows(make)


async def _rewards(make_plan: Make, task: Row, policy: str, *sets: str) -> StoredRun:
    """Eight siblings; the reference resolves each of them, no change none."""
    sets = ("service.workers=0", *sets, *LIMITS)
    began = time.monotonic()
    plan = make_plan([task], *sets, "run.sampling.max_tokens=131072", policy=policy, n=SIBLINGS)
    await run_plan(plan, json=True)
    took_s = (time.monotonic() - began) / SIBLINGS
    stored = check_complete(plan.directory, SIBLINGS)
    print(f"{task['instance_id']} {policy}: {took_s:.2f} s a rollout, {SIBLINGS} siblings")
    query = "select reward, failure_code, failure_message from rollouts"
    expected = 1.0 if policy == "oracle" else 0.0
    outcomes = rows(stored, query)
    assert [each["reward"] for each in outcomes] == [expected] * SIBLINGS, outcomes
    return stored


def _num_setups(stored: StoredRun) -> int:
    """Returns how many preparations made the workspaces that were scored."""
    query = "select content from messages where role = 'grader'"
    marks = [
        re.findall(r"^([0-9a-f-]{36})$", each["content"], re.M) for each in rows(stored, query)
    ]
    assert len(marks) == SIBLINGS
    assert all(len(task_marks) == 1 for task_marks in marks), marks
    return len({mark for task_marks in marks for mark in task_marks})


@pytest.mark.parametrize("fix", FIXES, ids=[fix.name for fix in FIXES])
@pytest.mark.parametrize("how", ["archives", "images"])
async def test_references_resolve_and_nothing_does_not(
    make_plan: Make, how: str, fix: Fix, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if how == "images" and fix.name in NOT_IN_IMAGES:
        pytest.skip(NOT_IN_IMAGES[fix.name])
    task: Row = request.getfixturevalue(how)(fix)
    registry = tmp_path / "images"
    sets = [f"service.sandbox.images={registry}", "service.sandbox.snapshot_bytes=4294967296"]
    sets += ["service.sandbox.kind=apptainer"] if how == "images" else []
    stored = await _rewards(make_plan, task, "oracle", *sets)
    assert _num_setups(stored) == 1, "each repository is prepared once a node"
    if how == "archives":
        packages = f"packages {', '.join(('pytest', *fix.needs))}"
        layers = [image.source for image in Registry(registry).list()]
        assert layers == [packages if fix.needs else "packages pytest from host"]
    await _rewards(make_plan, task, "noop", *sets)


def test_there_are_ten_of_each_kind() -> None:
    assert len([fix for fix in FIXES if fix.name not in NOT_IN_IMAGES]) >= 10
