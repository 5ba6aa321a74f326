"""The pages in a real browser: what they show, that text stays text, that nothing leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl.analysis.synthetic_runs import make_run
from prorl.view.frozen import freeze
from tests.view.run_kinds import KINDS
from tests.view.viewer_process import Viewer, run_that_says, viewing

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-ui")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.ui,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium: make test-ui"),
]

PATIENCE_MS = 180_000
AXE = os.environ.get("PRORL_AXE", "")

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "</pre></div><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "javascript:window.hacked=1",
    '"><b onmouseover=window.hacked=1>x',
    "' autofocus onfocus=window.hacked=1 x='",
    "<math><mi xlink:href='data:x,<script>window.hacked=1</script>'>",
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example><button autofocus>x</button></form>",
    "<object data=//evil.example></object>",
    "<embed src=//evil.example>",
    "<video><source onerror=window.hacked=1></video>",
    "<details open ontoggle=window.hacked=1>x</details>",
    "<template><script>window.hacked=1</script></template>",
    "<!--><script>window.hacked=1</script>-->",
    "<![CDATA[<script>window.hacked=1</script>]]>",
    "{{constructor.constructor('window.hacked=1')()}}",
    "${window.hacked=1}",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;",
    "&#60;script&#62;window.hacked=1",
    "\\u003cscript\\u003ewindow.hacked=1",
    "<ScRiPt>window.hacked=1</sCrIpT>",
    "<scr<script>ipt>window.hacked=1</script>",
    "<script src=data:,window.hacked=1></script>",
    "<p style=background:url(//evil.example/x)>",
    "![x](//evil.example/x.png)",
    "[x](javascript:window.hacked=1)",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07x\x1b]8;;\x07",
    "‮gnihtemos‬ ​⁦x⁩",
    "<\x00script>window.hacked=1</script>",
    "__proto__",
    "constructor",
    "'; drop table rollouts; --",
    "%3Cscript%3Ewindow.hacked=1%3C/script%3E",
)


class Tab:
    """A page of a viewer, and all that it said or asked for."""

    def __init__(self, page: Any, viewer: Viewer) -> None:
        self.page, self._address = page, viewer.address
        page.set_default_timeout(PATIENCE_MS)
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on(
            "console", lambda message: self.wrong.extend([message.text] * (message.type == "error"))
        )
        page.on(
            "request",
            lambda sent: self.wrong.extend([sent.url] * (not sent.url.startswith(self._address))),
        )
        page.goto(viewer.url)

    def go(self, place: str) -> None:
        """To an address below `#`, and wait until its page stands."""
        self.page.goto(f"{self._address}{place}")
        self.ready(place)

    def ready(self, place: str) -> None:
        """Wait until the page of an address that begins so stands."""
        self.page.wait_for_selector(f'#page[data-ready^="{place}"]')


@contextmanager
def browser(viewer: Viewer, **context: Any) -> Iterator[Tab]:
    """Debian's Chromium without a head."""
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        tab = Tab(chromium.new_context(**context).new_page(), viewer)
        yield tab
        assert tab.wrong == []
        chromium.close()


def test_from_the_table_to_the_tokens_of_a_sibling(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 2000, 2)
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        page = tab.page
        tab.go("#/r")
        page.get_by_role("link", name="Rollouts", exact=True).click()
        tab.ready("#/r/rollouts")
        page.get_by_label("Filter: an SQL condition").fill("reward > 0")
        page.keyboard.press("Enter")
        page.get_by_text("of 2,000").wait_for()
        page.locator("h1").click()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        tab.ready("#/r/rollout/")
        assert "where=reward" in page.url
        page.keyboard.press("t")
        page.locator(".tokens s").first.hover()
        assert "id" in page.locator(".about").inner_text()
        page.keyboard.press("g")
        page.get_by_text("tokens are the same").wait_for()
        page.keyboard.press("Escape")
        page.get_by_text("of 2,000").wait_for()


@pytest.mark.parametrize("width", [1400, 1100, 390])
def test_the_list_has_verdicts_and_gives_its_room_to_prompts_and_answers(
    tmp_path: Path, width: int
) -> None:
    KINDS["odd"](tmp_path / "r")
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.go("#/r/rollouts")
        chips = tab.page.locator(".row .verdict")
        chips.nth(7).wait_for()
        assert [chip.inner_text().split("\n")[0][0] for chip in chips.all()[:8]] == list("○○◐✓✕✕✓◐")
        assert "right, reward" in chips.nth(3).text_content()
        shares = tab.page.evaluate("""() => {
            const table = document.querySelector(".table");
            const cells = [...table.querySelector(".row:not(.head)").querySelectorAll(".text")]
                .filter((cell) => ["prompt", "answer", "error"].includes(
                    table.querySelectorAll(".head > div")[[...cell.parentNode.children]
                        .indexOf(cell)].textContent));
            const text = cells.reduce((sum, cell) => sum + cell.offsetWidth, 0);
            return [text / table.clientWidth, table.scrollWidth - table.clientWidth];
        }""")
        cells = tab.page.locator(".row:not(.head)").first.locator("> div:visible").all_inner_texts()
        assert shares[0] > 0.4
        assert "user says 0 of many words" in cells
        assert (len(cells) == 3) == (width == 390)
        assert shares[1] <= 0


def test_a_rollout_is_searched_and_its_messages_have_links(tmp_path: Path) -> None:
    KINDS["odd"](tmp_path / "r")
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        page = tab.page
        tab.go("#/r/rollout/0")
        page.locator(".folded").wait_for()
        page.keyboard.press("/")
        page.keyboard.type("The end")
        page.get_by_text("1 match", exact=True).wait_for()
        page.keyboard.press("Enter")
        page.get_by_text("1 of 1").wait_for()
        place = """() => [...CSS.highlights.get("find-at")][0].getBoundingClientRect().top"""
        assert 0 < page.evaluate(place) < page.viewport_size["height"]
        page.get_by_label("Find in this rollout").fill("says")
        page.locator("h1").click()
        for key, count in (("n", "1 of 3"), ("n", "2 of 3"), ("N", "1 of 3"), ("N", "3 of 3")):
            page.keyboard.press(key)
            page.get_by_text(count).wait_for()
        page.get_by_role("link", name="#3").click()
        tab.ready("#/r/rollout/0?at=3")
        page.locator(".message.at").wait_for()
        page.locator(".strip .model").first.wait_for()
        page.locator(".message.assistant").first.get_by_role("link", name="tokens").click()
        page.locator(".tokens s.at").wait_for()
        tab.go("#/r/rollout/1")
        output = page.locator(".message.tool")
        assert output.locator("pre").text_content() == "red plain"
        tab.go("#/r/rollout/3")
        output.get_by_role("button", name="raw").click()
        assert "\\u202egnihtemos" in output.locator("pre").text_content()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run_that_says(tmp_path / "r", HOSTILE)
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        page = tab.page
        for place in ("#/r", "#/r/rollouts", "#/r/tasks"):
            tab.go(place)
        for number, text in enumerate(HOSTILE):
            tab.go(f"#/r/rollout/{number}")
            content = page.locator(".message pre").first.text_content()
            assert content == text, text
        assert (
            page.locator("script:not([src]), iframe, object, embed, base, form[action]").count()
            == 0
        )
        assert "hacked" not in page.evaluate("() => Object.keys(window)")


@pytest.mark.skipif(not AXE, reason="PRORL_AXE names no axe.min.js: make test-ui")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_finding_of_axe(tmp_path: Path, theme: str) -> None:
    make_run(tmp_path / "r", 400, 2)
    make_run(tmp_path / "s", 80, 1)
    places = ("#/", "#/r", "#/r/rollouts", "#/r/tasks", "#/r/sql?q=select+1+as+one", "#/r/live")
    views = (f"#/r/rollout/7?tab={tab}" for tab in ("messages", "tokens", "siblings", "raw"))
    with (
        viewing(tmp_path) as viewer,
        browser(viewer, color_scheme=theme, bypass_csp=True) as tab,
    ):
        tab.page.add_init_script(path=AXE)
        tab.page.reload()
        for place in (*places, *views):
            tab.go(place)
            tab.page.wait_for_timeout(300)
            report = tab.page.evaluate("() => axe.run()")
            bad = [
                (
                    finding["id"],
                    finding["nodes"][0]["html"][:200],
                    finding["nodes"][0]["failureSummary"],
                )
                for finding in report["violations"]
                if finding["impact"] in ("serious", "critical")
            ]
            assert bad == [], place


def test_a_frozen_copy_lives_from_a_file(tmp_path: Path) -> None:
    run = run_that_says(tmp_path / "r", HOSTILE[:8])
    (tmp_path / "r.html").write_text(freeze(run.where))
    address = Viewer((tmp_path / "r.html").as_uri() + "#/r")
    with browser(address) as tab:
        tab.ready("#/r")
        tab.page.locator(".plot canvas, .bars").first.wait_for()
        tab.go("#/r/rollouts")
        tab.page.locator(".row .chip").first.click()
        tab.ready("#/r/rollout/")
        assert tab.page.locator(".message pre").first.text_content() in HOSTILE
        tab.page.keyboard.press("t")
        tab.page.locator(".tokens s").first.wait_for()
        assert "hacked" not in tab.page.evaluate("() => Object.keys(window)")


def test_a_damaged_part_is_named_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", 32, 2)
    part = next(f.path for f in run.commits()[1].files if f.table == "rollouts")
    (tmp_path / "r" / part).write_bytes(b"PAR1 is not what it was")
    with viewing(tmp_path) as viewer, browser(viewer) as tab:
        tab.go("#/r/rollouts")
        assert part in tab.page.get_by_text("cannot be read").locator("..").inner_text()
        tab.page.locator(".row .chip").first.wait_for()
