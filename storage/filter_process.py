"""A user's SQL in a process of its own: bounded in memory by the kernel and in time by SIGKILL.

    parent: FilterProcess(sql)            child: python -m prorl.storage.filter_process
        frame of SQL                  ->      binds it
        frame: rows as an Arrow stream ->     runs it
                                      <-      frame: `=` and an Arrow stream, or `!` and why not

Started when it is first asked, kept as long as its run, ended and started anew when it is late or
has died. Whatever it does, its parent waits `GRACE_S` longer than the SQL may run, holds one answer
of at most `MAX_ANSWER_BYTES`, and believes nothing of it unchecked. A frame is its length (u32) and
that many bytes. One question at a time; not thread-safe.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prorl.errors import ConfigError

if TYPE_CHECKING:
    from prorl.storage.sql import LockedDuckDB

MEMORY_BYTES = 512 << 20
"""Above what the process has before it runs SQL; DuckDB itself is told half of it."""

MAX_ANSWER_BYTES = 64 << 20

START_S = 60.0
"""Until it has bound the SQL: a loaded machine starts Python slowly."""

GRACE_S = 1.0
"""It stops its query itself; one that has not by then is killed."""

_LENGTH = struct.Struct("<I")


class _Late(Exception):
    """The child has not answered in time, or not at all."""


class FilterProcess:
    """One user's SQL. `columns` binds it, `answer` runs it; `close` at the end."""

    def __init__(self, sql: str, timeout_s: float) -> None:
        self._sql, self._timeout_s = sql, timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._columns: Mapping[str, str] = {}
        self.starts = 0

    def columns(self, empty: pa.Table) -> Mapping[str, str]:
        """Names and types that the SQL gives over a table like this one. Raises ConfigError."""
        self._start(empty)
        return self._columns

    def answer(self, rows: pa.Table, limit: int, projection: str) -> pa.Table:
        """The first `limit` rows of what the SQL gives over these. Raises ConfigError."""
        if self._child is None or self._child.poll() is not None:
            self._start(rows.slice(0, 0))
        asked = json.dumps({"limit": limit, "projection": projection}).encode()
        stopped = f"filter was stopped after {self._timeout_s:g} s"
        said = self._ask([asked, _stream(rows)], self._timeout_s + GRACE_S, stopped)
        try:
            with pa.ipc.open_stream(said) as reader:
                found = reader.read_all()
            found.validate(full=True)
        except pa.ArrowException as error:
            raise ConfigError(f"filter: its answer is damaged: {error}", "one SELECT") from None
        return found

    def _start(self, empty: pa.Table) -> None:
        self.close()
        argv = [sys.executable, "-P", "-m", __spec__.name, "--timeout-s", str(self._timeout_s)]
        argv += ["--parent", str(os.getpid())]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.starts += 1
        late = f"filter was not bound after {START_S:g} s"
        self._columns = json.loads(self._ask([self._sql.encode(), _stream(empty)], START_S, late))

    def _ask(self, frames: list[bytes], patience_s: float, late: str) -> bytes:
        """Raises ConfigError with what the child says, or after its end."""
        assert self._child is not None
        deadline = time.monotonic() + patience_s
        try:
            for frame in frames:
                self._write(_LENGTH.pack(len(frame)) + frame, deadline)
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            if length > MAX_ANSWER_BYTES:
                self.close()  # the rest of its answer would be read as the next one
                raise ConfigError(f"filter gave {length:,} bytes", f"at most {MAX_ANSWER_BYTES:,}")
            said = self._read(length, deadline)
        except (_Late, BrokenPipeError):
            raise self._ended(self._child, deadline, late) from None
        if said[:1] == b"!":
            raise ConfigError(*json.loads(said[1:]))
        return said[1:]

    def _ended(self, child: subprocess.Popen[bytes], deadline: float, late: str) -> ConfigError:
        """End a child that does not answer: the error says whether it was late or had died."""
        code = child.poll()
        self.close()
        if code is None or time.monotonic() >= deadline:
            return ConfigError(late, "a query that ends sooner")
        given = f"filter ended its process (it may use {MEMORY_BYTES >> 20} MiB)"
        return ConfigError(given, "a query that needs less")

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        handle = self._child.stdin.fileno()
        os.set_blocking(handle, False)
        view = memoryview(data)
        while view:
            self._wait(handle, select.POLLOUT, deadline)
            view = view[os.write(handle, view[: 1 << 16]) :]

    def _read(self, length: int, deadline: float) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        handle, found = self._child.stdout.fileno(), bytearray()
        while len(found) < length:
            self._wait(handle, select.POLLIN, deadline)
            data = os.read(handle, min(length - len(found), 1 << 20))
            if not data:
                self._child.wait()
                raise _Late
            found += data
        return bytes(found)

    @staticmethod
    def _wait(handle: int, events: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(handle, events)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _Late

    def close(self) -> None:
        """End the process; calling it again does nothing."""
        if self._child is not None:
            child, self._child = self._child, None
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()


def _stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue().to_pybytes())


def _frame() -> bytes:
    head = sys.stdin.buffer.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        os._exit(0)  # the parent is gone, or done with us
    return sys.stdin.buffer.read(_LENGTH.unpack(head)[0])


def _table() -> pa.Table:
    with pa.ipc.open_stream(_frame()) as reader:
        return reader.read_all()


def _say(data: bytes) -> None:
    sys.stdout.buffer.write(_LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def _bound_memory() -> None:
    """All that this process may map from here on: DuckDB's answers lie outside of its own limit."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)


def main() -> None:
    """Bind the SQL, then answer until the parent is gone."""
    from prorl.linux.calls import die_with_parent
    from prorl.storage.sql import LockedDuckDB

    given = _arguments()
    die_with_parent(signal.SIGKILL, given.parent)
    os.nice(5)
    sql, bound = _frame().decode(), False
    database = LockedDuckDB(memory=f"{MEMORY_BYTES >> 21}MiB", error=ConfigError, what="filter")
    _bound_memory()
    while True:
        asked = json.loads(_frame()) if bound else {}
        try:
            database.register("rollouts", _table())
            _say(b"=" + _answer(database, sql, asked, given.timeout_s))
            bound = True
        except ConfigError as error:
            _refuse(error.given, error.expected)
        except MemoryError:
            _refuse("filter: out of memory", "a query that needs less")


def _refuse(given: str, expected: str) -> None:
    _say(b"!" + json.dumps([given, expected]).encode())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prorl.storage.filter_process")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    return parser.parse_args()


def _answer(database: LockedDuckDB, sql: str, asked: dict[str, Any], timeout_s: float) -> bytes:
    """Rows of a query as Arrow; before anything was asked, the types that the SQL binds to."""
    if not asked:
        return json.dumps(dict(database.bind(sql))).encode()
    return _stream(database.query(sql, timeout_s, rows=asked["limit"], columns=asked["projection"]))


if __name__ == "__main__":
    main()
