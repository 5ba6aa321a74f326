"""Processes that are killed on other hosts than the gateway's, and the gateway itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cluster.cluster_service import running_cluster
from tests.cluster.test_cuts import begun
from tests.waiting import wait_until

OUT_AGAIN_S = 20.0


def test_a_node_is_killed(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as w:
        begun(w)
        w.nodes["n2"].kill()
        took_s = wait_until(lambda: w.count("attempt > 1") > 0, "a lease is out again", 60)
        assert took_s < OUT_AGAIN_S
        w.finish()
        assert w.charges()[1:] == (0, 0)


def test_a_killed_node_starts_again_under_its_name(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as w:
        begun(w)
        w.nodes["n2"].kill()
        w.nodes["n2"].wait()
        again = w.node(2)
        w.finish()
        assert again.returncode == 0
        assert w.charges()[1:] == (0, 0)


def test_two_nodes_of_the_same_name(tmp_path: Path) -> None:
    """A batch system may start a job again whose first incarnation still runs: the newest
    counts.
    """
    with running_cluster(tmp_path, num_nodes=3) as w:
        begun(w)
        earlier = w.nodes.pop("n2")
        w.node(2)
        earlier.wait(60)  # it ends by itself: who takes the name back would lose what both hold
        w.finish()
        assert w.charges()[1:] == (0, 0)


def test_the_gateway_is_killed(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as w:
        begun(w)
        os.kill(w.child(w.service, "prorl.deploy.service"), signal.SIGKILL)
        w.finish()
        assert w.charges()[1:] == (0, 0)


def test_the_store_is_killed(tmp_path: Path) -> None:
    apart = ("service.workers=nodes", "service.store.own_process=true")
    with running_cluster(tmp_path, layout=apart) as w:
        begun(w)
        wait_until(lambda: w.count("state = 'completed'") > 0, "one is completed")
        os.kill(w.child(w.service, "prorl.storage"), signal.SIGKILL)
        w.finish()
        assert w.charges() == (0, 0, 0)
