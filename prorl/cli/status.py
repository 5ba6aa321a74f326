"""`prorl status`: what the service of a root is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def status(*, root: Path = Path("prorl-runs"), url: str = "", json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """What the service of a root is doing: its workers, its open runs.

    Parameters
    ----------
    root
        Folder that the service works on.
    url
        Address of a service elsewhere (its token in PRORL_TOKEN).
    json
        Print JSON.
    """
    from prorl.cli.output import say_json, table
    from prorl.client.client import connect

    with connect(url or root) as client:
        found = client.status()
    if json:
        say_json(found)
        return 0
    workers = found.get("workers", [])
    stats = [worker.get("stats") or {} for worker in workers]
    rows = [
        (worker["name"], worker["role"], worker["pid"], s.get("busy", "-"), s.get("slots", "-"), s.get("queued", "-"), s.get("done", "-"))
        for worker, s in zip(workers, stats, strict=True)
    ]
    table(("worker", "role", "pid", "busy", "slots", "queued", "done"), rows)
    return 0
