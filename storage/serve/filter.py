"""The group filter: which complete groups are worth training on, decided by SQL.

What the SQL sees: a table `rollouts` with one row per *valid* member (completed, class "" or
`policy`) of the groups to decide:

    group_id int64, task_id text, num_members int32 (n, masked ones included), rollout_id int64,
    sample_index int32, attempt int32, failure_class text ('' or 'policy'), reward float,
    and columns of `rollouts` (`FILTER_COLUMNS`): source, stop reason, parts of the reward, turns,
    tokens, tool calls, versions, seconds, the user's extra values

and a table `history`, what became of these groups' tasks before (`history.py`).

What it gives: `group_id`, `kept` (boolean) and `reason` (text), at most one row per group. A group
that it leaves out is dropped as `unselected`. In a run of several epochs it may give two columns
more: `rest`, the number of epochs that the task sits out, and `siblings`, the number of rollouts of
its later groups (0: as before). Under a filter other than `none`, a group with fewer
than 2 valid members never reaches the SQL: dropped as `incomplete`. (Under `none`, a group without
a valid member is `incomplete` too: there is nothing to serve.)

The SQL runs in a `LockedDuckDB`, many groups a query, and is stopped after 5 s: ours in this
process, a user's in one of its own that has 512 MiB (`filter_process.py`). A query that fails
is tried again group by group; a group that still fails is dropped as `filter_error: ...`, since a
group must never stay undecided. A process that was killed or frozen decides nothing: it is asked
again (FilterLostError). Decisions here are proposals: the control log's first one stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from prorl.control import GroupComplete
from prorl.errors import ConfigError
from prorl.filters import (
    FILTERS,
    PASS_RATE,
    Filter,
    GroupDecision,
    GroupMember,
    find_filter,
    is_named,
)
from prorl.schema import ROLLOUTS
from prorl.storage.serve.filter_process import FilterLostError, FilterProcess
from prorl.storage.serve.history import HISTORY, History
from prorl.waits import wait_limit_s

TIMEOUT_S = wait_limit_s("store.filter")

_ANSWER = "group_id, kept, left(reason, 200) as reason"
_CURATES = ("rest", "siblings")
_INTEGERS = ("INTEGER", "BIGINT", "HUGEINT")
MOST = 1024
"""Epochs and siblings that may be said."""

FILTER_COLUMNS = (
    *("data_source", "env", "failure_code", "stop_reason", "reward_parts", "num_sequences"),
    *("num_turns", "num_tokens", "num_sampled", "num_trained", "num_tool_calls", "min_version"),
    *("max_version", "queue_s", "init_s", "run_s", "llm_s", "tool_s", "eval_s", "extra"),
    "logprob_sum",
)
"""Columns of `rollouts` that a filter sees as they are stored."""

_LOG_COLUMNS = pa.schema(
    [
        ("group_id", pa.int64()),
        ("task_id", pa.utf8()),
        ("num_members", pa.int32()),
        ("rollout_id", pa.int64()),
        ("sample_index", pa.int32()),
        ("attempt", pa.int32()),
        ("failure_class", pa.utf8()),
        ("reward", pa.float32()),
    ]
)
"""The columns of the log about a member."""

MEMBERS = pa.schema(
    [*_LOG_COLUMNS, *(ROLLOUTS.field(name).with_nullable(True) for name in FILTER_COLUMNS)]
)
"""The `rollouts` table that a filter reads."""

Tables = Mapping[str, pa.Table]
"""The tables that SQL reads, by name."""

EMPTY: Tables = {"rollouts": MEMBERS.empty_table(), "history": HISTORY.empty_table()}

NO_HISTORY = History()

_OUTPUT = {"group_id": ("BIGINT", "INTEGER"), "kept": ("BOOLEAN",), "reason": ("VARCHAR",)}


def valid_members(group: GroupComplete) -> tuple[GroupMember, ...]:
    """Members that may train; the others are masked."""
    return tuple(member for member in group.members if member.valid)


def filter_error(error: ConfigError) -> str:
    """The reason of groups that are dropped since the SQL is wrong."""
    return f"filter_error: {error.problem}"[:200]


def named_filter(name: str) -> Filter:
    """The filter of a name or of SQL. Raises ConfigError for a word that is no filter's name."""
    if not is_named(name) and len(name.split()) == 1:
        raise ConfigError(f"filter {name!r}", f"{', '.join(FILTERS)}, {PASS_RATE}, or one SELECT")
    return find_filter(name)


class GroupFilter:
    """A run's filter, compiled. `decide` blocks, for at most `TIMEOUT_S` a query."""

    def __init__(self, name: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises ConfigError for neither a filter's name nor SQL that binds, FilterLostError."""
        self._stored, self._history = _NONE, NO_HISTORY
        chosen = named_filter(name)
        self._min_valid = chosen.min_valid
        runs = _OurSQL if is_named(name) else FilterProcess
        self._query: _OurSQL | FilterProcess = runs(chosen.sql, timeout_s)
        try:
            columns = self._query.columns(EMPTY)
            _check_output(columns)
            more = (
                f"{name}::INT as {name}" if name in columns else f"0 as {name}" for name in _CURATES
            )
            self._answer = ", ".join((_ANSWER, *more))
        except (ConfigError, FilterLostError):
            self._query.close()
            raise

    def decide(
        self,
        groups: Sequence[GroupComplete],
        stored: pa.Table | None = None,
        history: History = NO_HISTORY,
    ) -> list[GroupDecision]:
        """Returns one decision per group, in their order; `stored`: rows of their members."""
        self._stored = _NONE if stored is None else stored.select(["rollout_id", *FILTER_COLUMNS])
        self._history = history
        eligible = [group for group in groups if len(valid_members(group)) >= self._min_valid]
        decisions = self._ask_all(eligible)
        return [decisions.get(group.group_id) or self._absent(group) for group in groups]

    def _absent(self, group: GroupComplete) -> GroupDecision:
        enough = len(valid_members(group)) >= self._min_valid
        return GroupDecision(
            group.group_id, kept=False, reason="unselected" if enough else "incomplete"
        )

    def _ask_all(self, groups: Sequence[GroupComplete]) -> dict[int, GroupDecision]:
        if not groups:
            return {}
        try:
            return self._ask(groups)
        except ConfigError as error:
            if len(groups) == 1:
                group_id = groups[0].group_id
                reason = filter_error(error)
                return {group_id: GroupDecision(group_id, kept=False, reason=reason)}
        return {
            group_id: decision
            for group in groups
            for group_id, decision in self._ask_all([group]).items()
        }

    def _ask(self, groups: Sequence[GroupComplete]) -> dict[int, GroupDecision]:
        tables = {
            "rollouts": _table(groups, self._stored),
            "history": self._history.table(group.task_id for group in groups),
        }
        decisions = [
            GroupDecision(group_id, kept, str(reason), rest, siblings)
            for group_id, kept, reason, rest, siblings in self._query.answer(
                tables, len(groups) + 1, self._answer
            )
        ]
        for decision in decisions:
            if not all(
                0 <= (number if number is not None else -1) <= MOST for number in decision[3:]
            ):
                problem = f"filter gave rest {decision.rest}, siblings {decision.siblings}"
                raise ConfigError(problem, f"0 to {MOST} each")
        group_ids = {group.group_id for group in groups}
        by_group = {decision.group_id: decision for decision in decisions}
        if (
            len(by_group) != len(decisions)
            or not group_ids.issuperset(by_group)
            or any(d.kept is None for d in decisions)
        ):
            raise ConfigError(
                "filter gave a group twice, an unknown group, or a NULL",
                "one row per group: group_id, kept, reason",
            )
        return by_group

    def close(self) -> None:
        self._query.close()


class _Now:
    """Holds what a name stands for now: to register a table costs half as much as our queries."""

    table: pa.Table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


class _OurSQL:
    def __init__(self, sql: str, timeout_s: float) -> None:
        self._sql, self._timeout_s = sql, timeout_s
        self._now = {name: _Now() for name in EMPTY}
        from prorl.storage.read.sql import LockedDuckDB  # DuckDB takes long to import

        self._database = LockedDuckDB(error=ConfigError, label="filter")

    def columns(self, empty: Tables) -> Mapping[str, str]:
        for name, now in self._now.items():
            now.table = empty[name]
            self._database.register(name, now)
        return self._database.bind(self._sql)

    def answer(self, tables: Tables, limit: int, projection: str) -> Sequence[tuple[Any, ...]]:
        for name, now in self._now.items():
            now.table = tables[name]
        return self._database.first(self._sql, self._timeout_s, rows=limit, columns=projection)

    def close(self) -> None:
        self._database.close()


def check_filter(name: str) -> None:
    """Raise ConfigError for neither a filter's name nor SQL that binds and gives the columns."""
    if not is_named(name):
        GroupFilter(name).close()


def _check_output(columns: Mapping[str, str]) -> None:
    for name, types in _OUTPUT.items():
        if columns.get(name) not in types:
            raise ConfigError(
                f"filter gives {', '.join(f'{name} {dtype}' for name, dtype in columns.items())}",
                "group_id BIGINT, kept BOOLEAN, reason VARCHAR",
            )
    for name in _CURATES:
        if columns.get(name, "INTEGER") not in _INTEGERS:
            raise ConfigError(f"filter gives {name} {columns[name]}", f"{name} INTEGER")


_NONE = MEMBERS.empty_table().select(["rollout_id", *FILTER_COLUMNS])


def _table(groups: Sequence[GroupComplete], stored: pa.Table) -> pa.Table:
    rows = [
        (
            g.group_id,
            g.task_id,
            len(g.members),
            m.rollout_id,
            m.sample_index,
            m.attempt,
            m.failure_class.value,
            m.reward,
        )
        for g in groups
        for m in valid_members(g)
    ]
    log_columns = [
        pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), _LOG_COLUMNS, strict=True)
    ]
    place = pc.index_in(
        log_columns[_LOG_COLUMNS.get_field_index("rollout_id")], stored.column("rollout_id")
    )
    seen = stored.select(FILTER_COLUMNS).take(place)
    return pa.Table.from_arrays([*log_columns, *seen.columns], schema=MEMBERS)
