"""Batches of a fixed number of groups, wherever the boundaries of the stream fall."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prorl.client.packed import PackedBatch


def regroup(batches: Iterable[PackedBatch], num_groups: int) -> Iterator[PackedBatch]:
    """Yield batches of exactly `num_groups` groups; only the last may have fewer.

    The same groups in the same order give the same batches, however they came: a trainer that is
    fed from a replay repeats the steps of the live run. Groups that lie in one batch are not
    copied. Nothing is fetched ahead of the batch that is asked for.
    """
    parts: list[PackedBatch] = []
    missing = num_groups
    for batch in batches:
        start = 0
        while start < batch.num_groups:
            part = batch.groups(start, start + missing)
            parts.append(part)
            start += part.num_groups
            missing -= part.num_groups
            if missing == 0:
                yield PackedBatch.concat(parts)
                parts, missing = [], num_groups
    if parts:
        yield PackedBatch.concat(parts)
