"""The report's JSON is a contract with scripts and CI."""

from __future__ import annotations

import io

import orjson
from rich.console import Console

from prorl.bench.report import Report, Row, machine, median

KEYS = {"what", "value", "unit", "repeats", "cpu_s", "rival", "rival_value", "rival_command", "ratio"}


def _report() -> Report:
    rows = (
        median("handoff_p50_ms", [0.5, 0.4, 0.9], "ms", cpu_s=1.5),
        Row(what="start_ms", value=8.0, unit="ms", rival="bwrap", note="rival is not installed"),
        Row(what="read_mb_s", value=90.0, unit="MB/s", rival="memcpy", rival_value=100.0, rival_command="python x.py", ratio=0.9),
    )
    return Report(bench="pipeline", machine=machine(), rows=rows)


def test_json_has_exactly_the_documented_keys() -> None:
    found = orjson.loads(orjson.dumps(_report().to_json()))
    assert set(found) == {"bench", "machine", "rows"}
    assert set(found["rows"][0]) == KEYS
    assert set(found["rows"][1]) == {*KEYS, "note"}
    assert found["rows"][0]["repeats"] == [0.5, 0.4, 0.9]
    assert found["rows"][0]["value"] == 0.5


def test_losing_rows_are_printed() -> None:
    out = io.StringIO()
    Console(file=out, width=250).print(_report().table())
    text = out.getvalue()
    assert "0.9x" in text
    assert "rival is not installed" in text
    assert "0.4..0.9" in text


def test_machine_names_what_matters() -> None:
    found = machine()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["pyarrow"][0].isdigit()
