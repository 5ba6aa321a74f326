"""Bytes and memory as the consumers of `prorl bench stream` count them."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_exactly(source: socket.socket, into: memoryview) -> memoryview:
    filled = 0
    while filled < len(into):
        got = source.recv_into(into[filled : filled + (1 << 20)])
        assert got, "the rival's producer is gone"
        filled += got
    return into


def total_read(tensor: Any) -> int:
    """Reads every byte: the sum of the tensor's memory taken as int64.

    A sum of int32 would be bound by the widening.
    """
    import torch

    even = tensor[:-1] if len(tensor) % 2 else tensor
    return (
        int(even.view(torch.int64).sum())
        if even.storage_offset() % 2 == 0 and even.data_ptr() % 8 == 0
        else int(even.sum())
    )


def checksum(arrays: list[NDArray[np.int32]]) -> int:
    return sum(int(array.sum(dtype=np.int64)) for array in arrays)


def memcpy_seconds(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return min(times)


def peak_mib() -> float:
    """Highest resident size of this process alone (`ru_maxrss` starts with the parent's)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def received_bytes() -> int:
    """Bytes that this process's TCP connections have received, as the kernel counts them.

    The figure is tcp_info.tcpi_bytes_received.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if (
                    duplicate.family in (socket.AF_INET, socket.AF_INET6)
                    and duplicate.type == socket.SOCK_STREAM
                ):
                    info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("<Q", info, 128)[0]
        except OSError:
            continue
    return total
