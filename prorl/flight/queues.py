"""The two hand-over points between an event loop and a stream's threads. Neither decides anything.

The inbox is bounded by the credit that its owner granted, the sender by `MAX_QUEUED_BYTES`: a peer
that reads nothing breaks its own stream instead of filling our memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import pyarrow as pa

from prorl.schema import MAX_BATCH_BYTES

MAX_QUEUED_BYTES = 512 << 20

JOIN_BYTES = 256 << 10
"""Batches above this size travel alone: copying them costs more than a message."""


class Inbox:
    """Carries rows from a reader thread (or the other local end) to one coroutine; many arrivals
    cost one wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batches: deque[pa.RecordBatch] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._scheduled = False
        self._ended = False

    def put_threadsafe(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._poke()

    def end_threadsafe(self) -> None:
        self._ended = True
        self._poke()

    def put(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _poke(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            call_threadsafe(self._loop, self._wake)

    def _wake(self) -> None:
        self._scheduled = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> pa.RecordBatch | None:
        while not self._batches:
            if self._ended:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._batches.popleft()


SMALL_BYTES = 8 << 10


def wire_bytes(batch: pa.RecordBatch) -> int:
    """The size of a batch as a message, of a slice too; of a small one that of its buffers.

    The exact size is that of a layout, which Arrow makes without the GIL: beside Flight's threads
    the loop waits for its turn after it. Most messages are control rows, for which a bound will do.
    """
    num_bytes = int(batch.get_total_buffer_size())
    return num_bytes if num_bytes < SMALL_BYTES else int(pa.ipc.get_record_batch_size(batch))


class SizedBatch(NamedTuple):
    batch: pa.RecordBatch
    num_bytes: int


class Sender:
    """Carries rows from the loop (`put`) to a writer thread (`take`); `end` belongs to anyone."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[SizedBatch | None] = SimpleQueue()
        self._put_bytes = 0
        self._dequeued_bytes = 0

    def put(self, batch: pa.RecordBatch) -> bool:
        """Queue a batch; False when the peer is so far behind that the stream must break."""
        num_bytes = wire_bytes(batch)
        self._put_bytes += num_bytes
        if self._put_bytes - self._dequeued_bytes > MAX_QUEUED_BYTES:
            return False
        self._queue.put(SizedBatch(batch, num_bytes))
        return True

    def end(self) -> None:
        """Let the thread finish what is queued and stop."""
        self._queue.put(None)

    def take(self, timeout_s: float) -> tuple[list[pa.RecordBatch], bool]:
        """Returns what is queued, joined, and whether it is the end; nothing after `timeout_s`."""
        queued: list[SizedBatch] = []
        ended = True
        try:
            sized = self._queue.get(timeout=timeout_s)
            while sized is not None:
                queued.append(sized)
                sized = self._queue.get_nowait()
        except Empty:
            ended = False
        self._dequeued_bytes += sum(sized.num_bytes for sized in queued)
        return join(queued), ended


def join(batches: list[SizedBatch]) -> list[pa.RecordBatch]:
    """Concatenate small neighbours; order stays.

    >>> one = SizedBatch(pa.record_batch({"a": [1]}), 8)
    >>> [batch.num_rows for batch in join([one, one, one])]
    [3]
    """
    runs = (batches[part] for part in together([sized.num_bytes for sized in batches]))
    return [
        run[0].batch if len(run) == 1 else pa.concat_batches([batch for batch, _ in run])
        for run in runs
    ]


def together(sizes: Iterable[int]) -> list[slice]:
    """Returns which neighbours travel in one message: up to `MAX_BATCH_BYTES` of them.

    What is larger than `JOIN_BYTES` goes alone.

    >>> together([10, 10, JOIN_BYTES + 1, 10])
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    parts: list[slice] = []
    room = -1
    for i, num_bytes in enumerate(sizes):
        if num_bytes <= min(room, JOIN_BYTES):
            parts[-1] = slice(parts[-1].start, i + 1)
            room -= num_bytes
        else:
            parts.append(slice(i, i + 1))
            room = MAX_BATCH_BYTES - num_bytes if num_bytes <= JOIN_BYTES else -1
    return parts


def call_threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Run `call` on the loop, unless the loop is gone: its process is leaving."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise
