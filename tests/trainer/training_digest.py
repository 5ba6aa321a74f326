"""Hashes what trains of each sequence: ids up to the last trained token, mask, logprobs where it is
set. Equal for an adapter's rows and for what `prorl sql` says of the stored run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from prorl.client.records import Feed
from prorl.storage.read.catalog import query


def digest(ids: Any, mask: Any, logprobs: Any) -> str:
    """Returns the digest of one whole sequence; "" where nothing trains."""
    mask = np.asarray(mask).astype(bool)
    if not mask.any():
        return ""
    stop = int(mask.nonzero()[0][-1]) + 1
    hasher = hashlib.blake2b(np.asarray(ids)[:stop].astype(np.int64).tobytes(), digest_size=12)
    hasher.update(np.packbits(mask[:stop]).tobytes())
    hasher.update(np.asarray(logprobs, np.float32)[:stop][mask[:stop]].tobytes())
    return hasher.hexdigest()


def of_response(prompt: Any, response: Any, mask: Any, logprobs: Any) -> str:
    """The same where mask and logprobs are those of the response alone."""
    none = np.zeros(len(prompt))
    return digest(
        np.concatenate([np.asarray(prompt), np.asarray(response)]),
        np.concatenate([none, np.asarray(mask)]),
        np.concatenate([none, np.asarray(logprobs)]),
    )


def stored(run_dir: Path, groups: Container[int] | None = None) -> Counter[str]:
    """Returns the digests of a stored run, or of its groups with these ids."""
    sql = "SELECT group_id, token_ids, logprobs, span_end, span_kind FROM sequences"
    counts: Counter[str] = Counter()
    for row in query(run_dir, sql).to_pylist():
        if groups is not None and row["group_id"] not in groups:
            continue
        widths = np.diff([0, *row["span_end"]])
        kinds = np.repeat(row["span_kind"], widths)
        logprobs = np.zeros(len(kinds), np.float32)
        logprobs[kinds > 0] = row["logprobs"]
        counts[digest(row["token_ids"], kinds == 1, logprobs)] += 1
    counts.pop("", None)
    return counts


def counted(digests: Any) -> Counter[str]:
    counts = Counter(digests)
    counts.pop("", None)
    return counts


def delivered(feed: Feed) -> list[int]:
    """Ids of the groups in delivery order."""
    return [group[0].group for group in feed]
