"""Measures how quick the pages are in Debian's Chromium, and what the server holds: prints one line
each.

python -m tests.view.page_times [FOLDER]      keeps its made-up runs in FOLDER for the next time
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from prorl.analysis.synthetic_runs import add_commit, make_run
from tests.view.viewer_process import Viewer, run_that_says

ROLLOUTS, TOKENS = 100_000, 64_000
PER_S, LIVE_S = 200, 30

PAINTED = """
window.painted_ms = {};
const note = name => {
  if (name in painted_ms) return;
  painted_ms[name] = 0;
  requestAnimationFrame(() => setTimeout(() => { painted_ms[name] = performance.now();
    document.documentElement.dataset.painted = Object.keys(painted_ms)
      .filter(key => painted_ms[key]).join(' '); }, 0));
};
new MutationObserver(() => {
  if (document.querySelector('.tiles .tile')) note('tiles');
  const cards = [...document.querySelectorAll('.grid p.plot')];
  if (cards.length) note('cards');
  else if ('cards' in painted_ms) note('figures');
}).observe(document, { subtree: true, childList: true });
"""
"""The page's own clock, from the start of its navigation to the paint: Playwright asks a busy page
late. A card is a `p.plot` until its figure is there.
"""


def main(folder: Path) -> None:
    """Make the runs where they are missing, serve them, and click."""
    if not (folder / "big").exists():
        make_run(folder / "big", ROLLOUTS, 50)
    if not (folder / "long").exists():
        run_that_says(folder / "long", ["x"], TOKENS)
    with _server(folder) as (url, pid):
        _click(url, pid)
    with tempfile.TemporaryDirectory(prefix="prorl-live-") as made:
        _live(Path(made))


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "prorl.cli", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield re.sub(r"^look at\s+", "", server.stdout.readline().strip()), server.pid
        finally:
            server.terminate()


def _live(folder: Path) -> None:
    """Measures the cost of the events of a run that grows by a commit a second, and their
    content.
    """
    run, rng = make_run(folder / "r", PER_S, 1), np.random.default_rng(0)
    with _server(folder) as (url, pid), ThreadPoolExecutor(1) as threads:
        num_events = threads.submit(asyncio.run, _events(Viewer(url), LIVE_S))
        time.sleep(5)  # until it is open
        before, start = _cpu_s(pid), time.monotonic()
        for second in range(1, LIVE_S + 1):
            add_commit(run, second + 1, range(PER_S * second, PER_S * (second + 1)), 0, 64, rng)
            time.sleep(max(0.0, start + second - time.monotonic()))
        wall = time.monotonic() - start
        share = (_cpu_s(pid) - before) / wall
        print(
            f"{PER_S * LIVE_S / wall:,.0f} rollouts/s for {wall:.0f} s:"
            f" {share:.1%} of a core, {num_events.result()} events"
        )


async def _events(viewer: Viewer, count: int) -> int:
    """Returns how many events came until the run had grown so often."""
    num_events = 0
    async with viewer.events("api/runs/r/events") as events:
        async for now in events:
            num_events += 1
            if now["totals"]["rollouts"] >= PER_S * (count + 1):
                break
    return num_events


def _click(url: str, pid: int) -> None:
    address = url.partition("#")[0]
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = chromium.new_page()
        page.goto(address + "style.css")
        page.evaluate("token => localStorage.setItem('token', token)", url.partition("=")[2])

        def show(place: str, until: str) -> Callable[[], None]:
            def go() -> None:
                page.goto(address + place)
                page.wait_for_selector(f"#page[data-ready='{place}']")  # not what stood before
                page.wait_for_selector(until)

            return go

        def far() -> None:
            page.evaluate(
                "() => { const table = document.querySelector('.table');"
                " table.scrollTop = 0.9 * (table.scrollHeight - table.clientHeight) }"
            )
            page.wait_for_selector("[role=row] >> text=/^(89|90)[0-9]{3}$/")

        first = "[role=row][aria-rowindex='2'] a, [role=row][aria-rowindex='2'] .chip"
        steps: dict[str, Callable[[], None]] = {
            f"overview of {ROLLOUTS:,} rollouts, server just started": show(
                "#/big", "text=mean reward"
            ),
            f"curves of {ROLLOUTS:,} rollouts": show("#/big/curves", "text=Mean reward"),
            f"{ROLLOUTS:,} rollouts ready": show("#/big/rollouts", first),
            "row 90,000": far,
            "filter reward > 0 and num_tokens > 70": show(
                "#/big/rollouts?where=reward+%3E+0+and+num_tokens+%3E+70", "text=of 100,000"
            ),
            "filter by the words assistant 4242": show(
                "#/big/rollouts?words=assistant+4242", "text=of 100,000"
            ),
            f"first tokens of {TOKENS:,}": show("#/long/rollout/0?tab=tokens", ".tokens s"),
            f"all {TOKENS:,} tokens": lambda: page.wait_for_selector("[data-whole]") and None,
        }
        page.add_init_script(PAINTED)
        for what, step in steps.items():
            before, start = _cpu_s(pid), time.perf_counter()
            step()
            took_ms = (time.perf_counter() - start) * 1e3
            print(f"{what}: {took_ms:,.0f} ms, of the server {_cpu_s(pid) - before:.2f} CPU s")
            if what.startswith("overview"):
                page.wait_for_selector("html[data-painted~=figures]")
                painted = page.evaluate("painted_ms")
                print(
                    f"    its tiles were painted after {painted['tiles']:,.0f} ms,"
                    f" its last figure after {painted['figures']:,.0f} ms"
                )
        page.goto(address + "#/big")
        page.wait_for_selector("text=Seconds of model and tools per unit of reward")
        page.wait_for_load_state("networkidle")
        chromium.close()
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    print(f"server's largest resident memory: {int(peak[1]) / 1024:,.0f} MiB")


def _cpu_s(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / 100


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="prorl-view-") as made:
            main(Path(made))
