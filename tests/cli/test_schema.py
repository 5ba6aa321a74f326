"""Every column of every edge and table has a meaning, and no meaning is of nothing."""

from __future__ import annotations

import json

import pytest

from prorl.cli.app import dispatch
from prorl.schema.fields import MEANINGS


def test_every_column_has_a_meaning_and_every_meaning_a_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dispatch(["schema", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [(table, row) for table, rows in found.items() for row in rows]
    assert [f"{table}.{row['name']}" for table, row in rows if not row["meaning"]] == []
    names = {row["name"] for _, row in rows} | {f"{table}.{row['name']}" for table, row in rows}
    assert set(MEANINGS) <= names
