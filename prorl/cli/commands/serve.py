"""`prorl serve`: a service that stays until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prorl.cli.commands.status import servers_out
from prorl.cli.options import ConfigFile, JobRoot, ServiceSettings, of
from prorl.cli.output import clean, say
from prorl.cli.settings import Job, check_model, job_settings, service_settings
from prorl.config import ServiceConfig
from prorl.config.layout import about
from prorl.deploy.running import first, http_of, service, signals
from prorl.deploy.tracking import RunTrackers, run_trackers
from prorl.dropin import SERVERS
from prorl.errors import UnavailableError, UserError
from prorl.linux.files import disk_full
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.supervisor.service import Supervisor
    from prorl.types import Json

WATCH_S = 2.0

RUN_S, STOP_S = wait_limit_s("serve.run"), wait_limit_s("serve.stop")


def serve(
    *,
    policy: Annotated[str | None, of(Job, "policy")] = None,
    port: Annotated[int | None, of(ServiceConfig, "http_port", "--port")] = None,
    listen: Annotated[str | None, of(ServiceConfig, "listen")] = None,
    advertise: Annotated[str | None, of(ServiceConfig, "advertise")] = None,
    view: int | None = None,
    guests: Annotated[int | None, of(ServiceConfig, "guests")] = None,
    as_: Annotated[str, Parameter(name="--as")] = "",
    root: JobRoot = None,
    config: ConfigFile = None,
    set_: ServiceSettings = None,
) -> int:
    """Start a long-running service: submit over HTTP, stream over Flight. --policy is for runs that
    name no servers.

    Example: prorl serve --root prorl-runs --policy flaky --port 7700 --view 7788

    Parameters
    ----------
    view
        Port of the pages of `prorl view` over its runs; 0 for any free one. Default: no pages.
    as_
        Also speak the HTTP of another rollout service: nemo-gym or prorl-agent; or NAME:PORT.
    """
    job = job_settings("serve", config, {"policy": policy}, set_ or [])
    keys = {"http_port": port, "listen": listen, "advertise": advertise, "guests": guests}
    values = {**job.service, **{key: value for key, value in keys.items() if value is not None}}
    chosen = policy or ("policy" in job.model_fields_set and job.policy) or ""
    name, _, port_of = as_.partition(":")
    if as_ and (name not in SERVERS or not (port_of or "0").isdecimal()):
        raise UserError(f"--as {as_!r}", f"{', '.join(SERVERS)}, or one with :PORT")
    beside: dict[tuple[str, ...], int] = {} if view is None else {("prorl.view",): view}
    if name:
        beside["prorl.dropin", name] = int(port_of or 0)
    settled = service_settings(values, root, chosen)
    bytes_ok = "`=bytes` where each run names its own model by `renderer.model`"
    check_model(values, settled, f"add --set service.tokenizer=DIR; {bytes_ok}")
    return asyncio.run(_serve(settled, beside))


async def _serve(config: ServiceConfig, beside: Mapping[tuple[str, ...], int]) -> int:
    async with (
        signals() as stop,
        service(config, stop) as running,
        contextlib.AsyncExitStack() as stack,
    ):
        for words, port in beside.items():
            await stack.enter_async_context(_beside(running.config, words, port))
        for line in _lines(running):
            say(line)
        trackers = await stack.enter_async_context(run_trackers(running, say))
        await first(stop, running, _watch(running, trackers))
        say("stopping: finished rollouts are scored and stored; interrupt again to stop at once")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.drain(RUN_S), STOP_S)
    say("stopped")
    return 0


def _lines(running: Supervisor) -> Iterator[str]:
    """Yields the lines that say where the service is, and how it is reached and stopped."""
    root, listener = running.config.root, running.config.listener
    yield f"serving  {running.url}   root {root}"
    yield f"connect  prorl.connect({str(root)!r})   token in {root / 'token'}"
    yield f"layout   {about(running.config)}"
    if not running.config.backends:
        yield (
            "servers  none by --policy: only runs with servers of their own, or of"
            " `prorl backends add`, go on"
        )
    if listener is not None:
        yield f"others   {listener.url}   join files in {root / 'join'}"
    if (at := running.config.guests_at("run-0")) is not None:
        yield f"guests   {at[2]}   tokens by `prorl token new --role guest`"
    yield (
        f"stop     Ctrl-C, or `kill {os.getpid()}` (the supervisor; `prorl status` lists its"
        " processes): finishes cleanly and keeps what was done; open runs go on with the next"
        " `prorl serve` of the same options"
    )


@contextlib.asynccontextmanager
async def _beside(config: ServiceConfig, module: tuple[str, ...], port: int) -> AsyncIterator[None]:
    """Another server over this service, which says in its first line where it listens. Raises
    UnavailableError for one that ends at its start.
    """
    where = {"--service": config.root, "--port": port, "--parent": os.getpid()}
    words = [str(word) for option in where.items() for word in option]
    runs = config.store.url or str(config.root)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m"),
        *(*module, runs, *words),
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    assert other.stdout is not None
    name = " ".join(module)
    try:
        line = (await other.stdout.readline()).decode().rstrip()
        if not line or line.startswith("no "):
            status = await other.wait()
            raise UnavailableError(line or f"{name} ended at its start with exit status {status}")
        say(line)
        watching = asyncio.create_task(_say_its_end(other, name))
        try:
            yield
        finally:
            watching.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            other.terminate()
        await other.wait()


async def _say_its_end(other: asyncio.subprocess.Process, name: str) -> None:
    assert other.stdout is not None
    while line := await other.stdout.readline():
        say(line.decode().rstrip())
    say(f"{name} ended with exit status {await other.wait()}; the service goes on without it")


async def _watch(running: Supervisor, trackers: RunTrackers) -> None:
    """Tell the supervisor of progress, so that a child which dies now and then is no crash loop;
    tell people what rollouts wait for; start the trackers of runs that have come.
    """
    http, trouble, reported = http_of(running), "", set[str]()
    num_restarts, began_at = running.restarts, time.time()
    while True:
        for death in running.deaths_since(num_restarts):
            say(f"restart  {death}: started again; its rollouts go on or begin anew")
        num_restarts = running.restarts
        if running.trouble != trouble:
            trouble = running.trouble
            say(f"waiting  {trouble}" if trouble else "the disk takes writes again")
        with contextlib.suppress(UnavailableError):
            status = await asyncio.to_thread(http.request, "GET", "v1", "status")
            running.note_commits(int(status["commits"]))
            for run in (*status["runs"], *status["ended_runs"]):
                if run["state"] == "open" or (run["finished_at"] or 0) > began_at:
                    trackers.follow(run["run_id"], run["track"])
            blocked = set(_blocked(status, running.config.root))
            for line in sorted(blocked - reported):
                say(line)
            if reported and not blocked:
                say("working  nothing is waited for any more")
            reported = blocked
        await asyncio.sleep(WATCH_S)


def _blocked(status: Mapping[str, Json], root: Path) -> Iterator[str]:
    """Yields what keeps rollouts waiting: servers, runs that do not move, a disk that is full."""
    for line in servers_out(status):
        yield f"waiting  {line}; it is probed on"
    for run in status["runs"]:
        if run["stalled"]:
            yield f"waiting  {run['run_id']} is stalled: {clean(run['stalled'])}"
    for line in status["warnings"]:
        yield f"warning  {clean(line)}"
    if full := disk_full(root):
        yield f"warning  {full}"
