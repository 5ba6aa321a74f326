"""`ControlClient`: a worker's side of the control protocol (`prorl/control.py`).

    on = {Kind.CANCEL: ..., Kind.ENDPOINTS: ...} client = ControlClient(network,
    config.gateway_flight, this_incarnation(...), attempts=..., on=on) client.start() await
    client.welcomed.wait() client.emit(Started(), key, stage="run")    # fire and forget; events
    travel together reserved = await client.request(Reserve(attempts=keys))

The client dials for ever: after a loss it opens a fresh session (seq from 1, `hello` with what is
held then) and sends requests that have no reply again, in their order. Events of a lost session are
not sent again, and events without a session are dropped: `hello` says what is held, and the gateway
has already decided what it could not see. The endpoints of a `welcome` go to the `endpoints`
handler, too. `stats` is the heartbeat. Pending requests are bounded by their callers; a reply with
a code raises the error of `_ERRORS`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
from msgspec import structs

from prorl.control import (
    Claim,
    ControlRow,
    Endpoints,
    Hello,
    Kind,
    Leaving,
    Payload,
    Problem,
    ReplyT,
    Request,
    Stats,
    Welcome,
    from_batch,
    to_batch,
)
from prorl.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    NotFoundError,
    ProrlError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
)
from prorl.flight.credit import NO_KEY
from prorl.flight.pacing import BACK_S, Paced, backoff_s
from prorl.protocols import Channel, Network
from prorl.schema import CONTROL
from prorl.schema.fields import SCHEMA_VERSION
from prorl.timing import FAR_HEARTBEAT_S, HEARTBEAT_S
from prorl.types import AttemptKey
from prorl.waits import wait_limit_s

PATH = "control"

REFUSALS = (UnauthorizedError, ForbiddenError)
"""The errors that do not pass by themselves: our certificate or token is not, or no longer, one of
theirs.
"""

REFUSED_S = wait_limit_s("flight.refused")

log = logging.getLogger("prorl.flight")

Handler = Callable[[ControlRow], None]


def send_rows(channel: Channel, rows: Sequence[ControlRow]) -> None:
    """Send rows to `from_batch` at the other end: as they are where that is in this process."""
    channel.send(tuple(rows) if channel.is_local else to_batch(rows))


def this_incarnation(**fields: Any) -> Hello:
    """Makes the first message of a worker's new incarnation, which it sends on every stream."""
    return Hello(
        incarnation=uuid.uuid4().hex,
        host=os.uname().nodename,
        pid=os.getpid(),
        schema_version=SCHEMA_VERSION,
        **fields,
    )


class ControlClient:
    """One worker's control stream, kept open. `attempts` and `stats` give them by its roles.

    All methods and handlers run on one event loop; handlers must not block.
    """

    def __init__(
        self,
        network: Network,
        location: str,
        identity: Hello,
        *,
        attempts: Callable[[], Mapping[str, Iterable[AttemptKey]]] = dict,
        stats: Callable[[], Mapping[str, Stats]] = dict,
        claims: Callable[[], Iterable[Claim]] = tuple,
        on: Mapping[Kind, Handler],
    ) -> None:
        self._network, self._location, self._identity = network, location, identity
        self._attempts, self._stats, self._on = attempts, stats, on
        self._claims = claims
        self._channel: Channel | None = None
        self._seq = 0
        self._outgoing: list[ControlRow] = []
        self._paced = Paced(self._flush, BACK_S)
        self._pending: dict[int, tuple[ControlRow, asyncio.Future[ControlRow]]] = {}
        self._unsent = count(-1, -1)
        """Places in `_pending` of requests that have no seq yet."""
        self._keeping: asyncio.Task[None] | None = None
        self._alone_since = 0.0
        self.welcomed = asyncio.Event()
        """Set while the gateway knows us."""

    def start(self) -> None:
        """Dial in the background, and again after every loss, until `close`."""
        self._alone_since = asyncio.get_running_loop().time()
        self._keeping = asyncio.ensure_future(self._keep())

    @property
    def alone_s(self) -> float:
        """Returns the seconds for which there has been no session; 0 in one."""
        now = asyncio.get_running_loop().time()
        return 0.0 if self._channel is not None else now - self._alone_since

    def announce(self, location: str) -> None:
        """Notes where this worker's edge is served, for the next hello."""
        self._identity = structs.replace(self._identity, location=location)

    def leave(self) -> None:
        """Tell the gateway, now and with every later hello, that this worker leaves in order."""
        self._identity = structs.replace(self._identity, leaving=True)
        self.emit(Leaving())

    async def wait(self) -> None:
        """Wait until it is closed. Raises what a handler raised: somebody must wait, or a bug ends
        as silence.
        """
        if self._keeping is not None:
            await asyncio.shield(self._keeping)

    async def close(self) -> None:
        """Send what was said, fail open requests; idempotent."""
        if self._keeping is not None:
            self._paced.now()
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        for _, waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError("the control stream is closed"))

    def emit(
        self, payload: Payload, key: AttemptKey = NO_KEY, *, stage: str = "", code: str = ""
    ) -> None:
        """Tell the gateway; dropped while there is no session."""
        if self._channel is not None:
            run_id, rollout_id, attempt = key
            self._say(
                ControlRow.of(
                    payload,
                    run_id=run_id,
                    rollout_id=rollout_id,
                    attempt=attempt,
                    stage=stage,
                    code=code,
                )
            )

    async def request(self, request: Request[ReplyT], *, run_id: str = "") -> ReplyT:
        """Ask the gateway and wait for its reply, over as many sessions as it takes."""
        row = ControlRow.of(request, run_id=run_id)
        waiting: asyncio.Future[ControlRow] = asyncio.get_running_loop().create_future()
        if self._channel is not None:
            row = self._say(row)
            self._pending[row.seq] = (row, waiting)
            self._paced.now()
        else:
            self._pending[next(self._unsent)] = (row, waiting)
        try:
            answer = await waiting
        finally:
            self._pending = {
                seq: entry for seq, entry in self._pending.items() if entry[1] is not waiting
            }
        if answer.code:
            raise _error(answer)
        return answer.read(type(request).reply)  # type: ignore[return-value]  # by its declaration

    def _say(self, row: ControlRow) -> ControlRow:
        self._seq += 1
        row = replace(row, seq=self._seq)
        self._outgoing.append(row)
        self._paced.ask()
        return row

    def _flush(self) -> None:
        rows, self._outgoing = self._outgoing, []
        if rows and self._channel is not None:
            send_rows(self._channel, rows)

    async def _keep(self) -> None:
        tries = 0
        while True:
            hello = msgspec.to_builtins(self._identity)
            try:
                channel = await self._network.dial(self._location, PATH, hello, CONTROL, CONTROL)
            except ProrlError as error:
                if isinstance(error, REFUSALS) and self.alone_s > REFUSED_S:
                    raise
                log.debug("cannot dial the gateway: %s", error)
                await asyncio.sleep(backoff_s(self._location, tries))
                tries += 1
            else:
                tries = 0
                await self._session(channel)

    async def _session(self, channel: Channel) -> None:
        self._open(channel)
        beating = asyncio.ensure_future(self._beat())
        beating.add_done_callback(_raise_what_it_raised)
        try:
            while (batch := await channel.receive()) is not None:
                for row in from_batch(batch):
                    self._hear(row)
        finally:
            beating.cancel()
            self._channel = None
            self._alone_since = asyncio.get_running_loop().time()
            self._outgoing.clear()
            self.welcomed.clear()
            await channel.close()

    def _open(self, channel: Channel) -> None:
        self._channel = channel
        self._seq = 0
        attempts = {role: tuple(keys) for role, keys in self._attempts().items()}
        hello = structs.replace(self._identity, in_flight=attempts, claims=tuple(self._claims()))
        self._say(ControlRow.of(hello))
        unanswered = list(self._pending.values())
        self._pending = {}
        for row, waiting in unanswered:
            again = self._say(row)
            self._pending[again.seq] = (again, waiting)

    async def _beat(self) -> None:
        pause_s = HEARTBEAT_S
        while True:
            await asyncio.sleep(pause_s)
            for role, stats in self._stats().items():
                self.emit(stats, stage=role)
            pause_s = FAR_HEARTBEAT_S if self._identity.remote else HEARTBEAT_S

    def _hear(self, row: ControlRow) -> None:
        match row.kind:
            case Kind.REPLY:
                _, waiting = self._pending.get(row.re, (row, None))
                if waiting is not None and not waiting.done():
                    waiting.set_result(row)
            case Kind.WELCOME:
                welcome = row.read(Welcome)
                if welcome.superseded:
                    raise FencedError(
                        f"another incarnation of {self._identity.worker} has taken our place"
                    )
                self._tell(row)
                self._tell(ControlRow.of(Endpoints(locations=welcome.endpoints)))
                self.welcomed.set()
            case _:
                self._tell(row)

    def _tell(self, row: ControlRow) -> None:
        handler = self._on.get(row.kind)
        if handler is not None:
            handler(row)


def _raise_what_it_raised(task: asyncio.Future[None]) -> None:
    """Pass an error on to the loop's exception handler, which ends the process."""
    if not task.cancelled():
        task.result()


_ERRORS = {
    "conflict": ConflictError,
    "fenced": FencedError,
    "not_found": NotFoundError,
    "storage": StorageError,
}


def _error(row: ControlRow) -> ProrlError:
    message = row.read(Problem).message or row.code
    kind = _ERRORS.get(row.code)
    return kind(message) if kind else UnavailableError(f"{row.code}: {message}")
