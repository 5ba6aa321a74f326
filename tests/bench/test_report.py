"""The report's JSON is a contract with scripts and CI."""

from __future__ import annotations

import orjson
import pytest

from prorl.bench.report import Figure, Report, median
from prorl.cli.commands.bench import show

KEYS = {
    "name",
    "value",
    "unit",
    "repeats",
    "cpu_s",
    "rival",
    "rival_value",
    "rival_command",
    "ratio",
}


def _report() -> Report:
    rows = (
        median("handoff_p50_ms", [0.5, 0.4, 0.9], "ms", cpu_s=1.5),
        Figure(name="start_ms", value=8.0, unit="ms", rival="tmux", note="rival is not installed"),
        Figure(
            name="read_mb_s",
            value=90.0,
            unit="MB/s",
            rival="memcpy",
            rival_value=100.0,
            rival_command="python x.py",
            ratio=0.9,
        ),
    )
    return Report(bench="pipeline", rows=rows)


def test_json_has_exactly_the_documented_keys() -> None:
    report = orjson.loads(orjson.dumps(_report().to_json()))
    assert set(report) == {"bench", "machine", "rows"}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_gib"] > 0
    assert report["machine"]["pyarrow"][0].isdigit()
    assert set(report["rows"][0]) == KEYS
    assert set(report["rows"][1]) == {*KEYS, "note"}
    assert report["rows"][0]["repeats"] == [0.5, 0.4, 0.9]
    assert report["rows"][0]["value"] == 0.5


def test_losing_rows_are_printed_and_empty_columns_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(_report())
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split("\t") == [
        *("name", "value", "unit", "min..max", "cpu s", "rival", "rival value", "ratio"),
    ]
    assert rows[2].endswith("memcpy\t100\t0.9x")
    assert "0.4..0.9" in rows[0]
    assert "start_ms: rival is not installed" in rows
    show(Report(bench="b", rows=(median("handoff_p50_ms.lease", [0.5], "ms"),)))
    assert capsys.readouterr().out.splitlines()[0] == "name\tvalue\tunit"
