"""`/v1/node` and `/v1/nodes`: what nodes ask of the service, and what operators ask of nodes."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from pydantic import Field

from prorl.config import NAME, StrictModel
from prorl.errors import ForbiddenError, UserError
from prorl.net.tls import MAX_NODE_NAME, Authority, Caller
from prorl.service import shapes
from prorl.service.gateway import Gateway
from prorl.service.http import views
from prorl.service.http.answers import reply


class CertificateBody(StrictModel):
    request: str = Field(max_length=10_000, description="PKCS#10 request in PEM text")


class DrainBody(StrictModel):
    deadline_s: float | None = Field(
        default=None,
        ge=0,
        le=7 * 86400,
        description="after this, what INIT and RUN have in hand goes back; null: it ends first",
    )


def node_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/node", response_model=views.NodeSettings)
    async def get_node_settings() -> Response:
        """The settings that a node on another host shares with the service."""
        return reply(views.NodeSettings.model_validate(gateway.config))

    @app.post("/v1/nodes/{node}/certificate", status_code=201, response_model=shapes.Certificate)
    async def sign_certificate(node: str, body: CertificateBody, request: Request) -> Response:
        """Sign a node's own key: with what comes back it speaks as this node, and as no other.
        Whoever has a certificate of a node already gets one of the same name alone.
        """
        caller: Caller | None = request.scope["state"].get("caller")
        if not NAME.fullmatch(node) or len(node) > MAX_NODE_NAME or node == "local":
            raise UserError(
                f"node {node[:200]!r}",
                f"letters, digits, `_`, `.`, `-`, at most {MAX_NODE_NAME}; not `local`",
            )
        if caller is not None and caller.node not in ("", node):
            raise ForbiddenError(
                f"a certificate of node {node!r} with that of node {caller.node!r}",
                "one's own name",
            )
        authority = Authority.of(gateway.config.tls_dir)
        signed = authority.sign(body.request, node, gateway.config.certificate_days)
        return reply(shapes.Certificate(certificate=signed, authority=authority.certificate), 201)

    @app.post("/v1/nodes/{node}/drain", status_code=202, response_model=shapes.Drained)
    async def drain_node(node: str, body: DrainBody) -> Response:
        """Have a node take nothing new, end or give back what it has, and leave. Charged to no
        rollout. Saying it again is fine, the earlier deadline counts. 404 once it has left.
        """
        drained = gateway.core.workers.drain(node, body.deadline_s)
        gateway.wake()
        in_flight = {record for worker in drained for record in worker.in_flight}
        workers = sorted(worker.name for worker in drained)
        return reply(shapes.Drained(node=node, workers=workers, in_flight=len(in_flight)), 202)
