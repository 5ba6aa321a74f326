"""Runs a process of the service from start to end: gateway, stage workers and store alike.

Their mains say what they serve, this says how.

It dies with its parent (asked of the kernel, before anything else). It logs JSON lines on stderr,
its own and the libraries'. It prints `ready {json}` on stdout when others can reach it. SIGTERM and
SIGINT set an event. It leaves with 0, with EXIT_DRAINED when its work is done, with 1 and a line
for each error that somebody can mend, or with 70 and a traceback for a bug of ours; always by
`os._exit`, since threads inside gRPC would keep it alive. Its loop beats for the supervisor
(`prorl/linux/heartbeat.py`). A task or callback that dies with nobody waiting for it ends the
process: silence in one part of it is a hang of all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import orjson

from prorl.config import ServiceConfig, check_failpoints, parse
from prorl.errors import ConfigError, DiskRefusedError, FencedError, ProrlError
from prorl.flight import FlightNetwork, trace, tune
from prorl.flight.control_client import REFUSALS
from prorl.linux import crashes, heartbeat
from prorl.linux.calls import die_with_parent
from prorl.linux.forked import EXIT_CRASHED, EXIT_DISK, EXIT_DRAINED, EXIT_REFUSED, EXIT_REPLACED
from prorl.net.bearer import keys_of
from prorl.net.join import SERVICE_FILE
from prorl.net.tls import LiveCredentials
from prorl.timing import run
from prorl.types import Json

SWITCH_S = 0.0005
"""The seconds for which a busy Python thread may keep the others waiting: a stream's threads hand
over in microseconds, the default is 5 ms.
"""

Serve = Callable[[ServiceConfig], Coroutine[Any, Any, int | None]]
"""Its answer is the exit code; None is 0."""


_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "taskName"}
"""The attributes that every record has; the rest was given as `extra`."""


class JsonLines(logging.Formatter):
    """One JSON object a line: `at`, `level`, `logger`, `event`. And what was given as `extra`, and
    a `traceback` where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Json] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in _PLAIN and k not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def credentials_of(config: ServiceConfig) -> LiveCredentials | None:
    """Returns what this process shows to other hosts; None when the service is not to be reached by
    any.
    """
    return (
        LiveCredentials(config.tls_dir / SERVICE_FILE) if config.listen or config.gateway else None
    )


def command_line(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, required=True, help="ROOT/service.json")
    return parser


def live(config: Path, serve: Serve, *, streams: bool = False) -> NoReturn:
    """Serve until `serve` returns or fails. `streams`: this process moves trajectories, not only
    control rows; its threads hand over sooner.
    """
    # Every process of ours dies with its parent, and reports in lines of JSON.
    die_with_parent(signal.SIGKILL)
    gc.freeze()  # what was imported stays: no collection looks through it
    gc.enable()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    sys.excepthook = _crash
    if streams:
        sys.setswitchinterval(SWITCH_S)
        tune()
    status = 0
    try:
        check_failpoints()
        resolved = _resolved(config)
        status = run(_lively(serve(resolved))) or 0
    except* ProrlError as group:
        status = 1
        for error in _leaves(group):
            logging.error("%s", error)
            status = EXIT_REPLACED if isinstance(error, FencedError) else status
            status = EXIT_REFUSED if isinstance(error, REFUSALS) else status
            status = EXIT_DISK if isinstance(error, DiskRefusedError) else status
    _leave(status)


def _resolved(path: Path) -> ServiceConfig:
    """Returns what the supervisor has written. Raises ConfigError."""
    try:
        values = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path}: {error}", "ROOT/service.json") from None
    return parse(ServiceConfig, values, str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePart:
    ready: Mapping[str, Json]
    """The facts that others must know to reach it."""
    work: Awaitable[None]
    """Ends when it has nothing more to do; raises what broke it."""


Serving = Callable[[ServiceConfig, FlightNetwork], AbstractAsyncContextManager[ServicePart]]
"""Entered, the part can be reached; left, it has ended in order."""


async def serve_part(name: str, serving: Serving, config: ServiceConfig) -> int:
    """Serve one part of the service until its work ends, or SIGTERM or SIGINT; its exit code."""
    if config.trace:
        trace.start(config.root / "trace", name)
    stop, credentials = stopping(), credentials_of(config)
    async with (
        FlightNetwork(config.token, credentials, keys_of(config)) as network,
        serving(config, network) as part,
    ):
        settle_heap()
        say_ready(**part.ready)
        work = asyncio.ensure_future(part.work)
        await until_first(work, stop.wait())
        ended = work.done()
        work.cancel()  # what ends around it from here on is no failure of its
        await asyncio.gather(work, return_exceptions=True)
        return EXIT_DRAINED if ended else 0


def settle_heap() -> None:
    """Leaves what was made until now out of every later garbage collection. So that one
    costs by what has come since and stops the loop for milliseconds.
    """
    gc.collect()
    gc.freeze()


async def _lively(work: Coroutine[Any, Any, int | None]) -> int | None:
    asyncio.get_running_loop().set_exception_handler(_loudly)
    heartbeat.start()
    crashes.start()
    return await work


def _loudly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process for an exception that nobody waits for: asyncio would only log it. Not for a
    connection's.
    """
    error = context.get("exception")
    if error is None or isinstance(error, OSError):
        loop.default_exception_handler(context)
    else:
        _crash(type(error), error, error.__traceback__)


def stopping() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def say_ready(**values: Json) -> None:
    print("ready " + orjson.dumps(values).decode(), flush=True)


async def until_first(*works: Awaitable[Any]) -> None:
    """Wait until one of these ends; raises what it raised. The others go on: whoever owns them ends
    them.
    """
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(work) for work in works], return_when=asyncio.FIRST_COMPLETED
    )
    for future in done:
        future.result()


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.critical("crashed: %s", error, exc_info=(kind, error, trace))
    _leave(EXIT_CRASHED)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    crashes.clear()
    os._exit(status)
