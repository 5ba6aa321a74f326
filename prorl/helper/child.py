"""The helper's side: answers questions on a socket, one after the other, until the parent is gone.

def prepare() -> Answer:
    import slow_package
    return lambda question: slow(question)

if __name__ == "__main__":
    serve(prepare)
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from prorl.errors import NotFoundError, ProrlError, RolloutError, StorageError, UserError
from prorl.linux.calls import die_with_parent
from prorl.linux.spared import spare_ancestors

Answer = Callable[[Any], Any]
CROSSES = (UserError, NotFoundError, StorageError, RolloutError)
"""The errors that are raised as themselves where the question was asked; users' code may raise
others, as that a process is fenced, which are words there.
"""
"""A role's answer to a question: plain data, dataclasses and bytes come back."""

LENGTH = struct.Struct("<Q")

MAX_WORDS = 2000


class HelperChannel:
    """Frames over the socket: pickles come, msgpack goes, each with its question's number.

    Threads may call back side by side: a reply bears its call's number, and whichever thread waits
    first reads for all.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._state = threading.Condition()  # protects what is sent, and the fields below
        self.number = 0
        """The number of the question that is being answered."""
        self._num_calls = self._num_open = 0
        self._replies: dict[int, tuple[str, Any]] = {}
        """Replies that their callers have not taken yet: one an open call at most."""
        self._is_read = False
        """True while some caller reads replies."""

    def receive(self) -> Any:
        """The next question; ends the process when the parent is gone."""
        try:
            (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
            return pickle.loads(self._exactly(length))
        except (EOFError, OSError):
            os._exit(0)

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            if not (got := self._socket.recv_into(view)):
                raise EOFError
            view = view[got:]
        return data

    def _send(self, kind: str, value: Any) -> None:
        data = _encode((self.number, kind, value))
        self._socket.sendall(LENGTH.pack(len(data)) + data)

    def finish(self, kind: str, value: Any) -> None:
        """The question is answered; nothing of it may call back from here on. Waits for calls that
        are open.
        """
        with self._state:
            self._state.wait_for(lambda: not self._num_open)
            try:
                self._send(kind, value)
            except OSError:  # the parent is gone, or this is a process that an answer forked
                os._exit(0)
            self.number += 1

    def call_back(self, number: int, *op: Any) -> tuple[str, Any]:
        """Returns what came of asking the parent, for the question of that number. Blocks."""
        with self._state:
            if number != self.number:
                raise RuntimeError("the call that this belongs to is over")
            self._num_calls += 1
            call = self._num_calls
            self._send("op", (call, *op))
            self._num_open += 1
            try:
                return self._reply(call)
            finally:
                self._num_open -= 1
                self._state.notify_all()

    def _reply(self, call: int) -> tuple[str, Any]:
        """The reply to a call, read here or by another that waits."""
        while call not in self._replies:
            if self._is_read:
                self._state.wait()
                continue
            self._is_read = True
            self._state.release()
            try:
                number, reply = self.receive()
            finally:
                self._state.acquire()
                self._is_read = False
            self._replies[number] = reply
            self._state.notify_all()
        return self._replies.pop(call)

    def close(self) -> None:
        self._socket.close()


def serve(prepare: Callable[..., Answer], *, with_channel: bool = False) -> NoReturn:
    """Prepare with the program's arguments (imports), then answer until the parent is gone.

    `with_channel`: `prepare` takes the channel first, for calls back.
    """
    args = _arguments()
    die_with_parent(signal.SIGKILL, args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spare_ancestors()
    os.nice(args.nice)
    _raise_oom_score()
    os.dup2(2, 1)  # what users' code prints is no answer
    channel = HelperChannel(socket.socket(fileno=args.channel))
    os.register_at_fork(after_in_child=lambda: _forked(channel))
    faulthandler.enable(args.faults, all_threads=False)
    faulthandler.register(signal.SIGUSR1, args.faults, all_threads=False)
    try:
        arguments = (channel, *args.arguments) if with_channel else args.arguments
        answer = prepare(*arguments)
    except BaseException as error:  # noqa: BLE001  whatever users' code raises is an answer
        channel.finish(*_raised(error))
        os._exit(1)
    _bound_memory(args.memory_bytes)
    channel.finish("ready", None)
    while True:
        question = channel.receive()
        try:
            kind, value = "value", answer(question)
            _encode(value)
        except BaseException as error:  # noqa: BLE001  whatever users' code raises is an answer
            kind, value = _raised(error)
        channel.finish(kind, value)


def _encode(value: Any) -> bytes:
    """Plain data; half a surrogate pair, which UTF-8 does not know, becomes a question mark, and an
    integer beyond 64 bits, which msgpack does not know, an extension of it (`read_extension`).
    """
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return msgspec.msgpack.encode(_plain(msgspec.to_builtins(value, builtin_types=(bytes,))))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_BIG_INTEGER, str(value).encode())
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_BIG_INTEGER = 1


def read_extension(code: int, data: memoryview) -> int:
    """Returns what an extension of msgpack holds. Raises ValueError."""
    if code != _BIG_INTEGER:
        raise ValueError(f"extension {code}")
    return int(bytes(data))


def _raised(error: BaseException) -> tuple[str, Any]:
    """An error that `CROSSES` is raised where it was asked for; of others their words."""
    if isinstance(error, CROSSES) and type(error).__module__ == ProrlError.__module__:
        arguments = [
            argument if isinstance(argument, int) else str(argument) for argument in error.args
        ]
        return "error", (type(error).__name__, arguments)
    return "raised", trouble(error)


def trouble(error: BaseException) -> dict[str, Any]:
    """Returns what an exception says, and the line that it came from: the last that is a user's, if
    any.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a user's own exception class, whose __str__ is broken
        text = "(it cannot say why)"
    words = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return {
        "words": words.encode("utf-8", "replace").decode()[:MAX_WORDS],
        "place": place_of(error) or _lines(error.__traceback__, lambda file: True),
        "trace": trace_of(error),
    }


def trace_of(error: BaseException) -> str:
    """Returns the end of an exception's traceback as Python prints it, from the first frame of
    users' code on, without the lines that underline.
    """
    report = traceback.TracebackException.from_exception(error)
    cause: traceback.TracebackException | None = report
    while cause is not None:
        users = (place for place, at in enumerate(cause.stack) if not is_common(at.filename))
        del cause.stack[: next(users, 0)]
        cause = cause.__cause__ or cause.__context__
    lines = "".join(report.format()).strip().splitlines()
    text = "\n".join(line for line in lines if line.strip(" ~^") or not line)
    return text.encode("utf-8", "replace").decode()[-MAX_WORDS:]


def place_of(error: BaseException, is_users: Callable[[str], bool] | None = None) -> str:
    """`file:line in function` of users' last line, in the first cause that has one; else empty."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    counts = is_users or (lambda file: not is_common(file))
    lines = (_lines(cause.__traceback__, counts) for cause in reversed(chain))
    return next(filter(None, lines), "")


def _lines(trace: TracebackType | None, counts: Callable[[str], bool]) -> str:
    for line in reversed(traceback.extract_tb(trace)):
        if counts(line.filename):
            return f"{line.filename}:{line.lineno} in {line.name}"
    return ""


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON = (os.path.dirname(os.__file__) + os.sep, "<frozen ")


def is_common(file: str) -> bool:
    """Returns whether a file is this package's or the standard library's."""
    if "site-packages" in file and not file.startswith(_OURS):
        return False
    return file.startswith((_OURS, *_PYTHON))


def _forked(channel: HelperChannel) -> None:
    die_with_parent(signal.SIGKILL)
    channel.close()


def _raise_oom_score() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")
    except OSError:
        pass  # no /proc of ours to write: the kernel chooses by size


def _bound_memory(more_bytes: int) -> None:
    """Bounds this process's own memory from here on; 0 = no bound."""
    if more_bytes:
        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (data + more_bytes,) * 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--channel", "--faults", "--parent", "--nice", "--memory-bytes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("arguments", nargs="*")
    return parser.parse_args(sys.argv[1:])
