"""The disk says EIO, once, to a write, an fsync or a rename, of the log, of a part or of a commit:
nothing is acknowledged that is not durable, and the run ends whole.

By the recorder's seccomp filter, so that every call of every process may be the one that fails.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

import pytest

import prorl
from prorl.errors import ProrlError
from prorl.types import Task
from tests.faults.power.recorder import Recorder, available
from tests.integration.run_checks import check_complete

COUNT = 12

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


class Once:
    """Fails the n-th change of a kind to a file whose path holds a text, once the service is there:
    one that cannot write its log at all says so and does not start.
    """

    def __init__(self, what: str, where: str, at: int) -> None:
        self.what, self.where, self.remaining = what, where, at
        self.armed = False

    def __call__(self, what: str, path: Path) -> int:
        """The errno for this change."""
        if self.armed and what == self.what and self.where in str(path):
            self.remaining -= 1
            return errno.EIO if self.remaining == 0 else 0
        return 0


PLACES = {
    "control.db-wal": ("change", "sync"),  # SQLite renames nothing
    "/sequences": ("change", "sync", "move"),
    "/commits": ("change", "sync", "move"),
}


@pytest.mark.parametrize(
    ("where", "what"), [(where, what) for where, kinds in PLACES.items() for what in kinds]
)
def test_an_error_of_the_disk_loses_nothing(tmp_path: Path, where: str, what: str) -> None:
    if problem := available():
        pytest.skip(problem)
    root, once = tmp_path / "root", Once(what, where, at=2)
    argv = [sys.executable, "-P", "-m", "prorl.cli", "serve", "--root", str(root)]
    argv += ["--policy", "scripted:random"]
    env = {**os.environ, "PYTHONPATH": str(Path(prorl.__file__).absolute().parent.parent)}
    with Recorder(tmp_path, argv, fail=once, env=env) as recorder:
        groups = _work(root, recorder, once)
        recorder.process.terminate()
        recorder.process.wait(60)
    assert recorder.problem is None, recorder.problem
    assert once.remaining <= 0, "no such call"
    check_complete(root / "r", COUNT)
    assert sorted(groups) == list(range(COUNT))


def _work(root: Path, recorder: Recorder, once: Once) -> list[int]:
    """A client that asks again whatever it is told; the groups that it has read, in order."""
    groups: list[int] = []
    while True:
        assert recorder.process.poll() is None, "the service ended"
        try:
            with prorl.connect(root) as client:
                client.status()
                once.armed = True
                client.create_run(run_id="r", delivery="stream", max_uncommitted_groups=4)
                for i in range(COUNT):
                    task = Task(task_id=f"t{i}", env="noop", prompt=f"say {i}")
                    client.submit("r", [task], 1, key=f"w{i}", last=i == COUNT - 1)
                for batch in client.stream("r", cursor=f"r@{len(groups)}", groups_per_batch=1):
                    groups.append(int(batch.group_ids[0]))
                    client.commit(batch)
                while client.run("r")["state"] != "finished":
                    time.sleep(0.1)
                return groups
        except (ProrlError, OSError) as error:
            print(f"{error!r}", file=sys.stderr)
            time.sleep(0.2)
