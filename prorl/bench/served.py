"""A service that a benchmark has started below itself: its client, its CPU, the end of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from prorl.bench.meter import tree
from prorl.client.client import Client
from prorl.client.http import Http
from prorl.linux import procfs
from prorl.supervisor.service import Supervisor


def client_of(service: Supervisor) -> Client:
    """A client of it, with its token."""
    return Client(http=Http(service.url, service.config.token), token=service.config.token)


def cpu_s() -> float:
    """CPU seconds so far of this process and all that live below it."""
    return sum(procfs.cpu_s(pid) for pid in tree(os.getpid()))


def wait_finished(
    client: Client, run_id: str, look_s: float, look: Callable[[], None] = lambda: None
) -> None:
    """Wait until a run is finished; `look` is called each time when it is not."""
    while client.run(run_id)["state"] != "finished":
        look()
        time.sleep(look_s)
