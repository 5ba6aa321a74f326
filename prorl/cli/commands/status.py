"""`prorl status`: what a service is doing, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prorl.cli.options import LOOK_S, JsonObject, ServiceRoot, ServiceUrl
from prorl.cli.output import clean, is_terminal, redrawn, say, say_json, table
from prorl.cli.progress import decided, ended, span
from prorl.cli.runs import DEFAULT_ROOT
from prorl.errors import UserError
from prorl.types import Json

GAUGES = ("busy", "slots", "queued", "done", "failed")
"""Of a worker, in this order."""
WAITS_MUCH, WAITS_LITTLE = 0.10, 0.05
"""Of a trainer's time: above, it lacks rollouts; below, it has more than it needs."""
STAGE_COLUMNS = ("stage", "workers", "busy", "queued", "rows/s", "failed/s", "tokens/s")


def status(
    *,
    watch: float | None = None,
    root: ServiceRoot = DEFAULT_ROOT,
    url: ServiceUrl = "",
    json: JsonObject = False,
) -> int:
    """What the service of a root is doing: its workers, its open runs, what needs a look.

    Example: prorl status --watch 2

    Parameters
    ----------
    watch
        Look again every so many seconds until Ctrl-C, with the rates of the stages in between
        (* marks the bottleneck).
    """
    if watch is not None and not 0.1 <= watch <= 3600:
        raise UserError(f"--watch {watch:g}", "0.1 to 3600 seconds")
    from prorl.client.client import connect  # with Arrow, which `prorl serve` does without

    with connect(url or root, retry_s=LOOK_S) as client:
        found, since = client.status(), time.monotonic()
        if watch is None:
            if json:
                say_json(found)
            else:
                _show(found)
            return 0
        while True:
            time.sleep(watch)
            before, began = found, since
            found, since = client.status(), time.monotonic()
            if json:
                say_json(found)
                continue
            if not is_terminal():
                _show_rates(before, found, since - began)
                continue
            with redrawn():
                say(time.strftime("%H:%M:%S"))
                _show_rates(before, found, since - began)


def _show_rates(before: Mapping[str, Json], now: Mapping[str, Json], seconds: float) -> None:
    if "stages" in now:
        table(STAGE_COLUMNS, stage_rows(before, now, seconds))
        say()
    _show(now)
    for line in speeds(before, now, seconds):
        say(line)


def speeds(before: Mapping[str, Json], now: Mapping[str, Json], seconds: float) -> Iterator[str]:
    """Of each open run: rollouts a second between two answers, and how long the rest takes."""
    earlier = {one["run_id"]: ended(one) for one in before.get("runs", ()) if "counts" in one}
    for one in now.get("runs", ()):
        if one.get("state") != "open" or one["run_id"] not in earlier:
            continue
        done, total = ended(one), sum(one["counts"].values())
        rate = max(0, done - earlier[one["run_id"]]) / seconds
        left = f", about {span((total - done) / rate)} left" if rate and done < total else ""
        yield f"{one['run_id']}: {rate:.1f} rollouts/s{left}"


def stage_rows(
    before: Mapping[str, Json], now: Mapping[str, Json], seconds: float
) -> list[tuple[object, ...]]:
    """Stages with their rates, from two answers of `/v1/status`."""
    rows: list[tuple[object, ...]] = []
    for name, gauges in now["stages"].items():
        rates = (
            round(max(0.0, float(gauges[gauge] - before["stages"][name][gauge])) / seconds, 2)
            for gauge in ("done", "failed", "tokens")
        )
        rows.append(
            (
                f"{name} *" if name == now["bottleneck"] else name,
                int(gauges["workers"]),
                f"{int(gauges['busy'])}/{int(gauges['slots'])}",
                int(gauges["queued"]),
                *rates,
            )
        )
    return rows


def _show(found: Mapping[str, Json]) -> None:
    if "workers" not in found:  # a role that may see its own run only
        known = ((one["run"], one["delivered"], one["end"]) for one in found.get("runs", []))
        table(("run", "delivered", "end"), known)
        return
    gateway = ("gateway", "gateway", found["pid"], *("-" for _ in ("held", *GAUGES)))
    columns = ["worker", "role", "pid", "held", *GAUGES]
    rows: list[tuple[object, ...]] = [gateway, *map(_worker_row, found["workers"])]
    hosts = [one["host"] for one in (found, *found["workers"])]
    if len(set(hosts)) > 1:
        columns.append("host")
        rows = [(*row, host) for row, host in zip(rows, hosts, strict=True)]
    table(columns, rows)
    if found["edges"]:
        table(("edge", "to", "endpoint", "by"), map(_edge_row, found["edges"]))
    if found["runs"]:
        table(("run", "state", "rollouts", "reward", "reused"), map(_run_row, found["runs"]))
    for line in remarks(found):
        say(line)


def _worker_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    gauges = (one["stats"].get(name, "-") for name in GAUGES)
    return (one["worker"], one["role"], one["pid"], one["held"], *gauges)


def _edge_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    how = "memory" if one["in_memory"] else "socket"
    return (one["edge"], one["worker"], one["endpoint"], how)


def _run_row(one: Mapping[str, Json]) -> tuple[object, ...]:
    states = " ".join(f"{state} {n}" for state, n in one["counts"].items() if n)
    reused = "-" if one["reused_share"] is None else f"{one['reused_share']:.0%}"
    return (one["run_id"], one["state"], states, one["reward_mean"], reused)


def remarks(found: Mapping[str, Json], run: str = "") -> Iterator[str]:
    """What a person should look at: the slowest stage, runs (or one) and servers in trouble."""
    if (slowest := found["bottleneck"]) and not run:
        stage = found["stages"][slowest]
        busy = f"{stage['busy']:.0f} of {stage['slots']:.0f} slots busy"
        yield f"bottleneck: {slowest.upper()} ({busy}, {stage['queued']:.0f} queued)"
    for one in found["runs"]:
        if run in ("", one["run_id"]) and one["stalled"]:
            how = "stalled" if one["state"] == "open" else one["state"]
            yield f"{one['run_id']} is {how}: {clean(one['stalled'])}"
        if run in ("", one["run_id"]) and one["state"] == "open" and (words := decided(one)):
            yield f"{one['run_id']}: {words}"
        if (
            run in ("", one["run_id"])
            and one["state"] != "open"
            and (count := one["uncommitted_groups"])
        ):
            how = "its trainer has not committed: they stay until it does"
            yield f"{one['run_id']} is {one['state']}, with {count:,} kept groups that {how}"
        if run in ("", one["run_id"]) and (failures := one["failures"]):
            words = ", ".join(f"{number:,} {clean(what)}" for what, number in failures.items())
            yield (
                f"{one['run_id']}: attempts that ended without a row: {words};"
                f" `prorl sql {one['run_id']} 'select * from attempts'` has each"
            )
        if run in ("", one["run_id"]) and (steps := one["steps"]):
            yield f"{one['run_id']}: {step_words(steps)}"
    for one in found.get("workers", ()):
        if one["lease_block_reason"]:
            yield f"{one['node']} gets no leases: {one['lease_block_reason']}"
    for one in found["backends"]:
        if number := one["refused_replies"]:
            yield f"{one['name']} contradicted itself in {number} replies, refused and asked again"
    yield from servers_out(found)
    yield from found["warnings"]


def servers_out(found: Mapping[str, Json]) -> Iterator[str]:
    """Model servers that get no work, each with the reason."""
    for one in found["backends"]:
        if one["state"] in ("ejected", "fenced"):
            yield f"{one['name']} is {one['state']}: {clean(one['reason']) or 'not ready yet'}"


def step_words(steps: Mapping[str, Json]) -> str:
    """Where the time of a trainer's steps went, and what to scale."""
    waited, idle = steps["trainer_wait_share"], steps["idle_slot_share"]
    advice = "The trainer is fed well"
    if waited > WAITS_MUCH:
        scaled = idle is not None and idle > WAITS_MUCH
        how = "raise max_open_groups or max_staleness" if scaled else "add model servers or slots"
        advice = f"To feed the trainer, {how}"
    elif waited < WAITS_LITTLE:
        advice = "Fewer rollouts would do"
    idled = "" if idle is None else f" slots idled {idle * 100:.0f} %,"
    return (
        f"of its last {steps['steps']} steps the trainer waited {waited * 100:.0f} %,{idled}"
        f" {steps['wasted'] * 100:.0f} % of the work was wasted. {advice}"
    )
