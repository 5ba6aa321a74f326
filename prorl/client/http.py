"""JSON over HTTP to the gateway, on urllib3.

It is small, synchronous, and safe to call from several threads. Every request of the client is
idempotent by the service's own rules (names, idempotency keys), so a request without an answer is
sent again, with jittered backoff, until `retry_s` is used up; 4xx answers are the caller's mistake
and are never repeated. Where the service is may be asked anew before each try: one that was started
again has another port, and another token if its root was made anew.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import orjson
import stamina
import urllib3
from urllib3.exceptions import HTTPError, ProtocolError, SSLError

from prorl import exact_json
from prorl.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
    UserError,
)
from prorl.net.join import JOIN_HINT
from prorl.net.tls import Credentials
from prorl.types import Json

WAIT_S = 1.0
"""Longest wait between two tries: a gateway is back in seconds, and has few clients."""


class Address(NamedTuple):
    url: str
    """`http://HOST:PORT` or `https://HOST:PORT`."""
    token: str = ""


class RootAddress:
    """A root whose service may be started again, with another port: `address` looks each time."""

    def __init__(self, path: Path, token: str = "") -> None:
        """`token`: instead of the root's own. Raises ConfigError when no service works there."""
        self._path, self._token = path, token
        self._read()

    def address(self) -> Address:
        """Raises UnavailableError while it has none: before its gateway listens, and after."""
        try:
            values = self._read()
        except ConfigError as error:
            raise UnavailableError(str(error)) from None
        if not values["http_port"]:
            raise UnavailableError(
                f"the service of {self._path} does not listen yet: it takes some seconds to start"
            )
        host = str(values["host"])
        url = f"http://{f'[{host}]' if ':' in host else host}:{values['http_port']}"
        return Address(url, self._token or str(values.get("token", "")))

    def _read(self) -> dict[str, object]:
        try:
            return dict(orjson.loads((self._path / "service.json").read_bytes()))
        except FileNotFoundError:
            raise ConfigError(
                f"no service works on {self._path}",
                "http://HOST:PORT, grpc://HOST:PORT, or the root directory of a running service",
                "start one with `prorl serve`",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{self._path}/service.json: {error.strerror}",
                "a file that you can read",
                "pass the token and http:// address",
            ) from None


class Http:
    def __init__(
        self,
        address: str | Callable[[], Address],
        token: str = "",
        *,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
        credentials: Credentials | None = None,
    ) -> None:
        """`address`: a URL, or what says where the service is now (raises UnavailableError)."""
        if isinstance(address, str):
            _check(address, credentials)
        self._locate = address if callable(address) else partial(Address, address, token)
        self._credentials, self._retry_s, self._timeout_s = credentials, retry_s, timeout_s
        self._pool = urllib3.PoolManager(retries=False, maxsize=1, **_tls(credentials))

    @property
    def address(self) -> Address:
        return self._locate()

    @property
    def url(self) -> str:
        return self._locate().url

    def request(
        self,
        method: str,
        *path: str,
        body: Json = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        retry_s: float | None = None,
    ) -> Json:
        """Send one request; `path` parts and `query` are quoted. `timeout_s`: for the answer, where
        it may take longer than usual. `retry_s`: instead of the client's own. Raises
        UnavailableError, ConflictError, NotFoundError, UserError.
        """
        target = "/" + "/".join(quote(part, safe="") for part in path)
        target += f"?{urlencode(query)}" if query else ""
        data = None if body is None else exact_json.dumps(body)
        limit_s = self._retry_s if retry_s is None else retry_s
        for attempt in stamina.retry_context(
            on=UnavailableError, attempts=None, timeout=limit_s, wait_max=WAIT_S
        ):
            with attempt:
                status, answer = self._once(method, target, data, timeout_s)
        if status >= 400:
            self._refuse(status, answer, f"{method} {target}")
        return exact_json.loads(answer) if answer else None

    def _once(
        self, method: str, target: str, data: bytes | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        url, token = self._locate()
        headers = {"content-type": "application/json", "accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        if self._credentials is not None:
            self._credentials.check_valid()
        try:
            response = self._pool.request(
                method,
                url.rstrip("/") + target,
                body=data,
                headers=headers,
                redirect=False,
                timeout=timeout_s or self._timeout_s,
            )
        except (HTTPError, OSError) as error:
            raise UnavailableError(
                f"no service answers at {url} ({_cause(error, url.startswith('https'))});"
                " is `prorl serve` running there? After a kill, start it again"
                " (`prorl run --resume RUN`, if it was a run's own)"
            ) from None
        if response.status >= 500 or response.status == 429:
            raise UnavailableError(
                f"{url}: {method} {target}: HTTP {response.status} {_detail(response.data)}"
            )
        return response.status, response.data

    def _refuse(self, status: int, answer: bytes, resource: str) -> NoReturn:
        detail = _detail(answer) or f"{resource}: HTTP {status}"
        if status == 403:
            raise ForbiddenError(detail)
        if status == 401:
            raise UnauthorizedError(
                f"{self.url} refused the token: {detail}", hint="pass token=, or set PRORL_TOKEN"
            )
        if status == 404:
            raise NotFoundError(detail)
        raise (ConflictError if status == 409 else UserError)(detail)


def _check(url: str, credentials: Credentials | None) -> None:
    """Raise ConfigError for what is no service's address."""
    parts = urlsplit(url)
    is_http = parts.scheme in ("http", "https") and parts.hostname
    if not is_http or parts.path.strip("/") or parts.query:
        raise ConfigError(f"service address {url!r}", "http://HOST:PORT")
    if parts.scheme == "https" and credentials is None:
        raise ConfigError(f"service address {url!r}", "a join file", JOIN_HINT)


def _tls(credentials: Credentials | None) -> dict[str, Any]:
    """The service's certificate is for its role, whatever its address."""
    if credentials is None:
        return {}
    name, context = credentials.peer_name, credentials.client_context()
    return {"ssl_context": context, "server_hostname": name, "assert_hostname": name}


def _cause(error: Exception, secure: bool) -> str:
    """Returns what a refused connection means, in one line."""
    inner = error.args[0] if isinstance(error, SSLError) and error.args else error
    text = str(inner)
    if isinstance(error, SSLError):
        if "has expired" in text:
            return "the service's certificate has expired: check the service's log"
        if "ostname mismatch" in text or "doesn't match" in text:
            return "its certificate is not one of a prorl service"
        if isinstance(inner, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in text:
            return "it is not the service of this join file: another authority"
        if "WRONG_VERSION_NUMBER" in text or "wrong version number" in text:
            return "no TLS is spoken there: is the port right?"
        return f"our certificate was refused ({text})"
    if secure and isinstance(error, ProtocolError):
        return "our certificate was refused, or it is just stopping"
    if reason := re.search(r"\[Errno -?\d+\] ([^)]+)", text):
        return reason[1].lower()
    return f"{type(error).__name__}: {text.rpartition('>: ')[2] or text}"


def _detail(answer: bytes) -> str:
    """Returns what the service says is wrong: `message` of its error body. Where there is none, it
    is the beginning of whatever came.
    """
    try:
        values = exact_json.loads(answer)
    except orjson.JSONDecodeError:
        values = None
    message = values.get("message") if isinstance(values, dict) else None
    return message if isinstance(message, str) else answer[:200].decode(errors="replace")
