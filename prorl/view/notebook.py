"""Stored runs that show themselves in a notebook: `prorl.open("prorl-runs/*")`.

A figure is a page of the viewer in a frame of its own, whose origin is nobody's: what it holds of
models' text can reach neither the notebook nor the network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from keyword import iskeyword
from pathlib import Path
from typing import Any

import duckdb

from prorl.analysis.analyses import ANALYSES
from prorl.analysis.opened import Runs
from prorl.analysis.opened import open_runs as opened
from prorl.errors import UserError
from prorl.pluralize import pluralize
from prorl.types import Json
from prorl.view.frozen import html

_SUMMARY = """
select run_id as run, count(*) as rollouts, avg(reward) filter (valid) as reward,
    count(*) filter (valid) / count(*) as valid, sum(num_tokens)::bigint as tokens,
    count(*) filter (failure_class in ('infra', 'task')) as failed
from rollouts group by 1 order by 1"""


class NotebookRuns(Runs):
    @property
    def plot(self) -> Plots:
        """`run.plot.reward()` and the other analyses of `prorl report`; `pass_`, since Python keeps
        the word `pass`.
        """
        return Plots(self)

    def rollouts(self) -> duckdb.DuckDBPyRelation:
        """A row for each rollout of all runs, without its artifact."""
        return self.sql("select * exclude (artifact) from rollouts")

    def _repr_html_(self) -> str:
        rows = self.table(_SUMMARY).to_pylist()
        names = list(rows[0]) if rows else ["no rollout is stored"]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        lines = ("".join(f"<td>{_cell_html(value)}</td>" for value in row.values()) for row in rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class Plots:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def __dir__(self) -> list[str]:
        return [f"{name}_" if iskeyword(name) else name for name in ANALYSES]

    def __getattr__(self, name: str) -> Callable[[], NotebookFigure]:
        if name.startswith("_"):
            raise AttributeError(name)
        name = name.removesuffix("_")
        if name not in ANALYSES:
            raise UserError(f"no analysis {name!r}", f"one of {', '.join(ANALYSES)}")
        return partial(self._figure, name)

    def _figure(self, name: str) -> NotebookFigure:
        analysis = ANALYSES[name]
        rows = [
            row | {"z": run.run_id} if len(self._runs.runs) > 1 else row
            for run in self._runs.runs
            for row in Runs([run]).table(analysis.sql).to_pylist()
        ]
        return NotebookFigure(
            {
                "name": name,
                "title": analysis.title,
                "picture": analysis.picture,
                "axis": analysis.axis,
                "rows": rows,
            }
        )


class NotebookFigure:
    def __init__(self, content: dict[str, Json]) -> None:
        self._content = content

    @property
    def rows(self) -> list[dict[str, Json]]:
        return list(self._content["rows"])

    def __repr__(self) -> str:
        return f"{self._content['title']}: {pluralize(len(self.rows), 'row')}"

    def _repr_html_(self) -> str:
        page = escape(html({"figure": self._content}))
        style = "width:100%;max-width:720px;height:320px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def _cell_html(value: Any) -> str:
    return escape(
        f"{value:,.3f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def open_runs(*where: str | Path) -> NotebookRuns:
    """Open run directories: paths, globs of paths, roots (all their runs), URLs. Raises
    NotFoundError when nothing is there.
    """
    return NotebookRuns(opened(*where).runs)
