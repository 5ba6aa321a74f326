"""`prorl top`: a running service, looked at again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prorl.cli.options import ServiceRoot, ServiceUrl
from prorl.cli.output import clean, is_terminal, say, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.client.client import Client, connect
from prorl.errors import UserError
from prorl.types import Json

LOOK_S = 2.0
"""A person waits for the answer."""

CLEAR = "\x1b[2J\x1b[H"

STAGE_COLUMNS = ("stage", "workers", "busy", "queued", "rows/s", "failed/s", "tokens/s")
BACKEND_COLUMNS = ("backend", "state", "rollouts", "reused", "why")
RUN_COLUMNS = ("run", "rollouts", "reward", "reused", "why")


class Sheet(NamedTuple):
    """One table of the display."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def sheets(before: Mapping[str, Json], now: Mapping[str, Json], seconds: float) -> list[Sheet]:
    """Stages with their rates since `before`, backends, runs, from two answers of `/v1/status`."""
    stages = [
        _stage_row(name, name == now["bottleneck"], gauges, before["stages"][name], seconds)
        for name, gauges in now["stages"].items()
    ]
    open_runs = [one for one in now["runs"] if one["state"] == "open"]
    return [
        Sheet(STAGE_COLUMNS, stages),
        Sheet(BACKEND_COLUMNS, [_backend_row(one) for one in now["backends"]]),
        Sheet(RUN_COLUMNS, [_run_row(one) for one in open_runs]),
    ]


def _stage_row(
    name: str, slowest: bool, now: Mapping[str, Json], before: Mapping[str, Json], seconds: float
) -> tuple[object, ...]:
    def rate(gauge: str) -> float:
        return round(max(0.0, float(now[gauge] - before[gauge])) / seconds, 2)

    return (
        f"{name} *" if slowest else name,
        int(now["workers"]),
        f"{int(now['busy'])}/{int(now['slots'])}",
        int(now["queued"]),
        rate("done"),
        rate("failed"),
        rate("tokens"),
    )


def _backend_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    why = clean(one["reason"] or one["alarm"])
    return (one["name"], one["state"], one["in_flight"], _share(one["reused_share"]), why)


def _run_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    states = " ".join(f"{name} {n}" for name, n in one["counts"].items() if n)
    why = clean(one["stuck"] or one["alarm"])
    return (one["run_id"], states, one["reward_mean"], _share(one["reused_share"]), why)


def top(
    *, root: ServiceRoot = DEFAULT_ROOT, url: ServiceUrl = "", every: float = 2.0, times: int = 0
) -> int:
    """What a service does now, again and again until Ctrl-C.

    Rates of the stages (* holds the others back), backends, open runs.

    Parameters
    ----------
    every
        Seconds between looks.
    times
        How many looks; 0 = until Ctrl-C.
    """
    if not 0.1 <= every <= 3600 or times < 0:
        raise UserError(f"--every {every} --times {times}", "0.1 to 3600 seconds, 0 or more times")
    with connect(url or root, retry_s=LOOK_S) as client:
        _watch(client, every, times)
    return 0


def _watch(client: Client, every: float, times: int) -> None:
    before, since, looks = client.status(), time.monotonic(), 0
    while not times or looks < times:
        time.sleep(every)
        now, at = client.status(), time.monotonic()
        _show(sheets(before, now, at - since))
        before, since, looks = now, at, looks + 1


def _show(found: Sequence[Sheet]) -> None:
    if is_terminal():
        say(CLEAR + time.strftime("%H:%M:%S"))
    for sheet in found:
        if sheet.rows:
            table(sheet.columns, sheet.rows)
            say()


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
