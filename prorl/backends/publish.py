"""How a model server is given new weights: pause, update, resume, in the words that the server
understands.

| dialect | server | update |
|---|---|---|
| `PRORL` | the embedded backend | `POST /update_weights {"path", "version"}` |
| `VLLM_TRANSFER` | vLLM with a disk weight-transfer backend | `/start_weight_update`, `/update_weights`, `/finish_weight_update` |
| `VLLM_RELOAD` | any vLLM in developer mode | `/collective_rpc` (wrong for tied embeddings), `/update_weight_version` |

Invariants: a dialect is found by asking the server, once; every call is answered before the next is
sent; whatever goes wrong is a BackendError. Not promised: that a server which failed in the middle
still serves what it served before: ask `version`. Protocol as measured with vLLM 0.27 - 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import orjson

from prorl.errors import BackendError, boundary
from prorl.types import FailureCode, Json

CALL_S = 120.0
"""For one call: a large checkpoint is read from disk in it."""
CONNECT_S = 5.0


class Call(NamedTuple):
    """One POST."""

    path: str
    body: Json = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a kind of server wants to hear."""

    name: str
    update: Callable[[str, int], tuple[Call, ...]]
    """(path, version) -> the calls between pause and resume."""


PRORL = Dialect(
    name="prorl",
    update=lambda path, version: (Call("/update_weights", {"path": path, "version": version}),),
)
VLLM_TRANSFER = Dialect(
    name="vllm-transfer",
    update=lambda path, version: (
        Call("/start_weight_update"),
        Call("/update_weights", {"update_info": {"path": path}}),
        Call("/finish_weight_update", {"weight_version": str(version)}),
    ),
)
VLLM_RELOAD = Dialect(
    name="vllm-reload",
    update=lambda path, version: (
        Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}),
        Call("/update_weight_version", {"new_version": str(version)}),
    ),
)


class WeightTarget:
    """One model server that takes weights. Its session belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._session = session
        # After an error vLLM closes a connection that it has just said to keep, and the next call
        # would be lost with it.
        self._headers = {"Connection": "close"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._dialect: Dialect | None = None

    async def pause(self) -> None:
        """Stop sampling; what runs is answered with its tokens so far, what comes waits.

        Raises BackendError.
        """
        await self._call("POST", "/pause?mode=abort")

    async def resume(self) -> None:
        """Go on. Raises BackendError."""
        await self._call("POST", "/resume")

    async def update(self, path: str, version: int) -> None:
        """Load the weights of a directory that the server can read, while it is paused.

        Raises BackendError.
        """
        dialect = await self.dialect()
        for call in dialect.update(path, version):
            await self._call("POST", call.path, call.body)

    async def version(self) -> int | None:
        """Id of the weights that serve; None when they are not one of ours. Raises BackendError."""
        reply = await self._call("GET", "/weight_info")
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.url}/weight_info"):
            label = str(orjson.loads(reply)["weight_version"])
        return int(label) if label.isdecimal() else None

    async def dialect(self) -> Dialect:
        """Ask the server which dialect it speaks. Raises BackendError."""
        if self._dialect is None:
            reply = await self._call("GET", "/version")
            with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.url}/version"):
                ours = str(orjson.loads(reply)["version"]).startswith("prorl")
            self._dialect = PRORL if ours else await self._vllm()
        return self._dialect

    async def _vllm(self) -> Dialect:
        try:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        except BackendError as error:
            if error.code is FailureCode.BACKEND_UNAVAILABLE:
                raise
            return VLLM_RELOAD
        return VLLM_TRANSFER

    async def _call(self, method: str, path: str, body: Json = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=CALL_S, sock_connect=CONNECT_S)
        data = None if body is None else orjson.dumps(body)
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                reply = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as cause:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{self.url}{path}: {type(cause).__name__}: {cause}",
            ) from cause
        if response.status != 200:
            text = reply[:300].decode("utf-8", "replace")
            raise BackendError(
                FailureCode.BACKEND_PROTOCOL, f"{self.url}{path}: HTTP {response.status}: {text}"
            )
        return reply
