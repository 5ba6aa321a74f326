"""Tests that the logs of the trainers of two runs stand beside each other in their report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl.analysis.synthetic_runs import make_run
from prorl.cli.app import dispatch
from prorl.storage.write.metrics import LoggedStep, append_logged
from prorl.types import Json


def test_two_trainers_are_compared_at_the_last_step_that_both_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, steps in (("a", 5), ("b", 3), ("none", 0)):
        made = make_run(tmp_path / name, 8, 1)
        for step in range(1, steps + 1):
            values = {"loss": 1 / step, name: 1.0}
            append_logged(made, LoggedStep(run=name, step=step, values=values, key=str(step)))

    def metrics(first: str, second: str) -> Json:
        command = ["report", first, second, "--root", str(tmp_path)]
        assert dispatch([*command, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["metrics"]

    both: Json = {"a": [1.0, None], "b": [None, 1.0], "loss": [1 / 3, 1 / 3]}
    assert metrics("a", "b") == {"step": 3, "values": both}
    assert metrics("a", "none") is None
    assert dispatch(["report", "a", "b", "--root", str(tmp_path)]) == 0
    assert "trainer at step 3\ta\tb\n" in capsys.readouterr().out


def test_settings_that_differ_are_named_as_on_a_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, temperature in (("a", 1.0), ("b", 0.7)):
        make_run(tmp_path / name, 8, 1)
        manifest = tmp_path / name / "manifest.json"
        config = {"run_id": name, "filter": "dapo", "sampling": {"temperature": temperature}}
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "config": config}))
    assert dispatch(["report", "a", "b", "--root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("run.")] == [
        "run.sampling.temperature\t1.0\t0.7"
    ]
