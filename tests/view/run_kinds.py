"""One run of each kind that a person may open: what a page must show without an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from prorl.analysis.synthetic_runs import make_run, rollout_tables, write_commit
from prorl.schema import SCORES, TABLES
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from prorl.storage.write.metrics import LoggedStep, append_logged
from prorl.types import Json
from tests.view.viewer_process import with_column

TOOL_OUTPUTS = (
    *("x" * 1_000_000 + " the end", "\x1b[1;31mred\x1b[0m \x1b[2Kplain", "\x00\x01\x7f\ufffd"),
    *("\u202egnihtemos\u202c \u2066x", "<|image_pad|>" * 50, "line\n" * 5000, "100 % it's", ""),
)
TASK_NAMES = (
    *("<b>task</b>", "../../etc/passwd", "it's 100 %", "a/b?c#d&e=f", "", "long" * 80),
    *("\u202eeman", "名前 🙂"),
)

ROOT = Path(__file__).parents[1] / "storage" / "golden_root" / "r"
"""A run that a service of today's format wrote."""


def _fresh(where: Path) -> None:
    make_run(where, 0, 0)


def _empty(where: Path) -> None:
    """Tasks were accepted, and no rollout has ended."""
    run = make_run(where, 8, 1)
    tasks = StoredRun(where).read("tasks")
    shutil.rmtree(where)
    run = make_run(where, 0, 0)
    write_commit(run, run.name, 1, {"tasks": tasks})


def _changed(where: Path, columns: Mapping[str, object], rollouts: int = 8) -> RunDir:
    """Rollouts that have these values, all of them the same."""
    run = make_run(where, 0, 0)
    tables = rollout_tables(np.arange(rollouts), 64, np.random.default_rng(0))
    rows = tables["rollouts"]
    for name, value in columns.items():
        field = TABLES["rollouts"].field(name)
        place = rows.column_names.index(name)
        rows = rows.set_column(place, field, pa.array([value] * rollouts, field.type))
    lost = columns.get("status") == "failed"
    kept = {"rollouts": rows} if lost else tables | {"rollouts": rows}
    write_commit(run, run.name, 1, kept)
    return run


def _faulty(where: Path) -> None:
    """Every rollout failed, and nothing of it is kept."""
    failure = {"failure_class": "infra", "failure_code": "grader_error"}
    failure |= {"failure_message": "the judge is away: connection refused", "status": "failed"}
    _changed(where, failure | {"valid": False, "reward": None, "num_turns": 0, "server": ""})


def _odd(where: Path) -> None:
    """Eight rollouts whose tools and tasks say what breaks pages, two of them without a number for
    a reward.
    """
    run = make_run(where, 0, 0)
    tables = rollout_tables(np.arange(8), 64, np.random.default_rng(0))
    words = tables["messages"].column("content").to_pylist()
    words[2::4] = TOOL_OUTPUTS
    rewards = pa.array([float("nan"), None, 0.25, 1.0, -1.0, 0.0, 3.0, 1e-7], pa.float32())
    for table, name, values in (
        ("messages", "content", pa.array(words)),
        ("rollouts", "task_id", pa.array(TASK_NAMES)),
        ("rollouts", "reward", rewards),
    ):
        tables[table] = with_column(tables[table], table, name, values)
    write_commit(run, run.name, 1, tables)


def _damaged(table: str) -> Callable[[Path], None]:
    def make(where: Path) -> None:
        run = make_run(where, 64, 2)
        part = next(f.path for f in run.commits()[1].files if f.table == table)
        (where / part).write_bytes(b"PAR1 is not what it was")

    return make


def _graded(where: Path) -> None:
    """`prorl eval --stored` wrote scores beside it."""
    run = make_run(where, 64, 1)
    rows: list[dict[str, Json]] = [
        {
            f.name: "" if pa.types.is_string(f.type) else None if f.nullable else 0
            for f in SCORES
            if not pa.types.is_list(f.type)
        }
        | {"rollout_id": number}
        for number in range(64)
    ]
    AppendedTable(run, "scores").append(pa.Table.from_pylist(rows, SCORES), "made")


def _logged(where: Path) -> None:
    """A trainer has logged ten steps, and one of them twice."""
    run = make_run(where, 64, 2)
    for number, step in enumerate((*range(1, 11), 10)):
        values = {"loss": 1 / step, "kl": 0.01, "tiny": 1e-9, "layer/0": float(number)}
        append_logged(
            run,
            LoggedStep(run=run.name, step=step, version=step, values=values, key=str(number)),
        )


def _copied(where: Path) -> None:
    """Its folder has another name than its manifest."""
    made = where.with_name("original")
    make_run(made, 64, 1)
    made.rename(where)


def _served(where: Path) -> None:
    shutil.copytree(ROOT, where)


KINDS: Mapping[str, Callable[[Path], object]] = {
    "fresh": _fresh,
    "empty": _empty,
    "one": lambda where: make_run(where, 1, 1),
    "many": lambda where: make_run(where, 1200, 3),
    "faulty": _faulty,
    "masked": lambda where: _changed(where, {"valid": False}),
    "odd": _odd,
    "no_version": lambda where: _changed(where, {"min_version": -1, "max_version": -1}),
    "damaged": _damaged("rollouts"),
    "damaged_turns": _damaged("turns"),
    "graded": _graded,
    "logged": _logged,
    "copied": _copied,
    "served": _served,
}


def every_kind(root: Path) -> None:
    for name, make in KINDS.items():
        make(root / name)
