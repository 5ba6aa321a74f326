"""The table of waits: what is shorter stays shorter, and every row is somebody's."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from prorl.waits import ORDER, TABLE, WaitOrder, wait_limit_s

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("order", ORDER, ids=lambda order: order.names[0])
def test_what_ends_first_is_shorter(order: WaitOrder) -> None:
    """The last of `supervisor.stop*` also leaves a second to the process, as it promises."""
    for shorter, longer in pairwise(order.names):
        assert wait_limit_s(shorter) < wait_limit_s(longer), order.why


def test_stages_of_a_chain_leave_within_what_a_worker_has_to_end() -> None:
    leave_s = wait_limit_s("chain.leave") + wait_limit_s("chain.end_first")
    assert leave_s <= wait_limit_s("supervisor.stop_worker") - 1


def test_every_row_is_used_by_code_and_every_use_has_a_row() -> None:
    names = [row.name for rows in TABLE.values() for row in rows]
    assert len(set(names)) == len(names)
    used = {
        name
        for folder in ("prorl", "stages", "storage", "trainer")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'wait_limit_s\("([\w.]+)"\)', path.read_text())
    }
    assert used == set(names)


def test_every_row_says_who_waits_what_happens_then_and_why() -> None:
    for rows in TABLE.values():
        for row in rows:
            assert row.seconds > 0
            assert ":" in row.waits or "," in row.waits, row.name
            assert row.then, row.name
            assert row.why.endswith("."), row.name
