"""Network namespaces as hosts on one bridge that lives in a namespace of its own: nothing is added
to the machine's network and nothing can leave it. Host K has the address 192.0.2.K.

They share the file system, so a test that two hosts do not touch each other's files needs more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

_NUMBERS = count()


def ip(*words: str) -> str:
    """`ip` with these words; its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def why_not() -> str:
    """Returns why this machine cannot do it; empty when it can."""
    if os.geteuid():
        return "network namespaces as hosts need root"
    name = f"prorl-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return ""


class Hosts:
    """Hosts 1 .. N."""

    def __init__(self, num: int) -> None:
        self.name = f"prorl{os.getpid()}-{next(_NUMBERS)}"
        self.num = num
        self.switch = f"{self.name}-sw"

    def of(self, host: int) -> str:
        """Name of a host's namespace."""
        return f"{self.name}-h{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host (TEST-NET-1, never routed)."""
        return f"192.0.2.{host}"

    def up(self) -> None:
        """Make them."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for host in range(1, self.num + 1):
            space, port = self.of(host), f"p{host}"
            ip("netns", "add", space)
            peer = ("peer", "name", "eth0", "netns", space)
            ip("-n", self.switch, "link", "add", port, "type", "veth", *peer)
            ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def argv(self, host: int, *words: str) -> list[str]:
        """A command that runs these words there. (`ip netns exec` would hide control groups.)"""
        return ["nsenter", f"--net=/run/netns/{self.of(host)}", *words]

    def cut(self, host: int) -> None:
        """Pull its cable: silence, no resets."""
        ip("-n", self.switch, "link", "set", f"p{host}", "down")

    def heal(self, host: int) -> None:
        """Put it back."""
        ip("-n", self.switch, "link", "set", f"p{host}", "up")

    def deafen(self, deaf: int, other: int) -> None:
        """One hears the other no more, and is heard: the other's frames go to nobody."""
        to = ("dev", "eth0", "lladdr", "02:00:00:00:00:01", "nud", "permanent")
        ip("-n", self.of(other), "neigh", "replace", self.address(deaf), *to)

    def hear(self, deaf: int, other: int) -> None:
        """It hears again."""
        ip("-n", self.of(other), "neigh", "del", self.address(deaf), "dev", "eth0")

    def swallow(self, host: int, mtu: int = 1480) -> None:
        """Large packets to and from it vanish, small ones pass: the switch's port has a smaller MTU
        than both ends (1500), and nobody tells them.
        """
        for end in range(1, self.num + 1):  # what is cut into packets later has no length yet
            ip("-n", self.of(end), "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", self.switch, "link", "set", f"p{host}", "mtu", str(mtu))

    def pids(self) -> list[int]:
        """Processes that live on the hosts."""
        pids: list[int] = []
        for host in range(1, self.num + 1):
            pids += map(int, ip("netns", "pids", self.of(host)).split())
        return pids

    def down(self) -> None:
        """End what still runs on them, remove them."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for _ in range(100):
            if not self.pids():
                break
            time.sleep(0.1)
        for space in [*(self.of(host) for host in range(1, self.num + 1)), self.switch]:
            ip("netns", "del", space)


class ThisHost(Hosts):
    """Everything on this one, as it is."""

    def __init__(self) -> None:
        super().__init__(0)

    def argv(self, host: int, *words: str) -> list[str]:
        """The words."""
        return list(words)


@contextmanager
def hosts(num: int) -> Iterator[Hosts]:
    """Hosts for the length of a block."""
    made = Hosts(num)
    try:
        made.up()
        yield made
    finally:
        made.down()
