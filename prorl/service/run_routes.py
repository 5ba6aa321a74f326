"""Routes of runs: made, given groups and weights, looked at, cancelled.

Every answer that promises something is sent after the log has it on disk.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl.config import NAME, RunConfig
from prorl.errors import UserError
from prorl.service import views
from prorl.service.answers import reply
from prorl.service.bodies import GroupsBody
from prorl.service.candidates import CheckTask
from prorl.service.gateway import Gateway
from prorl.service.state import GroupRecord, RunRecord
from prorl.service.submissions import accept, create
from prorl.tokens import TokenGrant
from prorl.types import Json
from prorl.validation import explain


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


def run_routes(app: FastAPI, gateway: Gateway, check: CheckTask) -> None:
    """Add them to the app; `check` is asked of each task before it is accepted."""
    _submissions(app, gateway, check)
    _lookups(app, gateway)
    _weights(app, gateway)
    _cancels(app, gateway)


def _run(gateway: Gateway, run_id: str) -> RunRecord:
    if not NAME.fullmatch(run_id):
        raise UserError(f"run {run_id[:200]!r}", "letters, digits, `_`, `.`, `-`")
    return gateway.core.run(run_id)


def _submissions(app: FastAPI, gateway: Gateway, check: CheckTask) -> None:
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


def _lookups(app: FastAPI, gateway: Gateway) -> None:
    core = gateway.core

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


def _parse(model: type[GroupsBody], body: bytes) -> GroupsBody:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise UserError(error.errors()[0]["msg"], "a JSON body") from None
        raise explain(error, model, "body") from None


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Documents a body that the route parses itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
