"""Compaction in a helper: it is done, or said to have failed; its end is nobody else's."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl.helper.pool import close
from prorl.linux import failpoints
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.tidy import tidy
from tests.storage.compactable_run import files, run_of_many_parts
from tests.waiting import until


@pytest.fixture(autouse=True)
async def _helpers_end() -> AsyncIterator[None]:
    yield
    close()


async def test_a_run_is_compacted_in_a_process_of_its_own(tmp_path: Path) -> None:
    run_of_many_parts(tmp_path, "a")
    run = RunDir(str(tmp_path / "a"))
    before = len(list(run.commits()))
    assert await tidy(run.where, 0.0, everything=True)
    assert len(list(RunDir(run.where).commits())) < before


async def test_what_cannot_be_compacted_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_of_many_parts(tmp_path, "a")
    (victim, *_) = sorted((tmp_path / "a" / "rollouts").glob("*.parquet"))
    for file in victim.parent.glob("*.parquet"):
        file.write_bytes(b"spoilt")
    assert not await tidy(str(tmp_path / "a"), 0.0, everything=True)
    assert "compaction failed" in caplog.text


async def test_a_run_that_is_deleted_is_no_failure_and_waits_for_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only helper is at work; one run is deleted before it is asked for, one while it waits."""
    run, other = run_of_many_parts(tmp_path), run_of_many_parts(tmp_path, "other")
    before = files(run)
    monkeypatch.setenv(failpoints.VARIABLE, "file.renamed:freeze@2")
    tidying = asyncio.create_task(tidy(run.where, 0.0, everything=True))
    await until(lambda: len(files(run)) > len(before) + 1)
    assert not await tidy(str(tmp_path / "deleted"), 0.0, everything=True)
    assert not tidying.done()
    waiting = asyncio.create_task(tidy(other.where, 0.0, everything=True))
    await asyncio.sleep(0)
    shutil.rmtree(other.root)
    tidying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tidying
    assert not await waiting
    assert caplog.text == ""


async def test_what_is_cancelled_leaves_no_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation comes as at the end of a service, in the middle of the work."""
    run = run_of_many_parts(tmp_path)
    before = files(run)
    monkeypatch.setenv(failpoints.VARIABLE, "file.renamed:freeze@2")
    tidying = asyncio.create_task(tidy(run.where, 0.0, everything=True))
    while len(files(run)) < len(before) + 2:
        await asyncio.sleep(0.01)
    tidying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tidying
    assert files(run) == before


async def test_what_dies_leaves_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_many_parts(tmp_path)
    before = files(run)
    monkeypatch.setenv(failpoints.VARIABLE, "file.synced:kill@2")
    assert not await tidy(run.where, 0.0, everything=True)
    assert files(run) == before
