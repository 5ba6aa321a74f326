"""Questions of a person who debugs, each answered by clicks alone; how many, and how long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prorl.analysis.synthetic_runs import make_run
from prorl.schema import TRAINED
from prorl.storage.files.appended import AppendedTable
from prorl.storage.read.catalog import StoredRun

pytest.importorskip("playwright.sync_api", reason="no playwright: make test-ui")
from tests.view.run_kinds import KINDS
from tests.view.test_pages import CHROMIUM, Tab, browser
from tests.view.viewer_process import viewing

pytestmark = [
    pytest.mark.ui,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: make test-ui"),
]


class Asker:
    """Clicks that are counted."""

    def __init__(self, tab: Tab) -> None:
        self.page, self.tab, self.clicks = tab.page, tab, 0

    def click(self, place: Any) -> None:
        place.click()
        self.clicks += 1

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.clicks += 1

    def to(self, tab: str) -> None:
        """One of the tabs on top."""
        bar = self.page.get_by_role("navigation", name="Pages of this run")
        self.click(bar.get_by_role("link", name=tab, exact=True))

    def first(self) -> None:
        """The rollout of the first row."""
        self.click(self.page.locator(".row .chip").first)
        self.tab.ready("#/r/rollout/")

    def card(self, title: str) -> Any:
        """A chart, or the number that stands for one where there is a single value."""
        return self.page.locator("section.card, .tile").filter(has_text=title)

    def choose(self, title: str) -> None:
        """The first bar of a chart, or the number."""
        place = self.card(title)
        place.filter(has_not_text="…").first.wait_for()
        bars = place.locator("button.bar")
        self.click(bars.first if bars.count() else place.first)

    def sees(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()


def reward_fell(a: Asker) -> None:
    """Why did reward fall at a version? The rollouts behind the point, and what they share."""
    a.card("Mean reward by policy version").locator(".u-over").wait_for()
    a.click(a.card("Mean reward by policy version").locator(".u-over"))
    a.sees("of 2,000")
    assert "min_version" in a.page.url


def tasks_flipped(a: Asker) -> None:
    """Which tasks flipped?"""
    a.to("Tasks")
    a.click(a.page.get_by_role("link", name="Flipped"))
    a.tab.ready("#/r/tasks?view=flipped")


def sampler_is_off(a: Asker) -> None:
    """Is the sampler off from the learner, and in which tokens?"""
    a.card("Learner minus sampler").get_by_text("0.3").first.wait_for()
    a.to("Rollouts")
    a.first()
    a.press("t")
    a.page.get_by_label("Colour by").select_option("learner")
    a.clicks += 2
    a.sees("learner − sampler: mean -0.3")


def failures_in_common(a: Asker) -> None:
    """What do failures have in common?"""
    a.choose("by class and code")
    a.page.locator(".facet .lift").filter(has_text="×").first.wait_for()


def waits_for_whom(a: Asker) -> None:
    """Who waits for whom? Without a service, from the stored seconds."""
    a.card("Seconds of a rollout by stage").locator("canvas").first.wait_for()
    a.to("Live")
    a.sees("Only what is stored")


def siblings_part(a: Asker) -> None:
    """Where does a failed rollout part from its rewarded sibling?"""
    a.to("Rollouts")
    a.first()
    a.press("g")
    a.sees("tokens are the same; they part in turn")


def groups_dropped(a: Asker) -> None:
    """Why were groups dropped?"""
    a.choose("Why groups were dropped")
    a.sees("of 2,000")


def slowest(a: Asker) -> None:
    """Which rollouts take longest, and in what?"""
    a.to("Rollouts")
    a.click(a.page.get_by_role("button", name="time in RUN"))
    a.page.locator("[aria-sort=descending]").wait_for()
    a.first()
    a.sees("Where the time went")


def reward_is_wrong(a: Asker) -> None:
    """This reward is wrong: say so."""
    a.to("Rollouts")
    a.first()
    a.click(a.page.get_by_role("button", name="Reward is wrong"))
    a.page.locator(".chip.warn", has_text="wrong-reward").wait_for()


def two_runs(a: Asker) -> None:
    """What is different between two runs?"""
    a.page.get_by_label("Compare with a run").select_option("s")
    a.clicks += 2
    a.sees("Side by side")


def _example(a: Asker, name: str) -> None:
    a.to("SQL")
    a.click(a.page.get_by_role("link", name=name, exact=True))
    a.page.get_by_text(re.compile(r"^\d+ rows? in")).wait_for(timeout=20_000)


def tools_fail(a: Asker) -> None:
    """How often do calls of each tool fail?"""
    _example(a, "tools, and how often they failed")


def tokens_by_turn(a: Asker) -> None:
    """How many tokens does each turn take?"""
    _example(a, "tokens by turn")


def equal_answers(a: Asker) -> None:
    """Which answers to a task are equal?"""
    _example(a, "equal answers")


QUESTIONS: tuple[Callable[[Asker], None], ...] = (
    reward_fell,
    tasks_flipped,
    sampler_is_off,
    failures_in_common,
    waits_for_whom,
    siblings_part,
    groups_dropped,
    slowest,
    reward_is_wrong,
    two_runs,
    tools_fail,
    tokens_by_turn,
    equal_answers,
)


@pytest.fixture(scope="module")
def run_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "r", 2000, 2)
    make_run(root / "s", 400, 1, seed=1)
    _train(StoredRun(root / "r"), 64, apart=-0.3)
    with viewing(root) as viewer, browser(viewer) as tab:
        yield tab


def _train(stored: StoredRun, count: int, apart: float) -> None:
    """Writes what a trainer leaves that found each of the first tokens this much less likely."""
    rows = stored.read("sequences").sort_by("sequence_id").slice(0, count).to_pylist()
    nullable = {field.name: None for field in TRAINED if field.nullable}
    zero = {f.name: "" if pa.types.is_string(f.type) else 0 for f in TRAINED if not f.nullable}
    made = [
        nullable
        | zero
        | {
            name: row[name]
            for name in ("sequence_id", "rollout_id", "group_id")
            if name in TRAINED.names
        }
        | {"step": 1, "advantage": 0.5}
        | {"learner_logprobs": [value + apart for value in row["logprobs"]]}
        for row in rows
    ]
    AppendedTable(stored.directory, "trained").append(pa.Table.from_pylist(made, TRAINED), "made")


def test_a_failed_judge_is_located_and_explained_in_three_clicks(tmp_path: Path) -> None:
    """It also leaves a comparison before that is there, which is no error. It stands before the
    questions that share a browser: a process drives one at a time.
    """
    KINDS["faulty"](tmp_path / "r")
    make_run(tmp_path / "s", 64, 1)
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        tab.page.goto(f"{viewer.address}#/?compare=r~s")
        tab.go("#/r")
        asker, began = Asker(tab), time.monotonic()
        asker.choose("by class and code")
        asker.sees("8 of 8 rollouts have no score that counts")
        asker.first()
        asker.sees("the judge is away: connection refused")
        print(f"A failed judge: {asker.clicks} clicks, {time.monotonic() - began:.1f} s")
        assert asker.clicks <= 3


def test_rollouts_whose_tokens_do_not_train_are_named_as_such(tmp_path: Path) -> None:
    """They have no failure: an evaluation during which other weights were published has many."""
    KINDS["masked"](tmp_path / "r")
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        tab.page.goto(viewer.address)
        tab.go("#/r/rollouts")
        Asker(tab).sees("without a token that trains")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
def test_a_question_is_answered_by_clicks(
    run_tab: Tab, question: Callable[[Asker], None], record_property: Callable[[str, object], None]
) -> None:
    run_tab.go("#/r")
    asker, began = Asker(run_tab), time.monotonic()
    question(asker)
    took = time.monotonic() - began
    print(f"{(question.__doc__ or '').splitlines()[0]} {asker.clicks} clicks, {took:.1f} s")
    assert asker.clicks <= 5
