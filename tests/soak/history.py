"""The history of what clients saw, written down as it happened, and its comparison with the store.

A line is written before a call (`invoke`) and after it (`ok`); a call that failed or whose client
died has no `ok`, and may have happened or not. `problems` is pure over the lines and the stored
run.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prorl.schema import SEQUENCES
from prorl.schema.rows import row_hashes
from prorl.storage.read.catalog import StoredRun
from prorl.storage.serve.replay import open_replay

Line = Mapping[str, Any]


def write(path: Path, **line: Any) -> None:
    """Append one line, in the kernel's hands when it returns."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines(path: Path) -> list[Line]:
    """Whole lines of a file; a writer that was killed may have left half of one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Stored(NamedTuple):
    """A run's directory, as far as clients can have seen it."""

    keys: Mapping[str, int]
    """Rollout key -> id."""
    status: Mapping[int, tuple[str, bool]]
    """Rollout id -> how it ended, and whether it may train."""
    order: list[int]
    """Groups by delivery_seq."""
    hashes: Mapping[int, list[str]]
    """Group -> its sequences' rows."""
    rollouts: Mapping[int, list[int]]
    """Group -> whose sequences these are."""

    @classmethod
    def read(cls, directory: Path) -> Stored:
        """Everything that was delivered, from the files alone."""
        stored = StoredRun(directory)
        rollouts = stored.sql("select rollout_key, rollout_id, status, valid from rollouts")
        order, index = open_replay(directory)
        delivered = stored.sql("select count(*) as n from groups where event = 'delivered'")
        groups = list(order.groups)[: delivered.to_pylist()[0]["n"]]
        batches = {group: index.read(group).select(SEQUENCES.names) for group in groups}
        rows = rollouts.to_pylist()
        return cls(
            {row["rollout_key"]: row["rollout_id"] for row in rows},
            {row["rollout_id"]: (row["status"], row["valid"]) for row in rows},
            groups,
            {group: row_hashes(batch) for group, batch in batches.items()},
            {group: batch.column("rollout_id").to_pylist() for group, batch in batches.items()},
        )


def problems(submitted: Iterable[Line], read: Iterable[Line], stored: Stored) -> Iterator[str]:
    """Each way in which what clients saw and what is stored do not agree."""
    yield from _submissions(submitted, stored)
    yield from _readings(list(read), stored)


def _submissions(submitted: Iterable[Line], stored: Stored) -> Iterator[str]:
    """Yields the differences between accepted groups and the store: each is stored once, under the
    ids that were answered.
    """
    answers: defaultdict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for line in submitted:
        if line["what"] == "ok":
            for key, group in line["groups"].items():
                answers[key].add(group)
        sizes |= dict.fromkeys(line["keys"], line["n"])
    for key, groups in answers.items():
        if len(groups) > 1:
            yield f"key {key} was answered with groups {sorted(groups)}"
    group_of = Counter(group for groups in answers.values() for group in groups)
    yield from (f"group {group} is {n} keys" for group, n in group_of.items() if n > 1)
    expected = {f"{key}/{i}" for key in answers for i in range(sizes[key])}
    possible = {f"{key}/{i}" for key, n in sizes.items() for i in range(n)}
    yield from (f"lost: {key} was accepted" for key in sorted(expected - set(stored.keys)))
    yield from (f"nobody asked for {key}" for key in sorted(set(stored.keys) - possible))


def _readings(read: list[Line], stored: Stored) -> Iterator[str]:
    """Yields the differences between what was read and what is stored: equal, in the stored order,
    trained on once.
    """
    for line in read:
        group, seq = line["group"], line["seq"]
        if stored.order[seq : seq + 1] != [group]:
            yield f"group {group} was read at {seq}, where another is stored"
        elif line["hashes"] != stored.hashes[group]:
            yield f"group {group} was read ({line['what']}) with other rows than are stored"
    trained = Counter(line["seq"] for line in read if line["what"] == "trained")
    yield from (f"trained {n} times: {seq}" for seq, n in trained.items() if n > 1)
    yield from (f"never trained: {seq}" for seq in range(len(stored.order)) if seq not in trained)
    for group, rollouts in stored.rollouts.items():
        for rollout in rollouts:
            # One that is not valid has no token that trains: it only lies beside those that do.
            if (ended := stored.status.get(rollout)) is None or ended[0] != "completed":
                yield f"group {group} trained rollout {rollout}, which ended as {ended}"
