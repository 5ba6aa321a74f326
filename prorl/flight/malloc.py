"""`tune`: keep glibc from giving pages back to the kernel between record batches.

Fresh pages halve Flight's throughput. Called by the mains of processes that serve Flight and by the
trainer's client, before the first Flight call. Price: resident memory stays at its high-water mark.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def tune() -> bool:
    """Apply the settings; False where libc has none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(option, value) == 1 for option, value in settings)
