"""Brings new weights to a model server: pause, update, resume, in the server's own dialect.

| dialect | server | update |
|---|---|---|
| `PRORL` | the embedded backend | `POST /update_weights {"path", "version"}` |
| `VLLM_TRANSFER` | vLLM with weight transfer by disk | `/{start,finish}_weight_update` around it |
| `VLLM_RELOAD` | any vLLM in developer mode | `/collective_rpc`, `/update_weight_version` |
| `VLLM_ADAPTER` | vLLM with LoRA, for a directory that holds an adapter | `/v1/load_lora_adapter` |
| `sglang.WEIGHTS` | SGLang | `/update_weights_from_disk` |

`VLLM_RELOAD` is wrong for tied embeddings. An adapter takes the place of the one that the service's
`model` names.

Invariants: a dialect is that of the URL's scheme, or found by asking the server, once; every call
is answered before the next is sent; whatever goes wrong is a BackendError. Not promised: that a
server which failed in the middle still serves what it served before: ask `version`. Protocol as
measured with vLLM 0.27 - 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import orjson

from prorl.backends.catalogue import CATALOGUE, address, imported, is_adapter, scheme_of
from prorl.errors import BackendError, boundary
from prorl.types import BackendFault, FailureCode, Json
from prorl.waits import wait_limit_s

CALL_S = wait_limit_s("weights.load")
ASK_S = wait_limit_s("weights.ask")
CONNECT_S = wait_limit_s("weights.connect")


class WeightCall(NamedTuple):
    """One POST that changes a server's weights."""

    path: str
    body: Json = None


_RESUME = WeightCall("/resume")


def _rename(label: str) -> WeightCall:
    return WeightCall("/update_weight_version", {"new_version": label})


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDialect:
    """Holds what a kind of server wants to hear."""

    name: str
    update: Callable[[str, int, str, str], tuple[WeightCall, ...]]
    """(path, version, label, model) -> the calls between pause and resume."""
    states_labels: bool = False
    """Each reply says which weights sampled it; else RUN asks after the call."""
    takes_adapters: bool = True
    pause: Callable[[str], WeightCall] = lambda mode: WeightCall(f"/pause?mode={mode}")
    """Raises BackendError for a mode that the server does not know."""
    resume: WeightCall = _RESUME
    label_path: str = "/weight_info"
    rename: Callable[[str], WeightCall] = _rename


# A load that fails in the middle must not leave new weights under the old label.
LOADING = "loading"
_NEITHER = _rename(LOADING)

PRORL = WeightDialect(
    name="prorl",
    update=lambda path, version, label, model: (
        WeightCall("/update_weights", {"path": path, "version": version, "label": label}),
    ),
    states_labels=True,
    takes_adapters=False,
)
VLLM_TRANSFER = WeightDialect(
    name="vllm-transfer",
    update=lambda path, version, label, model: (
        _NEITHER,
        WeightCall("/start_weight_update"),
        WeightCall("/update_weights", {"update_info": {"path": path}}),
        WeightCall("/finish_weight_update", {"weight_version": label}),
    ),
)
VLLM_RELOAD = WeightDialect(
    name="vllm-reload",
    update=lambda path, version, label, model: (
        _NEITHER,
        WeightCall(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
        ),
        _rename(label),
    ),
)
VLLM_ADAPTER = WeightDialect(
    name="vllm-adapter",
    update=lambda path, version, label, model: (
        _NEITHER,
        WeightCall(
            "/v1/load_lora_adapter",
            {"lora_name": model, "lora_path": path, "load_inplace": True},
        ),
        _rename(label),
    ),
)


def dialect_of(url: str) -> WeightDialect | None:
    """Returns how a model server gets weights, where its URL says it; None: ask the server."""
    scheme = scheme_of(url)
    if not (place := CATALOGUE[scheme].weights):
        return None
    dialect: WeightDialect = imported(place)
    return dialect


class WeightTarget:
    """One model server; the session is the caller's, `model` the name that rollouts ask for."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key: str = "", model: str = ""
    ) -> None:
        self.url, self._model = address(url), model
        self._session = session
        # After an error vLLM closes a connection that it has just said to keep, and the next call
        # would be lost with it.
        self._headers = {"Connection": "close"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._own = dialect_of(url)
        self._dialect = self._own

    async def pause(self, mode: str = "abort") -> None:
        """Stop sampling; what comes waits. Raises BackendError.

        What runs is answered with its tokens so far (`abort`), ends first (`wait`), or goes on
        after `resume` (`keep`).
        """
        call = self._words.pause(mode)
        await self._call("POST", call.path, call.body)

    async def resume(self) -> None:
        """Let the server sample again. Raises BackendError."""
        await self._call("POST", self._words.resume.path, self._words.resume.body, ASK_S)

    async def update(self, path: str, version: int, label: str) -> None:
        """Load the weights of a directory while it is paused. Raises BackendError."""
        dialect = await self.dialect()
        if is_adapter(path):
            if not (dialect.takes_adapters and self._model):
                raise BackendError(
                    FailureCode.BACKEND_PROTOCOL,
                    f"{self.url} takes no adapter: start vLLM with --enable-lora --lora-modules"
                    " NAME=DIR, and set the service's `model` to NAME",
                )
            dialect = VLLM_ADAPTER
        for call in dialect.update(path, version, label, self._model):
            await self._call("POST", call.path, call.body)

    async def rename(self, label: str) -> None:
        """Have the server call the weights that it serves something else. Raises BackendError."""
        call = self._words.rename(label)
        await self._call("POST", call.path, call.body, ASK_S)

    async def label(self) -> str:
        """Returns what the server calls the weights that it serves. Raises BackendError."""
        path = self._words.label_path
        reply = await self._call("GET", path, limit_s=ASK_S)
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, self.url + path):
            return str(orjson.loads(reply)["weight_version"])

    @property
    def _words(self) -> WeightDialect:
        return self._dialect or PRORL  # which has vLLM's for all but the update

    async def dialect(self) -> WeightDialect:
        """Ask the server which dialect it speaks. Raises BackendError."""
        if self._dialect is None:
            reply = await self._call("GET", "/version", limit_s=ASK_S)
            with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.url}/version"):
                ours = str(orjson.loads(reply)["version"]).startswith("prorl")
            self._dialect = PRORL if ours else await self._vllm()
        return self._dialect

    async def _vllm(self) -> WeightDialect:
        try:
            await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})
        except BackendError as error:
            if error.code is FailureCode.BACKEND_UNAVAILABLE:
                raise
            return VLLM_RELOAD
        return VLLM_TRANSFER

    async def _call(
        self, method: str, path: str, body: Json = None, limit_s: float = CALL_S
    ) -> bytes:
        data = None if body is None else orjson.dumps(body)
        where = self.url + path
        try:
            async with self._session.request(
                method,
                where,
                data=data,
                headers=self._headers | ({"Content-Type": "application/json"} if data else {}),
                timeout=aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S),
                allow_redirects=False,  # the key is for this address
            ) as response:
                reply = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError, UnicodeError) as cause:
            self._dialect = self._own  # it may come back as another server
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{where}: {type(cause).__name__}: {cause}",
                BackendFault.SILENT if isinstance(cause, TimeoutError) else BackendFault.REFUSED,
            ) from cause
        if response.status != 200:
            text = f"HTTP {response.status}: {reply[:300].decode('utf-8', 'replace')}"
            raise BackendError(FailureCode.BACKEND_PROTOCOL, f"{where}: {text}")
        return reply
