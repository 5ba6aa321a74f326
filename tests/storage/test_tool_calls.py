"""The view `tool_calls`: each call of a turn stands beside the reply that it got."""

from __future__ import annotations

import duckdb
import orjson

from prorl.storage.read.catalog import DERIVED
from prorl.types import Json


def message(index: int, turn: int, role: str, content: str, *calls: str) -> tuple[Json, ...]:
    made = [{"name": name, "arguments": {}, "error": ""} for name in calls]
    return ("r", 0, 1, index, turn, role, content, orjson.dumps(made).decode() if calls else "")


def test_a_call_has_the_exit_code_of_its_own_reply() -> None:
    rows = [
        message(0, 0, "user", "go [exit status 9]"),
        message(1, 0, "assistant", "", "bash", "python"),
        message(2, 0, "tool", "fine"),
        message(3, 0, "tool", "no\n[exit status -11]"),
        message(4, 1, "assistant", "", "bash", "bash"),
        message(5, 1, "tool", "[exit status 3] was printed\n[stopped after 30 s]"),
    ]
    with duckdb.connect() as database:
        database.execute(
            "create table messages (run_id text, rollout_id bigint, attempt int,"
            ' "index" int, turn int, role text, content text, tool_calls text)'
        )
        database.executemany("insert into messages values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        calls = database.sql(
            f"select turn, name, exit_code, timed_out from ({DERIVED['tool_calls'].sql}) order by 1"
        ).fetchall()
    assert sorted(calls, key=str) == [
        (0, "bash", 0, False),
        (0, "python", -11, False),
        (1, "bash", 0, True),
        (1, "bash", None, None),
    ]
