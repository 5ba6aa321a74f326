"""Tests of what a task may ask for, what an operator's cap leaves of it, and which addresses are
public.
"""

from __future__ import annotations

import ipaddress

import pytest

from prorl.errors import TaskError
from prorl.network_policy import (
    ALLOWLIST,
    MAX_HOSTS,
    NO_NETWORK,
    PUBLIC,
    NetworkPolicy,
    capped,
    closed_reason,
    network_of,
    read_hosts,
)
from prorl.testing import make_task
from prorl.types import Json, Stage

CLOSED = {
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "0.0.0.0": "unspecified",
    "10.1.2.3": "private",
    "172.31.0.1": "private",
    "192.168.0.1": "private",
    "100.64.0.1": "private",  # shared by a provider's customers (CGNAT)
    "100.100.100.200": "private",  # a cloud's metadata there
    "169.254.169.254": "link-local",
    "168.63.129.16": "metadata",
    "192.0.0.192": "private",
    "192.88.99.1": "tunnel",
    "198.18.0.1": "private",
    "203.0.113.9": "private",
    "224.0.0.1": "multicast",
    "240.0.0.1": "private",
    "255.255.255.255": "private",
    "::": "unspecified",
    "::1": "loopback",
    "::7f00:1": "private",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:10.0.0.1": "private",
    "::ffff:169.254.169.254": "link-local",
    "64:ff9b::7f00:1": "loopback",
    "64:ff9b::a9fe:a9fe": "link-local",
    "64:ff9b::a00:1": "private",
    "64:ff9b:1::1": "private",
    "2002:7f00:1::": "tunnel",
    "2001:0:7f00:1::": "tunnel",
    "fc00::1": "private",
    "fd00:ec2::254": "private",
    "fe80::1": "link-local",
    "fe80::1%lo": "link-local",
    "fec0::1": "private",
    "ff02::1": "multicast",
    "2001:db8::1": "private",
    "3fff::1": "private",
    "5f00::1": "private",
}
OPEN = ("8.8.8.8", "151.101.0.223", "2a04:4e42::223", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize(
    ("address", "reason"), [*CLOSED.items(), *((address, "") for address in OPEN)]
)
def test_only_public_addresses_are_open(address: str, reason: str) -> None:
    assert closed_reason(ipaddress.ip_address(address)) == reason


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("192.0.2.1", "is an address"),
        ("10.0.0.0/8", "is an address"),
        ("[::1]", "is an address"),
        ("2130706433", "is an address"),
        ("0x7f.1", "is an address"),
        ("example.org:443", "no host name"),
        ("https://example.org", "no host name"),
        ("exa mple.org", "no host name"),
        ("*", "no host name"),
        ("a.*.org", "no host name"),
        ("", "no host name"),
        ("a" * 64 + ".org", "no host name"),
        ("a.b" * 100, "no host name"),
    ],
)
def test_a_host_that_cannot_be_named_is_refused_in_a_single_line(entry: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        read_hosts([entry])
    assert "expected" in str(caught.value)
    with pytest.raises(TaskError, match="allowed_hosts"):
        network_of(_task({"network_mode": ALLOWLIST, "allowed_hosts": [entry]}), Stage.RUN)


def test_names_are_compared_whatever_their_spelling_and_wildcards_are_for_what_is_below() -> None:
    hosts = read_hosts(["PyPI.org.", "*.Example.org", "b\u00fccher.example", "pypi.org"])
    assert hosts == ("pypi.org", "*.example.org", "xn--bcher-kva.example")
    network = NetworkPolicy(ALLOWLIST, hosts)
    assert all(map(network.permits, ("pypi.org", "a.example.org", "a.b.example.org")))
    refused = ("example.org", "notexample.org", "pypi.org.evil.net", "www.pypi.org", "8.8.8.8")
    assert not any(map(network.permits, refused))
    with pytest.raises(ValueError, match=f"at most {MAX_HOSTS}"):
        read_hosts(f"h{i}.org" for i in range(MAX_HOSTS + 1))


ORGS, PYPI = (
    NetworkPolicy(ALLOWLIST, ("*.org",)),
    NetworkPolicy(ALLOWLIST, ("pypi.org", "files.net")),
)


@pytest.mark.parametrize(
    ("wish", "most", "result"),
    [
        (NetworkPolicy(PUBLIC), NetworkPolicy(), NetworkPolicy()),
        (PYPI, NetworkPolicy(), NetworkPolicy()),
        (NetworkPolicy(), NetworkPolicy(PUBLIC), NetworkPolicy()),
        (NetworkPolicy(PUBLIC), NetworkPolicy(PUBLIC), NetworkPolicy(PUBLIC)),
        (PYPI, NetworkPolicy(PUBLIC), PYPI),
        (NetworkPolicy(PUBLIC), PYPI, PYPI),
        (PYPI, ORGS, NetworkPolicy(ALLOWLIST, ("pypi.org",))),
        (ORGS, PYPI, NetworkPolicy(ALLOWLIST, ("pypi.org",))),
        (PYPI, NetworkPolicy(ALLOWLIST, ("other.net",)), NetworkPolicy(ALLOWLIST)),
    ],
)
def test_a_task_gets_no_more_than_the_operator_grants(
    wish: NetworkPolicy, most: NetworkPolicy, result: NetworkPolicy
) -> None:
    assert capped(wish, most) == result


def _task(network: Json) -> Json:
    return make_task("code", network=network)


@pytest.mark.parametrize(
    ("value", "agent", "verifier"),
    [
        (PUBLIC, PUBLIC, PUBLIC),
        ({"network_mode": PUBLIC, "verifier": NO_NETWORK}, PUBLIC, NO_NETWORK),
        ({"agent": {"network_mode": PUBLIC}}, PUBLIC, NO_NETWORK),
        ({}, NO_NETWORK, NO_NETWORK),
    ],
)
def test_each_phase_has_its_own_network(value: Json, agent: str, verifier: str) -> None:
    modes = [network_of(_task(value), stage).mode for stage in (Stage.RUN, Stage.EVAL)]
    assert modes == [agent, verifier]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("internet", "network_mode is 'internet'"),
        ({"network_mode": "host"}, "network_mode is 'host'"),
        ({"mode": PUBLIC}, "data.network has mode"),
        ({"network_mode": PUBLIC, "allowed_hosts": []}, "allowed_hosts with network_mode public"),
        ({"network_mode": ALLOWLIST, "allowed_hosts": "pypi.org"}, "allowed_hosts is 'pypi.org'"),
        ({"network_mode": ALLOWLIST, "allowed_hosts": [7]}, "7 is no host name"),
        (["public"], "data.network is"),
    ],
)
def test_an_unreadable_network_is_refused_in_a_single_line(value: Json, problem: str) -> None:
    with pytest.raises(TaskError, match=r"task 'test/1': data.network") as caught:
        network_of(_task(value), Stage.EVAL)
    assert problem in str(caught.value)
