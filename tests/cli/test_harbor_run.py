"""A run of Harbor tasks through the whole pipeline, in sandboxes that hold."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from prorl.cli import progress
from prorl.cli.app import dispatch
from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.sandbox.images import dockerfile
from prorl.sandbox.kinds import load
from prorl.storage.read.catalog import query
from prorl.storage.read.verify import verify
from tests.harbor_folders import TOML, make_folder
from tests.sandbox import small_image
from tests.sandbox.conftest import short_folder

needs_buildah = pytest.mark.skipif(not dockerfile.program(), reason="neither buildah nor podman")
SOLVE = "#!/bin/bash\n# " + "longer than a turn " * 2000 + "\necho 5 > sum.txt\n"
TEST = (
    '#!/bin/bash\nread -r sum < sum.txt; if [ "$sum" = 5 ]; then r=1; else r=0; fi\n'
    "echo $r > /logs/verifier/reward.txt\n"
)
NOISE = (
    'while read -r -N 65536 x; do echo -n "$x"; ((++n < 40)) || break; done < /dev/urandom > n\n'
)


def test_work_that_does_not_cross_is_graded_where_it_lies_and_is_not_graded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := load("pyns").missing():
        pytest.skip(missing)
    with short_folder(0o755) as folder:
        image = small_image.make_image(folder, (*small_image.PROGRAMS, "chmod", "mkdir", "rm"))
        toml = TOML.replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n')
        for name, solve in (("little", SOLVE), ("much", SOLVE + NOISE)):
            parts = {"task.toml": toml, "solution/solve.sh": solve, "tests/test.sh": TEST}
            make_folder(tmp_path / "tasks" / name, **parts)
        flags = {
            "tasks": str(tmp_path / "tasks"),
            "policy": "oracle",
            "name": "r",
            "run": {"limits": {"artifact_mb": 1}},
            "service": {"workers": 0, "sandbox": {"kind": "pyns"}},
        }
        root = tmp_path / "root"
        assert asyncio.run(run_plan(JobPlan.make(None, flags, [], root=root), json=True)) == 0
        rows = query(
            root / "r",
            "select task_id, reward, rescorable, octet_length(artifact) > 0 as kept"
            " from rollouts order by task_id",
        ).to_pylist()
        assert rows == [
            {"task_id": "little", "reward": 1.0, "rescorable": True, "kept": True},
            {"task_id": "much", "reward": 1.0, "rescorable": False, "kept": False},
        ]
        assert verify(root / "r") == []
        capsys.readouterr()
        words = ["eval", "--stored", "r", "--name", "again", "--root", str(root), "--json"]
        assert dispatch([*words, "--sandbox", "pyns"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["scored"] == 1
        (line,) = [line for line in captured.err.splitlines() if "left out" in line]
        assert line.startswith("1 rollout is left out: it changed more than crossed")


@needs_buildah
def test_tasks_run_once_their_images_are_built_and_a_failed_build_is_the_tasks_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is graded again finds the images by the settings of the environment."""
    if missing := load("pyns").missing():
        pytest.skip(missing)
    for name, step in (("fails", "RUN echo no such compiler; exit 3\n"), ("works", "")):
        folder = make_folder(
            tmp_path / "tasks" / name,
            **{
                "environment/Dockerfile": f"FROM scratch\nCOPY base /\nWORKDIR /app\n{step}",
                "solution/solve.sh": SOLVE,
                "tests/test.sh": TEST,
            },
        )
        base = small_image.make_image(
            folder / "environment", (*small_image.PROGRAMS, "chmod", "mkdir", "rm")
        )
        base.rename(folder / "environment/base")
    with short_folder(0o755) as images:
        flags = {
            "tasks": str(tmp_path / "tasks"),
            "policy": "oracle",
            "name": "r",
            "service": {"workers": 0, "sandbox": {"kind": "pyns", "images": str(images)}},
        }
        root = tmp_path / "root"
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        asyncio.run(run_plan(JobPlan.make(None, flags, [], root=root)))
        stderr = capsys.readouterr().err
        assert "to build: 2 of 2 images" in stderr
        assert " · images to build 2 · " in stderr
        assert "images to build" not in stderr.splitlines()[-1]
        assert stderr.count("works/environment: built in") == 1
        rows = query(
            root / "r",
            "select task_id, reward, failure_code, failure_message, attempt from rollouts"
            " order by task_id",
        ).to_pylist()
        monkeypatch.setenv("PRORL_SANDBOX__IMAGES", str(images))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another registry"))
        words = ["eval", "--stored", "r", "--name", "again", "--root", str(root), "--json"]
        assert dispatch([*words, "--sandbox", "pyns"]) == 0
        assert json.loads(capsys.readouterr().out)["scored"] == 1
        assert not (tmp_path / "another registry").exists()
    (failed, played) = rows
    assert (played["task_id"], played["reward"]) == ("works", 1.0)
    assert (failed["reward"], failed["failure_code"], failed["attempt"]) == (None, "bad_task", 1)
    assert "no such compiler" in failed["failure_message"]
