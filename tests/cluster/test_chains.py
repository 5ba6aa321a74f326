"""Chains of stages that join and leave while a run is under way: rows go on, over sockets or in
memory, and nothing is lost.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster.cluster_service import PRORL, SLOTS, RunningCluster, running_cluster

MANY = 4 * SLOTS
TURN_S = 2.0

pytestmark = pytest.mark.timeout(900)


def _holds(w: RunningCluster, name: str) -> bool:
    """Returns whether RUN of a node has something in hand."""
    argv = w.hosts.argv(1, *PRORL, "status", "--json", "--root", str(w.root))
    done = subprocess.run(argv, capture_output=True, text=True)
    return f'"worker":"{name}' in done.stdout.replace(" ", "")


def _drain(w: RunningCluster, name: str) -> None:
    argv = [*PRORL, "node", "--drain", name, "--deadline", "60", "--root", str(w.root)]
    subprocess.run(w.hosts.argv(1, *argv), check=True, capture_output=True)


def test_a_chain_on_another_host_joins_drains_the_first_and_it_comes_back(tmp_path: Path) -> None:
    """Nothing is lost or charged: what RUN has begun ends where it began."""
    with running_cluster(tmp_path, num_nodes=1, num_hosts=3, turn_s=TURN_S) as w:
        w.submit(MANY, last=False)
        w.running(SLOTS)
        w.node(3)
        w.wait_busy(lambda: _holds(w, "n3/worker-0"), "the second chain has come")
        first = w.nodes["n2"]
        _drain(w, "n2")
        w.wait_busy(lambda: first.poll() is not None, "the first one has left")
        assert first.returncode == 0
        w.node(2)
        w.wait_busy(lambda: _holds(w, "n2/worker-0"), "the first one is back")
        second = w.nodes["n3"]
        _drain(w, "n3")
        w.wait_busy(lambda: second.poll() is not None, "the second one has left")
        assert second.returncode == 0
        w.submit(SLOTS)
        w.finish()
        assert w.charges()[1:] == (0, 0)
        assert w.charges()[0] <= 2 * SLOTS, "INIT's leases go back at once; what RUN has, ends"


def test_the_chain_of_the_service_leaves_and_gateway_and_store_go_on(tmp_path: Path) -> None:
    """From memory to the socket in the middle of a run: the next host takes over."""
    with running_cluster(tmp_path, num_nodes=0, num_hosts=2, layout=("service.workers=0",)) as w:
        w.submit(MANY, last=False)
        w.running(SLOTS)
        w.node(2)
        w.wait_busy(lambda: _holds(w, "n2/worker-0"), "a chain of another host has come")
        _drain(w, "local")
        w.wait_busy(lambda: not _holds(w, "service"), "the service's own chain has left")
        w.submit(SLOTS)
        w.finish()
        assert w.charges()[1:] == (0, 0)
        assert w.charges()[0] <= SLOTS
