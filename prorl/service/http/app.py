"""The HTTP app of a gateway: its routes, thin over the core, and its OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from prorl.net.access import OPEN
from prorl.net.bearer import keys_of
from prorl.net.join import ends_soon
from prorl.service import shapes
from prorl.service.core.manifest import code_version
from prorl.service.gateway import Gateway
from prorl.service.http import metrics, views
from prorl.service.http.answers import (
    ERROR_SCHEMA,
    RESPONSES,
    ErrorBody,
    answer_errors,
    reply,
)
from prorl.service.http.backend_routes import backend_routes
from prorl.service.http.guard import GuardMiddleware
from prorl.service.http.node_routes import node_routes
from prorl.service.http.run_routes import run_routes
from prorl.service.submissions import check_env_exists


def create_app(gateway: Gateway) -> GuardMiddleware:
    """The ASGI app of a gateway, token and limits included."""
    app = FastAPI(
        title="prorl",
        version=code_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        generate_unique_id_function=lambda route: route.name,  # a generated client's method
        redirect_slashes=False,  # it would name the host that the request named
        responses=RESPONSES,
    )
    run_routes(app, gateway, check_env_exists(gateway.config.load_code))
    backend_routes(app, gateway)
    node_routes(app, gateway)
    core = gateway.core

    @app.get("/v1/status", response_model=views.Status)
    async def get_status() -> Response:
        """Workers, stages, the bottleneck, backends, runs."""
        listener = gateway.config.listener
        soon = await asyncio.to_thread(ends_soon, gateway.config.root) if listener else {}
        warnings = [f"the certificate in {file} ends in {d:.0f} days" for file, d in soon.items()]
        warnings += [f"{n} gets no leases: {why}" for n, why in core.workers.blocked_absent_nodes()]
        if gateway.trouble:
            warnings.insert(0, f"nothing is accepted: {gateway.trouble}")
        now, proving = asyncio.get_running_loop().time(), gateway.proofs.all()
        return reply(views.status(core, gateway.leases.waiting, now, proving, warnings, listener))

    @app.get("/metrics")
    async def get_metrics() -> Response:
        """Everything that a monitor wants, in Prometheus' text format."""
        text = metrics.exposition(core, gateway.leases.waiting, code_version())
        return Response(text, media_type=metrics.CONTENT_TYPE)

    @app.get(OPEN, response_model=shapes.HealthReply)
    async def get_health() -> Response:
        """Answers whether the gateway serves; needs no token."""
        return reply(shapes.HealthReply(ok=True))

    answer_errors(app)
    app.openapi = _openapi(app)  # type: ignore[method-assign]
    return GuardMiddleware(app, keys_of(gateway.config))


def _openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            body = document["paths"]["/v1/runs/{run_id}/groups"]["post"]["requestBody"]["content"][
                "application/json"
            ]["schema"]
            schemas |= body.pop("$defs", {}) | {ErrorBody.__name__: ERROR_SCHEMA}
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"}
            }
            document["security"] = [{"bearer": []}]
            document["paths"][OPEN]["get"]["security"] = []
            app.openapi_schema = document
        return app.openapi_schema

    return build
