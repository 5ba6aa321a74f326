"""A live stream and a replay mixed at a ratio.

    live = service.stream("mine", groups_per_batch=1)
    old = prorl.connect("grpc://...").stream("theirs", groups_per_batch=1)
    for batch, replayed in mix(live, old, ratio=0.25):
        ...

Which group comes next depends on how many have come and on nothing else: after n groups exactly
floor(n * ratio) of them are replayed, evenly spread. Groups are marked, and each batch keeps its
own run and cursor: a trainer that goes on gives both cursors to the streams and both counts to
`mix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from prorl.client.packed import PackedBatch
from prorl.errors import UserError


class Mixed(NamedTuple):
    """A group and where it comes from."""

    batch: PackedBatch
    replayed: bool


def mix(
    live: Iterator[PackedBatch],
    replay: Iterator[PackedBatch],
    ratio: float,
    *,
    num_live: int = 0,
    num_replayed: int = 0,
) -> Iterator[Mixed]:
    """Groups of both until one whose turn it is has no more; batches hold one group each. Raises
    UserError for a ratio outside 0 to 1, for counts that this ratio does not give, and for batches
    of several groups.
    """
    if not 0 <= ratio <= 1:
        raise UserError(f"ratio {ratio}", "from 0 to 1")
    share, count = Fraction(str(ratio)), num_live + num_replayed
    if num_replayed != int(count * share):
        raise UserError(
            f"{num_replayed} replayed of {count} groups at ratio {ratio}",
            f"{int(count * share)}: both counts as they were at the checkpoint",
        )
    return _mixed(live, replay, share, count)


def _mixed(
    live: Iterator[PackedBatch], replay: Iterator[PackedBatch], share: Fraction, count: int
) -> Iterator[Mixed]:
    while True:
        replayed = int((count + 1) * share) > int(count * share)
        batch = next(replay if replayed else live, None)
        if batch is None:
            return
        if batch.num_groups != 1:
            raise UserError(f"a batch of {batch.num_groups} groups", "groups_per_batch=1")
        yield Mixed(batch, replayed)
        count += 1
