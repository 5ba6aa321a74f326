"""The trackers of one run, in a process of its own: `prorl track`, and what a service starts for a
run with `track`.

    python -m prorl.analysis.tracking RUN --to wandb tensorboard --folder DIR --service ROOT

It ends when the run has ended and everything is sent. The end of its standard input, which the
process that started it keeps open, and SIGTERM have it send what is stored and end. A process that
is started again sends what is stored again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from prorl.analysis.traces import Exporter, ReadPosition, traces
from prorl.analysis.track import POLL_S, follow, open_tracker
from prorl.client import connect
from prorl.config.trackers import OTLP
from prorl.errors import ProrlError, UserError
from prorl.pluralize import pluralize
from prorl.storage.files.runs import is_run
from prorl.storage.read.catalog import StoredRun

LOOK_S = 0.1
"""A service that does not answer is looked for so long: it has gone, and the run with it. Also
between two looks for a directory that is not there yet.
"""


def track(
    where: str,
    names: Sequence[str],
    folder: Path,
    endpoint: str,
    ended: Callable[[], bool],
    wait: Callable[[float], object],
) -> str:
    """Send what a run measures until `ended()`; returns a line for people. Raises UserError."""
    names, stored = list(dict.fromkeys(names)), StoredRun(where)
    sent = []
    if OTLP in names:
        if names != [OTLP]:
            raise UserError("otlp beside other trackers", "a process of its own for each")
        num_rollouts = send_traces(where, Exporter(endpoint), ended, wait)
        sent.append(f"{pluralize(num_rollouts, 'rollout')} as traces")
    else:
        trackers = [open_tracker(name, stored, folder) for name in names]
        try:
            sent.append(f"{follow(where, trackers, ended, wait):,} scalars")
        finally:
            for tracker in trackers:
                tracker.close()
    return f"sent {', '.join(sent)} of {stored.run_id} to {', '.join(names)}"


def send_traces(
    where: str, exporter: Exporter, ended: Callable[[], bool], wait: Callable[[float], object]
) -> int:
    """Send each rollout that is stored, and new ones until `ended()`; returns how many."""
    last, count = ReadPosition(), 0
    try:
        while True:
            is_last = ended()
            for trace in traces(StoredRun(where), last):
                exporter.write(trace)
                last, count = trace.place, count + 1
            if is_last:
                return count
            wait(POLL_S)
    finally:
        exporter.close()


def is_open(service: str, run: str) -> bool:
    """Returns whether a service works on the run and it has not ended."""
    try:
        with connect(service, retry_s=LOOK_S) as client:
            return bool(client.run(run)["state"] == "open")
    except ProrlError:
        return False


def _wait_for_end(stop: threading.Event) -> None:
    """Sets `stop` at the end of standard input; `sys.stdin` would be locked when this ends."""
    while os.read(0, 4096):
        pass
    stop.set()


def main() -> int:
    """Track one run of the service that started this."""
    parser = argparse.ArgumentParser(prog="python -m prorl.analysis.tracking")
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--to", nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--service", required=True, help="root of the service that writes it")
    arguments = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    while not is_run(arguments.run) and not stop.wait(LOOK_S):
        pass  # the store makes the directory a moment after the run was accepted
    run_id = StoredRun(arguments.run).run_id

    def ended() -> bool:
        return stop.is_set() or not is_open(arguments.service, run_id)

    try:
        line = track(arguments.run, arguments.to, arguments.folder, "", ended, stop.wait)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
