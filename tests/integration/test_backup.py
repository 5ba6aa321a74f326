"""A backup that was made while a service works goes on elsewhere, as docs/upgrade.md says."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.deploy.running import Stop, client_of, service
from prorl.storage.keep.backup import back_up
from prorl.types import Task
from tests.integration.run_checks import check_complete
from tests.integration.services import settings, view
from tests.storage.write_golden_root import restore
from tests.waiting import until

NUM_GROUPS = 60
FAST = {"flush_s": 0.1}


def num_commits(root: Path) -> int:
    return len(list((root / "r" / "commits").glob("0*.json")))


@pytest.mark.parametrize("is_slow", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_backup_of_a_working_service_goes_on_elsewhere(
    tmp_path: Path, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_slow`: the service commits more between the copy of the log and that of the run."""
    root, copy = tmp_path / "root", tmp_path / "elsewhere"
    tasks = [
        Task(task_id=f"t{i}", env="noop", prompt="?", data={"reward": i % 2})
        for i in range(NUM_GROUPS)
    ]
    config = settings(root, "local", "scripted:oracle?delay_s=0.05", workers=0, store=FAST)
    async with service(config, Stop()) as running:
        client = client_of(running)
        await asyncio.to_thread(client.create_run, run_id="r")
        await asyncio.to_thread(client.submit, "r", tasks, n=2, key="all", last=True)
        await until(lambda: num_commits(root) >= 2)
        if is_slow:

            def list_later(folder: Path) -> list[str]:
                asyncio.run(until(lambda: num_commits(root) > num_before + 2))
                return ["r"]

            num_before = num_commits(root)
            monkeypatch.setattr("prorl.storage.keep.backup.list_runs", list_later)
        ((run, copied_commits),) = await asyncio.to_thread(lambda: list(back_up(root, copy)))
        with closing(sqlite3.connect(copy / "control.db")) as log:
            assert log.execute("select state from runs").fetchall() == [("open",)]
    assert (run, num_commits(copy)) == ("r", copied_commits)
    config = settings(copy, "local", "scripted:oracle", workers=0, store=FAST)
    async with service(config, Stop()) as running:
        client = client_of(running)
        async with asyncio.timeout(100):
            while (await view(client))["state"] != "finished":
                await asyncio.sleep(0.1)
    check_complete(copy / "r", 2 * NUM_GROUPS)


@pytest.mark.parametrize("blocks", [8, 1024], ids=["log", "part"])
def test_a_backup_without_room_is_a_single_line_and_leaves_no_folder(
    tmp_path: Path, blocks: int
) -> None:
    """Files of more than `blocks` KiB are refused, as a full disk refuses them: the copy of the
    log, which SQLite writes, or that of a part.
    """
    root, copy = tmp_path / "root", tmp_path / "copy"
    restore(root)
    (root / "r" / "rollouts" / "part-of-tests.parquet").write_bytes(bytes(2 << 20))
    words = [sys.executable, "-m", "prorl.cli", "backup", str(copy), "--root", str(root)]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "bash", *words],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "expected a disk with room for a copy of the root" in done.stderr
    assert "Traceback" not in done.stderr
    assert not copy.exists()


def test_a_folder_that_somebody_makes_meanwhile_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to nowhere is no folder yet, and cannot be made one."""
    restore(tmp_path / "root")
    copy = tmp_path / "copy"
    copy.symlink_to("nowhere")
    assert dispatch(["backup", str(copy), "--root", str(tmp_path / "root")]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
    assert copy.is_symlink()
