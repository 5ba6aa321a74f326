"""A service on host 1, nodes on the others, a run of short waits; all as people start them."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.namespace_hosts import Hosts, hosts
from tests.waiting import wait_until

PRORL = (sys.executable, "-m", "prorl.cli")
PATIENCE_S = 240.0
SLOTS = 8
TURN_S = 4
"""How long the scripted model takes for a turn; every rollout has one."""

SUBMIT = """
import sys, prorl
from prorl.types import Task
client = prorl.connect(sys.argv[1])
client.create_run(run_id="far")
first, num, last = map(int, sys.argv[2:])
tasks = [Task(task_id=f"t{i}", env="math", prompt="2 + 2?", data={"answer": "4"})
         for i in range(first, first + num)]
client.submit("far", tasks, n=1, key=f"k{first}", last=bool(last))
"""


@dataclass
class RunningCluster:
    """The service, hosts and run that a test works with."""

    hosts: Hosts
    path: Path
    service: subprocess.Popen[bytes]
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    num: int = 0

    @property
    def root(self) -> Path:
        return self.path / "root"

    def node(self, host: int, *words: str) -> subprocess.Popen[bytes]:
        """Start the node of a host (or its next incarnation)."""
        name = f"n{host}"
        argv = [*PRORL, "node", str(self.root / "join" / "node.json"), "--name", name]
        scratch = self.path / f"{name}-{time.monotonic_ns()}"
        argv += ["--root", str(scratch), *words, *pools()]
        self.nodes[name] = _start(self.hosts, host, argv, self.path / f"{name}.log")
        return self.nodes[name]

    def submit(self, num: int, last: bool = True) -> None:
        """Submit so many further rollouts; the first call creates the run, the last one ends it."""
        argv = [sys.executable, "-c", SUBMIT, str(self.root), str(self.num), str(num)]
        subprocess.run(self.hosts.argv(1, *argv, str(int(last))), check=True)
        self.num += num

    def wait_busy(
        self, holds: Callable[[], object], what: str, limit_s: float = PATIENCE_S
    ) -> float:
        """Wait for a condition while rollouts are always queued, however long it takes. Returns
        the seconds. The run must still be open (`last=False`).
        """

        def check() -> object:
            if self.count("state = 'queued'") < 4 * SLOTS:
                self.submit(4 * SLOTS, last=False)
            return holds()

        return wait_until(check, what, limit_s)

    def log(self, query: str) -> list[tuple[int, ...]]:
        """Rows of the control log."""
        with contextlib.closing(sqlite3.connect(self.root / "control.db", timeout=30)) as log:
            return log.execute(query).fetchall()

    def count(self, where: str) -> int:
        """Rollouts for which something holds."""
        return self.log(f"SELECT COUNT(*) FROM rollouts WHERE {where}")[0][0]

    def running(self, at_least: int) -> None:
        """Wait until so many are being run."""
        wait_until(lambda: self.count("state = 'running'") >= at_least, f"{at_least} run")

    def charges(self) -> tuple[int, int, int]:
        """Attempts beyond the first, infrastructure failures, worker losses."""
        sums = "SUM(attempt - 1), SUM(infra_failures), SUM(worker_losses)"
        (row,) = self.log(f"SELECT {sums} FROM rollouts WHERE attempt > 0")
        return row[0], row[1], row[2]

    def child(self, process: subprocess.Popen[bytes], module: str) -> int:
        """Pid of a child of a supervisor by its module."""
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == process.pid and module.encode() in words:
                    return pid
        raise AssertionError(f"pid {process.pid} has no child {module}")

    def finish(self) -> None:
        """Every rollout completed and stored exactly once; everything ends in order, and nothing is
        left on the hosts.
        """
        self.complete()
        for process in (*self.nodes.values(), self.service):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        self.verify()
        wait_until(lambda: not self.hosts.pids(), "nothing is left", 30)

    def complete(self) -> None:
        """Wait until every rollout is completed and stored."""
        try:
            wait_until(
                lambda: self.count("state = 'completed'") == self.num, f"{self.num} completed"
            )
        except AssertionError as error:
            grouped = (
                "SELECT state, attempt, worker_losses, COUNT(*) FROM rollouts GROUP BY 1, 2, 3"
            )
            raise AssertionError(f"{error}: {self.log(grouped)}; logs below {self.path}") from None
        stored = "SELECT COUNT(*) FROM runs WHERE finished_at > 0"
        wait_until(lambda: self.log(stored)[0][0] == 1, "the run has finished")

    def verify(self) -> None:
        """Asserts that the stored run is whole, and that each rollout is there once."""
        verify = [*PRORL, "verify", str(self.root / "far")]
        assert subprocess.run(verify, capture_output=True).returncode == 0


def pools(*more: str) -> list[str]:
    """Words that give a service or node its pools, and more of its settings."""
    settings = [f"service.{stage}.slots={SLOTS}" for stage in ("init", "run", "eval")]
    settings += ["service.sandbox.kind=pyns", *more]
    return [word for setting in settings for word in ("--set", setting)]


def _start(on: Hosts, host: int, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(on.argv(host, *argv), stdout=out, stderr=out)


@contextmanager
def running_cluster(
    tmp_path: Path,
    num_nodes: int = 2,
    turn_s: float = TURN_S,
    layout: tuple[str, ...] = ("service.workers=nodes",),
    num_hosts: int = 0,
    policy: str = "oracle",
) -> Iterator[RunningCluster]:
    """A service on host 1, by default without stages, nodes n2, n3 ... on the others."""
    with ExitStack() as stack:
        made = stack.enter_context(hosts(num_hosts or 1 + num_nodes))
        argv = [*PRORL, "serve", "--root", str(tmp_path / "root")]
        argv += ["--listen", f"{made.address(1)}:7700", *pools(*layout)]
        argv += ["--set", f'service.backends=["scripted:{policy}?delay_s={turn_s}"]']
        service = _start(made, 1, argv, tmp_path / "serve.log")
        cluster = RunningCluster(hosts=made, path=tmp_path, service=service)
        join = cluster.root / "join" / "node.json"
        wait_until(
            lambda: (cluster.root / "service.json").exists() and join.exists(), "the service"
        )
        for host in range(2, 2 + num_nodes):
            cluster.node(host)
        yield cluster
