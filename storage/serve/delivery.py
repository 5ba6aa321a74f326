"""One run's delivery order, and who has read how far.

`LiveOrder` asks the control log for it; `serve/replay.py` has it from a directory.

There is one order per run: `delivery_seq` is dense from 0 and given when a group is first handed
out, oldest span version first, then in the order of decisions. Every consumer is a cursor over that
order, and any may cause a hand-out.
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prorl.control import GroupEventRow, HandedOut, KeptGroup
from prorl.errors import ConflictError
from prorl.limits import Clock
from prorl.pluralize import pluralize
from prorl.timing import now

HANDED_AT_ONCE = 64
"""Groups of one request to the log, whose loop reads each back: a quarter of a millisecond."""

_GROWTH = 4096
"""Bytes by which `_ever_kept` grows at once, beyond the new group."""


class OrderRequest(NamedTuple):
    """A consumer's request for the groups from `seq` on."""

    seq: int
    max_groups: int
    """0 = no bound."""
    max_bytes: int
    wait_s: float


class OrderReply(NamedTuple):
    """The groups from `OrderRequest.seq` on."""

    groups: tuple[int, ...]
    end: bool
    """Nothing will ever come after them."""
    stalled: str = ""
    """The reason why there are none, if the run does not move."""


class Order(Protocol):
    """Describes what the endpoint needs of a run."""

    run_id: str

    @property
    def delivered(self) -> int:
        """Tells how many groups have a delivery_seq."""

    @property
    def finished(self) -> bool:
        """Tells whether no group will ever be added to those that have a delivery_seq."""

    def committed(self, consumer: str) -> int:
        """Returns the delivery_seq of this consumer's last commit; 0 without one."""

    async def take(self, request: OrderRequest) -> OrderReply:
        """Returns groups from `request.seq` on: at least one unless none comes in time. Raises
        ConflictError for a seq ahead of the order.
        """

    async def commit(self, consumer: str, seq: int) -> None:
        """Note that everything before `seq` is trained and durable. Raises ConflictError for a seq
        ahead of the order.
        """


def bounded(
    groups: Iterable[int], size: Callable[[int], int], max_groups: int, max_bytes: int
) -> list[int]:
    """Returns a prefix within the bounds, but at least one group.

    >>> bounded([1, 2, 3], lambda group: 10, 0, 25)
    [1, 2]
    """
    prefix: list[int] = []
    total = 0
    for group in groups:
        total += size(group)
        if prefix and (total > max_bytes or (max_groups and len(prefix) >= max_groups)):
            break
        prefix.append(group)
    return prefix


def check_seq(seq: int, delivered: int, run_id: str) -> None:
    """Raise ConflictError for a cursor that the order has not reached."""
    if seq > delivered:
        raise ConflictError(
            f"cursor {run_id}@{seq} is ahead of run {run_id}, which has delivered"
            f" {pluralize(delivered, 'group')}",
            f"at most {run_id}@{delivered}",
            "is this the run that the checkpoint was trained on?",
        )


class _Entry(NamedTuple):
    """Compared in this order: oldest version first, then as decided."""

    min_version: int
    decision: int
    group_id: int


AskHandout = Callable[[list[KeptGroup]], Awaitable[HandedOut]]
"""Asks what became of groups, once that is durable."""

SaveCursor = Callable[[str, int], Awaitable[None]]


class LiveOrder:
    """The order of a running run: hands kept groups out through the control log."""

    def __init__(
        self,
        run_id: str,
        *,
        size: Callable[[int], int],
        handout: AskHandout,
        save_cursor: SaveCursor,
        clock: Clock = now,
    ) -> None:
        """`size` gives a group's bytes, about."""
        self.run_id = run_id
        self._size, self._handout, self._save_cursor = size, handout, save_cursor
        self._clock, self._used_at = clock, clock()
        self._undelivered: dict[int, int] = {}
        self._oldest_first: list[_Entry] = []
        """A heap over `_undelivered`; an entry whose group is not kept any more is skipped."""
        self._decisions = count()
        self._delivered = array("q")
        self._cursors: dict[str, int] = {}
        self._ever_kept = bytearray()
        """1 for each group that was ever kept: 9 bytes of memory are all that an old one costs."""
        self._finished = False
        self._stalled = ""
        self._changed = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    @property
    def delivered(self) -> int:
        return len(self._delivered)

    @property
    def finished(self) -> bool:
        return self._finished and not self._undelivered

    @property
    def num_kept(self) -> int:
        return len(self._undelivered)

    @property
    def idle_s(self) -> float:
        """Returns the seconds since a consumer took or committed, or a group was kept."""
        return self._clock() - self._used_at

    def committed(self, consumer: str) -> int:
        return self._cursors.get(consumer, 0)

    def restore(self, delivered: NDArray[np.int64]) -> None:
        """Restores the order that an earlier process delivered; called before `apply_events`."""
        self._delivered.frombytes(delivered.tobytes())
        flags = np.zeros(int(delivered.max(initial=-1)) + 1, np.uint8)
        flags[delivered] = 1
        self._ever_kept = bytearray(flags.tobytes())

    def apply_events(self, events: Iterable[GroupEventRow]) -> None:
        """Applies what the log says became of groups, in order. Idempotent."""
        for event in events:
            if event.event == "delivered":
                self._place(event.group_id, event.delivery_seq)
            elif event.event == "stale":
                self._is_new(event.group_id)
                self._undelivered.pop(event.group_id, None)
            elif event.kept:
                self.keep(event.group_id, event.min_version)

    def restore_cursors(self, cursors: Mapping[str, int]) -> None:
        """Puts consumers where the log says that they are."""
        self._cursors |= cursors

    def _is_new(self, group_id: int) -> bool:
        """Marks a group as kept once; returns whether it is the first time."""
        if group_id >= len(self._ever_kept):
            self._ever_kept.extend(bytes(group_id + _GROWTH - len(self._ever_kept)))
        was_kept, self._ever_kept[group_id] = self._ever_kept[group_id], 1
        return not was_kept

    def keep(self, group_id: int, min_version: int) -> None:
        """Note that the log has kept a group, which may be handed out from now on. Idempotent."""
        if self._is_new(group_id):
            self._undelivered[group_id] = min_version
            heapq.heappush(self._oldest_first, _Entry(min_version, next(self._decisions), group_id))
            self._wake()

    def finish(self) -> None:
        self._finished = True
        self._wake()

    def tell(self, stalled: str) -> None:
        """Wake the consumers that wait, with why the run does not move; empty: it moves."""
        self._stalled = stalled
        self._changed.set()
        self._changed = asyncio.Event()

    def _place(self, group_id: int, seq: int) -> None:
        self._is_new(group_id)
        self._undelivered.pop(group_id, None)
        if seq == len(self._delivered):
            self._delivered.append(group_id)
        assert self._delivered[seq] == group_id, f"delivery_seq {seq} belongs to two groups"

    def _wake(self) -> None:
        self._used_at = self._clock()
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, request: OrderRequest) -> OrderReply:
        check_seq(request.seq, self.delivered, self.run_id)
        self._used_at = self._clock()
        await self._until_ready(request)
        groups = bounded(
            (self._delivered[seq] for seq in range(request.seq, self.delivered)),
            self._size,
            request.max_groups,
            request.max_bytes,
        )
        end = self.finished and request.seq + len(groups) == self.delivered
        return OrderReply(tuple(groups), end=end, stalled="" if groups else self._stalled)

    async def _until_ready(self, request: OrderRequest) -> None:
        """Waits until a group is at `request.seq`, the deadline passes or the run stalls."""
        deadline = asyncio.get_running_loop().time() + request.wait_s
        earlier_stall = self._stalled
        while self.delivered == request.seq and not self.finished:
            if self._undelivered:
                await self._hand_out(request)
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return
            if self._stalled not in ("", earlier_stall):
                return

    async def _hand_out(self, request: OrderRequest) -> None:
        # One request at a time: two would ask for the same groups. It outlives the client that
        # caused it, because the log may have numbered the groups by the time that client is gone.
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(request))
            self._asking.add_done_callback(self._clear_request)
        await asyncio.shield(self._asking)

    def _clear_request(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()

    async def _ask(self, request: OrderRequest) -> None:
        chosen = self._pop_oldest(request)
        groups = [KeptGroup(entry.group_id, entry.min_version) for entry in chosen]
        try:
            for first in range(0, len(groups), HANDED_AT_ONCE):
                await self._ask_for(groups[first : first + HANDED_AT_ONCE])
        finally:
            for entry in chosen:
                if entry.group_id in self._undelivered:
                    heapq.heappush(self._oldest_first, entry)
        self._wake()

    async def _ask_for(self, groups: list[KeptGroup]) -> None:
        answer = await self._handout(groups)
        for place in sorted(answer.delivered, key=attrgetter("delivery_seq")):
            self._place(place.group_id, place.delivery_seq)
        for group_id in {*(group.group_id for group in groups), *answer.stale}:
            # Stale, or unknown to the log: either way nobody will get it.
            self._undelivered.pop(group_id, None)

    def _pop_oldest(self, request: OrderRequest) -> list[_Entry]:
        """Takes kept groups to ask for, within the bounds but at least one; O(their number)."""
        chosen: list[_Entry] = []
        total = 0
        while self._oldest_first:
            entry = heapq.heappop(self._oldest_first)
            if entry.group_id not in self._undelivered:
                continue
            total += self._size(entry.group_id)
            full = request.max_groups and len(chosen) >= request.max_groups
            if chosen and (full or total > request.max_bytes):
                heapq.heappush(self._oldest_first, entry)
                break
            chosen.append(entry)
        return chosen

    async def commit(self, consumer: str, seq: int) -> None:
        check_seq(seq, self.delivered, self.run_id)
        self._used_at = self._clock()
        await self._save_cursor(consumer, seq)
        self._cursors[consumer] = max(seq, self.committed(consumer))
