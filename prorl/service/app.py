"""The HTTP routes, thin over the core.

Every answer that promises something is sent after the log has it on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from prorl.config import NAME, RunConfig
from prorl.errors import ProrlError, UserError
from prorl.service import metrics, views
from prorl.service.accept import CheckTask
from prorl.service.backend_routes import backend_routes
from prorl.service.bodies import GroupsBody
from prorl.service.gateway import Gateway
from prorl.service.http import GuardMiddleware, error_body, status_of
from prorl.service.manifest import code_version
from prorl.service.node_routes import node_routes
from prorl.service.state import GroupRecord, RunRecord
from prorl.service.submissions import accept, create, known_env
from prorl.tokens import TokenGrant, keys_of
from prorl.types import Json
from prorl.validation import expected, explain, given


class VersionBody(BaseModel):
    """Body of `POST /v1/runs/{run}/versions`."""

    model_config = ConfigDict(extra="forbid")
    version: int = Field(default=0, ge=0, description="one above the last; 0 = let the gateway say")
    path: str = Field(
        default="",
        max_length=4096,
        description="Hugging Face directory that the backends can read; empty = only an id",
    )
    pause: Literal["abort", "wait", "keep"] = Field(
        default="abort", description="what becomes of calls that run: cut, ended first, or frozen"
    )


def reply(content: Json, status: int = 200) -> Response:
    """An answer as JSON, encoded by orjson."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def create_app(gateway: Gateway, check: CheckTask | None = None) -> GuardMiddleware:
    """The ASGI app of a gateway, token and limits included."""
    app = FastAPI(
        title="prorl",
        version=code_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    _runs(app, gateway, check or known_env(gateway.config.load_code))
    _weights(app, gateway)
    _cancels(app, gateway)
    _service(app, gateway)
    backend_routes(app, gateway, reply)
    node_routes(app, gateway, reply)
    _errors(app)
    app.openapi = _openapi(app)  # type: ignore[method-assign]
    return GuardMiddleware(app, keys_of(gateway.config))


def _run(gateway: Gateway, run_id: str) -> RunRecord:
    if not NAME.fullmatch(run_id):
        raise UserError(f"run {run_id[:200]!r}", "letters, digits, `_`, `.`, `-`")
    return gateway.core.run(run_id)


def _runs(app: FastAPI, gateway: Gateway, check: CheckTask) -> None:
    core = gateway.core

    @app.post("/v1/runs", status_code=201)
    async def create_run(config: RunConfig, request: Request) -> Response:
        """Make a run from the request's body.

        The same body again answers 200 with its present state; another body for the same name 409.
        """
        grant: TokenGrant = request.scope["state"]["grant"]
        grant.check_run(config.run_id)
        created = await create(gateway, config)
        return reply(views.run_view(core, core.run(config.run_id)), 201 if created else 200)

    @app.post("/v1/runs/{run_id}/groups", status_code=202, openapi_extra=_body(GroupsBody))
    async def submit(run_id: str, request: Request) -> Response:
        """Submit groups. 202 when something new was accepted, 200 when all of it was there."""
        run = _run(gateway, run_id)
        body = _parse(GroupsBody, await request.body())
        accepted = await accept(gateway, run, body, check)
        if body.last:
            core.end_of_groups(run)
        await gateway.durable()
        groups = [_accepted(group, created) for group, created in accepted]
        return reply(
            {"run_id": run_id, "groups": groups},
            202 if any(created for _, created in accepted) else 200,
        )

    @app.get("/v1/runs")
    async def list_runs() -> Response:
        """All runs of this root."""
        return reply({"runs": [views.run_summary(run) for run in core.state.runs.values()]})

    @app.get("/v1/runs/{run_id}")
    async def get_run(run_id: str) -> Response:
        """A run: its config, counts, rewards, stages, and where its trainer reads."""
        return reply(views.run_view(core, _run(gateway, run_id)))

    @app.get("/v1/runs/{run_id}/groups/{group_id}")
    async def get_group(run_id: str, group_id: int) -> Response:
        """A group with its members."""
        return reply(views.group_view(core.group(_run(gateway, run_id).run_id, group_id)))

    @app.get("/v1/runs/{run_id}/rollouts/{rollout_id}")
    async def get_rollout(run_id: str, rollout_id: int) -> Response:
        """A rollout's fate so far."""
        return reply(views.rollout_view(core.rollout(_run(gateway, run_id).run_id, rollout_id)))


def _weights(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/runs/{run_id}/versions", status_code=201)
    async def publish(run_id: str, body: VersionBody) -> Response:
        """Have the run's backends load weights and publish them as a version, one above the last.

        The same version and path again answer 200; 202 while backends still load them: say it
        again; a used id or one that is not the next 409; 503 when no backend took them.
        """
        run = _run(gateway, run_id)
        done = await gateway.publisher.publish(run, body.version, body.path, pause=body.pause)
        status = 202 if done.pending else 201 if done.fresh else 200
        return reply(
            {
                "run_id": run_id,
                "version": done.version,
                "failed": dict(done.failed),
                "pending": done.pending,
            },
            status,
        )


def _accepted(group: GroupRecord, created: bool) -> dict[str, Json]:
    return {
        "group_id": group.group_id,
        "key": group.key,
        "first_rollout_id": group.first_rollout,
        "n": group.n,
        "state": group.state.value,
        "created": created,
    }


def _cancels(app: FastAPI, gateway: Gateway) -> None:
    core = gateway.core

    @app.delete("/v1/runs/{run_id}")
    async def cancel_run(run_id: str) -> Response:
        """Cancel everything of a run that has not ended. Idempotent."""
        run = _run(gateway, run_id)
        core.cancel_run(run)
        await gateway.durable()
        return reply(views.run_view(core, run))

    @app.delete("/v1/runs/{run_id}/groups/{group_id}")
    async def cancel_group(run_id: str, group_id: int) -> Response:
        """Cancel a group's members that have not ended. Idempotent."""
        group = core.group(_run(gateway, run_id).run_id, group_id)
        core.cancel_group(group)
        await gateway.durable()
        return reply(views.group_view(group))

    @app.delete("/v1/runs/{run_id}/rollouts/{rollout_id}")
    async def cancel_rollout(run_id: str, rollout_id: int) -> Response:
        """Cancel a rollout; one whose commit is in flight may still complete. Idempotent."""
        record = core.rollout(_run(gateway, run_id).run_id, rollout_id)
        core.cancel_rollout(record)
        await gateway.durable()
        return reply(views.rollout_view(record))


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


def _parse(model: type[GroupsBody], body: bytes) -> GroupsBody:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise UserError(error.errors()[0]["msg"], "a JSON body") from None
        raise explain(error, model, "body") from None


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ProrlError)
    async def ours(request: Request, error: ProrlError) -> Response:
        status, code = status_of(error)
        return _error(request, status, code, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        text = str(UserError(given(first), expected(first)))
        return _error(request, 422, "invalid", text)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
        return _error(
            request, error.status_code, code, f"{request.method} {request.url.path}: {error.detail}"
        )

    @app.exception_handler(Exception)
    async def ours_to_mend(request: Request, error: Exception) -> Response:
        return _error(
            request,
            500,
            "internal",
            "internal error; the gateway's log has it under this request id",
        )


def _error(request: Request, status: int, code: str, message: str) -> Response:
    body = error_body(code, message, request.scope.get("prorl.request_id", ""))
    return Response(body, status, media_type="application/json")


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Documents a body that the route parses itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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
