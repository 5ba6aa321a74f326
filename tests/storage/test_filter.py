"""The group filter: DAPO's rule, masking, the contract of users' SQL, and what such SQL must not be
able to do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prorl.control import GroupComplete
from prorl.errors import ConfigError
from prorl.filters import FILTERS, GroupDecision, GroupMember
from prorl.schema import ROLLOUTS
from prorl.storage.read import sql as sql_module
from prorl.storage.serve.filter import FILTER_COLUMNS, MEMBERS, GroupFilter, check_filter
from prorl.storage.serve.filter_process import FilterLostError, FilterProcess
from prorl.storage.serve.history import History
from prorl.types import FailureClass, RolloutState
from tests.waiting import resident_bytes


def member(
    rollout_id: int,
    sample_index: int,
    reward: float | None,
    failure_class: FailureClass = FailureClass.NONE,
    num_trained: int = 5,
) -> GroupMember:
    """A member of a group; one of class infra has failed."""
    lost = failure_class is FailureClass.INFRA
    return GroupMember(
        rollout_id=rollout_id,
        sample_index=sample_index,
        attempt=3 if lost else 1,
        state=RolloutState.FAILED if lost else RolloutState.COMPLETED,
        failure_class=failure_class,
        reward=reward,
        num_trained=num_trained,
    )


def group(group_id: int, *rewards: float | None) -> GroupComplete:
    """A group with these rewards; None is a member lost to infrastructure."""
    members = [
        (
            member(group_id * 100 + i, i, reward)
            if reward is not None
            else member(group_id * 100 + i, i, None, FailureClass.INFRA)
        )
        for i, reward in enumerate(rewards)
    ]
    return GroupComplete(group_id=group_id, task_id=f"t{group_id}", members=tuple(members))


def decisions(name: str, groups: list[GroupComplete], *more: Any) -> list[GroupDecision]:
    chosen = GroupFilter(name)
    try:
        group_decisions = chosen.decide(groups, *more)
    finally:
        chosen.close()
    assert [d.group_id for d in group_decisions] == [g.group_id for g in groups]
    return group_decisions


def decide(name: str, *groups: GroupComplete) -> list[tuple[bool, str]]:
    return [(d.kept, d.reason) for d in decisions(name, list(groups))]


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("dapo", [(0, 1), (0.5, 0.25)], [(True, "informative")] * 2),
        ("dapo", [(1, 1, 1), (0, 0), (1, None, 1)], [(False, "all_equal")] * 3),
        ("dapo", [(1, None, 0)], [(True, "informative")]),
        ("dapo", [(1, None), (None, None)], [(False, "incomplete")] * 2),
        ("none", [(1,), (0, None), (None,)], [(True, "unfiltered")] * 2 + [(False, "incomplete")]),
        (
            "select group_id, true as kept, 'x' as reason from rollouts",
            [(0, 1)],
            [
                (
                    False,
                    "filter_error: filter gave a group twice, an unknown group, or a NULL",
                )
            ],
        ),
    ],
)
def test_what_is_kept_and_why(
    name: str, groups: list[tuple[float | None, ...]], expected: list[tuple[bool, str]]
) -> None:
    assert decide(name, *(group(i, *rewards) for i, rewards in enumerate(groups))) == expected


def test_a_member_without_a_sampled_token_enters_no_filter() -> None:
    silent = member(7, 2, 1.0, num_trained=0)
    equal = group(0, 0, 0)
    equal = GroupComplete(group_id=0, task_id=equal.task_id, members=(*equal.members, silent))
    assert decide("dapo", equal) == [(False, "all_equal")]


def test_a_failure_of_the_policy_counts() -> None:
    failed = member(1, 1, 0.0, FailureClass.POLICY)
    mixed = GroupComplete(group_id=0, task_id="t", members=(group(0, 1).members[0], failed))
    assert decide("dapo", mixed) == [(True, "informative")]


def test_users_sql_decides_and_what_it_leaves_out_is_dropped() -> None:
    sql = (
        "select group_id, avg(reward) < 0.9 as kept, 'mean ' || avg(reward) as reason from rollouts"
        " where task_id <> 't2' group by 1"
    )
    assert decide(sql, group(0, 0, 1), group(1, 1, 1), group(2, 0, 1), group(3, None, None)) == [
        (True, "mean 0.5"),
        (False, "mean 1.0"),
        (False, "unselected"),
        (False, "incomplete"),
    ]


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("dapoo", f"expected {', '.join(FILTERS)}, pass_rate:LO-HI, or one SELECT"),
        ("select * from nowhere", "nowhere"),
        ("select group_id, 1 as kept, '' as reason from rollouts", "kept BOOLEAN"),
        ("select group_id from rollouts", "kept BOOLEAN"),
        ("select 1; select 2", "exactly one SELECT"),
        ("", "exactly one SELECT"),
    ],
)
def test_sql_that_does_not_bind_is_refused_in_a_single_line(sql: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_filter(sql)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "sql",
    [
        "copy rollouts to '{dir}/stolen.csv'",
        "attach '{dir}/other.db'",
        "select group_id, true as kept, content as reason from rollouts, read_text('{dir}/secret')",
        (
            "select 1 as group_id, true as kept, column0 as reason from read_csv('{dir}/secret',"
            " header = false)"
        ),
        "select 1 as group_id, true as kept, column0 as reason from '{dir}/secret'",
        "select 1 as group_id, true as kept, file as reason from glob('{dir}/*')",
        "select a as group_id, true as kept, b as reason from python_variable",
        "set threads = 8",
        "set enable_external_access = true",
        "install httpfs",
        "create table mine as select 1",
        "pragma database_list",
        "call pragma_version()",
        "drop view rollouts; select 1 as group_id, true as kept, '' as reason",
        (
            "with gone as (delete from rollouts returning *) select group_id, true as kept, '' as"
            " reason from gone"
        ),
        "select 1 as group_id, true as kept, q::text as reason from query('drop view rollouts') q",
        "select 1 as group_id, true as kept, getenv('HOME') as reason",
    ],
)
def test_sql_that_reaches_outside_is_refused(
    sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sql_module, "python_variable", pa.table({"a": [1], "b": ["x"]}), raising=False
    )
    (tmp_path / "secret").write_text("secret\n")
    with pytest.raises(ConfigError):
        check_filter(sql.format(dir=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_endless_sql_is_stopped_and_its_group_dropped() -> None:
    endless = (
        "with recursive t(i) as (select 1 union all select i + 1 from t) select count(*) as"
        " group_id, true as kept, '' as reason from t"
    )
    chosen = GroupFilter(endless, timeout_s=0.2)
    start = time.monotonic()
    decisions = chosen.decide([group(7, 0, 1)])
    chosen.close()
    assert decisions == [
        GroupDecision(7, kept=False, reason="filter_error: filter was stopped after 0.2 s")
    ]
    assert time.monotonic() - start < 60


def test_an_answer_without_end_takes_no_memory() -> None:
    """A cross join's rows lie outside DuckDB's limit: 764 MB in five seconds."""
    endless = """
        select group_id, true as kept, repeat('x', 1000000) as reason
        from rollouts, range(10000000000)
    """
    before = pa.total_allocated_bytes()
    ((kept, reason),) = decide(endless, group(0, 0, 1))
    assert (kept, reason[:30]) == (False, "filter_error: filter gave a gr")
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_comment_and_a_semicolon_end_nothing() -> None:
    sql = "select group_id, true as kept, 'ü;' as reason from rollouts group by 1; -- {done}"
    assert decide(sql, group(0, 0, 1)) == [(True, "ü;")]


def test_sql_that_fails_on_a_group_decides_the_others() -> None:
    sql = (
        "select group_id, if(task_id = 't1', error('bad group'), true) as kept, 'ok' as reason from"
        " rollouts group by group_id, task_id"
    )
    verdicts = decide(sql, group(0, 0, 1), group(1, 0, 1), group(2, 0, 1))
    assert [kept for kept, _ in verdicts] == [True, False, True]
    assert verdicts[1][1].startswith("filter_error: ")
    assert "bad group" in verdicts[1][1]


HUNGRY = """
    select group_id, true as kept, list(repeat('x', 100000) || i)::varchar as reason
    from rollouts, range(100000) t(i) group by group_id
"""


def test_users_sql_has_its_own_memory_and_ends_nobody_else() -> None:
    """It fails in its process, as an error or by that process's end; the next question is heard."""
    chosen = GroupFilter(f"with r as ({HUNGRY}) select * from r", timeout_s=30.0)
    before = resident_bytes()
    (decision,) = chosen.decide([group(0, 0, 1)])
    assert not decision.kept
    assert decision.reason.startswith("filter_error: filter")
    assert resident_bytes() - before < 64 << 20
    (again,) = chosen.decide([group(1, 0, 1)])
    assert again.reason.startswith("filter_error: filter")
    chosen.close()


SOUND = "select group_id, true as kept, '' as reason from rollouts group by 1"


def _pid(chosen: FilterProcess) -> int:
    return chosen.helpers._free[-1][0].pid


def test_a_value_that_cannot_be_interrupted_times_out_and_is_killed() -> None:
    huge = "select group_id, true as kept, left(repeat('x', {}), 1) as reason from rollouts"
    chosen = FilterProcess(huge.format("2000000000 * (1 + 0 * group_id)"), timeout_s=0.5)
    rows = pa.Table.from_pylist([{"group_id": 7}], MEMBERS)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"filter( was stopped|:|.*ended its process)"):
        chosen.answer({"rollouts": rows}, 1, "group_id, kept, reason")
    assert time.monotonic() - began < 60
    chosen.close()


def test_a_process_that_was_killed_or_frozen_decides_nothing() -> None:
    chosen = FilterProcess(SOUND, timeout_s=1.0)
    rows = MEMBERS.empty_table()
    assert list(chosen.columns({"rollouts": rows})) == ["group_id", "kept", "reason"]
    os.kill(_pid(chosen), signal.SIGSTOP)
    assert chosen.answer({"rollouts": rows}, 1, "group_id, kept, reason") == []
    os.kill(_pid(chosen), signal.SIGKILL)
    assert chosen.answer({"rollouts": rows}, 1, "group_id, kept, reason") == []
    assert chosen.helpers.starts == 3
    chosen.close()


def test_a_process_that_is_killed_while_it_starts_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed as often as it is asked: lost, not refused; once more, it answers."""
    popen, victims = subprocess.Popen, [True, True, False]

    def doomed(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        child = popen(*args, **more)
        if victims.pop(0):
            child.kill()
        return child

    monkeypatch.setattr(subprocess, "Popen", doomed)
    chosen = FilterProcess(SOUND, timeout_s=5.0)
    with pytest.raises(FilterLostError, match="SIGKILL"):
        chosen.columns({"rollouts": MEMBERS.empty_table()})
    assert list(chosen.columns({"rollouts": MEMBERS.empty_table()})) == [
        "group_id",
        "kept",
        "reason",
    ]
    chosen.close()


def test_an_answer_that_is_too_large_is_refused_and_the_next_answer_is_its_own() -> None:
    sql = "select group_id, true as kept, repeat('x', if(count(*) > 1, 40000000, 1)) as reason"
    chosen = FilterProcess(f"{sql} from rollouts group by 1", timeout_s=20.0)
    names = "group_id, kept, reason"
    two = pa.Table.from_pylist([{"group_id": 7}] * 2, MEMBERS)
    with pytest.raises(ConfigError, match=r"filter gave 40,\d+,\d+ bytes; expected at most 33,"):
        chosen.answer({"rollouts": two}, 1, names)
    assert chosen.answer({"rollouts": two.slice(0, 1)}, 1, names) == [(7, True, "x")]
    chosen.close()


def rows_of(complete_group: GroupComplete, **columns: list[Any]) -> pa.Table:
    """Stored rows of a group's members; columns that are not given are null."""
    ids = [member.rollout_id for member in complete_group.members]
    names = ["rollout_id", *FILTER_COLUMNS]
    schema = pa.schema([ROLLOUTS.field(name).with_nullable(True) for name in names])
    values = {"rollout_id": ids, **columns}
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return pa.Table.from_pylist(rows, schema)


def test_sql_sees_what_is_stored_of_each_member() -> None:
    sql = """select group_id, sum(num_turns) > 5 as kept,
        string_agg(stop_reason || ' ' || (extra->>'$.kind'), ', ' order by sample_index) as reason
        from rollouts group by group_id"""
    complete_group = group(1, 1.0, 0.0)
    stored = rows_of(
        complete_group,
        num_turns=[4, 2],
        stop_reason=["done", "max_tokens"],
        extra=['{"kind": "a"}', '{"kind": "b"}'],
    )
    group_decisions = decisions(sql, [complete_group], stored.take([1, 0]))
    assert group_decisions == [GroupDecision(1, True, "done a, max_tokens b")]


def test_sql_sees_what_became_of_the_task_before() -> None:
    history = History()
    rows = {
        "task_id": ["t1"] * 4,
        "group_id": [0, 0, 1, 1],
        "valid": [True] * 4,
        "reward": [1.0, 0.0, 1.0, 1.0],
        "num_tokens": [10] * 4,
        "run_s": [2.0] * 4,
        "max_version": [0] * 4,
    }
    history.add(pa.table(rows))
    sql = """select r.group_id, h.streak is null as kept,
        coalesce(h.informative || ' of ' || h.groups || ', streak ' || h.streak, 'unknown')
          as reason
        from (select distinct group_id, task_id from rollouts) r
        left join history h using (task_id)
    """
    assert decisions(sql, [group(1, 1.0, 0.0), group(2, 1.0, 0.0)], None, history) == [
        GroupDecision(1, False, "1 of 2, streak 1"),
        GroupDecision(2, True, "unknown"),
    ]


def streaks(*lengths: int) -> History:
    """Returns a history of tasks t1, t2 ...: so many groups in which all was right."""
    history = History()
    groups = [(task, i) for task, n in enumerate(lengths, 1) for i in range(n)]
    for task, i in groups:
        row = {"task_id": f"t{task}", "group_id": 100 * task + i, "valid": True, "reward": 1.0}
        more = {"num_tokens": 1, "run_s": 1.0, "max_version": 0}
        history.add(pa.Table.from_pylist([{**row, **more}] * 2))
    return history


def test_a_task_that_taught_nothing_sits_out_the_longer_the_more_often() -> None:
    groups = [group(1, 1.0, 1.0), group(2, 1.0, 1.0), group(3, 1.0, 1.0), group(4, 1.0, 0.0)]
    group_decisions = decisions("greso", groups, None, streaks(0, 3, 20, 3))
    assert [decision.kept for decision in group_decisions] == [False, False, False, True]
    assert [decision.rest for decision in group_decisions] == [0, 3, 8, 0]


def test_users_sql_may_curate() -> None:
    sql = "select group_id, true as kept, 'x' as reason, {} as rest, 16 as siblings"
    group_decisions = decisions(f"{sql.format(2)} from rollouts group by 1", [group(1, 1.0, 0.0)])
    assert group_decisions == [GroupDecision(1, True, "x", rest=2, siblings=16)]
    (refused,) = decisions(f"{sql.format(-2)} from rollouts group by 1", [group(1, 1.0, 0.0)])
    assert refused.reason == "filter_error: filter gave rest -2, siblings 16"
    with pytest.raises(ConfigError, match="filter gives rest VARCHAR; expected rest INTEGER"):
        check_filter(sql.format("'long'") + " from rollouts group by 1")


@pytest.mark.parametrize(
    ("rewards", "stops", "decision"),
    [
        ([1.0, 0.0, 0.0], ["done", "done", "max_tokens"], (True, "informative")),
        ([1.0, 1.0, 0.0], ["done", "done", "max_tokens"], (False, "overlong")),
        ([0.0, 0.0, 0.0], ["done", "context", "max_tokens"], (False, "all_equal")),
    ],
)
def test_a_difference_that_only_cut_off_answers_make_is_overlong(
    rewards: list[float], stops: list[str], decision: tuple[bool, str]
) -> None:
    complete_group = group(1, *rewards)
    (group_decision,) = decisions(
        "overlong", [complete_group], rows_of(complete_group, stop_reason=stops)
    )
    assert group_decision[1:3] == decision


@pytest.mark.parametrize(
    ("rewards", "decision"),
    [
        ([1.0] * 7 + [0.0] * 3, (True, "informative")),
        ([1.0] * 9 + [0.0], (False, "too_easy")),
        ([1.0] + [0.0] * 9, (False, "too_hard")),
    ],
)
def test_a_pass_rate_is_a_window(rewards: list[float], decision: tuple[bool, str]) -> None:
    assert decide("pass_rate:0.2-0.8", group(1, *rewards)) == [decision]
