"""The judge of the `code` env for programs that talk with a task's interactor over pipes.

A program for `python3 -I -c` in a fresh EVAL sandbox.

Standard library, Python 3.8 or newer.

    stdin: one JSON object {"program", "interactor", "cases": [{"input"}], "case_s", "total_s",
    "stop_early", "nonce"}
    stdout: `NONCE start`, a line about each case that fails, the last line `NONCE PASSED TOTAL`,
    or `NONCE error` when the interactor failed

The interactor is Python text that defines `interact(case, talk)`: `case` is the input of a case,
`talk` a Talk. It runs in this process, whose memory and descriptors are closed to the program.
It says that the program is wrong by `talk.wrong(why)`; an error of its own is the task's fault.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

MAX_LINE_BYTES, MAX_TALK_BYTES = 1 << 20, 16 << 20
MAX_SHOWN = 200
END_S = 1.0
"""For a program to end after the talk."""
PR_SET_DUMPABLE = 4


class Wrong(BaseException):
    """The program has failed the case. No Exception, so that no interactor swallows it."""


class Late(BaseException):
    """Time is up while the interactor computes."""


class Talk:
    """The interactor's side of the pipes."""

    def __init__(self, process: subprocess.Popen[bytes], until: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._to, False)
        self._until, self._left, self._num_bytes = until, b"", 0

    def say(self, *values: Any) -> None:
        """One line to the program."""
        data = (" ".join(map(str, values)) + "\n").encode()
        while data:
            self._wait([], [self._to])
            try:
                data = data[os.write(self._to, data) :]
            except BrokenPipeError:
                raise Wrong("stopped to listen") from None
            except BlockingIOError:
                continue

    def hear(self) -> str:
        """One line of the program, without its end."""
        while b"\n" not in self._left:
            if len(self._left) > MAX_LINE_BYTES or self._num_bytes > MAX_TALK_BYTES:
                raise Wrong("said too much")
            self._wait([self._from], [])
            data = os.read(self._from, 1 << 16)
            self._num_bytes += len(data)
            if not data:
                raise Wrong("ended before its time")
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        return line.decode("utf-8", "replace").rstrip("\r")

    def hear_int(self, low: int, high: int) -> int:
        """One line that is a whole number, `low` to `high`."""
        text = self.hear().strip()
        if not re.fullmatch("-?[0-9]{1,40}", text):
            raise Wrong(f"said {text[:MAX_SHOWN]!r} where a number belongs")
        if not low <= int(text) <= high:
            raise Wrong(f"said {text}, which is not from {low} to {high}")
        return int(text)

    def wrong(self, why: str) -> None:
        """The program has failed; does not return."""
        raise Wrong(why)

    def _wait(self, reads: list[int], writes: list[int]) -> None:
        left_s = self._until - time.monotonic()
        if left_s <= 0 or not any(select.select(reads, writes, [], left_s)):
            raise Wrong("took too long")


def hide() -> None:
    """Close this process's memory and descriptors to others of the same uid (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


class Alarm:
    """The end of a case's time; a program may send the signal earlier."""

    def __init__(self) -> None:
        self._at = 0.0
        signal.signal(signal.SIGALRM, self._ring)

    def set(self, limit_s: float) -> None:
        """0: never."""
        self._at = time.monotonic() + limit_s if limit_s else float("inf")
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    def _ring(self, *_: Any) -> None:
        if time.monotonic() >= self._at:
            raise Late


def try_case(interact: Any, case: Any, limit_s: float, alarm: Alarm) -> str:
    """Why a case fails; empty when it passes. Raises what the interactor does."""
    process = start()
    try:
        alarm.set(limit_s + END_S)
        interact(case, Talk(process, time.monotonic() + limit_s))
        alarm.set(0)
        process.communicate(timeout=END_S)
        return f"ended with exit status {process.returncode}" if process.returncode else ""
    except Wrong as wrong:
        return str(wrong)
    except subprocess.TimeoutExpired:
        return "did not end after the talk"
    finally:
        alarm.set(0)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def start() -> subprocess.Popen[bytes]:
    """The program, in a session of its own, with pipes for the talk."""
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "solution.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def talks(job: dict[str, Any], interact: Any) -> int:
    """How many cases pass."""
    passed, alarm = 0, Alarm()
    until = time.monotonic() + job["total_s"]
    for number, case in enumerate(job["cases"]):
        left_s = until - time.monotonic()
        problem = "no time was left" if left_s <= 0 else ""
        problem = problem or try_case(interact, case["input"], min(job["case_s"], left_s), alarm)
        if not problem:
            passed += 1
        elif passed + 3 > number:
            print(f"case {number}: {problem}", flush=True)
        if problem and (job["stop_early"] or left_s <= 0):
            break
    return passed


def main() -> int:
    """Run the cases, say what came out."""
    hide()
    job = json.loads(sys.stdin.read())
    nonce = job["nonce"]
    with open("solution.py", "w") as file:
        file.write(job["program"])
    print(nonce + " start", flush=True)
    scope: dict[str, Any] = {"__name__": "interactor"}
    try:
        exec(compile(job["interactor"], "interactor.py", "exec"), scope)
        passed = talks(job, scope["interact"])
    except (Exception, Late):  # noqa: BLE001
        traceback.print_exc(limit=-3, file=sys.stdout)
        print(f"\n{nonce} error", flush=True)
        return 2
    print(f"\n{nonce} {passed} {len(job['cases'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
