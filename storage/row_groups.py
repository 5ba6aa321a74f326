"""Where the rows of a part are cut into row groups: what a reader reads at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

MIN_GROUP_ROWS = 8


MAX_GROUP_ROWS = 64


ROW_GROUP_BYTES = 1 << 20


WIDE_ROW_GROUP_BYTES = 2 << 20


WIDE = 32
"""Columns of a table whose footer grows fast with its row groups."""


LARGE_ROWS = 1024


LARGE_GROUP_ROWS = 4096


SMALL_ROW_GROUP_BYTES = 1 << 20


def cut_by_size(rows: pa.Table) -> list[tuple[int, int]]:
    """Row groups of about the size at which footer and row group cost a reader the same.

    For a reader of a few rows of a large file.
    """
    size = WIDE_ROW_GROUP_BYTES if rows.num_columns >= WIDE else ROW_GROUP_BYTES
    each = max(1024, rows.num_rows * size // max(1, rows.nbytes))
    return [(i, min(i + each, rows.num_rows)) for i in range(0, rows.num_rows, each)]


def row_groups(rows: pa.Table) -> list[tuple[int, int]]:
    """Where to cut `sequences` rows that are sorted by group: at borders of groups, if possible.

    A row group has 8-64 rows. A group of more rows is cut inside; the last row group may be short.
    """
    least, most = _row_group_bounds(rows)
    ids = rows.column("group_id").to_numpy()
    borders = [*(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    cuts, start = [], 0
    for border, following in zip(borders, [*borders[1:], None], strict=True):
        while border - start > most:
            cuts.append((start, start + most))
            start += most
        if following is None or border - start >= least or following - start > most:
            cuts.append((start, border))
            start = border
    return cuts


def _row_group_bounds(rows: pa.Table) -> tuple[int, int]:
    """Fewest and most rows of a row group.

    In a large file short rows stand more together, up to `SMALL_ROW_GROUP_BYTES` and 4,096: whoever
    opens it decodes a footer that grows with its row groups.
    """
    least, most = MIN_GROUP_ROWS, MAX_GROUP_ROWS
    if rows.num_rows > LARGE_ROWS:
        width = max(1, rows.nbytes // rows.num_rows)
        least = min(LARGE_GROUP_ROWS, max(least, SMALL_ROW_GROUP_BYTES // width))
        most = max(most, least)
    return least, most
