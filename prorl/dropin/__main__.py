"""`python -m prorl.dropin`: a drop-in server beside `prorl serve`, in a process of its own.

What it puts together for its clients costs the service no time.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from importlib import import_module

from aiohttp import web

from prorl.client import connect
from prorl.dropin import SERVERS
from prorl.dropin.rollouts import RolloutRequests, refusals
from prorl.linux.calls import die_with_parent

MAX_BYTES = 64 << 20
"""Largest request: a task with its repository."""


def app_of(name: str, rollouts: RolloutRequests) -> web.AppRunner:
    """The server of a protocol. Whoever closes a connection cancels what it waits for."""
    app = web.Application(middlewares=[refusals], client_max_size=MAX_BYTES)
    app.add_routes(import_module(SERVERS[name]).routes(rollouts))
    return web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)


async def _serve(name: str, service: str, runs: str, port: int) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with connect(service) as client:
        runner = app_of(name, RolloutRequests(client, runs, name))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            print(f"speaks   {name} at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
            await stop.wait()
        except OSError as error:
            print(f"no {name}: port {port}: {error.strerror}", flush=True)
            return 1
        finally:
            await runner.cleanup()
    return 0


def main() -> int:
    """Serve until a signal comes or the parent ends; 1 when the port is taken."""
    parser = argparse.ArgumentParser(prog="python -m prorl.dropin")
    parser.add_argument("name", choices=[*SERVERS])
    parser.add_argument("runs", help="root of the runs")
    parser.add_argument("--service", required=True, help="root of the service that writes them")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM, arguments.parent)
    return asyncio.run(_serve(arguments.name, arguments.service, arguments.runs, arguments.port))


if __name__ == "__main__":
    sys.exit(main())
