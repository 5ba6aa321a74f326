"""A control log of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.service.log.log import ControlLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ControlLog]:
    log = ControlLog(tmp_path / "control.db")
    yield log
    log.close()
