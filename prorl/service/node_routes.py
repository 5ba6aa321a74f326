"""`/v1/node` and `/v1/nodes`: what nodes ask of the service, and what operators ask of nodes."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field

from prorl.service import views
from prorl.service.gateway import Gateway
from prorl.types import Json

Reply = Callable[[Json, int], Response]


class DrainBody(BaseModel):
    """Body of `POST /v1/nodes/{node}/drain`."""

    model_config = ConfigDict(extra="forbid")
    deadline_s: float | None = Field(
        default=None,
        ge=0,
        le=7 * 86400,
        description="after this, what INIT and RUN have in hand goes back; null: it ends first",
    )
    reason: str = Field(default="", max_length=200, description="for the log")


def node_routes(app: FastAPI, gateway: Gateway, reply: Reply) -> None:
    """Add them to the app."""

    @app.get("/v1/node")
    async def node() -> Response:
        """The settings that a node on another host shares with the service."""
        return reply(views.node_settings(gateway.config), 200)

    @app.post("/v1/nodes/{node}/drain", status_code=202)
    async def drain(node: str, body: DrainBody) -> Response:
        """Have a node take nothing new, end or give back what it has, and leave.

        Charged to no rollout. Saying it again is fine, the earlier deadline counts. 404 once it has
        left.
        """
        asked = gateway.core.workers.drain(node, body.deadline_s, body.reason or "an operator")
        gateway.wake()
        held = {record for worker in asked for record in worker.held}
        workers = sorted(worker.name for worker in asked)
        return reply({"node": node, "workers": workers, "held": len(held)}, 202)
