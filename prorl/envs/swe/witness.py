"""Observes the tests' outcomes from inside pytest or unittest, and sends them to the runner.

Shipped as text into sandboxes (`runner.py`): standard library, Python 3.7 or newer. pytest loads it
by `-p prorl_pytest`, before anything of the repository; for unittest a `sitecustomize` beside it
calls `watch_unittest` when an interpreter starts. Each outcome is a line over a socket, at once.

Not promised: the tests share a process with the code that they test, which can speak in its place.
What does so whatever the tests expect is found out by the altered twin (`twin.py`).
"""

from __future__ import annotations

import json
import os
import socket
from os import getpid
from typing import Any

_TEXT = json.JSONEncoder().encode


class Voice:
    """One process's way to the runner; what it forks is not heard."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._send = socket.socket(fileno=fd).sendall
        self._pid = getpid()
        self.say({"say": "start"})

    def say(self, message: dict[str, Any]) -> None:
        if getpid() == self._pid:
            self._send(_TEXT(message).encode() + b"\n")

    def tell(self, names: set[str], good: bool) -> None:
        self.say({"outcomes": dict.fromkeys(names, good)})


def connect() -> Voice | None:
    """This process's voice, once; None where nobody listens."""
    fd = os.environ.pop("PRORL_WITNESS", "")
    # what the tests start themselves must find neither
    for name, between in (("PYTHONPATH", ":"), ("PYTEST_ADDOPTS", " ")):
        parts = os.environ.pop(name, "").replace("-p prorl_pytest", "").split(between)
        rest = between.join(
            part for part in parts if part and not part.startswith("/proc/self/fd/")
        )
        if rest:
            os.environ[name] = rest
    try:
        return Voice(int(fd)) if fd else None
    except OSError:
        return None


# ---- pytest


class Plugin:
    def __init__(self, config: Any, voice: Voice) -> None:
        self._config, self._voice = config, voice

    def pytest_runtest_logreport(self, report: Any) -> None:
        names = {report.nodeid}
        relative = getattr(self._config, "cwd_relative_nodeid", None)
        if relative is not None:
            names.add(relative(report.nodeid))
        is_xfail = hasattr(report, "wasxfail") and report.outcome == "skipped"
        is_good = report.outcome == "passed" and not hasattr(report, "wasxfail")
        if report.when == "call" or report.outcome != "passed":
            self._voice.tell(names, is_xfail or (is_good and report.when == "call"))


def attach(config: Any, voice: Voice | None) -> None:
    """Called by `prorl_pytest`, which has connected before the repository's code was read.

    Workers of xdist have no witness: what they see is reported here, too.
    """
    plugins = getattr(config.option, "plugins", None)
    if plugins and "prorl_pytest" in plugins:
        plugins.remove("prorl_pytest")
    if voice is not None:
        config.pluginmanager.register(Plugin(config, voice), "prorl_witness_hooks")


# ---- unittest


def watch_unittest() -> None:
    """Wrap what every result of unittest goes through.

    Of the programs that a command starts the first is heard that is `python -m unittest`, or has a
    result.
    """
    import unittest.result

    result: Any = unittest.result.TestResult
    with open("/proc/self/cmdline") as file:
        words = file.read().split("\0")
    voices = [connect()] if "unittest" in words else []

    def wrap(name: str, good: bool) -> None:
        original = getattr(result, name, None)
        if original is None:
            return

        def add(self: Any, test: Any, *rest: Any) -> Any:
            if not voices:
                voices.append(connect())
            if voices[0] is not None:
                voices[0].tell(names_of(test), good if name != "addSubTest" else rest[-1] is None)
            return original(self, test, *rest)

        setattr(result, name, add)

    for name in ("addSuccess", "addExpectedFailure", "addSubTest"):
        wrap(name, True)
    for name in ("addFailure", "addError", "addSkip", "addUnexpectedSuccess"):
        wrap(name, False)


def names_of(test: Any) -> set[str]:
    """Returns the names that unittest prints for a test, before and since Python 3.11: its dotted
    name, and its text.
    """
    identity = str(test.id()) if hasattr(test, "id") else str(test)
    place, _, method = identity.rpartition(".")
    names = {str(test), identity, f"{method} ({place})"}
    names.add(f"{method} ({place}.{method})")
    describe = getattr(test, "shortDescription", None)
    text = describe() if describe is not None else None
    return names | ({text} if text else set())
