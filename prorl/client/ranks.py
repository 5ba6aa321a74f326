"""A step's share of each rank of a data-parallel trainer.

    for step in client.stream_shares("mine", rank, world, groups_per_step=32, max_tokens=65536):
        for batch in step.passes:                  # as many on every rank; DDP and FSDP need that
            loss(batch.torch(), step.num_trained)  # a dummy token of weight 0 where it is None
        if rank == 0: save_checkpoint(weights, step.cursor); client.commit(step.cursor)

A step is `groups_per_step` whole groups in delivery order; its borders do not depend on `world`, so
that a restart with another world goes on at the same cursor. Every rank streams the same groups
under one consumer name and deals by itself: `deal` is a pure function, so no rank needs to be told
anything. Advantages are computed on whole groups before dealing. Ranks that share a data rank
(tensor, pipeline, context parallel) ask for the same `rank`.

Promised: each sequence on exactly one rank, once; as many passes on every rank; no pass above
`max_tokens` unless one sequence alone is; the same share for the same cursor, in a replay too. Not
promised: that ranks which name different worlds notice it (`step.digest` is equal on all ranks of a
world), and that less than the whole step crosses the network to a trainer on another host.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from prorl.client.packed import PackedBatch
from prorl.errors import UserError
from prorl.types import SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rows = tuple[int, ...]
"""Rows of a step, in delivery order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The share of a step that one rank trains."""

    passes: tuple[PackedBatch | None, ...]
    """One forward and backward each; None: one of a dummy token with weight 0, since the others
    wait in their collectives.
    """
    num_trained: int
    """Trained tokens of the whole step: what every rank divides its loss by (times `world` under
    DDP, which averages).
    """
    num_tokens: int
    """The tokens of this rank."""
    cursor: str
    """After the step: for the checkpoint; rank 0 commits it."""
    digest: str
    """The digest of how the step was dealt; equal on all ranks of one world."""


def deal(
    lengths: Sequence[int] | NDArray[np.int64], world: int, max_tokens: int
) -> tuple[tuple[Rows, ...], ...]:
    """Passes by rank: sequences longest first, each to the rank with fewest tokens.

    Then each rank's go into passes of up to `max_tokens`. Ties go by row and rank: pure, equal
    everywhere.

    >>> deal([5, 4, 3, 3, 3], world=2, max_tokens=8)
    (((0,), (3,)), ((1, 2), (4,)))

    Two passes here and one there would leave a rank waiting: a pass is split where it can be.
    """
    sizes = [int(length) for length in lengths]
    owned: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        load, rank = heapq.heappop(loads)
        owned[rank].append(row)
        heapq.heappush(loads, (load + sizes[row], rank))
    passes = [_pack(rows, sizes, max_tokens) for rows in owned]
    most = max(map(len, passes))
    return tuple(_spread(mine, sizes, most) for mine in passes)


def _pack(rows: Iterable[int], sizes: Sequence[int], max_tokens: int) -> list[Rows]:
    """First fit of rows that come longest first."""
    room: list[int] = []
    packs: list[list[int]] = []
    for row in rows:
        fits = next((i for i, free in enumerate(room) if sizes[row] <= free), len(room))
        if fits == len(room):
            room.append(max_tokens)
            packs.append([])
        room[fits] -= sizes[row]
        packs[fits].append(row)
    return [tuple(sorted(mine)) for mine in packs]


def _spread(passes: list[Rows], sizes: Sequence[int], count: int) -> tuple[Rows, ...]:
    """Splits passes until a rank has as many as the others. The largest is split in two while one
    can be, then empty ones follow.
    """
    passes = list(passes)
    while len(passes) < count and any(len(rows) > 1 for rows in passes):
        where = max(
            (place for place, rows in enumerate(passes) if len(rows) > 1),
            key=lambda place: (sum(sizes[row] for row in passes[place]), -place),
        )
        rows = passes[where]
        passes[where : where + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return (*passes, *((),) * (count - len(passes)))


def share(step: PackedBatch, rank: int, world: int, max_tokens: int) -> RankShare:
    """A rank's share of a step of whole groups, advantages included: one copy of its rows."""
    lengths = np.diff(step.cu_seqlens)
    dealt = deal(lengths, world, max_tokens)
    passes = tuple(_take(step, rows) for rows in dealt[rank])
    return RankShare(
        passes=passes,
        num_trained=int(step.span_widths[step.span_kind == SpanKind.TRAINED].sum()),
        num_tokens=int(sum(lengths[list(rows)].sum() for rows in dealt[rank] if rows)),
        cursor=step.cursor,
        digest=blake2b(repr((step.cursor, dealt)).encode(), digest_size=8).hexdigest(),
    )


def _take(step: PackedBatch, rows: Rows) -> PackedBatch | None:
    if not rows:
        return None
    advantages = None if step.advantages is None else step.advantages[list(rows)]
    return PackedBatch(step.arrow.take(list(rows)), step.run, advantages)


def check_rank(rank: int, world: int, max_tokens: int) -> None:
    """Raise UserError for a rank that the world does not have."""
    if world < 1 or not 0 <= rank < world:
        raise UserError(f"rank {rank} of world {world}", "0 <= rank < world")
    if max_tokens < 1:
        raise UserError(f"max_tokens {max_tokens}", "at least 1")
