"""JSON over HTTP to the gateway, with the standard library.

It is small, synchronous, and safe to call from several threads. Every request of the client is
idempotent by the service's own rules (names, idempotency keys), so a request without an answer is
sent again, with jittered backoff, until `retry_s` is used up; 4xx answers are the caller's mistake
and are never repeated. Each request has its own connection: a trainer makes a few per step, and
nothing is left open when it dies.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import orjson
import stamina

from prorl.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from prorl.tls import JOIN_HINT, Credentials, server_name
from prorl.types import Json

WAIT_S = 1.0
"""Longest wait between two tries: a gateway is back in seconds, and has few clients."""


def _address(url: str) -> SplitResult:
    """The parts of a service's address. Raises ConfigError for what is none."""
    parts = urlsplit(url)
    is_http = parts.scheme in ("http", "https") and parts.hostname
    if not is_http or parts.path.strip("/") or parts.query:
        raise ConfigError(f"service address {url!r}", "http://HOST:PORT")
    return parts


class Http:
    """The gateway at `url`, e.g. `http://127.0.0.1:8000`."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
        credentials: Credentials | None = None,
    ) -> None:
        parts = _address(url)
        self.url = url.rstrip("/")
        if parts.scheme == "https" and credentials is None:
            raise ConfigError(f"service address {url!r}", "a join file", JOIN_HINT)
        self._context = credentials.client_context() if credentials is not None else None
        self._secure, self._host, self._port = (
            parts.scheme == "https",
            parts.hostname or "",
            parts.port,
        )
        self._token, self._timeout_s, self._retry_s = token, timeout_s, retry_s

    def request(
        self, method: str, *path: str, body: Json = None, query: Mapping[str, str] | None = None
    ) -> Json:
        """Send one request; `path` parts and `query` are quoted.

        Raises UnavailableError, ConflictError, NotFoundError, UserError.
        """
        target = "/" + "/".join(quote(part, safe="") for part in path)
        target += f"?{urlencode(query)}" if query else ""
        data = None if body is None else orjson.dumps(body)
        for attempt in stamina.retry_context(
            on=UnavailableError, attempts=None, timeout=self._retry_s, wait_max=WAIT_S
        ):
            with attempt:
                status, answer = self._once(method, target, data)
        if status >= 400:
            self._refuse(status, answer, f"{method} {target}")
        return orjson.loads(answer) if answer else None

    def _once(self, method: str, target: str, data: bytes | None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json", "accept": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        connection = self._connection()
        try:
            connection.request(method, target, data, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"no service answers at {self.url}: {_cause(error, self._secure)};"
                " see whether it runs, and there (`prorl serve`)"
            ) from None
        finally:
            connection.close()
        if response.status >= 500 or response.status == 429:
            raise UnavailableError(
                f"{self.url}: {method} {target}: HTTP {response.status} {_detail(answer)}"
            )
        return response.status, answer

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            assert self._context is not None
            return _Https(self._host, self._port, timeout=self._timeout_s, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _refuse(self, status: int, answer: bytes, what: str) -> NoReturn:
        detail = _detail(answer) or f"{what}: HTTP {status}"
        if status == 403:
            raise ForbiddenError(detail)
        if status == 401:
            raise UserError(
                f"{self.url} refused the token",
                "the token in the service's ROOT/token",
                "pass token=, or set PRORL_TOKEN",
            )
        if status == 404:
            raise NotFoundError(detail)
        raise (ConflictError if status == 409 else UserError)(detail)


class _Https(http.client.HTTPSConnection):
    """The service's certificate is for its role, whatever its address."""

    def connect(self) -> None:
        """Open and check the connection."""
        http.client.HTTPConnection.connect(self)
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]
        self.sock = context.wrap_socket(self.sock, server_hostname=server_name("service"))


def _cause(error: Exception, secure: bool) -> str:
    """What a refused connection means, in one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if "expired" in error.verify_message:
            return "its certificate has expired: `prorl certs renew` makes another join file"
        if "ostname mismatch" in error.verify_message:
            return "its certificate is not one of a prorl service"
        return "it is not the service of this join file: another authority"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "no TLS is spoken there: is the port right?"
    if secure and isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        return "our certificate was refused, or it is just stopping"
    if isinstance(error, ssl.SSLError):
        return f"our certificate was refused ({error.reason})"
    return f"{type(error).__name__}: {error}"


def _detail(answer: bytes) -> str:
    """What the service says is wrong: `message` of its error body.

    Where there is none, it is the beginning of whatever came.
    """
    try:
        values = orjson.loads(answer)
    except orjson.JSONDecodeError:
        values = None
    message = values.get("message") if isinstance(values, dict) else None
    return message if isinstance(message, str) else answer[:200].decode(errors="replace")
