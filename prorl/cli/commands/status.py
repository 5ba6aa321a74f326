"""`prorl status`: what the service of a root is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import clean, say, say_json, table
from prorl.client.client import connect

LOOK_S = 2.0
"""A person waits for the answer."""


def status(
    *,
    root: Path = Path("prorl-runs"),
    url: str = "",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
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
    with connect(url or root, retry_s=LOOK_S) as client:
        found = client.status()
    if json:
        say_json(found)
        return 0
    if "workers" not in found:
        table(
            ("run", "delivered", "end"),
            [(one["run"], one["delivered"], one["end"]) for one in found.get("runs", [])],
        )
        return 0
    gauges = ("busy", "slots", "queued", "done", "failed")
    rows = [
        (
            w["worker"],
            w["role"],
            w["pid"],
            w["held"],
            *(w["stats"].get(name, "-") for name in gauges),
        )
        for w in found["workers"]
    ]
    table(("worker", "role", "pid", "held", *gauges), rows)
    states = [
        (
            r["run_id"],
            r["state"],
            " ".join(f"{k} {n}" for k, n in r["counts"].items() if n),
            r["reward_mean"],
            "-" if r["reused_share"] is None else f"{r['reused_share']:.0%}",
        )
        for r in found["runs"]
    ]
    if states:
        table(("run", "state", "rollouts", "reward", "reused"), states)
    if found["bottleneck"]:
        stage = found["stages"][found["bottleneck"]]
        say(
            f"{found['bottleneck'].upper()} holds the others back:"
            f" {stage['busy']:.0f} of {stage['slots']:.0f} slots busy, {stage['queued']:.0f} queued"
        )
    for one in found["runs"]:
        if one["stuck"]:
            say(f"{one['run_id']} is stuck: {clean(one['stuck'])}")
    for one in found["runs"]:
        if one["alarm"]:
            say(f"{one['run_id']}: {clean(one['alarm'])}")
    for one in found["backends"]:
        if one["state"] in ("ejected", "fenced"):
            say(f"{one['name']} is {one['state']}: {clean(one['reason']) or 'not ready yet'}")
        if one["alarm"]:
            say(f"{one['name']}: {clean(one['alarm'])}")
    return 0
