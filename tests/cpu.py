"""`pytest --cpu` prints which files of the suite use the most CPU.

Counted is what setup, call and teardown of each test use: of pytest's own process, and of the
processes that it started and waited for. Fixtures count for the test that made or ended them.
Processes that something else waits for (those of a sandbox, of a daemon) are missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

MAX_ROWS = 40
COLLECTION = "(start and collection)"


class Usage(NamedTuple):
    """The seconds that tests used, and their number."""

    own_s: float = 0.0
    children_s: float = 0.0
    clock_s: float = 0.0
    tests: int = 0

    def plus(self, other: Usage, sign: int = 1) -> Usage:
        return Usage(
            self.own_s + sign * other.own_s,
            self.children_s + sign * other.children_s,
            self.clock_s + sign * other.clock_s,
            self.tests + sign * other.tests,
        )


def _until_now() -> Usage:
    times = os.times()
    own_s, children_s = times.user + times.system, times.children_user + times.children_system
    return Usage(own_s, children_s, times.elapsed)


class CpuTable:
    """The usage of each file, added up over the processes of pytest-xdist."""

    def __init__(self) -> None:
        self._usage: dict[str, Usage] = {}

    def _add(self, file: str, usage: Usage) -> None:
        self._usage[file] = self._usage.get(file, Usage()).plus(usage)

    def pytest_collection_finish(self) -> None:
        self._add(COLLECTION, _until_now()._replace(clock_s=0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _until_now()
        result = yield
        used = _until_now().plus(before, -1)
        self._add(item.nodeid.partition("::")[0], used._replace(tests=1))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu"] = {file: list(usage) for file, usage in self._usage.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, usage in getattr(node, "workeroutput", {}).get("cpu", {}).items():
            self._add(file, Usage(*usage))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files = sorted(
            self._usage.items(), key=lambda row: row[1].own_s + row[1].children_s, reverse=True
        )
        total = Usage()
        for _, usage in files:
            total = total.plus(usage)
        terminalreporter.section("CPU s: own, of children; s by the clock; tests")
        for file, usage in [*files[:MAX_ROWS], ("all files", total)]:
            terminalreporter.write_line(
                f"{usage.own_s:8.1f} {usage.children_s:8.1f} {usage.clock_s:8.1f} "
                f"{usage.tests:5}  {file}"
            )
