"""From `prorl run` typed to the first rollout out of the queue."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.bench.report import Figure, median
from prorl.client.http import Http
from prorl.config import ServiceConfig
from prorl.errors import NotFoundError, UnavailableError, UserError


def first_lease(starts: int) -> Figure:
    """The row: seconds of so many starts."""
    times = [_one_first_lease() for _ in range(starts)]
    return median("first_lease_s", times, "s", note="`prorl run` typed to first lease; bar: 8")


def _one_first_lease() -> float:
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder,
        _prorl_run(Path(folder)) as (process, start),
    ):
        while not _leased(Path(folder) / "root"):
            if process.poll():
                raise UnavailableError(f"`prorl run` ended with {process.returncode}")
            time.sleep(0.01)
        return time.perf_counter() - start


@contextmanager
def _prorl_run(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"task_id": "1", "env": "noop", "prompt": "do nothing"}\n')
    what = ["--tasks", str(tasks), "--policy", "noop", "--name", "first"]
    where = ["--root", str(folder / "root"), "--quiet"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "prorl.cli", "run", *what, *where], stdout=subprocess.DEVNULL
    )
    try:
        yield process, start
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def _leased(root: Path) -> bool:
    try:
        service = ServiceConfig.model_validate_json((root / "service.json").read_text())
        if not service.http_port:
            return False
        run = Http(
            f"http://{service.host}:{service.http_port}", service.token, retry_s=0.01
        ).request("GET", "v1", "runs", "first")
    except (OSError, UserError, NotFoundError, UnavailableError):
        return False
    states: dict[str, int] = run["counts"]
    return sum(states.values()) > states.get("queued", 0)
