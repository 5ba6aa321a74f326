"""The HTTP app of a gateway: its routes, thin over the core, and its OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from prorl.service import metrics, views
from prorl.service.answers import answer_errors, reply
from prorl.service.backend_routes import backend_routes
from prorl.service.candidates import CheckTask
from prorl.service.gateway import Gateway
from prorl.service.http import GuardMiddleware
from prorl.service.manifest import code_version
from prorl.service.node_routes import node_routes
from prorl.service.run_routes import run_routes
from prorl.service.submissions import known_env
from prorl.tokens import keys_of


def create_app(gateway: Gateway, check: CheckTask | None = None) -> GuardMiddleware:
    """The ASGI app of a gateway, token and limits included."""
    app = FastAPI(
        title="prorl",
        version=code_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    run_routes(app, gateway, check or known_env(gateway.config.load_code))
    _service(app, gateway)
    backend_routes(app, gateway, reply)
    node_routes(app, gateway, reply)
    answer_errors(app)
    app.openapi = _openapi(app)  # type: ignore[method-assign]
    return GuardMiddleware(app, keys_of(gateway.config))


def _service(app: FastAPI, gateway: Gateway) -> None:
    core = gateway.core

    @app.get("/v1/status")
    async def status() -> Response:
        """Workers, stages, the bottleneck, backends, runs."""
        return reply(views.status(core, gateway.leases.waiting, gateway.config.listener))

    @app.get("/metrics")
    async def scrape() -> Response:
        """Everything that a monitor wants, in Prometheus' text format."""
        text = metrics.exposition(core, gateway.leases.waiting, code_version())
        return Response(text, media_type=metrics.CONTENT_TYPE)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the gateway serves; needs no token."""
        return reply({"ok": True})


def _openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            body = document["paths"]["/v1/runs/{run_id}/groups"]["post"]["requestBody"]["content"][
                "application/json"
            ]["schema"]
            schemas |= body.pop("$defs", {})
            app.openapi_schema = document
        return app.openapi_schema

    return build
