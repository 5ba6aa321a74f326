"""One connection pool to one model server, and what its troubles are called.

Invariants: whatever goes wrong is a BackendError that says whose trouble it is; a request is sent
again, once, only when the server closed the connection before answering a single byte; a cancelled
request closes its connection. Bounded: requests in flight, bytes of a reply, time.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from prorl.errors import BackendError
from prorl.types import BackendFault, FailureCode

MAX_REPLY_BYTES = 64 << 20
_READ_BYTES = 1 << 16
MAX_RETRY_AFTER_S = 300.0
"""Nobody is believed to be busy for longer without a further word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    max_in_flight: int = 1024
    connect_s: float = 10.0
    read_s: float = 300.0
    """Longest silence: until the first token, and between two."""
    request_s: float = 1800.0
    """Longest request in all, against servers that drip bytes."""
    keepalive_s: float = 4.0
    """Under the server's own (vLLM: 5 s), so that it rarely closes a connection that is just being
    reused.
    """
    stream_interval: int = 16
    """Tokens that a streamed reply may collect before it sends them: the most that a server's death
    loses, where the server heeds it (vLLM has a flag of that name). 0 = one reply per call.
    """


class ServerConnections:
    """Holds the connections to the server at `url`; opens with the first call and belongs to its
    event loop.
    """

    def __init__(self, url: str, api_key: str, limits: HttpLimits) -> None:
        self.url, self._api_key, self._limits = url, api_key, limits
        self._slots = asyncio.Semaphore(limits.max_in_flight)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def exchange(
        self, method: str, path: str, body: bytes | None = None, limit_s: float = 0.0
    ) -> bytes:
        """One request and its whole reply. Raises BackendError."""
        async with self.stream(method, path, body, {}, limit_s) as (_, parts):
            return b"".join([part async for part in parts])

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        limit_s: float = 0.0,
    ) -> AsyncGenerator[tuple[str, AsyncIterator[bytes]]]:
        """One request; the reply's content type, and its bytes. Raises BackendError, also later."""
        where = self.url + path
        async with self._slots:
            with _as_backend_error(where):
                async with asyncio.timeout(limit_s or self._limits.request_s):
                    async with await self._send(method, where, body, headers) as response:
                        await _check_status(response, where)
                        _check_plain(response, where)
                        yield response.content_type, _bounded(response, where)

    async def close(self) -> None:
        """Close every connection; idempotent.

        A call that comes later is refused: it would open connections that nobody closes.
        """
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        session = self._open()
        kind = {"Content-Type": "application/json"} if body else {}
        for again in (True, False):
            try:
                return await session.request(
                    method, url, data=body, headers={**headers, **kind}, allow_redirects=False
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # A connection that was kept and that the server closed meanwhile.
                if not again or isinstance(error, aiohttp.ClientConnectorError):
                    raise
        raise AssertionError

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                "the connections to this server were closed",
                BackendFault.REFUSED,
            )
        if self._session is None:
            limits = self._limits
            # No limit in the connector: waiting happens at our own semaphore, outside of every
            # timeout.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.keepalive_s)
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_s, sock_read=limits.read_s
            )
            # Nothing is unpacked: a few bytes may stand for gigabytes.
            headers = {"Accept-Encoding": "identity"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=headers, auto_decompress=False
            )
        return self._session


async def _bounded(response: aiohttp.ClientResponse, where: str) -> AsyncIterator[bytes]:
    total = 0
    async for part in response.content.iter_any():
        total += len(part)
        if total > MAX_REPLY_BYTES:
            raise BackendError(
                FailureCode.BACKEND_PROTOCOL,
                f"{where} sent more than {MAX_REPLY_BYTES} bytes",
                BackendFault.MALFORMED,
            )
        yield part


async def _check_status(response: aiohttp.ClientResponse, where: str) -> None:
    """Raises BackendError for anything but 200."""
    status = response.status
    if status == 200:
        return
    text = (await response.content.read(_READ_BYTES))[:500].decode("utf-8", "replace")
    code, trouble = FailureCode.BACKEND_PROTOCOL, BackendFault.DECLINED
    if status in (408, 429, 503):
        code, trouble = FailureCode.BACKEND_UNAVAILABLE, BackendFault.BUSY
    elif status >= 500:
        code, trouble = FailureCode.BACKEND_UNAVAILABLE, BackendFault.ERROR
    elif status in (401, 403, 404) or status < 400:
        trouble = BackendFault.MALFORMED  # no server of ours, or not with this key or model
    wait_s = retry_after_s(response.headers.get("Retry-After", ""), time.time())
    raise BackendError(code, f"{where}: HTTP {status}: {text}", trouble, wait_s)


def _check_plain(response: aiohttp.ClientResponse, where: str) -> None:
    """Raises BackendError for a packed reply."""
    if (packed := response.headers.get("Content-Encoding", "identity")) != "identity":
        text = f"{where} sent Content-Encoding {packed:.40}; identity was asked for"
        raise BackendError(FailureCode.BACKEND_PROTOCOL, text, BackendFault.MALFORMED)


def retry_after_s(header: str, now: float) -> float:
    """Returns the seconds to wait by a `Retry-After` (RFC 9110: seconds, or a date); 0 for what is
    neither.

    >>> retry_after_s("120", 0.0), retry_after_s("Thu, 01 Jan 1970 00:00:05 GMT", 2.0)
    (120.0, 3.0)
    >>> retry_after_s("soon", 0.0)
    0.0
    """
    if re.fullmatch(r"\s*\d{1,9}(\.\d+)?\s*", header):
        return min(float(header), MAX_RETRY_AFTER_S)
    try:
        wait_s = parsedate_to_datetime(header).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)


def _unavailable(where: str, cause: BaseException, trouble: BackendFault) -> BackendError:
    return BackendError(
        FailureCode.BACKEND_UNAVAILABLE, f"{where}: {type(cause).__name__}: {cause}", trouble
    )


@contextmanager
def _as_backend_error(where: str) -> Iterator[None]:
    """Turns what a connection raises into a BackendError of its trouble."""
    try:
        yield
    except (TimeoutError, aiohttp.ServerTimeoutError) as cause:
        raise _unavailable(where, cause, BackendFault.SILENT) from cause
    except aiohttp.ClientResponseError as cause:
        raise BackendError(
            FailureCode.BACKEND_PROTOCOL, f"{where}: {cause}", BackendFault.MALFORMED
        ) from cause
    # A name that no resolver takes, such as a label of 64 letters, is a UnicodeError.
    except (aiohttp.ClientError, OSError, UnicodeError) as cause:
        raise _unavailable(where, cause, BackendFault.REFUSED) from cause
