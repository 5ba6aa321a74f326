"""What answers look like: JSON, and for whatever is raised an error with its request id."""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from prorl.errors import ProrlError, UserError
from prorl.service.http import error_body, status_of
from prorl.types import Json
from prorl.validation import expected, given


def reply(content: Json, status: int = 200) -> Response:
    """An answer as JSON, encoded by orjson."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def answer_errors(app: FastAPI) -> None:
    """Have the app answer what its routes raise."""
    app.exception_handler(ProrlError)(_ours)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http)
    app.exception_handler(Exception)(_internal)


async def _ours(request: Request, error: ProrlError) -> Response:
    status, code = status_of(error)
    return _error(request, status, code, str(error))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    text = str(UserError(given(first), expected(first)))
    return _error(request, 422, "invalid", text)


async def _http(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _error(request, error.status_code, code, text)


async def _internal(request: Request, error: Exception) -> Response:
    text = "internal error; the gateway's log has it under this request id"
    return _error(request, 500, "internal", text)


def _error(request: Request, status: int, code: str, message: str) -> Response:
    body = error_body(code, message, request.scope.get("prorl.request_id", ""))
    return Response(body, status, media_type="application/json")
