"""Cables that are pulled: a blip costs nothing, silence costs one attempt each and charges nobody,
nothing is lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.cluster_service import PRORL, SLOTS, RunningCluster, running_cluster
from tests.waiting import wait_until

MANY = 100
CUTS = int(os.environ.get("PRORL_CUTS", "2"))
"""How often the cable of one node is pulled for a short time, while both work."""
BETWEEN_S = 8.0
LEAVES_S = 90.0
"""Without a gateway: `sigterm_drain_s`, noticing it, waiting for it, ending its processes."""


def begun(w: RunningCluster) -> None:
    """Both nodes work."""
    w.submit(MANY)
    w.running(2 * SLOTS)


@pytest.mark.parametrize("away_s", [5, 14])
def test_a_short_cut_costs_no_attempt(tmp_path: Path, away_s: float) -> None:
    """Only leases that were lost on their way go again, and nobody is charged for them."""
    with running_cluster(tmp_path) as w:
        w.submit(MANY + CUTS * 64)
        for number in range(CUTS):
            w.running(2 * SLOTS)
            time.sleep(BETWEEN_S + number % 8 / 2)  # each time at another moment of a turn
            w.hosts.cut(2)
            time.sleep(away_s)
            w.hosts.heal(2)
            print(f"after {number + 1} cuts of {away_s} s: charges {w.charges()}")
        w.finish()
        print(f"in the end: charges {w.charges()}")
        assert w.charges()[1:] == (0, 0)
        assert w.charges()[0] <= CUTS * SLOTS


def test_a_long_cut_costs_a_single_attempt_each(tmp_path: Path) -> None:
    """The late rows of the node that comes back are refused, and nothing is stored twice."""
    with running_cluster(tmp_path) as w:
        begun(w)
        w.hosts.cut(2)
        time.sleep(60)
        assert w.count("attempt > 1") > 0
        w.hosts.heal(2)
        w.finish()
        assert w.count("attempt > 2") == 0
        assert 0 < w.charges()[0] <= 4 * SLOTS
        assert w.charges()[1:] == (0, 0)


@pytest.mark.parametrize("who", ["the node", "the gateway"])
def test_packets_lost_in_a_single_direction_cost_nothing(tmp_path: Path, who: str) -> None:
    deaf, other = (2, 1) if who == "the node" else (1, 2)
    with running_cluster(tmp_path) as w:
        begun(w)
        w.hosts.deafen(deaf, other)
        time.sleep(14)
        w.hosts.hear(deaf, other)
        w.finish()
        assert w.charges()[1:] == (0, 0)


def test_the_host_of_gateway_and_store_is_cut_off(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as w:
        begun(w)
        w.hosts.cut(1)
        time.sleep(14)
        w.hosts.heal(1)
        w.finish()
        assert w.charges()[1:] == (0, 0)


def test_a_line_that_swallows_large_packets_costs_nobody_and_its_node_is_let_go(
    tmp_path: Path,
) -> None:
    """Small ones pass, so the node comes again and again, takes leases and delivers nothing."""
    with running_cluster(tmp_path) as w:
        begun(w)
        w.hosts.swallow(2)
        w.complete()
        assert w.count("state = 'failed'") == 0
        assert w.charges()[1:] == (0, 0)
        status = w.hosts.argv(1, *PRORL, "status", "--root", str(w.root))
        wait_until(
            lambda: b"its line broke" in subprocess.run(status, capture_output=True).stdout,
            "status says why the node gets no leases",
        )
        w.hosts.swallow(2, mtu=1500)
        w.finish()


def test_leases_of_a_dead_host_are_out_again(tmp_path: Path) -> None:
    """Its processes die with it, and no word of it arrives: the slowest death there is."""
    with running_cluster(tmp_path) as w:
        begun(w)
        w.hosts.cut(2)
        took_s = wait_until(lambda: w.count("attempt > 1") > 0, "a lease is out again", 60)
        print(f"out again after {took_s:.1f} s")
        w.complete()
        began = time.monotonic()
        w.nodes["n2"].send_signal(signal.SIGINT)
        w.nodes["n2"].wait(LEAVES_S)
        print(f"it left {time.monotonic() - began:.1f} s after SIGINT, without a gateway")
        w.finish()


def test_a_node_drains_though_its_gateway_has_just_been_cut_off(tmp_path: Path) -> None:
    """The node's rows wait for a store that does not answer."""
    with running_cluster(tmp_path) as w:
        begun(w)
        w.hosts.cut(2)
        began = time.monotonic()
        w.nodes["n2"].send_signal(signal.SIGTERM)
        w.nodes["n2"].wait(LEAVES_S)
        print(f"it left {time.monotonic() - began:.1f} s after SIGTERM and the cut")
        w.finish()
