"""Every column of every edge and table has a meaning, and no meaning is of nothing."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from prorl.cli.app import dispatch
from prorl.cli.commands.schema import config_schema, settings_of
from prorl.envs import BUILT_IN, get_env
from prorl.envs.settings import record_of
from prorl.schema.fields import MEANINGS


def test_every_column_has_a_meaning_and_every_meaning_a_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dispatch(["schema", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    rows = [(table, row) for table, rows in tables.items() for row in rows]
    assert [f"{table}.{row['name']}" for table, row in rows if not row["meaning"]] == []
    names = {row["name"] for _, row in rows} | {f"{table}.{row['name']}" for table, row in rows}
    assert set(MEANINGS) <= names


def test_the_page_has_every_setting_of_every_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["schema", "--settings"]) == 0
    page = capsys.readouterr().out
    for name in BUILT_IN:
        for field in fields(record_of(get_env(name))):
            assert f"| {name} | {field.name} | " in page
    assert '| math | grading | one of strict, closed_form, value | "closed_form" | ' in page
    rows = page.partition("## Settings of envs")[2].splitlines()[6:]
    assert all(line.count(" | ") == 4 for line in rows)


def test_every_key_of_a_config_has_a_meaning() -> None:
    settings = settings_of(config_schema())
    defaults = {setting.key: setting.default for setting in settings}
    assert {"tasks", "run.limits.tool_s"} <= defaults.keys()
    slots = [defaults[f"service.{stage}.slots"] for stage in ("init", "run", "eval")]
    assert slots == ["`8`", "`32`", "`16`"], "each section has its own, not its type's"
    assert [setting.key for setting in settings if not (setting.meaning and setting.type)] == []
