"""The test runner of the `code` env: a program for `python3 -I -c` in a fresh EVAL sandbox.

Standard library, Python 3.8 or newer.

    stdin: one JSON object {"program", "head", "test", "entry_point", "nonce"} stdout: `NONCE
    start`, a traceback when a test fails, and as the last line `NONCE pass|fail|error`; exit status
    0, 1 or 2

The program runs in a child of its own and never shares an interpreter with the tests: calls and
results cross a socket as plain data. So a program that prints, calls `sys.exit(0)`, rebinds
`check`, returns objects that equal everything, or walks the interpreter's frames meets neither the
tests nor the nonce. It cannot signal the test runner (`fence`). The child is forked before anything
is read, and the parent is not dumpable, so that its memory and descriptors stay closed to it. The
program gets to run after `NONCE start` is out: a runner that dies later was killed by the program,
one that never started is the machine's fault.

Not promised: values that are not plain data (functions, instances, generators) cross as an error,
and a change that a program makes to its arguments is not seen by the test.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any

PASS, FAIL, ERROR = 0, 1, 2
VERDICTS = ("pass", "fail", "error")
MAX_FRAME_BYTES = 32 << 20
PR_SET_DUMPABLE = 4
COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}


class CandidateError(Exception):
    """The program broke its side of the protocol or died."""


class UnsupportedTest(BaseException):
    """A test passes what is not plain data. Not an Exception, so that no test swallows it."""


def hide() -> None:
    """Close this process's memory and descriptors to others of the same uid (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def fence() -> None:
    """Confine signals: from here on they reach this process and its own alone (Landlock, Linux
    6.12).

    The sandbox has one uid, so its runner's would not keep them off. Where the kernel cannot, a
    runner that is stopped or killed is a failure of the program all the same.
    """
    try:
        import ctypes

        call = ctypes.CDLL(None).syscall
        create, restrict, scope_signals = 444, 446, 1 << 1
        rules = struct.pack("QQQ", 0, 0, scope_signals)
        number = call(create, rules, len(rules), 0)
        if number >= 0:
            call(restrict, number, 0)
            os.close(number)
    except (ImportError, OSError, AttributeError):
        pass


def encode(value: Any) -> Any:
    """Plain data as JSON values; of a subclass its plain base alone, none of its methods."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return {"i": hex(int(value))}  # decimal text has a limit of 4300 digits
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, dict):
        return {"d": [[encode(key), encode(item)] for key, item in value.items()]}
    for tag, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {tag: [encode(item) for item in value]}
    raise TypeError(f"a value of type {type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    if tag == "i":
        return int(inner, 16)
    if tag == "f":
        return float.fromhex(inner)
    if tag == "c":
        return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
    if tag == "b":
        return bytes.fromhex(inner)
    if tag == "d":
        return {decode(key): decode(item) for key, item in inner}
    return COLLECTIONS[tag](decode(item) for item in inner)


def send(channel: socket.socket, value: Any) -> None:
    """Send one length-prefixed JSON frame."""
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    channel.sendall(struct.pack("!I", len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """The next frame. Raises EOFError when the other side is gone."""
    (size,) = struct.unpack("!I", _exactly(channel, 4))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return json.loads(_exactly(channel, size).decode("utf-8", "surrogatepass"))


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the program ended")
        data += part
    return data


def serve(channel: socket.socket) -> None:
    """The child: define the program, then answer calls until the parent hangs up.

    Every error is the program's own.
    """
    program, entry_point = receive(channel)
    scope: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(program, "solution.py", "exec"), scope)
        function = scope[entry_point]
    except BaseException as cause:  # noqa: BLE001
        send(channel, _error(cause))
        return
    send(channel, {"value": None})
    while True:
        arguments, named = decode(receive(channel))
        try:
            reply = {"value": encode(function(*arguments, **named))}
        except BaseException as cause:  # noqa: BLE001
            reply = _error(cause)
        send(channel, reply)


def _error(cause: BaseException) -> Any:
    return {
        "error": type(cause).__name__,
        "text": "".join(traceback.format_exception_only(type(cause), cause))[-2000:],
    }


def ask(channel: socket.socket, request: Any) -> Any:
    """The value of the reply to a request, or its error raised."""
    try:
        send(channel, request)
        reply = receive(channel)
        if "error" not in reply:
            return decode(reply["value"])
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as cause:
        raise CandidateError(f"the program gave no usable answer: {cause}") from None
    # Raise what the program raised; a built-in exception as itself: tests may expect it.
    kind = getattr(builtins, str(reply["error"]), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(reply["text"])
        except TypeError:
            error = CandidateError(reply["text"])
        raise error
    raise CandidateError(reply["text"])


def run_check(channel: socket.socket, job: Any) -> int:
    candidate = stand_in(channel)
    try:
        check = check_of(job, candidate)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return ERROR
    try:
        ask(channel, [job["program"], job["entry_point"]])
        check(candidate)
    except UnsupportedTest:
        traceback.print_exc()
        return ERROR
    except BaseException:  # noqa: BLE001
        traceback.print_exc(limit=-3)
        return FAIL
    return PASS


def stand_in(channel: socket.socket) -> Any:
    """A function for the tests that calls the program's."""

    def candidate(*arguments: Any, **named: Any) -> Any:
        try:
            request = encode((arguments, named))
        except TypeError as cause:
            raise UnsupportedTest(str(cause)) from None
        return ask(channel, request)

    return candidate


def check_of(job: Any, candidate: Any) -> Any:
    """The tests' function `check`. Raises what their own code does."""
    scope: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["head"], "head.py", "exec"), scope)
    scope[job["entry_point"]] = candidate
    exec(compile(job["test"], "test.py", "exec"), scope)
    return scope["check"]


def fork_program() -> tuple[int, socket.socket]:
    """The program's process, waiting for its text; (pid, channel to it)."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        ours.close()
        fence()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        serve(theirs)
    finally:
        os._exit(0)


def main() -> int:
    hide()
    pid, channel = fork_program()
    job = json.loads(sys.stdin.read())
    sys.stderr = sys.stdout
    nonce = job["nonce"]
    print(f"{nonce} start", flush=True)
    try:
        verdict = run_check(channel, job)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(f"\n{nonce} {VERDICTS[verdict]}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
