"""`prorl view` as an ASGI app: JSON of stored runs, and the pages that show it.

It serves this host alone. A request must name a host that we listen on and, from a page, come from
our own: a name that some DNS answers with 127.0.0.1 gets nothing. What is said of runs needs the
token, which travels in the fragment of the address and in a header, never in a request line. Pages
may load nothing from elsewhere and run no script of a text. Nothing is written but annotations.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl.analysis.analyses import ANALYSES
from prorl.analysis.annotations import annotate
from prorl.analysis.difference import difference
from prorl.client import connect
from prorl.errors import (
    ForbiddenError,
    NotFoundError,
    ProrlError,
    StorageError,
    UnavailableError,
    UserError,
)
from prorl.storage.files.runs import below, is_run, list_runs
from prorl.types import Json
from prorl.view.opened import LIVE, Opened, Question
from prorl.view.tokens import Pieces, tokens

STATIC = Path(__file__).parent / "static"
OPEN_RUNS = 3
"""Held at a time, the last looked at: each has narrow columns of its rollouts in memory."""

EVENTS_S = 1.0
PAGE_ROWS = 500
SQL_ROWS = 1000
BODY_BYTES = 64 << 10

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none';"
        b" frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Library:
    """The runs below a root, or one of them; the last few that were looked at are open."""

    def __init__(
        self, root: str, only: str = "", tokenizer: str = "", *, service: str = ""
    ) -> None:
        """`service`: root of the service that writes there. Default: `root`."""
        self._root, self._only, self._tokenizer = root, only, tokenizer
        self._service = service or root
        self._open: OrderedDict[str, Opened] = OrderedDict()
        self._pieces: dict[str, Pieces] = {}
        self._lock = threading.Lock()

    @classmethod
    def at(cls, where: str, tokenizer: str = "") -> Library:
        """A run directory, or a root of some. Raises NotFoundError for neither."""
        if is_run(where):
            root, _, name = where.rstrip("/").rpartition("/")
            return cls(root or ".", name, tokenizer)
        if not list_runs(where):
            raise NotFoundError(f"no run in {where}; `prorl demo` makes one")
        return cls(where, "", tokenizer)

    def names(self) -> list[str]:
        """The newest first."""
        return [self._only] if self._only else list(reversed(list_runs(self._root)))

    def open(self, name: str) -> Opened:
        """A run with what is committed by now. Raises NotFoundError, StorageError, SchemaError."""
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                opened = self._open[name]
                opened.refresh()
                return opened
            if name not in self.names():
                raise NotFoundError(f"no run {name[:200]!r} in {self._root}")
            opened = self._open[name] = Opened(below(self._root, name))
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)
            return opened

    def warm(self) -> None:
        """Open the newest run, while the browser that will ask for it starts."""
        with suppress(ProrlError):
            for name in self.names()[:1]:
                self.open(name)

    def service(self) -> Json:
        with connect(self._service, retry_s=0.1) as client:
            return client.status()

    def pieces(self, opened: Opened) -> Pieces:
        """Returns the tokenizer of a run's ids: the one requested, or its manifest's."""
        spec = self._tokenizer or str(opened.stored.manifest.get("tokenizer") or "")
        if spec not in self._pieces:
            self._pieces[spec] = Pieces(spec)
        return self._pieces[spec]


def user_name() -> str:
    """Returns who looks, as notes are signed; the number of a uid without a name (OpenShift gives
    such).
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class RequestGuard:
    """Refuses what does not come from our own page, then what has no token."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, then pass it on; every answer says what pages may do."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        try:
            self._check(Headers(scope=scope), scope["path"], scope["method"])
        except ProrlError as error:
            await _refusal(error)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _check(self, headers: Headers, path: str, method: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            raise ForbiddenError(f"host {host[:200]!r}", "the address that `prorl view` printed")
        if origin is not None and origin.partition("://")[2] != host:
            raise ForbiddenError(f"a request from {origin[:200]!r}", "one from our own page")
        if not path.startswith("/api/"):
            return
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ForbiddenError("a request from another site", "one from our own page")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(bearer.encode(), self._token.encode()):
            raise ForbiddenError(
                "no token, or another one", "the address with #token=... that was printed"
            )


def create_app(library: Library, token: str, hosts: frozenset[str], author: str) -> ASGIApp:
    def runs(_: Request) -> Json:
        return {"runs": library.names()}

    def run(request: Request) -> Json:
        return _of(request).about()

    def spark(request: Request) -> Json:
        return {"rewards": _of(request).spark()}

    def provenance(request: Request) -> Json:
        return _of(request).provenance()

    def figure(request: Request) -> Json:
        name = request.path_params["name"]
        if name not in ANALYSES:
            raise NotFoundError(f"no analysis {name[:100]!r}")
        return _of(request).figure(name)

    def curves_of(request: Request) -> Json:
        return _of(request).curves(request.path_params["axis"])

    def difference_of(request: Request) -> Json:
        a, b = (library.open(request.query_params.get(name, "")) for name in ("a", "b"))
        comparison = difference(a.answer, b.answer)
        tasks = [task._asdict() for task in comparison.tasks[:SQL_ROWS]]
        counts = {
            "shared": len(comparison.tasks),
            "flipped": sum(task.flipped for task in comparison.tasks),
        }
        return comparison._asdict() | {"tasks": tasks} | counts

    def rows(request: Request) -> Json:
        params = request.query_params
        limit = min(_whole(params, "limit", 100), PAGE_ROWS)
        return _of(request).page(_question(params), _whole(params, "offset"), limit)

    def facets(request: Request) -> Json:
        return {"facets": _of(request).facets(_question(request.query_params))}

    def rollout(request: Request) -> Json:
        opened, rollout_id = _of(request), request.path_params["rollout"]
        around = opened.neighbours(_question(request.query_params), rollout_id)
        return opened.rollout(rollout_id) | {"around": around}

    def tokens_of(request: Request) -> Json:
        opened = _of(request)
        return tokens(opened, library.pieces(opened), request.path_params["rollout"])

    def sql(request: Request) -> Json:
        opened, query = _of(request), request.query_params
        ask = opened.answer if "page" in query else opened.ask
        matches = ask(query.get("q", ""), rows=SQL_ROWS + 1)
        return {"rows": matches[:SQL_ROWS], "more": len(matches) > SQL_ROWS}

    async def events(request: Request) -> Response:
        """Streams the run's state now and after each change of it or its service, at 1 Hz."""
        opened = await run_in_threadpool(_of, request)

        async def changes() -> AsyncIterator[bytes]:
            sent = b""
            while not await request.is_disconnected():
                now = orjson.dumps(
                    await run_in_threadpool(_now, opened, library.service), default=plain
                )
                if now != sent:
                    yield b"data: " + now[:-1] + b',"at":%.1f}\n\n' % time.time()
                sent = now
                await asyncio.sleep(EVENTS_S)

        return StreamingResponse(changes(), media_type="text/event-stream")

    async def note(request: Request) -> Response:
        body = await request.body()
        if len(body) > BODY_BYTES:
            return _refusal(UserError(f"{len(body)} bytes", f"at most {BODY_BYTES}"))
        try:
            annotation = dict(orjson.loads(body))
        except (orjson.JSONDecodeError, TypeError, ValueError):
            return _refusal(UserError("a body that is no JSON object", "rollout_id and label"))
        return await run_in_threadpool(_answer, lambda request: say(request, annotation), request)

    def say(request: Request, annotation: dict[str, Json]) -> Json:
        opened = _of(request)
        try:
            annotate(opened.stored, [annotation], author=author)
        except StorageError as error:
            raise UserError(str(error), "a run directory that can be written") from None
        return {"annotations": opened.rollout(int(annotation["rollout_id"]))["annotations"]}

    def _of(request: Request) -> Opened:
        return library.open(request.path_params["run"])

    api = "/api/runs/{run}"
    routes = {
        "/api/runs": runs,
        "/api/difference": difference_of,
        api: run,
        f"{api}/spark": spark,
        f"{api}/provenance": provenance,
        f"{api}/figures/{{name}}": figure,
        f"{api}/curves/{{axis}}": curves_of,
        f"{api}/rows": rows,
        f"{api}/facets": facets,
        f"{api}/rollouts/{{rollout:int}}": rollout,
        f"{api}/rollouts/{{rollout:int}}/tokens": tokens_of,
        f"{api}/sql": sql,
    }
    app = Starlette(
        routes=[
            *(Route(path, partial(_answer, handler)) for path, handler in routes.items()),
            Route(f"{api}/annotations", note, methods=["POST"]),
            Route(f"{api}/events", events),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ]
    )
    return RequestGuard(app, token, hosts)


class Listening(NamedTuple):
    url: str
    """With the token."""
    library: Library
    server: uvicorn.Server
    listener: socket.socket

    async def serve(self) -> None:
        """Serve until a signal comes, or `server.should_exit`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_in_threadpool(self.library.warm))
            await self.server.serve(sockets=[self.listener])


def listen(library: Library, port: int, author: str) -> Listening:
    """Take a port of this host. Raises UserError when it is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(f"port {port}: {error.strerror}", "a free one, or 0 for any") from None
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(16)
    hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
    app = create_app(library, token, hosts, author)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    return Listening(f"http://127.0.0.1:{port}/#token={token}", library, server, listener)


def _now(opened: Opened, service: Callable[[], Json]) -> Json:
    """Totals of a run, and what its service says of itself if one is there."""
    opened.refresh()
    now: dict[str, Json] = {"totals": opened.answer(LIVE)[0], "service": None}
    try:
        now["service"] = service()
    except ProrlError as error:
        now["silent"] = f"Only what is stored: {str(error).partition(';')[0][:300]}"
    return now


def plain(value: object) -> int | float | str:
    """Returns a sum of DuckDB's as a number, and what else JSON lacks as text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def _answer(handler: Callable[[Request], Json], request: Request) -> Response:
    try:
        body = orjson.dumps(handler(request), default=plain, option=orjson.OPT_SERIALIZE_NUMPY)
    except ProrlError as error:
        return _refusal(error)
    return Response(body, media_type="application/json")


def _refusal(error: ProrlError) -> Response:
    kinds = (
        *((ForbiddenError, 403), (NotFoundError, 404)),
        *((UserError, 422), (UnavailableError, 503)),
    )
    status = next((status for kind, status in kinds if isinstance(error, kind)), 500)
    body = orjson.dumps({"error": str(error)[:2000]})
    return Response(body, status, media_type="application/json")


def _question(params: QueryParams) -> Question:
    order, words = params.get("order") or "rollout_id", params.get("words", "")
    return Question(params.get("where", ""), order, "down" in params, words)


def _whole(params: QueryParams, name: str, default: int = 0) -> int:
    text = params.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise UserError(f"{name} {text[:40]!r}", "a whole number from 0 on")
    return int(text)
