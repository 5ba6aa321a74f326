"""`prorl bench concurrency`, small; what it says where the machine has no room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prorl.bench.concurrency import Look, check_room, figures, measured
from prorl.errors import UserError
from prorl.sandbox.kind import MAX_PTYS, room, short_of_terminals


def test_too_few_terminals_are_reported_with_the_command_that_raises_the_limit() -> None:
    assert short_of_terminals(room()) == ""
    message = short_of_terminals(room() + 1)
    suggested_limit = re.search(r"sysctl -w kernel.pty.max=(\d+)$", message)
    assert suggested_limit
    reserve = int(Path("/proc/sys/kernel/pty/reserve").read_text())
    assert int(suggested_limit[1]) == (room() + 1) * MAX_PTYS + reserve
    with pytest.raises(UserError, match=r"expected enough for 1000000 rollouts in hand; sysctl"):
        check_room(1_000_000)


def test_what_the_service_costs_without_work_is_subtracted() -> None:
    looks = [
        Look(
            at_s=10.0, cpu_s=5.0, pss_mb=300.0, sandboxes_mb=50.0, processes=8, most_descriptors=9
        ),
        Look(
            at_s=14.0, cpu_s=7.0, pss_mb=700.0, sandboxes_mb=440.0, processes=9, most_descriptors=9
        ),
        Look(
            at_s=24.0, cpu_s=7.5, pss_mb=800.0, sandboxes_mb=450.0, processes=9, most_descriptors=9
        ),
    ]
    value_by_figure = {row.name: row.value for row in figures(100, *looks)}
    assert value_by_figure["begin_s.100"] == 4.0
    assert value_by_figure["begin_cpu_ms.100"] == pytest.approx(20.0)
    assert value_by_figure["pss_mb.100"] == pytest.approx(5.0)
    assert value_by_figure["idle_cores.100"] == pytest.approx(0.05)


@pytest.mark.slow
async def test_the_bench_keeps_rollouts_open_in_a_real_service() -> None:
    row_by_figure = {row.name: row for row in await measured(4, 1.0)}
    assert 1.0 < row_by_figure["pss_mb.4"].value < 100.0
    assert row_by_figure["processes.4"].value >= 4 * 2, "a tool server and its shell each"
