"""A run's counts as the log keeps them: one text per run.

It is written with every transaction that changes one, so that no restart counts rows.
"""

from __future__ import annotations

from collections import Counter

import orjson

from prorl.service.core.sampler import Rate
from prorl.service.core.state import RunRecord

COUNTS = (
    "next_group",
    "next_rollout",
    "next_commit",
    "next_event",
    "outbox_end",
    "outbox_stored",
    "next_delivery",
    "acked",
    "version",
    "given_version",
    "unstored",
    "stored_bytes",
    "open_groups",
    "undecided",
    "kept",
    "waiting",
    "group_size",
    "num_rewards",
    "paused",
    "num_tasks",
    "fed",
    "skipped",
    "group_s",
    "taken_s",
    "reward_sum",
)
STATES = ("group_states", "rollout_states")


def dump(run: RunRecord) -> str:
    counts = {name: getattr(run, name) for name in COUNTS}
    counts["rate"] = list(run.rate)
    counts |= {
        name: {str(state): count for state, count in getattr(run, name).items() if count}
        for name in STATES
    }
    return orjson.dumps(counts).decode()


def restore(run: RunRecord, text: str) -> None:
    for name, value in orjson.loads(text).items():
        match name:
            case "rate":
                run.rate = Rate(*value)
            case "group_states" | "rollout_states":
                setattr(run, name, Counter(value))
            case _:
                setattr(run, name, value)
