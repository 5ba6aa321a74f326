"""A real Slurm whose jobs are nodes: pre-empted and back, its daemon killed, at the end of time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import prorl
from tests.cluster.cluster_service import PRORL, SLOTS, RunningCluster, pools
from tests.cluster.namespace_hosts import ThisHost
from tests.cluster.slurm import Slurm, slurm, why_not
from tests.integration.test_outside import three_ports
from tests.waiting import wait_until

pytest.importorskip("dask_jobqueue", reason="placing jobs needs the extra `dask`")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

NODE_SCRIPT = Path(__file__).parents[2] / "configs" / "slurm-node.sh"
BACK_S = 30.0
OF_DASK = "prorl-node"
"""Name of the jobs that Dask submits."""


@dataclass
class Site:
    """A Slurm, a service without workers, and who places its nodes."""

    slurm: Slurm
    service: RunningCluster
    cluster: subprocess.Popen[bytes] | None = None

    def place(self, num: int, *words: str, besides: int = 0) -> None:
        """Nodes as jobs of the partition that is pre-empted, through Dask, besides others."""
        root = str(self.service.root)
        argv = [*PRORL, "cluster", "slurm", "--nodes", str(num), "--root", root]
        argv += ["--queue", "scavenge", "--cores", "2", "--memory", "2GB", *words]
        argv += [*pools(), "--set", "service.sigterm_drain_s=2"]
        with (self.service.path / "cluster.log").open("wb") as out:
            self.cluster = subprocess.Popen(
                argv, stdout=out, stderr=out, env=self.slurm.env, cwd=self.service.path
            )
        wait_until(lambda: len(self.nodes()) == num + besides, f"{num} nodes", 120)

    def nodes(self) -> set[str]:
        """Names of nodes of which a RUN is registered."""
        with prorl.connect(self.service.root) as client:
            workers = client.status()["workers"]
        return {worker["node"] for worker in workers if worker["role"] == "run"}

    def work(self) -> None:
        """Open a run that works on every node."""
        self.service.submit(4 * SLOTS, last=False)
        self.service.running(SLOTS + 1)

    def complete(self) -> None:
        """End the run, and wait until every rollout is completed."""
        self.service.submit(SLOTS)
        self.service.complete()

    def busy(self) -> int:
        """Returns how many RUNs have something in hand."""
        with prorl.connect(self.service.root) as client:
            workers = client.status()["workers"]
        return sum(worker["in_flight"] > 0 for worker in workers if worker["role"] == "run")

    def close(self) -> None:
        """End the placer in order."""
        if self.cluster is not None and self.cluster.poll() is None:
            self.cluster.send_signal(signal.SIGINT)
            try:
                self.cluster.wait(90)
            except subprocess.TimeoutExpired:
                self.cluster.kill()
                self.cluster.wait()


@contextmanager
def site(tmp_path: Path, num_nodes: int) -> Iterator[Site]:
    """All of it for the length of a block; nothing of any job is left behind."""
    with ExitStack() as stack:
        (tmp_path / "slurm").mkdir()
        tmp_path.chmod(0o755)
        batch = stack.enter_context(slurm(tmp_path / "slurm", num_nodes))
        argv = [*PRORL, "serve", "--root", str(tmp_path / "root"), *pools("service.workers=nodes")]
        argv += ["--listen", f"127.0.0.1:{three_ports()}"]
        argv += ["--set", 'service.backends=["scripted:oracle?delay_s=4"]']
        with (tmp_path / "serve.log").open("wb") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=out)
        made = Site(
            slurm=batch, service=RunningCluster(hosts=ThisHost(), path=tmp_path, service=process)
        )
        stack.callback(_end, process)
        stack.callback(made.close)
        join = made.service.root / "join" / "node.json"
        wait_until(
            lambda: (made.service.root / "service.json").exists() and join.exists(), "service"
        )
        yield made
        made.close()
    wait_until(lambda: not batch.strays(), "nothing of a job is left", 30)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    if process.poll() is None:
        process.kill()
        process.wait()


def test_a_preempted_node_is_back_within_half_a_minute_of_room(tmp_path: Path) -> None:
    with site(tmp_path, 2) as s:
        s.place(2)
        s.work()
        wait_busy = s.service.wait_busy
        urgent = s.slurm.submit("-p", "main", "-c", "2", "--wrap", "sleep 12")
        wait_busy(lambda: urgent in s.slurm.jobs("wrap"), "the urgent job runs", 60)
        wait_busy(lambda: len(s.nodes()) == 1, "one node is away", 60)
        wait_busy(lambda: urgent not in s.slurm.jobs("wrap"), "there is room again", 60)
        back_s = wait_busy(lambda: len(s.nodes()) == 2 and s.busy() == 2, "back at work", 120)
        s.complete()
        print(f"back at work {back_s:.1f} s after there was room; charges {s.service.charges()}")
        assert back_s < BACK_S
        assert s.service.charges()[1:] == (0, 0)


def test_a_job_that_ended_is_replaced(tmp_path: Path) -> None:
    """Not after Dask's patience with nodes that it does not see: Slurm says that it has ended."""
    with site(tmp_path, 1) as s:
        s.place(1)
        (before,) = s.slurm.jobs("prorl-node")
        s.slurm.ask("scancel", before)
        wait_until(lambda: not s.nodes(), "the node is away", 60)
        wait_until(lambda: bool(set(s.slurm.jobs("prorl-node")) - {before}), "another job", 60)
        wait_until(lambda: len(s.nodes()) == 1, "another node", 60)
        assert "another one" in (s.service.path / "cluster.log").read_text()


def test_slurmd_is_killed_and_its_job_lives_twice(tmp_path: Path) -> None:
    """The job goes on without it, and is started again elsewhere: the newest incarnation counts."""
    with site(tmp_path, 3) as s:
        s.place(2)
        s.work()
        before = s.slurm.jobs(OF_DASK)
        job, node = next(iter(before.items()))
        s.slurm.kill(node)
        again = s.service.wait_busy(
            lambda: s.slurm.jobs(OF_DASK).get(job, node) != node, "it runs twice", 120
        )
        s.complete()
        print(f"started again elsewhere after {again:.1f} s; charges {s.service.charges()}")
        assert s.service.count("worker_losses > 1") == 0
        assert s.service.charges()[2] <= 2 * SLOTS
        s.slurm.back(node)


def test_a_job_ends_at_its_time_and_another_goes_on(tmp_path: Path) -> None:
    """Two minutes of walltime; the other node is a job of the script that anybody can submit."""
    with site(tmp_path, 2) as s:
        s.slurm.env["PRORL"] = f"{Path(sys.executable).parent}/prorl"
        join = str(s.service.root / "join" / "node.json")
        array = s.slurm.submit("--export=ALL", "--array=7", str(NODE_SCRIPT), join, *pools())
        wait_until(lambda: len(s.nodes()) == 1, "the script's node", 120)
        assert s.nodes() == {f"n-{array}_7-0"}
        began = time.monotonic()
        s.place(1, "--walltime", "00:02:00", besides=1)
        s.work()
        s.service.wait_busy(lambda: len(s.nodes()) == 1, "its time is over", 180)
        exit_s = time.monotonic() - began
        s.complete()
        print(f"left {exit_s:.0f} s after it was asked for; charges {s.service.charges()}")
        assert s.service.charges()[1:] == (0, 0)
