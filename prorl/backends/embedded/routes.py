"""How a weight publisher speaks to the embedded backend: as to vLLM, and one route for weights.

    POST /pause?mode=abort|wait|keep    POST /resume    GET /weight_info
    POST /update_weights {"path": "/dir", "version": 7, "label": "what replies call them"}
    POST /update_weight_version {"new_version": "what replies call them from now on"}

Invariants: weights are taken over whole or not at all (400 says why, the old ones go on serving);
the reply comes after they serve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import orjson
from aiohttp import web

from prorl.backends.embedded.backend import PauseMode
from prorl.errors import ConfigError

if TYPE_CHECKING:
    from prorl.backends.embedded.backend import EmbeddedBackend
    from prorl.types import Json


def control_routes(backend: EmbeddedBackend) -> list[web.RouteDef]:
    routes = _Routes(backend)
    return [
        web.post("/pause", routes.pause),
        web.post("/resume", routes.resume),
        web.get("/weight_info", routes.weight_info),
        web.post("/update_weights", routes.update_weights),
        web.post("/update_weight_version", routes.rename),
    ]


class _Routes:
    def __init__(self, backend: EmbeddedBackend) -> None:
        self._backend = backend

    async def pause(self, request: web.Request) -> web.Response:
        asked = request.query.get("mode", "abort")
        if asked == "wait":
            await self._backend.drain()
            return web.json_response({"status": "paused"})
        for mode in get_args(PauseMode):
            if mode == asked:
                self._backend.pause(mode)
                return web.json_response({"status": "paused"})
        return _refuse(f"mode {asked!r}; {', '.join(get_args(PauseMode))} or wait is expected")

    async def resume(self, request: web.Request) -> web.Response:
        self._backend.resume()
        return web.json_response({"status": "resumed"})

    async def weight_info(self, request: web.Request) -> web.Response:
        backend = self._backend
        return web.json_response({"weight_version": backend.label(backend.version)})

    async def update_weights(self, request: web.Request) -> web.Response:
        try:
            body: Json = orjson.loads(await request.read())
            path, version, label = body["path"], body["version"], body.get("label", "")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return _refuse('{"path": "/dir", "version": 7} is expected')
        if not (isinstance(path, str) and isinstance(label, str)) or not _is_version(version):
            return _refuse(
                f"path {path!r}, version {version!r}; a directory and an integer >= 0 are expected"
            )
        try:
            self._backend.update_weights(path, version, label)
        except ConfigError as error:
            return _refuse(str(error))
        return web.json_response({"weight_version": self._backend.label(version)})

    async def rename(self, request: web.Request) -> web.Response:
        try:
            label = orjson.loads(await request.read())["new_version"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            label = None
        if not isinstance(label, str) or not label:
            return _refuse('{"new_version": "label"} is expected')
        self._backend.rename(label)
        return web.json_response({"success": True})


def _is_version(version: Json) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and version >= 0


def _refuse(message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "BadRequestError", "code": 400}}, status=400
    )
