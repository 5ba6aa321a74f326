"""`prorl status`: what a service is doing, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prorl.cli.options import LOOK_S, Flag, JsonObject, ServiceRoot, ServiceUrl
from prorl.cli.output import clean, is_terminal, redrawn, say, say_json, table
from prorl.cli.progress import decided, ended, span
from prorl.cli.runs import DEFAULT_ROOT
from prorl.errors import UserError
from prorl.pluralize import pluralize
from prorl.service.shapes import StepShares
from prorl.types import Json

GAUGES = ("busy", "slots", "queued", "done", "failed")
"""The gauges of a worker, in this order."""
WAITS_MUCH, WAITS_LITTLE = 0.10, 0.05
"""Shares of a trainer's time: above, it lacks rollouts; below, it has more than it needs."""
SERVER_COLUMNS = ("backend", "state", "rollouts", "cached", "reused", "why")
STAGE_COLUMNS = ("stage", "workers", "busy", "queued", "rows/s", "failed/s", "tokens/s")


def status(
    *,
    watch: float | None = None,
    edges: Flag = False,
    root: ServiceRoot = DEFAULT_ROOT,
    url: ServiceUrl = "",
    json: JsonObject = False,
) -> int:
    """Show what the service of a root is doing: its open runs, what needs attention, its model
    servers and its processes.

    Example: prorl status --watch 2

    Parameters
    ----------
    watch
        Look again every so many seconds until Ctrl-C, with the rates of the stages in between
        (* marks the bottleneck).
    edges
        Also list the edges between the stages: who reads where, and whether by memory or socket.
    """
    if watch is not None and not 0.1 <= watch <= 3600:
        raise UserError(f"--watch {watch:g}", "0.1 to 3600 seconds")
    from prorl.client.client import connect  # with Arrow, which `prorl serve` does without

    with connect(url or root, retry_s=LOOK_S) as client:
        answer, since = client.status(), time.monotonic()
        if watch is None:
            if json:
                say_json(answer)
            else:
                _show(answer, edges=edges)
            return 0
        while True:
            time.sleep(watch)
            before, began = answer, since
            answer, since = client.status(), time.monotonic()
            if json:
                say_json(answer)
                continue
            if not is_terminal():
                _show(answer, (before, since - began), edges=edges)
                continue
            with redrawn():
                say(time.strftime("%H:%M:%S"))
                _show(answer, (before, since - began), edges=edges)


def speeds(before: Mapping[str, Json], now: Mapping[str, Json], seconds: float) -> Iterator[str]:
    """Yields each open run's rollouts a second between two answers, and the time remaining."""
    earlier = {run["run_id"]: ended(run) for run in before.get("runs", ()) if "counts" in run}
    for run in now.get("runs", ()):
        if run.get("state") != "open" or run["run_id"] not in earlier:
            continue
        done, total = ended(run), sum(run["counts"].values())
        rate = max(0, done - earlier[run["run_id"]]) / seconds
        remaining = f", about {span((total - done) / rate)} left" if rate and done < total else ""
        yield f"{run['run_id']}: {rate:.1f} rollouts/s{remaining}"


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


def _show(
    answer: Mapping[str, Json],
    before: tuple[Mapping[str, Json], float] | None = None,
    *,
    edges: bool,
) -> None:
    """Print an answer, runs first. `before`: an earlier answer, and the seconds since."""
    if "workers" not in answer:  # a role that may see its own run only
        run_rows = ((run["run"], run["delivered"], run["end"]) for run in answer.get("runs", []))
        table(("run", "delivered", "end"), run_rows)
        return
    if runs := (*answer["runs"], *answer["ended_runs"]):
        table(("run", "state", "rollouts", "reward", "reused"), map(_run_row, runs))
    if not answer["runs"]:
        say("no run is open: a trainer's create_run makes one; `prorl run` needs a root of its own")
    for line in (*(speeds(before[0], answer, before[1]) if before else ()), *remarks(answer)):
        say(line)
    if before:
        say()
        table(STAGE_COLUMNS, stage_rows(before[0], answer, before[1]))
    if answer["backends"]:
        say()
        table(SERVER_COLUMNS, map(server_row, answer["backends"]))
    say()
    _show_processes(answer)
    if edges:
        say()
        table(("edge", "to", "endpoint", "by"), map(_edge_row, answer["edges"]))


def _show_processes(answer: Mapping[str, Json]) -> None:
    gateway = ("gateway", "gateway", answer["pid"], *("-" for _ in ("in flight", *GAUGES)))
    columns = ["worker", "role", "pid", "in flight", *GAUGES]
    rows: list[tuple[object, ...]] = [gateway, *map(_worker_row, answer["workers"])]
    hosts = [process["host"] for process in (answer, *answer["workers"])]
    if len(set(hosts)) > 1:
        columns.append("host")
        rows = [(*row, host) for row, host in zip(rows, hosts, strict=True)]
    table(columns, rows)
    supervisor = answer["supervisor_pid"]
    say(
        f"pid {supervisor} is the supervisor: it starts these processes again when they die, and"
        f" `kill {supervisor}` stops the service"
    )


def server_row(server: Mapping[str, Json]) -> tuple[object, ...]:
    """Returns a model server's row of a table with `SERVER_COLUMNS`."""
    shares = (server["cached_share"], server["reused_share"])
    return (
        server["name"],
        server["state"] if server["in_pool"] else f"{server['state']}, of a run",
        server["in_flight"],
        *("-" if share is None else f"{share:.0%}" for share in shares),
        clean(server["reason"]),
    )


def _worker_row(worker: Mapping[str, Json]) -> tuple[object, ...]:
    gauges = (worker["stats"].get(name, "-") for name in GAUGES)
    return (worker["worker"], worker["role"], worker["pid"], worker["in_flight"], *gauges)


def _edge_row(edge: Mapping[str, Json]) -> tuple[object, ...]:
    how = "memory" if edge["in_memory"] else "socket"
    return (edge["edge"], edge["worker"], edge["endpoint"], how)


def _run_row(run: Mapping[str, Json]) -> tuple[object, ...]:
    states = " ".join(f"{state} {n}" for state, n in run["counts"].items() if n)
    reused = "-" if run["reused_share"] is None else f"{run['reused_share']:.0%}"
    return (run["run_id"], run["state"], states, run["mean_reward"], reused)


def remarks(answer: Mapping[str, Json], run: str = "") -> Iterator[str]:
    """Yields what needs a look: the slowest stage, runs (or one) and servers in trouble."""
    if (slowest := answer["bottleneck"]) and not run:
        stage = answer["stages"][slowest]
        busy = f"{stage['busy']:.0f} of {pluralize(round(stage['slots']), 'slot')} busy"
        yield f"bottleneck: {slowest.upper()} ({busy}, {stage['queued']:.0f} queued)"
    for row in answer["runs"]:
        if run in ("", row["run_id"]) and row["stalled"]:
            how = "stalled" if row["state"] == "open" else row["state"]
            yield f"{row['run_id']} is {how}: {clean(row['stalled'])}"
        if run in ("", row["run_id"]) and row["idle"]:
            yield f"{row['run_id']} is idle: {clean(row['idle'])}"
        if run in ("", row["run_id"]) and row["state"] == "open" and (words := decided(row)):
            yield f"{row['run_id']}: {words}"
        if (
            run in ("", row["run_id"])
            and row["state"] != "open"
            and (count := row["uncommitted_groups"])
        ):
            groups = f"{pluralize(count, 'group')} that its trainer has not committed"
            yield f"{row['run_id']} is {row['state']}, and keeps {groups}"
        if run in ("", row["run_id"]) and (failures := row["failures"]):
            words = ", ".join(f"{number:,} {clean(code)}" for code, number in failures.items())
            yield (
                f"{row['run_id']}: attempts that ended without a result: {words};"
                f" `prorl sql {row['run_id']} 'select * from attempts'` has each"
            )
        if run in ("", row["run_id"]) and row["state"] == "open" and (steps := row["steps"]):
            yield f"{row['run_id']}: {step_words(steps)}"
    for worker in answer.get("workers", ()):
        if worker["lease_block_reason"]:
            yield f"{worker['node']} gets no leases: {worker['lease_block_reason']}"
    for server in answer["backends"]:
        if number := server["refused_replies"]:
            replies = f"{pluralize(number, 'reply', 'replies')}, refused and asked again"
            yield f"{server['name']} contradicted itself in {replies}"
    yield from servers_out(answer)
    yield from answer["warnings"]


def servers_out(answer: Mapping[str, Json]) -> Iterator[str]:
    """Yields the model servers that get no work, each with the reason."""
    for server in answer["backends"]:
        if server["state"] in ("ejected", "fenced"):
            reason = clean(server["reason"]) or "not ready yet"
            yield f"{server['name']} is {server['state']}: {reason}"


def step_words(steps: StepShares) -> str:
    """Returns the words for where the time of a trainer's steps went, and what to scale."""
    waited, idle = steps["trainer_wait_share"], steps["idle_slot_share"]
    advice = "The trainer is fed well"
    if waited > WAITS_MUCH:
        scaled = idle is not None and idle > WAITS_MUCH
        how = "raise max_open_groups or max_staleness" if scaled else "add model servers or slots"
        advice = f"To feed the trainer, {how}"
    elif waited < WAITS_LITTLE:
        advice = "Fewer model servers or slots would do"
    idled = "" if idle is None else f" slots idled {idle * 100:.0f} %,"
    return (
        f"of its last {pluralize(steps['steps'], 'step')} the trainer waited {waited * 100:.0f} %,"
        f"{idled}"
        f" {steps['wasted_share'] * 100:.0f} % of the work was wasted. {advice}"
    )
