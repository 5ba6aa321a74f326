"""The control protocol's wire: every payload comes back as it was, nothing else gets in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from prorl import control
from prorl.control import (
    CallTotals,
    ControlRow,
    GroupEventRow,
    Hello,
    Kind,
    Payload,
    Progress,
    Request,
    Reserve,
    TaskRow,
    Terminal,
    TrajectorySummary,
    from_batch,
    to_batch,
)
from prorl.errors import SchemaError
from prorl.schema import GROUPS, ROLLOUTS, TASKS
from prorl.schema.fields import SCHEMA_VERSION
from prorl.types import AttemptKey
from tests.strategies import text

RECORDS: list[type[Payload]] = [
    record
    for record in vars(control).values()
    if isinstance(record, type) and issubclass(record, Payload) and hasattr(record, "kind")
]


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType(ge=low, le=high):
            return st.integers(
                -(2**63) if low is None else low, 2**63 - 1 if high is None else high
            )
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return text
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls=members):
            return st.sampled_from(members)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case (
            inspect.StructType(cls=made, fields=fields)
            | inspect.DataclassType(cls=made, fields=fields)
            | inspect.NamedTupleType(cls=made, fields=fields)
        ):
            return st.builds(made, **{field.name: values(field.type) for field in fields})
    raise AssertionError(f"no strategy for {kind}")


def test_every_kind_has_a_single_record() -> None:
    kinds = [record.kind for record in RECORDS if record.kind is not Kind.REPLY]
    assert sorted(kinds) == sorted(set(Kind) - {Kind.REPLY})
    replies = {record for record in RECORDS if record.kind is Kind.REPLY}
    assert {record.reply for record in RECORDS if issubclass(record, Request)} <= replies


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_payload_comes_back_as_it_was(record: type[Payload]) -> None:
    ids = st.integers(-1, 2**31 - 1)

    @settings(max_examples=30)
    @given(payload=values(inspect.type_info(record)), run_id=text, ids=st.tuples(ids, ids, ids))
    def holds(payload: Payload, run_id: str, ids: tuple[int, int, int]) -> None:
        rollout_id, attempt, group_id = ids
        sent = ControlRow.of(
            payload, seq=3, run_id=run_id, rollout_id=rollout_id, attempt=attempt, group_id=group_id
        )
        (row,) = from_batch(to_batch([sent]))
        assert row == sent
        assert row.read(record) == payload
        assert row.key == AttemptKey(run_id, rollout_id, attempt)

    holds()


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        (Reserve, "{}", "missing required field `attempts`"),
        (Reserve, '{"attempts": [["r", 1]]}', "`array` of length 3"),
        (Reserve, '{"attempts": [["r", "1", 2]]}', "Expected `int`, got `str`"),
        (Progress, '{"turn": -1, "tokens": 2}', "Expected `int` >= 0"),
        (Progress, '{"turn": 1, "tokens": 2, "tool_s": 3}', "unknown field `tool_s`"),
        (Progress, "[1, 2]", "Expected `object`, got `array`"),
        (Progress, "{", "truncated"),
    ],
)
def test_a_malformed_payload_is_a_single_clear_error(
    kind: type[Payload], payload: str, expected: str
) -> None:
    row = ControlRow(kind=kind.kind, payload=payload)
    with pytest.raises(SchemaError) as caught:
        row.read(kind)
    assert expected in str(caught.value)
    assert f"the payload of a {kind.kind.value!r} row" in str(caught.value)
    assert f"expected {kind.__name__} with" in str(caught.value)


@pytest.mark.parametrize(
    "payload",
    [
        {"schema_version": SCHEMA_VERSION + 1, "another": {"shape": 1}},
        {"worker": "x", "roles": {"run": 1}},
        {"schema_version": "two"},
    ],
)
def test_a_hello_of_another_version_says_so_whatever_its_shape(payload: dict[str, Any]) -> None:
    row = ControlRow(kind=Kind.HELLO, payload=msgspec.json.encode(payload).decode())
    with pytest.raises(SchemaError, match="run-0 has schema version"):
        row.read_hello("run-0")
    good = Hello(worker="x", roles={"run": 1}, schema_version=SCHEMA_VERSION)
    assert ControlRow.of(good).read_hello("run-0") == good


def test_rows_of_tables_have_their_columns() -> None:
    """The control row's own column says whose row it is."""
    assert ["run_id", *TaskRow.__struct_fields__] == TASKS.names
    assert ["run_id", *GroupEventRow.__struct_fields__] == GROUPS.names
    assert set(Terminal.__struct_fields__) <= set(ROLLOUTS.names)
    assert set(TrajectorySummary.__struct_fields__) <= set(ROLLOUTS.names)


def test_sums_of_model_calls_grow_whatever_workers_come_and_go() -> None:
    first = CallTotals(10, 5, 8, 4, 3, 1.0)
    later = CallTotals(20, 9, 16, 8, 6, 2.0)
    assert first.since(CallTotals()) == first
    assert later.since(first) == CallTotals(10, 4, 8, 4, 3, 1.0)
    assert first.since(later) == first, "a worker that was started anew"
    assert first.plus(later.since(first)) == later
    assert (later.cached_share, later.reused_share) == (0.45, 0.5)
    assert CallTotals().cached_share is CallTotals().reused_share is None
