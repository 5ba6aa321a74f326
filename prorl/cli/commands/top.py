"""`prorl top`: a running service, looked at again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prorl.cli.output import clean, is_terminal, say, table
from prorl.client.client import connect
from prorl.errors import UserError
from prorl.types import Json

LOOK_S = 2.0
"""A person waits for the answer."""

CLEAR = "\x1b[2J\x1b[H"


class Sheet(NamedTuple):
    """One table of the display."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def sheets(before: Mapping[str, Json], now: Mapping[str, Json], seconds: float) -> list[Sheet]:
    """Stages with their rates since `before`, backends, runs, from two answers of `/v1/status`."""

    def rate(stage: str, name: str) -> float:
        grown = float(now["stages"][stage][name] - before["stages"][stage][name])
        return round(max(0.0, grown) / seconds, 2)

    stages = [
        (
            f"{stage} *" if stage == now["bottleneck"] else stage,
            int(g["workers"]),
            f"{int(g['busy'])}/{int(g['slots'])}",
            int(g["queued"]),
            rate(stage, "done"),
            rate(stage, "failed"),
            rate(stage, "tokens"),
        )
        for stage, g in now["stages"].items()
    ]
    backends = [
        (
            *(b["name"], b["state"], b["in_flight"], _share(b["reused_share"])),
            clean(b["reason"] or b["alarm"]),
        )
        for b in now["backends"]
    ]
    runs = [
        (
            r["run_id"],
            " ".join(f"{name} {n}" for name, n in r["counts"].items() if n),
            r["reward_mean"],
            _share(r["reused_share"]),
            clean(r["stuck"] or r["alarm"]),
        )
        for r in now["runs"]
        if r["state"] == "open"
    ]
    columns = ("stage", "workers", "busy", "queued", "rows/s", "failed/s", "tokens/s")
    return [
        Sheet(columns, stages),
        Sheet(("backend", "state", "rollouts", "reused", "why"), backends),
        Sheet(("run", "rollouts", "reward", "reused", "why"), runs),
    ]


def top(
    *, root: Path = Path("prorl-runs"), url: str = "", every: float = 2.0, times: int = 0
) -> int:
    """What a service does now, again and again until Ctrl-C.

    Rates of the stages (* holds the others back), backends, open runs.

    Parameters
    ----------
    root
        Folder that the service works on.
    url
        Address of a service elsewhere (its token in PRORL_TOKEN).
    every
        Seconds between looks.
    times
        How many looks; 0 = until Ctrl-C.
    """
    if not 0.1 <= every <= 3600 or times < 0:
        raise UserError(f"--every {every} --times {times}", "0.1 to 3600 seconds, 0 or more times")
    with connect(url or root, retry_s=LOOK_S) as client:
        before, since, looks = client.status(), time.monotonic(), 0
        while not times or looks < times:
            time.sleep(every)
            now, at = client.status(), time.monotonic()
            if is_terminal():
                say(CLEAR + time.strftime("%H:%M:%S"))
            for sheet in sheets(before, now, at - since):
                if sheet.rows:
                    table(sheet.columns, sheet.rows)
                    say()
            before, since, looks = now, at, looks + 1
    return 0


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
