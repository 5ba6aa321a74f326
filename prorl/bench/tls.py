"""`prorl bench tls`: what mutual TLS costs a trainer on another host (a network namespace).

The same trajectories from the store's endpoint over Flight with mutual TLS, over plain Flight, over
a raw TLS socket of Python's `ssl` and over a raw socket, in turns, so that a busy neighbour meets
all of them. Rows: GB/s (median and best), CPU seconds a GB of both ends; what TLS adds to the CPU
of a rollout that moves `ROLLOUT_BYTES` to gateway, store and trainer, beside the `ROLLOUT_CPU_S`
that all processes of a pipeline without sandboxes take for it (`prorl bench pipeline`). Needs root.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from prorl.bench.children import Answering
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.bench.stream import make_runs
from prorl.bench.tls_ends import FLIGHT, RAW
from prorl.bench.wire import HERE, far_apart
from prorl.tls import Authority

ROUNDS, QUICK = 24, 8
ROLLOUT_BYTES = 42_000
"""Of 3,200 tokens: 34 kB to gateway and store, 8 kB back."""
ROLLOUT_CPU_S = 0.0024
PATHS = (*FLIGHT, *RAW)


async def run(quick: bool) -> Report:
    """Measure all paths."""
    with tempfile.TemporaryDirectory(prefix="prorl-tls-") as folder, far_apart(0.0) as ends:
        path = Path(folder)
        run_dir = (await asyncio.to_thread(make_runs, path))[0]
        authority = Authority.of(path / "tls")
        for role in ("service", "trainer"):
            authority.credentials(role).write(path / f"{role}.json")
        module = (sys.executable, "-m", "prorl.bench.tls_ends")
        async with AsyncExitStack() as stack:
            argv = (*ends.here, *module, "serve", HERE, str(run_dir), str(path / "service.json"))
            server = await stack.enter_async_context(Answering(*argv))
            argv = (*ends.there, *module, "consume", server.ready, str(path / "trainer.json"))
            consumer = await stack.enter_async_context(Answering(*argv))
            found = await _rounds(server, consumer, QUICK if quick else ROUNDS)
        num_bytes = json.loads(server.ready)["num_bytes"]
    return Report(bench="tls", machine=machine(), rows=tuple(_rows(found, num_bytes / 1e9)))


Found = dict[str, list[tuple[float, float, float]]]
"""By path: seconds, CPU seconds of the consumer and of the server, a round each."""


async def _rounds(server: Answering, consumer: Answering, rounds: int) -> Found:
    found: Found = defaultdict(list)
    for number in range(rounds + 1):
        for path in PATHS:
            before = server.cpu_s
            said = await consumer.ask(path)
            if number:
                took = (said["seconds"], said["cpu_s"], server.cpu_s - before)
                found[path].append(took)
    return found


def _rows(found: Found, gigabytes: float) -> list[Figure]:
    median_s = {path: statistics.median(took[0] for took in found[path]) for path in PATHS}
    cpu = {path: _cpu_per_gb(found[path], gigabytes) for path in PATHS}
    added_s = (sum(cpu["mtls"]) - sum(cpu["plain"])) * ROLLOUT_BYTES / 1e9
    note = f"{1e6 * added_s:.0f} us for {ROLLOUT_BYTES} bytes; bar 0.03"
    return [
        *(_rate(path, [took[0] for took in found[path]], cpu[path], gigabytes) for path in PATHS),
        _ratio("of_plain", median_s["plain"] / median_s["mtls"], "bar 0.35"),
        _ratio("of_raw_tls_socket", median_s["raw_tls_socket"] / median_s["mtls"], "bar 1"),
        _ratio("cpu_per_rollout", added_s / ROLLOUT_CPU_S, note),
    ]


def _rate(path: str, seconds: Sequence[float], cpu: Sequence[float], gigabytes: float) -> Figure:
    note = f"CPU {cpu[0]:.2f} + {cpu[1]:.2f} s/GB (trainer + store)"
    return Figure(
        what=path,
        value=gigabytes / statistics.median(seconds),
        unit="GB/s",
        repeats=tuple(gigabytes / one for one in seconds),
        cpu_s=sum(cpu),
        note=f"best {gigabytes / min(seconds):.2f}; {note}",
    )


def _ratio(what: str, value: float, note: str) -> Figure:
    return Figure(what=what, value=value, unit="times", note=note)


def _cpu_per_gb(rounds: Sequence[tuple[float, float, float]], gigabytes: float) -> list[float]:
    """CPU seconds a GB: of the consumer, of the server."""
    moved = gigabytes * len(rounds)
    return [sum(took[end] for took in rounds) / moved for end in (1, 2)]
