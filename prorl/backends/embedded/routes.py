"""The routes by which a weight publisher drives the embedded backend: those of vLLM, and one more
for weights.

    POST /pause?mode=abort|wait|keep    POST /resume    GET /weight_info
    POST /update_weights {"path": "/dir", "version": 7, "label": "what replies call them"}
    POST /update_weight_version {"new_version": "what replies call them from now on"}

Invariants: weights are taken over whole or not at all (400 says why, the old ones go on serving);
the reply comes after they serve.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from aiohttp import web

from prorl.errors import ConfigError

if TYPE_CHECKING:
    from prorl.backends.embedded.backend import EmbeddedBackend

BodyT = TypeVar("BodyT")


class _Update(msgspec.Struct):
    path: str
    version: Annotated[int, msgspec.Meta(ge=0)]
    label: str = ""


class _Rename(msgspec.Struct):
    new_version: Annotated[str, msgspec.Meta(min_length=1)]


class _Pause(msgspec.Struct):
    mode: Literal["abort", "keep", "wait"] = "abort"


def control_routes(backend: EmbeddedBackend) -> list[web.RouteDef]:
    async def pause(request: web.Request) -> web.Response:
        try:
            mode = msgspec.convert(dict(request.query), _Pause).mode
        except msgspec.ValidationError as error:
            raise _refusal(error) from None
        if mode == "wait":
            await backend.drain()
        else:
            backend.pause(mode)
        return web.json_response({"status": "paused"})

    async def resume(request: web.Request) -> web.Response:
        backend.resume()
        return web.json_response({"status": "resumed"})

    async def weight_info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": backend.label(backend.version)})

    async def update_weights(request: web.Request) -> web.Response:
        update = await _body(request, _Update)
        try:
            backend.update_weights(update.path, update.version, update.label)
        except ConfigError as error:
            raise _refusal(error) from None
        return web.json_response({"weight_version": backend.label(backend.version)})

    async def rename(request: web.Request) -> web.Response:
        backend.rename((await _body(request, _Rename)).new_version)
        return web.json_response({"success": True})

    return [
        web.post("/pause", pause),
        web.post("/resume", resume),
        web.get("/weight_info", weight_info),
        web.post("/update_weights", update_weights),
        web.post("/update_weight_version", rename),
    ]


async def _body(request: web.Request, kind: type[BodyT]) -> BodyT:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refusal(error) from None


def _refusal(error: Exception) -> web.HTTPBadRequest:
    body = {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
    return web.HTTPBadRequest(text=json.dumps(body), content_type="application/json")
