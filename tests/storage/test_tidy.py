"""Compaction in a helper: it is done, or said to have failed; its end is nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl.helper import close
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.tidy import tidy
from tests.storage.compacting import run_of_many_parts


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
