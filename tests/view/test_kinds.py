"""No card errs: each figure, table and page of a run of each kind, without and in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import orjson
import pyarrow as pa
import pytest

from prorl.analysis.analyses import ANALYSES
from prorl.analysis.curves import AXES
from prorl.analysis.synthetic_runs import make_run, rollout_tables, write_commit
from prorl.storage.read.catalog import DERIVED, VIEWS, StoredRun
from prorl.view.frozen import freeze
from prorl.view.opened import Opened, Question
from tests.view.run_kinds import KINDS, TASK_NAMES, every_kind
from tests.view.viewer_process import Viewer, viewing
from tests.waiting import wait_until

TABS = ("messages", "tokens", "siblings", "raw")
TASK_VIEWS = ("hardest", "never", "flipped", "better", "worse", "slow")
SPELLED = re.compile(r"\bNaN\b|\bundefined\b|\[object |\bnull\b|\bInfinity\b")
"""What a page shows where it forgot that a value may be missing."""

WAITING = re.compile(r"^…$|^Reading tokens|^Waiting for the first event")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kinds")
    every_kind(made)
    return made


def _damage(kind: str) -> str:
    """Returns what an error may name in a run of this kind; empty: there may be none."""
    return "/part-" if kind.startswith("damaged") else ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_and_table_has_an_answer(root: Path, kind: str) -> None:
    opened = Opened(str(root / kind))
    assert opened.about()["totals"]["rollouts"] == opened.rows.num_rows
    opened.provenance(), opened.facets(Question())
    for axis in AXES:
        opened.curves(axis)
    errors = [error for name in ANALYSES if (error := opened.figure(name).get("error"))]
    errors += opened.damaged.values()
    for row in opened.page(Question(), 0, 3)["rows"]:
        errors += opened.rollout(row["rollout_id"])["damaged"].values()
    if damage := _damage(kind):
        assert errors
        assert all(damage in error for error in errors)
    else:
        assert errors == []
        for name in (*VIEWS, *DERIVED):
            opened.answer(f'select * from "{name}"', rows=1)


def test_the_list_shows_prompt_and_answer_and_searches_words(root: Path) -> None:
    served, faulty, many = (Opened(str(root / kind)) for kind in ("served", "faulty", "many"))
    assert [row["asked"] for row in served.page(Question(), 0, 1)["rows"]] == ["t0"]
    (row,) = many.page(Question(), 8, 1)["rows"]
    assert row["asked"].startswith("user says 8")
    assert row["answered"].startswith("assistant says 8")
    assert faulty.page(Question(words="JUDGE away"), 0, 9)["total"] == 8
    assert faulty.page(Question(words="judge's"), 0, 9)["total"] == 0
    page = many.page(Question(words="1187", where="reward >= 0 -- all"), 0, 9)
    assert [row["rollout_id"] for row in page["rows"]] == [1187]
    assert many.facets(Question(words="1187"))


def test_the_list_has_the_answer_that_a_task_expects(tmp_path: Path) -> None:
    tasks = StoredRun(make_run(tmp_path / "other", 8, 1).root).read("tasks")
    run, place = make_run(tmp_path / "r", 0, 0), tasks.column_names.index("task")
    data = orjson.dumps({"data": {"answer": 617}}).decode()
    column = pa.array([data] * tasks.num_rows)
    tasks = tasks.set_column(place, tasks.schema.field(place), column)
    rollouts = rollout_tables(np.arange(8), 64, np.random.default_rng(0))
    write_commit(run, run.name, 1, rollouts | {"tasks": tasks})
    rows = Opened(str(tmp_path / "r")).page(Question(), 0, 8)["rows"]
    assert [row["expected"] for row in rows] == ["617"] * 8


def _places(opened: Opened, kind: str) -> Iterator[str]:
    yield from (f"#/{kind}", f"#/{kind}/rollouts", f"#/{kind}/live", f"#/{kind}/sql")
    yield f"#/{kind}/rollouts?where=reward+%3E+0&order=run_s&down=1"
    yield f"#/{kind}/sql?q=from+rollouts+select+run_id%2C+count(*)+group+by+all"
    yield f"#/{kind}/rollouts?words=says+words"
    yield from (f"#/{kind}/tasks?view={view}" for view in TASK_VIEWS)
    yield from (f"#/{kind}/curves?axis={axis}&smooth=0.5&with=many" for axis in AXES)
    yield f"#/{kind}/curves"
    if kind == "odd":
        for name in TASK_NAMES[::2]:
            question = {"words": name, "where": "task_id = '" + name.replace("'", "''") + "'"}
            yield f"#/odd/rollouts?{urlencode(question)}"
        question = {"where": "task_id like '%0 %' or task_id = '\"'"}
        yield f"#/odd/rollouts?{urlencode(question)}"
    ids = [row["rollout_id"] for row in opened.page(Question(), 0, 9)["rows"]]
    for rollout_id in ids[::8]:
        yield from (f"#/{kind}/rollout/{rollout_id}?tab={tab}" for tab in TABS)
    if kind == "odd":
        yield from (f"#/odd/rollout/{rollout_id}" for rollout_id in ids[1:])


def _look(tab: Any, damage: str) -> None:
    """Nothing on the page says that something went wrong, or shows a value that is none."""
    page = tab.page
    wait_until(lambda: not page.get_by_text(WAITING).count(), page.url, limit_s=120.0)
    words = page.locator("#page .trouble, #page [role=alert], #said").all_inner_texts()
    fine = ("Ids only: the manifest names no tokenizer", *filter(None, (damage,)))
    bad = [text for text in words if text.strip() and not any(part in text for part in fine)]
    assert bad == [], page.url
    text = page.evaluate("""() => [...document.querySelectorAll('#page :not(pre, code)')]
        .flatMap((e) => [...e.childNodes].filter((n) => n.nodeType === 3)).map((n) => n.data)
        .join('\\n')""")
    if "tab=raw" not in page.url:
        assert not SPELLED.search(text), page.url
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{page.url} is wider than the window"


@pytest.mark.ui
@pytest.mark.timeout(900)
def test_no_page_of_a_run_of_any_kind_has_an_error(root: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="no playwright: make test-ui")
    pages = import_module("tests.view.test_pages")
    with viewing(root) as viewer, pages.browser(viewer) as tab:
        tab.go("#/")
        for kind in KINDS:
            for place in _places(Opened(str(root / kind)), kind):
                tab.go(place)
                _look(tab, _damage(kind))
            tab.go(f"#/{kind}/sql")
            examples = [link.get_attribute("href") for link in tab.page.locator(".tools a").all()]
            assert examples
            for place in examples:
                tab.go(place)
                _look(tab, _damage(kind))
            if _damage(kind):  # an example that reads the damaged part is refused
                tab.wrong[:] = [line for line in tab.wrong if "status of 500" not in line]
        for pair in ("many~graded", "fresh~one~faulty", "empty~served~copied~no_version"):
            tab.go(f"#/?compare={pair}")
            tab.page.get_by_text("Side by side").wait_for()
            _look(tab, "")


@pytest.mark.ui
@pytest.mark.timeout(900)
def test_no_page_of_a_report_of_any_kind_has_an_error(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="no playwright: make test-ui")
    pages = import_module("tests.view.test_pages")
    for kind in KINDS:
        file = tmp_path / f"{kind}.html"
        file.write_text(freeze(str(root / kind)))
        with pages.browser(Viewer(file.as_uri() + "#/")) as tab:
            tab.page.locator("#bar nav a").first.wait_for()
            for title in ("Overview", "Curves", "Rollouts"):
                tab.page.get_by_role("link", name=title, exact=True).click()
                tab.page.get_by_role("heading").first.wait_for()
                _look(tab, _damage(kind))
            if tab.page.locator(".row .chip").count():
                tab.page.locator(".row .chip").first.click()
                tab.ready("#/")
                _look(tab, _damage(kind))
