"""The shape of answers: JSON, and for whatever is raised an error with its request id."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from prorl.config.validation import describe_input, expected
from prorl.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    NotFoundError,
    ProrlError,
    QueueFullError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    UserError,
)
from prorl.types import Json

MAX_MESSAGE = 1000


class BodyTooLarge(UserError):
    """More bytes than the route takes (HTTP 413)."""


_ERRORS: tuple[tuple[type[ProrlError], int, str, str], ...] = (
    (BodyTooLarge, 413, "too_large", "more bytes than the route takes"),
    (UnauthorizedError, 401, "unauthorized", "no bearer token, or one that does not count"),
    (
        *(ForbiddenError, 403, "forbidden"),
        "the role of the token or of the certificate may not do this, or not to this run",
    ),
    (NotFoundError, 404, "not_found", "no such run, group, rollout, node or backend"),
    (FencedError, 409, "fenced", "the name or key is taken by something else"),
    (ConflictError, 409, "conflict", "the name or key is taken by something else"),
    (UserError, 422, "invalid", "the request is wrong"),
    (
        *(QueueFullError, 429, "queue_full"),
        "more rollouts wait than the service may have",
    ),
    (
        *(UnavailableError, 503, "unavailable"),
        "something that the answer needs is not there now: ask again",
    ),
    (StorageError, 507, "storage", "the store or the log could not make it durable"),
    (ProrlError, 500, "internal", "a bug"),
)
"""Status, code and meaning of each error; the first that fits counts."""


class ErrorBody(BaseModel):
    """Holds what every answer from 400 on says."""

    code: str
    message: str = Field(description="what was given, what was expected, how to mend it")
    request_id: str = Field(description="finds the request in the gateway's log")


ERROR_SCHEMA = ErrorBody.model_json_schema()
_CONTENT = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "content": _CONTENT} for _, status, _, meaning in _ERRORS
}
"""Any route may answer so. FastAPI would build a model for each route and status, which is half of
what the routes cost at a start.
"""


def also(shape: object, **answers: str) -> dict[int | str, dict[str, Any]]:
    """Other answers of its shape that a route gives when all is well: `_202="why"`."""
    return {
        int(status[1:]): {"model": shape, "description": meaning}
        for status, meaning in answers.items()
    }


def reply(content: Json, status: int = 200) -> Response:
    """`content`: JSON values, and models among them."""
    data = orjson.dumps(content, default=lambda model: model.model_dump(mode="json"))
    return Response(data, status, media_type="application/json")


def refusal(error: ProrlError, request_id: str) -> Response:
    status, code = next(
        (status, code) for kind, status, code, _ in _ERRORS if isinstance(error, kind)
    )
    return _error(status, code, str(error), request_id)


def answer_errors(app: FastAPI) -> None:
    @app.exception_handler(ProrlError)
    async def ours(request: Request, error: ProrlError) -> Response:
        return refusal(error, request.scope["prorl.request_id"])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            refused = UserError(first["ctx"]["error"], "a JSON body")
        else:
            where, *place = first["loc"]
            first = {**first, "loc": tuple(place) if where == "body" else first["loc"]}
            refused = UserError(describe_input(first), expected(first))
        return refusal(refused, request.scope["prorl.request_id"])

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # a body that is not even text
            refused = UserError(
                f"{request.method} {request.url.path}: {error.detail}", "a JSON body"
            )
            return refusal(refused, request.scope["prorl.request_id"])
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
        text = f"{request.method} {request.url.path}: {error.detail}"
        answer = _error(error.status_code, code, text, request.scope["prorl.request_id"])
        answer.headers.update(error.headers or {})  # a 405 says which methods there are
        return answer

    @app.exception_handler(Exception)
    async def a_bug(request: Request, error: Exception) -> Response:
        text = "internal error; the gateway's log has it under this request id"
        return _error(500, "internal", text, request.scope["prorl.request_id"])


def _error(status: int, code: str, message: str, request_id: str) -> Response:
    text = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
    answer = reply({"code": code, "message": text, "request_id": request_id}, status)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer
