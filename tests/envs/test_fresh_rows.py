"""Ten published formats in every container: a right reply earns 1, a wrong one and none 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.envs.fresh_rows import graded


@pytest.mark.slow
async def test_fresh_rows_are_read_and_graded(tmp_path: Path, sandbox_kind: str) -> None:
    assert await graded(sandbox_kind, tmp_path) == []
