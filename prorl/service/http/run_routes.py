"""Routes of runs: made, given groups and weights, looked at, cancelled. Every answer that promises
something is sent after the log has it on disk.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Literal, Self

from fastapi import FastAPI, Request, Response
from pydantic import Field, ValidationError, model_validator

from prorl.config import MAX_INT32, NAME, RunConfig, StrictModel
from prorl.config.validation import explain
from prorl.errors import UnavailableError, UserError
from prorl.net.bearer import TokenGrant
from prorl.net.tls import Caller
from prorl.network_policy import ungranted_network
from prorl.service import shapes
from prorl.service.core.candidates import CheckTask, GroupsBody
from prorl.service.core.recover import closed_runs
from prorl.service.core.state import RunRecord
from prorl.service.gateway import Gateway
from prorl.service.http import views
from prorl.service.http.answers import also, reply
from prorl.service.pool.weights import Expected
from prorl.service.submissions import accept, create

_REFS = "#/components/schemas/{model}"


class AnnouncedBody(StrictModel):
    """A server that has a version from its trainer."""

    backend: str = Field(min_length=1, max_length=500)
    label: str = Field(
        default="",
        max_length=500,
        description="what its `/weight_info` states only since it has these weights; may be left"
        " out where `POST /v1/backends/pause` stopped it before they came",
    )


class VersionBody(StrictModel):
    version: int = Field(
        default=0, ge=0, le=MAX_INT32, description="one above the last; 0 = let the gateway say"
    )
    path: str = Field(
        default="",
        max_length=4096,
        description="Hugging Face directory that the backends can read; empty = only an id, for"
        " backends that are scripts",
    )
    announce: list[AnnouncedBody] = Field(
        default=[],
        max_length=1000,
        description="instead of a path: servers that have the weights from the trainer itself",
    )
    pause: Literal["abort", "wait", "keep"] = Field(
        default="abort", description="what becomes of calls that run: cut, ended first, or frozen"
    )
    expected: Expected | None = None
    trained: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 63,
        description="delivered groups that these weights were trained on: the number in the"
        " cursor of their last batch; absent = what the last commit covers",
    )

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        if self.announce and self.path:
            raise ValueError("`announce` beside `path`: either loads weights or not")
        return self


def run_routes(app: FastAPI, gateway: Gateway, check: CheckTask) -> None:
    core = gateway.core
    groups_json = {"schema": GroupsBody.model_json_schema(ref_template=_REFS)}

    def find_run(run_id: str) -> RunRecord:
        if not NAME.fullmatch(run_id):
            raise UserError(f"run {run_id[:200]!r}", "letters, digits, `_`, `.`, `-`")
        if gateway.proofs.find(run_id) is not None:
            raise UnavailableError(f"run {run_id!r} is being proved: `POST /v1/runs` waits for it")
        return core.run(run_id)

    @app.post(
        "/v1/runs",
        status_code=201,
        response_model=views.RunView,
        responses=also(
            views.RunView, _200="it was there", _202="its chat template is being proved: ask again"
        ),
    )
    async def create_run(config: RunConfig, request: Request) -> Response:
        """Make a run from the request's body. 202 with state `proving` while its chat template is
        proved: ask again, which waits. The same body again answers 200 with its present state;
        another body for the same name 409.
        """
        grant: TokenGrant = request.scope["state"]["grant"]
        grant.check_run(config.run_id)
        caller: Caller | None = request.scope["state"].get("caller")
        owner = not grant.role and caller is None
        created = await gateway.proofs.make(
            config, partial(create, gateway, config, new_servers=owner)
        )
        if created is None and (proving := gateway.proofs.find(config.run_id)) is not None:
            return reply(views.run_view(core, proving), 202)
        return reply(views.run_view(core, core.run(config.run_id)), 201 if created else 200)

    @app.post(
        "/v1/runs/{run_id}/groups",
        status_code=202,
        response_model=views.Accepted,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": groups_json}}
        },
        responses=also(views.Accepted, _200="all of it was there"),
    )
    async def submit_groups(run_id: str, request: Request) -> Response:
        """Submit groups. 202 when something new was accepted, 200 when all of it was there. To a
        run with `epochs` they are its dataset: `last` says that it is whole, and the run makes
        groups of it.
        """
        run = find_run(run_id)
        # We parse it ourselves: FastAPI takes 3.5 times as long, on this loop.
        try:
            body = GroupsBody.model_validate_json(await request.body())
        except ValidationError as error:
            if (first := error.errors()[0])["type"] == "json_invalid":
                raise UserError(first["msg"], "a JSON body") from None
            raise explain(error, GroupsBody, "body") from None
        accepted = await accept(gateway, run, body, check)
        if body.last:
            core.runs.end_of_groups(run)
        fresh = bool(run.dataset.new_tasks) or any(created for _, created in accepted)
        await gateway.durable()
        groups = [views.AcceptedGroup.model_validate(group) for group, _ in accepted]
        for view, (_, created) in zip(groups, accepted, strict=True):
            view.created = created
        most = gateway.config.sandbox.network.most
        answer = views.Accepted(
            run_id=run_id,
            groups=groups,
            tasks=run.dataset.num_tasks,
            notes=ungranted_network((group.task for group in body.groups), most),
        )
        return reply(answer, 202 if fresh else 200)

    @app.post("/v1/runs/{run_id}/pause", response_model=views.RunView)
    async def pause_run(run_id: str) -> Response:
        """Start no more groups; those that are started end. Idempotent."""
        return await paused(run_id, True)

    @app.post("/v1/runs/{run_id}/resume", response_model=views.RunView)
    async def resume_run(run_id: str) -> Response:
        """Go on with a paused run. Idempotent."""
        return await paused(run_id, False)

    async def paused(run_id: str, paused: bool) -> Response:
        run = find_run(run_id)
        core.runs.pause(run, paused)
        await gateway.durable()
        return reply(views.run_view(core, run))

    @app.get("/v1/runs", response_model=views.RunList)
    async def list_runs() -> Response:
        """All runs of this root."""
        closed = await asyncio.to_thread(closed_runs, core.log)
        open_runs = list(core.state.open.values())
        open_ids = {run.run_id for run in open_runs}
        runs = core.state.runs
        ended = [runs.get(run.run_id, run) for run in closed if run.run_id not in open_ids]
        listed = (*ended, *open_runs, *gateway.proofs.all())
        return reply(views.RunList(runs=[views.RunSummary.model_validate(run) for run in listed]))

    @app.get("/v1/runs/{run_id}", response_model=views.RunView)
    async def get_run(run_id: str, request: Request) -> Response:
        """A run: its config, counts, rewards, stages, and where its trainer reads."""
        is_far = request.scope["state"].get("caller") is not None
        outside = gateway.config.listener if is_far else None
        run = gateway.proofs.find(run_id) or find_run(run_id)
        return reply(views.run_view(core, run, outside))

    @app.get("/v1/runs/{run_id}/groups/{group_id}", response_model=views.GroupView)
    async def get_group(run_id: str, group_id: int) -> Response:
        """A group with its members."""
        return reply(views.GroupView.model_validate(core.group(find_run(run_id).run_id, group_id)))

    @app.get("/v1/runs/{run_id}/rollouts/{rollout_id}", response_model=views.RolloutView)
    async def get_rollout(run_id: str, rollout_id: int) -> Response:
        """A rollout's fate so far."""
        return reply(
            views.RolloutView.model_validate(core.rollout(find_run(run_id).run_id, rollout_id))
        )

    @app.post(
        "/v1/runs/{run_id}/versions",
        status_code=201,
        response_model=shapes.PublishedVersion,
        responses=also(
            shapes.PublishedVersion,
            _200="it was published",
            _202="backends still load them: say it again",
        ),
    )
    async def publish_version(run_id: str, body: VersionBody) -> Response:
        """Have the run's backends load weights and publish them as a version, one above the last.

        With `announce` nothing is loaded: servers that the trainer gave them are believed when they
        stood paused meanwhile or state the label given; what the others sample keeps its version.
        With `expected` servers are compared with the trainer's own logprobs before they get
        rollouts, paused ones when they resume; without it the answer's `verified` is false.
        The same version and path again answer 200; 202 while backends still load them: say it
        again; a used id or one that is not the next 409, as is an announcement that no server
        bears out; 503 when no backend took them.
        """
        run = find_run(run_id)
        if body.trained is not None:
            core.groups.note_trained(run, body.trained)
        if body.announce:
            labels = {announced.backend: announced.label for announced in body.announce}
            done = await gateway.publisher.announce(run, body.version, labels, body.expected)
        else:
            done = await gateway.publisher.publish(
                run, body.version, body.path, pause=body.pause, expected=body.expected
            )
        published = shapes.PublishedVersion(
            run_id=run_id,
            version=done.version,
            failed=dict(done.failed),
            pending=done.pending,
            verified=body.expected is not None,
        )
        return reply(published, 202 if done.pending else 201 if done.fresh else 200)

    @app.delete("/v1/runs/{run_id}", response_model=views.RunView)
    async def cancel_run(run_id: str) -> Response:
        """Cancel everything of a run that has not ended. Idempotent."""
        if (proving := gateway.proofs.find(run_id)) is not None:
            gateway.proofs.cancel(run_id)
            return reply(views.run_view(core, proving))
        run = find_run(run_id)
        core.cancel_run(run)
        await gateway.durable()
        return reply(views.run_view(core, run))

    @app.delete("/v1/runs/{run_id}/data", response_model=shapes.Deleted)
    async def delete_run(run_id: str) -> Response:
        """Remove an ended run and all that is stored of it: its name is free again. 409 while it is
        open, or its trainer has not committed all that it was given.
        """
        await gateway.delete_run(find_run(run_id))
        return reply(shapes.Deleted(run_id=run_id, deleted=True))

    @app.delete("/v1/runs/{run_id}/groups/{group_id}", response_model=views.GroupView)
    async def cancel_group(run_id: str, group_id: int) -> Response:
        """Cancel a group's members that have not ended. Idempotent."""
        group = core.group(find_run(run_id).run_id, group_id)
        core.cancel_group(group)
        await gateway.durable()
        return reply(views.GroupView.model_validate(group))

    @app.delete("/v1/runs/{run_id}/rollouts/{rollout_id}", response_model=views.RolloutView)
    async def cancel_rollout(run_id: str, rollout_id: int) -> Response:
        """Cancel a rollout; one whose commit is in flight may still complete. Idempotent."""
        record = core.rollout(find_run(run_id).run_id, rollout_id)
        core.cancel_rollout(record)
        await gateway.durable()
        return reply(views.RolloutView.model_validate(record))
