"""`python -m prorl.deploy.placed SCHEDULER --name N --join FILE --placer DIR`: a node of Dask's.

The process is the node: its supervisor runs sandboxd, INIT, RUN and EVAL as `prorl node` does. In
its loop it holds a Dask `Worker` as a handle, by which the cluster sees it and asks it to leave.
Dask schedules nothing here and holds no truth: when the scheduler dies the node goes on and
registers with the next one; when Dask retires the worker the node leaves (`leaving.py`).

It takes the arguments of `dask worker` that it needs and passes over the others, so that
dask-jobqueue can start it as its `worker_command`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import dask
from distributed import Worker
from distributed.security import Security

from prorl.config import ServiceConfig, parse
from prorl.config.file import load_file
from prorl.deploy.leaving import LeaveRequests, leave_requests, outlast_slurm, seconds, stay
from prorl.deploy.node import address_towards, keep_certificate, node
from prorl.deploy.placer import security
from prorl.errors import ProrlError
from prorl.net.join import Join

RETRY_S = 1.0
"""Between attempts to register with a scheduler that is away."""

REFUSALS = (OSError, TimeoutError, ValueError, RuntimeError)
"""The errors that a scheduler raises that is away, and one that refuses: while it believes in an
earlier incarnation of the node, the node's name is taken.
"""

RETIRED = "scheduler-"
"""The beginning of the reason with which Dask closes a worker that it retires."""

FRUGAL = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.monitor-interval": "5s",
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
}
"""A handle does no work: measured 3 instead of 30 ms of CPU a second."""

log = logging.getLogger("prorl.deploy")


class Handle(Worker):  # type: ignore[misc]
    """A Dask worker that remembers why it was closed."""

    why = ""

    def start_http_server(self, *_: object, **__: object) -> None:
        """Start none: a handle has nothing to show."""

    async def close(self, *args: object, reason: str = "worker-close", **kwargs: object) -> object:
        self.why = self.why or reason
        return await super().close(*args, reason=reason, **kwargs)


async def be_seen(scheduler: str, name: str, tls: Security) -> None:
    """Hold a handle until Dask retires it.

    It registers again for as long as the scheduler is away or refuses.
    """
    while True:
        try:
            async with Handle(
                scheduler,
                name=name,
                nthreads=1,
                resources={"NODE": 1},
                dashboard=False,
                security=tls,
                host=address_towards(scheduler),
            ) as handle:
                log.info("registered with %s", scheduler)
                await handle.finished()
                if handle.why.startswith(RETIRED):
                    return
        except REFUSALS as error:
            log.info("not registered with %s: %s", scheduler, error)
        await asyncio.sleep(RETRY_S)


async def serve(
    scheduler: str,
    name: str,
    join: Join,
    tls: Security,
    config: ServiceConfig,
    remaining_s: float | None,
) -> None:
    """Starts a placed node, watches it, ends it."""
    async with leave_requests(config) as requests:
        supervisor = await asyncio.to_thread(node, join, config)
        async with supervisor:
            log.info("node %s works", name)
            seen = leave_when_retired(scheduler, name, tls, requests, config.drain_s)
            await stay(
                supervisor, requests, remaining_s, seen, keep_certificate(join, supervisor.config)
            )
        await outlast_slurm(requests)


async def leave_when_retired(
    scheduler: str, name: str, tls: Security, requests: LeaveRequests, drain_s: float
) -> None:
    """Be seen by Dask; ask to leave when it retires the node, then for ever nothing."""
    await be_seen(scheduler, name, tls)
    requests.ask("Dask", drain_s)
    await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 1 with one line for what somebody can mend."""
    args, _ = _parser().parse_known_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    dask.config.set(FRUGAL)
    scratch = Path(tempfile.gettempdir()) / f"prorl-node-{args.name}-{os.getpid()}"
    try:
        settings = args.placer / "nodes.json"
        values = {**load_file(settings), "root": scratch, "node_id": args.name}
        config = parse(ServiceConfig, values, str(settings))
        join, tls = Join.read(args.join), security(args.placer)
        asyncio.run(serve(args.scheduler, args.name, join, tls, config, args.walltime))
    except ProrlError as error:
        log.error("%s", error)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m prorl.deploy.placed")
    parser.add_argument("scheduler")
    parser.add_argument("--name", required=True)
    parser.add_argument("--join", type=Path, required=True)
    parser.add_argument("--placer", type=Path, required=True, help="folder below ROOT/placers")
    parser.add_argument("--walltime", type=seconds, help="remaining walltime, as Slurm writes it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
