"""`prorl status`: what the service of a root is doing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl.cli.options import JsonObject, ServiceRoot, ServiceUrl
from prorl.cli.output import clean, say, say_json, table
from prorl.cli.runs import DEFAULT_ROOT
from prorl.cli.waits import image_making_s, image_words
from prorl.client.client import connect
from prorl.config import ServiceConfig, parse
from prorl.config_file import load_file
from prorl.types import Json

LOOK_S = 2.0
"""A person waits for the answer."""

GAUGES = ("busy", "slots", "queued", "done", "failed")
"""Of a worker, in this order."""


def status(
    *, root: ServiceRoot = DEFAULT_ROOT, url: ServiceUrl = "", json: JsonObject = False
) -> int:
    """What the service of a root is doing: its workers, its open runs."""
    with connect(url or root, retry_s=LOOK_S) as client:
        found = client.status()
    if json:
        say_json(found)
        return 0
    if "workers" not in found:
        table(("run", "delivered", "end"), [_narrow_row(one) for one in found.get("runs", [])])
        return 0
    table(("worker", "role", "pid", "held", *GAUGES), map(_worker_row, found["workers"]))
    if found["runs"]:
        table(("run", "state", "rollouts", "reward", "reused"), map(_run_row, found["runs"]))
    for line in _remarks(found):
        say(line)
    if not url and found["stages"].get("init", {}).get("busy"):
        _say_image(root)
    return 0


def _say_image(root: Path) -> None:
    """Say what the INIT of a service on this host waits for, where that is an image."""
    file = root / "service.json"
    if file.exists():
        images = parse(ServiceConfig, load_file(file), str(file)).sandbox.images
        if making_s := image_making_s(images):
            say(image_words(making_s))


def _narrow_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    """What a role sees that may see its own run only."""
    return (one["run"], one["delivered"], one["end"])


def _worker_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    gauges = (one["stats"].get(name, "-") for name in GAUGES)
    return (one["worker"], one["role"], one["pid"], one["held"], *gauges)


def _run_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    states = " ".join(f"{state} {n}" for state, n in one["counts"].items() if n)
    states += f" ({one['suspended']} stand still)" if one["suspended"] else ""
    reused = "-" if one["reused_share"] is None else f"{one['reused_share']:.0%}"
    return (one["run_id"], one["state"], states, one["reward_mean"], reused)


def _remarks(found: Mapping[str, Json]) -> Iterator[str]:
    """What a person should look at: the slowest stage, runs and servers with a problem."""
    if slowest := found["bottleneck"]:
        stage = found["stages"][slowest]
        busy = f"{stage['busy']:.0f} of {stage['slots']:.0f} slots busy"
        yield f"{slowest.upper()} holds the others back: {busy}, {stage['queued']:.0f} queued"
    for one in found["runs"]:
        if one["stuck"]:
            yield f"{one['run_id']} is stuck: {clean(one['stuck'])}"
    for one in found["runs"]:
        if one["alarm"]:
            yield f"{one['run_id']}: {clean(one['alarm'])}"
    for one in found["backends"]:
        if one["state"] in ("ejected", "fenced"):
            yield f"{one['name']} is {one['state']}: {clean(one['reason']) or 'not ready yet'}"
        if one["alarm"]:
            yield f"{one['name']}: {clean(one['alarm'])}"
