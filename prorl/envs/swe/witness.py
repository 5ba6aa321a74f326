"""What sees the tests' outcomes from inside pytest or unittest, and tells the runner.

Shipped as text into sandboxes (`runner.py`): standard library, Python 3.7 or newer. pytest loads it
before anything of the repository, by `-p prorl_pytest`; for unittest a `sitecustomize` beside it
loads it when the interpreter starts.

It answers to the runner alone, over a socket whose key it reads once. It says what passed, whether
a test that must fail failed (the canary), what of the runner's own functions was replaced
(`suspects.py`) or of the tests was changed (`kept.py`), and who else spoke for a test.

Not promised: the tests share a process with the code that they test. Code that reads this process's
memory, by ctypes for instance, can speak in its place.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from _thread import get_ident
from collections.abc import Generator, Iterable
from os import getpid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # in a sandbox there is no prorl
    from prorl.envs.swe.kept import Kept
    from prorl.envs.swe.suspects import Suspects

CANARY = "prorl_canary"
OURS = ("prorl_pytest", "prorl_witness", "prorl_suspects", "prorl_kept")
_ENCODER = json.JSONEncoder()
_COMPILED: Any = getattr(json.encoder, "c_make_encoder", None)
if _COMPILED is not None:  # nothing in it can be replaced later
    _QUOTE = json.encoder.encode_basestring_ascii
    _PARTS = _COMPILED(None, _ENCODER.default, _QUOTE, None, ": ", ", ", False, False, True)
else:

    def _PARTS(message: Any, depth: int) -> Iterable[str]:
        return _ENCODER.iterencode(message)


class Witness:
    """One session's outcomes, each told at once: the runner forgets no failure."""

    def __init__(self, fd: int, suspects: Suspects, kept: Kept) -> None:
        self._voice = voice(fd)
        next(self._voice)
        self._pid = getpid()
        self._thread = get_ident()
        self._outcomes: dict[str, bool] = {}
        self._expected: set[str] = set()
        self._suspects = suspects
        self._kept = kept
        atexit.register(self._bye)

    def note(
        self,
        names: Iterable[str],
        good: bool,
        expected: bool = False,
        path: str = "",
        test: str = "",
    ) -> None:
        """A test's verdict; one that is ever bad stays bad.

        `expected`: good since it failed; `path`: its file; `test`: pytest's name of it.
        """
        if getpid() != self._pid:
            return
        self._suspects.stands_behind(sys._getframe(1), get_ident() == self._thread)
        self._suspects.is_busy = True
        try:
            self._suspects.look()
            changed = self._kept.look(path, test)
        finally:
            self._suspects.is_busy = False
        for said in changed:
            self._suspects.note("", said)
        fresh = {name: good for name in names if self._outcomes.get(name, not good) is not good}
        self._outcomes.update(fresh)
        if expected:
            self._expected.update(fresh)
        suspects = self._suspects.fresh()
        if fresh or suspects:
            self._voice.send({"say": "seen", "outcomes": fresh, "suspects": suspects})

    def tell(self) -> None:
        """What was expected to fail, and what code of the repository did beside being right."""
        if getpid() == self._pid:
            suspects = self._suspects.found() + self._kept.found()
            expected = sorted(self._expected)
            self._voice.send({"say": "told", "expected": expected, "suspects": suspects})

    def tests(self, paths: Iterable[str]) -> None:
        """Files whose tests are run."""
        for said in self._kept.tests(paths):
            self._suspects.note("", said)
        self._suspects.tests = self._kept.paths

    def item(self, item: Any) -> None:
        """A test of pytest that was collected."""
        self.tests([str(item.fspath)])
        self._kept.item(item)

    def runs(self, item: Any) -> None:
        """A test of pytest is run now."""
        self._kept.runs(item)

    def hooks(self, relay: Any) -> None:
        """Pytest's hooks, at a moment when a test is about to run."""
        self._suspects.is_busy = True
        try:
            hooks = self._kept.hooks(relay)
        finally:
            self._suspects.is_busy = False
        for said in hooks:
            self._suspects.note("", said)

    def plugin(self, plugin: Any) -> None:
        """A plugin of pytest that came."""
        self._suspects.plugin(plugin)

    def _bye(self) -> None:
        if getpid() == self._pid:
            self._voice.send({"say": "bye", "modules": origins()})


def voice(fd: int) -> Generator[None, dict[str, Any], None]:
    """Says what it is sent to the runner, once that has let it start.

    A generator, since what it holds can be read by means that are seen only (`suspects.py`).
    Raises OSError where nobody listens.
    """
    end = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    key, say, parts = end.recv(64), end.sendall, _PARTS
    say(key + b'{"say": "start"}\n')
    if end.recv(2) != b"go":
        raise OSError("the runner listens to another one")
    frame_of, join = sys._getframe, "".join
    ours = [one.__code__ for one in (Witness.note, Witness.tell, Witness._bye)]
    while True:
        message = yield
        if frame_of(1).f_code not in ours:
            message = {"say": "seen", "suspects": ["somebody else speaks for the tests"]}
        say(key + join(parts(message, 0)).encode() + b"\n")


def forget(modules: dict[str, Any]) -> None:
    """Take this module and those beside it out of the way of code that looks for them."""
    for name in OURS:
        modules.pop(name, None)


def origins() -> dict[str, str]:
    """Where the top-level modules lie that were imported, those of Python itself left out."""
    found = {}
    library = os.path.dirname(os.__file__)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if "." in name or not isinstance(path, str):
            continue
        if not path.startswith(library) or "-packages" in path:
            found[name] = path
    return found


def connect(suspects: Suspects, kept: Kept) -> Witness | None:
    """The witness of this process, once; None where nobody listens."""
    fd = os.environ.pop("PRORL_WITNESS", "")
    # what the tests start themselves must find neither
    for name, between in (("PYTHONPATH", ":"), ("PYTEST_ADDOPTS", " ")):
        parts = os.environ.pop(name, "").replace("-p prorl_pytest", "").split(between)
        rest = between.join(
            part for part in parts if part and not part.startswith("/proc/self/fd/")
        )
        if rest:
            os.environ[name] = rest
    if not fd:
        return None
    try:
        return Witness(int(fd), suspects, kept)
    except (OSError, ValueError):
        return None


# ---- pytest


class Plugin:
    """The hooks of pytest by which verdicts leave the test process."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._canary_failed = False
        self._config: Any = None

    def watch(self, config: Any) -> None:
        """Workers of xdist have no witness: what they see is reported here, too."""
        plugins = getattr(config.option, "plugins", None)
        if plugins and "prorl_pytest" in plugins:
            plugins.remove("prorl_pytest")
        self._config = config

    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        """One more test, which must fail."""
        for item in items:
            self._witness.item(item)
        canary = make_canary(session)
        if canary is not None:
            items.append(canary)

    def pytest_itemcollected(self, item: Any) -> None:
        """Each, as soon as its file has been read."""
        self._witness.item(item)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test is about to run."""
        self._witness.hooks(self._config.hook)

    def pytest_runtest_call(self, item: Any) -> None:
        """A test runs."""
        self._witness.runs(item)

    def pytest_plugin_registered(self, plugin: Any) -> None:
        """Code under test may register hooks of its own."""
        self._witness.plugin(plugin)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Each phase of each test."""
        if report.nodeid.endswith(CANARY):
            self._canary_failed = self._canary_failed or report.outcome == "failed"
            return
        names = {report.nodeid}
        relative = getattr(self._config, "cwd_relative_nodeid", None)
        if relative is not None:
            names.add(relative(report.nodeid))
        is_xfail = hasattr(report, "wasxfail") and report.outcome == "skipped"
        is_good = report.outcome == "passed" and not hasattr(report, "wasxfail")
        path = str(self._config.rootdir.join(report.nodeid.partition("::")[0]))
        if report.when == "call":
            self._witness.note(names, is_good or is_xfail, is_xfail, path, report.nodeid)
        elif report.outcome != "passed":
            self._witness.note(names, is_xfail, is_xfail, path)

    def pytest_sessionfinish(self, session: Any) -> None:
        """Tell before others may end the process."""
        self._witness.note([CANARY], self._canary_failed)
        self._witness.tell()


def make_canary(session: Any) -> Any:
    """A test that fails, as this pytest makes tests; None where it cannot."""
    import pytest

    class Canary(pytest.Item):
        def runtest(self) -> None:
            raise AssertionError(CANARY)

        def repr_failure(self, *of: Any, **style: Any) -> Any:
            return "as it must: the tests are seen to fail where they do"

        def reportinfo(self) -> Any:
            return str(session.fspath), 0, CANARY

    try:
        if hasattr(Canary, "from_parent"):
            return Canary.from_parent(session, name=CANARY)
        return Canary(CANARY, session)
    except (TypeError, AttributeError):
        return None


def attach(config: Any, witness: Witness | None) -> None:
    """Called by `prorl_pytest`, which has connected before the repository's code was read."""
    if witness is not None:
        plugin = Plugin(witness)
        plugin.watch(config)
        config.pluginmanager.register(plugin, "prorl_witness_hooks")


# ---- unittest


def watch_unittest(suspects: Suspects, kept: Kept) -> None:
    """Wrap what every result of unittest goes through."""
    import unittest.result

    result: Any = unittest.result.TestResult
    state: dict[str, Any] = {"witness": None, "asked": False}

    def witness() -> Any:
        if not state["asked"]:
            state["asked"] = True
            state["witness"] = connect(suspects, kept)
            if state["witness"] is not None:
                atexit.register(finish)
        return state["witness"]

    def finish() -> None:
        failed = canary_of_unittest()
        state["witness"].note([CANARY], failed)
        state["witness"].tell()

    def wrap(name: str, good: bool) -> None:
        original = getattr(result, name, None)
        if original is None:
            return

        def add(self: Any, test: Any, *rest: Any) -> Any:
            seen = witness()
            if seen is not None and not str(getattr(test, "id", str)()).endswith(CANARY):
                fine = good if name != "addSubTest" else rest[-1] is None
                paths = file_of(test)
                seen.tests(paths)
                seen.note(names_of(test), fine, name == "addExpectedFailure", "".join(paths))
            return original(self, test, *rest)

        setattr(result, name, add)

    for name, good in (
        ("addSuccess", True),
        ("addExpectedFailure", True),
        ("addFailure", False),
        ("addError", False),
        ("addSkip", False),
        ("addUnexpectedSuccess", False),
        ("addSubTest", True),
    ):
        wrap(name, good)

    begin = result.startTestRun

    def start_run(self: Any) -> Any:
        seen = witness()
        if seen is not None:
            seen.tests(test_files())
        return begin(self)

    result.startTestRun = start_run


def canary_of_unittest() -> bool:
    """Whether a test that fails is told to have failed."""
    import unittest

    class Canary(unittest.TestCase):
        def prorl_canary(self) -> None:
            self.assertEqual(1, 2)  # noqa: PT009

    outcome = unittest.TestResult()
    Canary(CANARY).run(outcome)
    return len(outcome.failures) == 1


def test_files() -> list[str]:
    """Modules that are loaded and whose names are those of tests."""
    paths = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [path for path in paths if isinstance(path, str) and is_test(os.path.basename(path))]


def is_test(name: str) -> bool:
    """Whether a file of this name holds tests.

    >>> is_test("test_a.py"), is_test("a_test.py"), is_test("tests.py"), is_test("latest.py")
    (True, True, True, False)
    """
    return name.startswith("test") or name.endswith(("_test.py", "_tests.py"))


def file_of(test: Any) -> list[str]:
    """Where a test's class was written."""
    module = sys.modules.get(type(test).__module__)
    path = getattr(module, "__file__", None)
    return [path] if isinstance(path, str) else []


def names_of(test: Any) -> set[str]:
    """As unittest prints it, before and since Python 3.11, by its dotted name, and by its text."""
    identity = str(test.id()) if hasattr(test, "id") else str(test)
    place, _, method = identity.rpartition(".")
    names = {str(test), identity, f"{method} ({place})"}
    names.add(f"{method} ({place}.{method})")
    describe = getattr(test, "shortDescription", None)
    text = describe() if describe is not None else None
    return names | ({text} if text else set())
