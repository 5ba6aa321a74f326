"""`GuestBroker`: what the guests of one RUN worker share: turns at starting, and work for those
elsewhere.

A guest that RUN starts waits for its turn, at nobody's expense: two hundred interpreters that begin
at once would spend each other's time. A guest that comes from elsewhere leases an attempt, over
HTTP (`prorl.agents.guest_broker_server`); attempts wait for one at nobody's expense, too, and
without a slot of RUN's: the gateway leases only so many rows ahead of a run's guests. A lease is
one attempt's and ends with it, whoever ends that. A guest that is silent for `SILENT_S` has lost
it, and attempt + 1 is offered anew. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from os import cpu_count
from typing import TYPE_CHECKING

import orjson

from prorl import exact_json
from prorl.errors import RolloutError, UserError
from prorl.linux.guest import MAX_REWARD_BYTES
from prorl.net.bearer import EVERYTHING, Keys, TokenGrant, keys_of
from prorl.net.join import SERVICE_FILE
from prorl.net.tls import LiveCredentials
from prorl.types import FailureCode, Json
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from aiohttp import web

    from prorl.config import ServiceConfig
    from prorl.limits import Deadline
    from prorl.net.tls import AnyCredentials
    from prorl.types import AttemptKey

SILENT_S = wait_limit_s("guest.silent")
MAX_LOG = 8000
"""Letters of a guest's log that are kept, its last: as of a guest that RUN starts."""
START_S = wait_limit_s("guest.start")
REMEMBERED = 4096
"""Digests of outcomes, so that one that is said twice is answered twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestWork:
    """An attempt that RUN lends to guests of one name."""

    name: str
    key: AttemptKey
    task: dict[str, Json]
    deadline: Deadline
    """It is paused while no guest has the attempt."""
    queue_s: float
    """The seconds that the attempt may wait for a guest."""
    environment: Callable[[str, str], Mapping[str, str]]
    """(base URL, key) -> the variables by which a guest's programs find the policy."""
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    """Answers the guest's model calls."""


@dataclass(eq=False)
class GuestLease:
    """An attempt that a guest plays, or may."""

    name: str
    run: str
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    offer: dict[str, Json]
    outcome: asyncio.Future[dict[str, Json]] = field(default_factory=asyncio.Future)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    alive_at: float = 0.0
    asking: int = 0
    """Requests that are being answered."""

    def note_activity(self) -> None:
        self.alive_at = asyncio.get_running_loop().time()


class GuestBroker:
    """Offers attempts to guests. `at`: host, port, URL for guests from elsewhere; without it none
    come.

    Keys of guest leases are made of `secret`, so that the next incarnation still knows who had one.
    """

    def __init__(
        self,
        at: tuple[str, int, str] | None = None,
        keys: Keys | None = None,
        secret: str = "",
        credentials: AnyCredentials | None = None,
        waits: Callable[[AttemptKey, bool], None] = lambda key, waits: None,
    ) -> None:
        self.at, self.credentials, self._waits = at, credentials, waits
        self.keys = keys or Keys(secrets.token_hex())
        self._secret = (secret or secrets.token_hex()).encode()
        self._starts = asyncio.Semaphore(2 * (cpu_count() or 1))
        self._offered: list[GuestLease] = []
        self._leased: dict[str, GuestLease] = {}
        self._outcome_digests: OrderedDict[str, bytes] = OrderedDict()
        self._news = asyncio.Condition()

    @classmethod
    def of(
        cls, config: ServiceConfig, worker: str, waits: Callable[[AttemptKey, bool], None]
    ) -> GuestBroker:
        credentials = LiveCredentials(config.tls_dir / SERVICE_FILE) if config.listener else None
        return cls(config.guests_at(worker), keys_of(config), config.token, credentials, waits)

    @property
    def waits_for(self) -> dict[str, dict[str, int]]:
        """Returns the number of attempts that wait for guests, by run and the guest's name."""
        counts: dict[str, dict[str, int]] = {}
        for lease in self._offered:
            names = counts.setdefault(lease.run, {})
            names[lease.name] = names.get(lease.name, 0) + 1
        return counts

    # ---- of RUN

    @asynccontextmanager
    async def starting(
        self, deadline: Deadline, first_call: asyncio.Future[None]
    ) -> AsyncIterator[None]:
        """A turn at starting a guest, which ends with its first call, or after START_S."""
        deadline.pause()
        try:
            await self._starts.acquire()
        finally:
            deadline.resume()
        over = asyncio.ensure_future(asyncio.wait({first_call}, timeout=START_S))
        over.add_done_callback(lambda _: self._starts.release())
        try:
            yield
        finally:
            over.cancel()

    async def lend(self, work: GuestWork) -> dict[str, Json]:
        """The outcome that a guest reports of an attempt. Raises RolloutError."""
        if self.at is None:
            text = f"guest {work.name!r} comes from elsewhere, and this RUN has no `guests` port"
            raise RolloutError(FailureCode.STAGE_ERROR, text)
        url, key = self.at[2], self.key(lease_id := secrets.token_hex(8))
        run, rollout, attempt = work.key
        offer = {"lease": lease_id, "run": run, "rollout": rollout, "attempt": attempt}
        offer |= {"task": work.task, "base_url": f"{url}/v1", "key": key}
        offer |= {"env": work.environment(url, key), "deadline_s": work.deadline.remaining_s}
        lease = GuestLease(work.name, run, work.answer, offer)
        work.deadline.pause()
        self._offered.append(lease)
        self._waits(work.key, True)
        try:
            async with self._news:
                self._news.notify_all()
            await asyncio.wait_for(lease.accepted.wait(), work.queue_s)
        except TimeoutError:
            text = f"no guest {work.name!r} came for {work.queue_s:g} s"
            raise RolloutError(FailureCode.STAGE_ERROR, text) from None
        finally:
            work.deadline.resume()
            self._waits(work.key, False)
            if lease in self._offered:
                self._offered.remove(lease)
        try:
            return await self._outcome(lease)
        finally:
            self._leased.pop(lease_id, None)

    async def _outcome(self, lease: GuestLease) -> dict[str, Json]:
        now = asyncio.get_running_loop().time
        while not lease.outcome.done():
            remaining_s = SILENT_S if lease.asking else lease.alive_at + SILENT_S - now()
            if remaining_s <= 0:
                text = f"guest {lease.name!r} was silent for {SILENT_S:g} s"
                raise RolloutError(FailureCode.EVAL_FAILED, text)
            await asyncio.wait({lease.outcome}, timeout=remaining_s)
        return lease.outcome.result()

    # ---- of guests

    def key(self, lease: str) -> str:
        """Proves that a lease was given, also when it is no more."""
        return f"{lease}.{hmac.digest(self._secret, lease.encode(), hashlib.sha256).hex()}"

    def lease_of(self, lease_id: str) -> GuestLease | None:
        return self._leased.get(lease_id)

    async def wait_for(self, name: str, wait_s: float, grant: TokenGrant) -> None:
        """Wait until there is something for guests of this name, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: self._open(name, grant))

    def take(self, name: str, slots: int, grant: TokenGrant = EVERYTHING) -> list[GuestLease]:
        """Give attempts away, the oldest first."""
        accepted = self._open(name, grant)[:slots]
        for lease in accepted:
            self._offered.remove(lease)
            self._leased[lease.offer["lease"]] = lease
            lease.note_activity()
            lease.accepted.set()
        return accepted

    def _open(self, name: str, grant: TokenGrant) -> list[GuestLease]:
        mine = (lease for lease in self._offered if lease.name == name)
        return [lease for lease in mine if not grant.runs or lease.run in grant.runs]

    def end(self, lease_id: str, how: str, body: dict[str, Json]) -> int:
        """Ends an attempt with its guest's outcome and returns the HTTP status of the answer.

        Raises UserError for more than an outcome may hold.
        """
        outcome = exact_json.dumps([how, body], option=orjson.OPT_SORT_KEYS)
        digest = hashlib.blake2b(outcome, digest_size=16).digest()
        if (before := self._outcome_digests.get(lease_id)) is not None:
            return 200 if before == digest else 409
        if how == "failed":
            body = {"failed": body.get("code", "infra"), "message": body.get("message", "")}
        log, reward = body.pop("log", ""), exact_json.dumps(body).decode()
        if len(reward) > MAX_REWARD_BYTES:
            raise UserError("a longer outcome", f"at most {MAX_REWARD_BYTES} bytes")
        lease = self._leased.pop(lease_id, None)
        if lease is None:
            return 410
        log = log[-MAX_LOG:] if isinstance(log, str) else ""
        lease.outcome.set_result({"exit_code": 0, "reward": reward, "output": log})
        self._outcome_digests[lease_id] = digest
        while len(self._outcome_digests) > REMEMBERED:
            self._outcome_digests.popitem(last=False)
        return 200
