"""What must hold between the tables of a run directory, as SQL.

Each query gives the rows that break a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from prorl.schema import APPENDED, TABLES
from prorl.storage.catalog import StoredRun
from prorl.storage.sql import LockedDuckDB


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


_QUERIES = {
    "rollouts": {
        "rollout {0} is stored {1} times": (
            "select rollout_id, count(*) from rollouts group by 1 having count(*) > 1"
        ),
        "rollout {0} is completed but its class is {1!r}": (
            """
            select rollout_id, failure_class from rollouts
            where status = 'completed' and failure_class not in ('', 'policy')"""
        ),
        "rollout {0} is {1} but valid": (
            "select rollout_id, status from rollouts where valid and status <> 'completed'"
        ),
    },
    "sequences": {
        "sequence {0} is stored {1} times": (
            "select sequence_id, count(*) from sequences group by 1 having count(*) > 1"
        ),
        "rollout {0} counts {1} sequences and {2} tokens, stored are {3} and {4}": (
            """
            select rollout_id, num_sequences, num_tokens, coalesce(n, 0), coalesce(t, 0)
            from rollouts left join (
                select rollout_id, attempt, count(*) as n, sum(num_tokens) as t
                from sequences group by all
            ) using (rollout_id, attempt)
            where num_sequences <> coalesce(n, 0) or num_tokens <> coalesce(t, 0)"""
        ),
        "sequence {0} belongs to no completed rollout of that attempt": (
            """
            select sequence_id from sequences
            anti join (from rollouts where status = 'completed') using (rollout_id, attempt)"""
        ),
    },
    "turns": {
        "rollout {0} counts {1} turns, stored are {2}": (
            """
            select rollout_id, num_turns, count(turn)
            from rollouts left join turns using (rollout_id, attempt)
            where status = 'completed' group by rollout_id, num_turns
            having num_turns <> count(turn)"""
        ),
    },
    "groups": {
        "event {0} is stored {1} times": (
            "select event_seq, count(*) from groups group by 1 having count(*) > 1"
        ),
        "group {0} was decided {1} times": (
            "select group_id, count(*) from groups where event = 'decided' group by 1 having"
            " count(*) > 1"
        ),
        "group {0} was delivered but never kept": (
            """
            select group_id from groups where event = 'delivered'
            and group_id not in (select group_id from groups where event = 'decided' and kept)"""
        ),
        "delivery_seq {0} stands where {1} was expected": (
            """
            select delivery_seq, n from (
                select delivery_seq, row_number() over (order by delivery_seq) - 1 as n
                from groups where event = 'delivered'
            ) where delivery_seq <> n"""
        ),
    },
    "trained": {
        "checkpoint {0} was trained on sequence {1}, which is not stored": (
            "select checkpoint, sequence_id from trained anti join sequences using (sequence_id)"
        ),
        "checkpoint {0} was trained on sequence {1} {2} times": (
            """
            select checkpoint, sequence_id, count(*) from trained
            group by consumer, checkpoint, sequence_id having count(*) > 1"""
        ),
    },
    "annotations": {
        "annotation {0} is of rollout {1}, which is not stored": (
            "select annotation_id, rollout_id from annotations anti join rollouts using"
            " (rollout_id)"
        ),
    },
    "tasks": {
        "task of group {0} is stored {1} times": (
            "select group_id, count(*) from tasks group by 1 having count(*) > 1"
        )
    },
}
"""Per table: what is wrong -> rows for which it is.

`sequences` here is its scalar columns and num_tokens.
"""


_MOST = 20
"""Rows that one rule reports."""


def broken_rules(stored: StoredRun) -> Iterator[Finding]:
    database = LockedDuckDB(memory="2GB")
    try:
        for table in ("rollouts", "turns", "groups", "tasks", *APPENDED):
            database.register(table, stored.view(table))
        database.register("sequences", _sequence_counts(stored))
        for table, rules in _QUERIES.items():
            for text, sql in rules.items():
                for row in database.query(f"{sql} limit {_MOST}").to_pylist():
                    yield Finding(where=table, what=text.format(*row.values()))
    finally:
        database.close()


def _sequence_counts(stored: StoredRun) -> pa.Table:
    keys = ["sequence_id", "rollout_id", "attempt"]
    batches = stored.dataset("sequences").to_batches(columns=[*keys, "token_ids"])
    schema = pa.schema(
        [TABLES["sequences"].field(name) for name in keys] + [("num_tokens", pa.int64())]
    )
    counted = [
        pa.RecordBatch.from_arrays(
            [
                *(batch.column(name) for name in keys),
                pc.list_value_length(batch.column("token_ids")).cast(pa.int64()),
            ],
            schema=schema,
        )
        for batch in batches
    ]
    return pa.Table.from_batches(counted, schema)
