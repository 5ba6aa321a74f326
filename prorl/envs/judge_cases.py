"""The judge of the `code` env for programs with cases.

It looks at what they print for an input, or what their function gives for arguments. A program for
`python3 -I -c` in a fresh EVAL sandbox.

Standard library, Python 3.8 or newer.

    stdin: one JSON object {"program", "cases": [{"input", "output"}], "function", "case_s",
    "total_s", "stop_early", "nonce"}
    stdout: `NONCE start`, a line about each case that fails, the last line `NONCE PASSED TOTAL`

Each case runs in a process of its own that is given its input and nothing else: what is expected
stays in this process, whose memory and descriptors are closed to it. An output is right when its
lines are equal but for space at their ends, or word by word, numbers with a decimal point within
1e-6. A value is right when it is equal as JSON, tuples being lists.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

MAX_OUTPUT_BYTES = 16 << 20
MAX_SHOWN = 200
TOLERANCE = 1e-6
PR_SET_DUMPABLE = 4

CALLER = """
import json, os, sys
reply, job = int(sys.argv[1]), json.load(sys.stdin)
scope = {"__name__": "solution"}
exec(compile(job["program"], "solution.py", "exec"), scope)
found = scope.get(job["function"])
if found is None and "Solution" in scope:
    found = getattr(scope["Solution"](), job["function"])
if found is None:
    raise NameError("no function " + job["function"])
value = found(*job["arguments"])
with os.fdopen(reply, "w") as out:
    plain = lambda one: sorted(one) if isinstance(one, (set, frozenset)) else str(one)
    json.dump({"value": value}, out, default=plain)
"""
"""Calls the function of a program once."""


def hide() -> None:
    """Close this process's memory and descriptors to others of the same uid (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def run(argv: list[str], given: bytes, limit_s: float, reply: bool) -> tuple[bytes, bytes, str]:
    """(standard output or reply, end of standard error, why it is no good)."""
    read, write = os.pipe()
    stdin = input_file(given)
    process = subprocess.Popen(
        [*argv, str(write)] if reply else argv,
        stdin=stdin,
        stdout=subprocess.DEVNULL if reply else write,
        stderr=subprocess.PIPE,
        pass_fds=(write,) if reply else (),
        start_new_session=True,
    )
    os.close(write)
    os.close(stdin)
    assert process.stderr is not None
    found = {read: bytearray(), process.stderr.fileno(): bytearray()}
    problem, status = collect(process, found, limit_s), end(process)
    os.close(read)
    process.stderr.close()
    out, errors = map(bytes, found.values())
    return out, errors, problem or (f"ended with exit status {status}" if status else "")


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a program and what it has started in its session; its exit status."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.wait()


def input_file(content: bytes) -> int:
    """A file without a name that is read from its beginning; its descriptor."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def collect(process: subprocess.Popen[bytes], found: dict[int, bytearray], limit_s: float) -> str:
    """Read both descriptors, output and errors, until they end; why the output is no good."""
    until = time.monotonic() + limit_s
    output, errors = found
    left = set(found)
    while left:
        wait_s = until - time.monotonic()
        if wait_s <= 0:
            return f"took more than {limit_s:g} s"
        if process.poll() is not None:
            wait_s = min(wait_s, 0.2)
        ready = select.select(list(left), [], [], wait_s)[0]
        if not ready and process.poll() is not None:
            break
        left -= {fd for fd in ready if not read_into(found[fd], fd)}
        if len(found[output]) > MAX_OUTPUT_BYTES:
            return f"printed more than {MAX_OUTPUT_BYTES} bytes"
        del found[errors][:-4096]
    return ""


def read_into(found: bytearray, fd: int) -> bool:
    """Read what is there; False at the end."""
    data = os.read(fd, 1 << 16)
    found += data
    return bool(data)


def same_text(given: str, expected: str) -> bool:
    """Whether a program's output is right."""
    lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (given, expected)]
    if lines[0] == lines[1]:
        return True
    words, wanted = given.split(), expected.split()
    return len(words) == len(wanted) and all(map(same_word, words, wanted))


def same_word(word: str, wanted: str) -> bool:
    """Equal, or numbers in ASCII of which the wanted one has a decimal point or exponent."""
    if word == wanted:
        return True
    if not any(char in wanted for char in ".eE") or not word.isascii() or "_" in word:
        return False
    try:
        return same_number(float(word), float(wanted))
    except ValueError:
        return False


def same_number(value: float, wanted: float) -> bool:
    """Within TOLERANCE, absolute or relative."""
    return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(value: Any, wanted: Any) -> bool:
    """Whether what a function gave is right."""
    if isinstance(wanted, float) and isinstance(value, (int, float)):
        return not isinstance(value, bool) and same_number(value, wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(
            same_value(value[key], wanted[key]) for key in wanted
        )
    return type(value) is type(wanted) and bool(value == wanted)


def try_case(job: dict[str, Any], case: dict[str, Any], limit_s: float) -> str:
    """Why a case fails; empty when it passes."""
    python = [sys.executable, "-I", "-B"]
    if not job["function"]:
        out, errors, problem = run([*python, "solution.py"], case["input"].encode(), limit_s, False)
        if not problem and same_text(out.decode("utf-8", "replace"), case["output"]):
            return ""
    else:
        given = {name: job[name] for name in ("program", "function")}
        given["arguments"] = case["input"]
        argv = [*python, "-c", CALLER]
        out, errors, problem = run(argv, json.dumps(given).encode(), limit_s, True)
        try:
            value = json.loads(out.decode("utf-8", "replace"))["value"] if not problem else None
        except (ValueError, LookupError, TypeError, RecursionError):
            problem = "gave no value that is JSON"
        if not problem and same_value(value, case["output"]):
            return ""
    return failure(out, errors, problem, case["output"])


def failure(out: bytes, errors: bytes, problem: str, expected: Any) -> str:
    """What is said of a case that fails: the problem, or what came out of it."""
    if problem:
        said = errors.decode("utf-8", "replace").strip()[-MAX_SHOWN:]
        return f"{problem}: {said}" if said else problem
    shown = out.decode("utf-8", "replace")[:MAX_SHOWN]
    return f"gave {shown!r}, expected {str(expected)[:MAX_SHOWN]!r}"


def main() -> int:
    """Run the cases, say what came out."""
    hide()
    job = json.loads(sys.stdin.read())
    nonce, passed = job["nonce"], 0
    with open("solution.py", "w") as file:
        file.write(job["program"])
    print(nonce + " start", flush=True)
    until = time.monotonic() + job["total_s"]
    for number, case in enumerate(job["cases"]):
        left_s = until - time.monotonic()
        problem = "no time was left" if left_s <= 0 else ""
        problem = problem or try_case(job, case, min(job["case_s"], left_s))
        if not problem:
            passed += 1
        elif passed + 3 > number:
            print(f"case {number}: {problem}", flush=True)
        if problem and (job["stop_early"] or left_s <= 0):
            break
    print(f"\n{nonce} {passed} {len(job['cases'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
