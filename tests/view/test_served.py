"""`prorl serve --view`: the pages beside a service, in a process that ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import prorl
from prorl.linux.procfs import descendants
from tests.view.viewer_process import Viewer
from tests.waiting import wait_until


@contextmanager
def served(root: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], Viewer]]:
    command = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(root), "--view", "0"]
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith("look at"))
        yield process, Viewer(next(lines).split()[-1])
    finally:
        process.kill()
        process.communicate()


async def test_pages_of_a_service_follow_its_runs_and_end_with_it(tmp_path: Path) -> None:
    where = ["--set", f"service.store.url={tmp_path / 'runs'}", "--set", "service.workers=0"]
    with served(tmp_path / "root", "--policy", "scripted:oracle", *where) as (process, viewer):
        assert await viewer.ask("api/runs") == (200, {"runs": []})
        with prorl.connect(str(tmp_path / "root")) as client:
            task = {"task_id": "t", "env": "math", "prompt": "1 + 1?", "data": {"answer": "2"}}
            client.create_run(run_id="r")
            client.submit("r", [task], n=2)
            assert (await viewer.ask("api/runs"))[1] == {"runs": ["r"]}
            async with viewer.events("api/runs/r/events") as events:
                async for now in events:
                    assert now["service"] is not None, "it knows where the service is"
                    if now["totals"]["rollouts"] == 2:
                        break
        (child,) = [pid for pid in descendants(process.pid) if _is_view(pid)]
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not _is_view(child))


def _is_view(pid: int) -> bool:
    try:
        return b"prorl.view" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
