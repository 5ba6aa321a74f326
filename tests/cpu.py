"""`pytest --cpu` prints which files of the suite use the most CPU.

Counted is what setup, call and teardown of each test use: of pytest's own process, and of the
processes that it started and waited for. Fixtures count for the test that made or ended them.
Processes that something else waits for (those of a sandbox, of a daemon) are missing.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

MAX_ROWS = 40
COLLECTION = "(start and collection)"


def _times() -> Counter[str]:
    times = os.times()
    return Counter(
        own=times.user + times.system,
        children=times.children_user + times.children_system,
        clock=times.elapsed,
    )


class CpuTable:
    """The seconds of each file, added up over the processes of pytest-xdist."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_finish(self) -> None:
        times = os.times()
        self._seconds[COLLECTION].update(own=times.user + times.system)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _times()
        result = yield
        seconds = self._seconds[item.nodeid.partition("::")[0]]
        seconds.update(_times())
        seconds.subtract(before)
        seconds.update(tests=1)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu"] = {name: dict(counts) for name, counts in self._seconds.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, counts in getattr(node, "workeroutput", {}).get("cpu", {}).items():
            self._seconds[name].update(counts)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = sorted(
            self._seconds.items(), key=lambda row: row[1]["own"] + row[1]["children"], reverse=True
        )
        total = sum((counts for _, counts in rows), Counter[str]())
        terminalreporter.section("CPU s: own, of children; s by the clock; tests")
        for name, counts in [*rows[:MAX_ROWS], ("all files", total)]:
            terminalreporter.write_line(
                f"{counts['own']:8.1f} {counts['children']:8.1f} {counts['clock']:8.1f} "
                f"{counts['tests']:5.0f}  {name}"
            )
