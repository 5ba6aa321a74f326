"""Two hosts on one machine: two network namespaces and a wire between them.

The wire is a veth pair or, where it is to be slow, a TAP device each and a process that hands
frames on some time later.

    with far_apart(delay_s=0.05) as ends:          # each way; a round trip takes twice that
        ends.enter()                               # this thread, and what it starts from now on
        subprocess.Popen([*ends.there, *argv])     # on the other host

That works on kernels without netem. Needs root and iproute2. Addresses are of TEST-NET-1: nothing
leaves the machine. Frames keep their order; at most `MAX_FRAMES` wait, more are dropped as a full
queue does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prorl.errors import ConfigError

HERE, THERE = "192.0.2.1", "192.0.2.2"
"""Addresses of the two ends."""

MAX_FRAMES = 100_000
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Ends:
    """Names of the namespaces of both ends."""

    near: str
    far: str

    @property
    def here(self) -> tuple[str, ...]:
        """Words before a command that is to run on the near host."""
        return ("nsenter", f"--net=/run/netns/{self.near}")

    @property
    def there(self) -> tuple[str, ...]:
        """Words before a command that is to run on the far host."""
        return ("nsenter", f"--net=/run/netns/{self.far}")

    def enter(self) -> None:
        """Move this thread to the near host."""
        _enter(f"/run/netns/{self.near}")


@contextmanager
def far_apart(delay_s: float) -> Iterator[Ends]:
    """Two hosts for the length of the block; this thread is back where it was at its end.

    Raises ConfigError where they cannot be made.
    """
    ends = Ends(near=f"prorl-near-{os.getpid()}", far=f"prorl-far-{os.getpid()}")
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    wire: subprocess.Popen[bytes] | None = None
    try:
        for name in (ends.near, ends.far):
            _ip("netns", "add", name)
        wire = _wire(ends, delay_s)
        for name, address in ((ends.near, HERE), (ends.far, THERE)):
            _set_up(name, address)
        yield ends
    finally:
        _enter(f"/proc/self/fd/{home}")
        os.close(home)
        if wire is not None:
            _cut(wire)
        for name in (ends.near, ends.far):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _set_up(host: str, address: str) -> None:
    _ip("-n", host, "addr", "add", f"{address}/24", "dev", "wire")
    _ip("-n", host, "link", "set", "wire", "up")
    _ip("-n", host, "link", "set", "lo", "up")


def _cut(wire: subprocess.Popen[bytes]) -> None:
    assert wire.stdout is not None
    wire.kill()
    wire.wait()
    wire.stdout.close()


def _wire(ends: Ends, delay_s: float) -> subprocess.Popen[bytes] | None:
    """Lay the wire; a slow one is a process."""
    if delay_s:
        return _slow_wire(ends, delay_s)
    peer = ("peer", "name", "wire", "netns", ends.far)
    _ip("-n", ends.near, "link", "add", "wire", "type", "veth", *peer)
    return None


def _slow_wire(ends: Ends, delay_s: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "prorl.bench.wire", ends.near, ends.far, str(delay_s)]
    wire = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert wire.stdout is not None
    wire.stdout.readline()
    return wire


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode().strip()
        raise ConfigError(f"ip {' '.join(words)}: {said or error}", "root and iproute2") from None


def _enter(path: str) -> None:
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")


def _tap(namespace: str) -> int:
    """A TAP device `wire` in a namespace; this thread stays there."""
    _enter(f"/run/netns/{namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", b"wire", _TAP_WITHOUT_HEADER))
    return fd


def carry(one: int, other: int, delay_s: float) -> None:
    """Hand frames from each descriptor to the other one, late, for ever."""
    way = {one: other, other: one}
    late: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select(list(way), [], [], wait_s)
        for fd in readable:
            for frame in _frames(fd):
                if len(late) < MAX_FRAMES:
                    late.append((time.monotonic() + delay_s, way[fd], frame))
        while late and late[0][0] <= time.monotonic():
            _, fd, frame = late.popleft()
            try:
                os.write(fd, frame)
            except OSError:
                continue  # a device that is down or full drops, as wires do


def _frames(fd: int) -> Iterator[bytes]:
    """What can be read now, at most 64."""
    for _ in range(64):
        try:
            yield os.read(fd, 65536)
        except OSError:
            return


if __name__ == "__main__":
    near, far = (_tap(name) for name in sys.argv[1:3])
    print("ready", flush=True)
    carry(near, far, float(sys.argv[3]))
