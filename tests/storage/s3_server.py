"""An S3 server on this host, moto over HTTP, that fails as real ones do when it is told to."""

from __future__ import annotations

import io
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUSY, CONFLICT, LOST = "503 Slow Down", "409 Conflict", "500 Internal Server Error"
"""What a put may be answered; `LOST` comes after the put has been carried out."""

CUT = "cut"
"""The connection ends without an answer, and a put has been carried out: the next try hears 412."""

SILENT = "silence"
"""The same, but that the connection stays, and nothing comes on it."""

BURST = 3
"""So many requests fail in a row, at most, when there is a storm."""

_CODES = {BUSY: "SlowDown", CONFLICT: "ConditionalRequestConflict", LOST: "InternalError"}

Start = Callable[..., Any]


class Strike(NamedTuple):
    """Something that is done when a put comes, once; the put's sender hears nothing."""

    do: Callable[[], None]
    path: str
    """Part of the put's path."""
    at: int = 1
    """At so many such puts from now on."""
    carried_out: bool = False
    """Whether the server keeps what the put brought."""


class FaultyS3:
    """A WSGI application: moto behind a list of faults for the next puts."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.faults: list[str] = []
        self.strike: Strike | None = None
        self.puts = 0
        self.storm = 0.0
        """Share of all requests, of any method, at which a burst of faults begins."""
        self.refusals = [BUSY, CUT]
        """What a storm does to requests that change nothing."""
        self._chance = random.Random(0)
        self._burst = 0
        self.struck: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            self.puts += 1
            if not _has_whole_body(environ):
                return _cut(environ)
            if (strike := self._due(environ["PATH_INFO"])) is not None:
                if strike.carried_out:
                    list(self._moto(environ, lambda *_: None))
                else:
                    _read_body(environ)
                strike.do()
                return _cut(environ)
            if self.faults:
                return self._fail(self.faults.pop(0), environ, start)
        if self._strikes():
            change = environ["REQUEST_METHOD"] in ("PUT", "DELETE", "POST")
            fault = self._chance.choice([BUSY, CONFLICT, LOST, CUT] if change else self.refusals)
            self.struck[f"{environ['REQUEST_METHOD']} {fault}"] += 1
            return self._fail(fault, environ, start)
        answer: Iterable[bytes] = self._moto(environ, start)
        return answer

    def _due(self, path: str) -> Strike | None:
        strike = self.strike
        if strike is None or strike.path not in path:
            return None
        self.strike = strike._replace(at=strike.at - 1) if strike.at > 1 else None
        return strike if strike.at == 1 else None

    def _strikes(self) -> bool:
        """Several threads ask; to which of them it happens does not matter."""
        if not self._burst and self._chance.random() < self.storm:
            self._burst = self._chance.randint(1, BURST)
        self._burst -= struck if (struck := self._burst > 0) else 0
        return struck

    def _fail(self, fault: str, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if fault in (LOST, CUT, SILENT):
            list(self._moto(environ, lambda *_: None))
        else:
            _read_body(environ)
        if fault == SILENT:
            raise ConnectionAbortedError("the server takes it that the other end has gone")
        if fault == CUT:
            return _cut(environ)
        body = f"<Error><Code>{_CODES[fault]}</Code><Message>no</Message></Error>".encode()
        start(fault, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]  # HTTP: HEAD has no body


def _has_whole_body(environ: dict[str, Any]) -> bool:
    """Reads the body at once, and returns whether its sender has sent all of it: moto stores the
    half of one, where S3 answers IncompleteBody.
    """
    num_bytes = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(num_bytes)
    environ["wsgi.input"] = io.BytesIO(body)
    return len(body) == num_bytes


def _read_body(environ: dict[str, Any]) -> None:
    """Reads the rest of a body, which would be taken for the connection's next request."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))


def _cut(environ: dict[str, Any]) -> Iterable[bytes]:
    """End the connection, as a network does."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


@contextmanager
def s3_server() -> Iterator[tuple[str, FaultyS3]]:
    """(endpoint, its faults)."""
    application = FaultyS3()
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", application
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
