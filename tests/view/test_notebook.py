"""Runs show themselves in a notebook; `configs/stored-run.ipynb` does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

import prorl
from prorl.analysis.synthetic_runs import make_run
from prorl.errors import UserError
from tests.view.viewer_process import run_that_says

NOTEBOOK = Path(__file__).parents[2] / "configs" / "stored-run.ipynb"


def test_a_run_shows_its_rows_and_its_figures(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 32, 2)
    make_run(tmp_path / "b", 16, 1)
    runs = prorl.open(tmp_path)
    assert "<td>a</td><td>32</td>" in runs._repr_html_()
    rollouts = runs.rollouts()
    assert rollouts.to_arrow_table().num_rows == 48
    assert rollouts.filter("run_id = 'b'").aggregate("count(*)").fetchall() == [(16,)]
    assert {row["z"] for row in runs.plot.reward().rows} == {"a", "b"}
    assert "pass_" in dir(runs.plot)
    assert runs.plot.pass_().rows, "`pass` is a keyword"
    with pytest.raises(UserError, match="no analysis 'rewrd'"):
        runs.plot.rewrd()
    assert "reward" in dir(runs.plot)


def test_a_figure_lives_in_a_frame_that_nothing_leaves(tmp_path: Path) -> None:
    text = "</script><script>window.hacked=1</script>"
    run_that_says(tmp_path / "r", [text])
    plot = prorl.open(tmp_path / "r").plot.slow()
    assert plot.rows[0]["x"] == text
    page = plot._repr_html_()
    assert 'sandbox="allow-scripts"' in page
    assert "hacked" in page
    assert "&lt;script&gt;window.hacked" not in page


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="no ipykernel: the extra `jupyter`")
    from jupyter_client.manager import start_new_kernel

    make_run(tmp_path / "r", 64, 2)
    monkeypatch.setenv("RUNS", str(tmp_path / "r"))
    manager, client = start_new_kernel(startup_timeout=120, cwd=str(tmp_path))
    try:
        outputs: list[Any] = []
        for cell in orjson.loads(NOTEBOOK.read_bytes())["cells"]:
            if cell["cell_type"] == "code":
                reply = client.execute_interactive(
                    "".join(cell["source"]), timeout=120, output_hook=outputs.append
                )
                assert reply["content"]["status"] == "ok", reply["content"]
        results = [
            output["content"]["data"]
            for output in outputs
            if output["msg_type"] == "execute_result"
        ]
        assert "<td>r</td><td>64</td>" in results[0]["text/html"]
        assert sum("<iframe" in data.get("text/html", "") for data in results) == 2
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
