"""Workers: who is there, what they hold, where they are reached.

A closed control stream is a death, at once. A worker that leaves in order says so first, or is
asked to (`drain`): what it gives back then is charged to nobody.

After a gateway's restart workers say `hello` with what they hold; so does a worker whose stream
broke. What nobody claims within the grace is leased again. A `hello` under a name that is taken
replaces that worker: what the newcomer holds stays, the rest is lost. A RUN worker that keeps a
journal is waited for: its next life claims what the journal holds, and gets what is still current
and in nobody else's hands.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from prorl.control import Claim, ControlRow, Drain, Endpoints, Hello, Welcome
from prorl.errors import FencedError, NotFoundError, UserError
from prorl.limits import Clock
from prorl.service import messages
from prorl.service.commits import Commits
from prorl.service.images import told
from prorl.service.journal import Journal
from prorl.service.lifecycle import Event, EventKind
from prorl.service.preemption import Preemption
from prorl.service.rollouts import Rollouts
from prorl.service.state import (
    IN_HAND,
    REMOTE_GRACE_S,
    ROLES,
    RolloutRecord,
    State,
    WorkerRecord,
)
from prorl.types import AttemptKey

CLAIM_GRACE_S = 2.0
"""How long an attempt waits to be claimed after its lease stream or the gateway was lost."""

REMEMBERED_LIVES = 1024

HUSHED_S = 3.0
"""A worker that said something each half second and then nothing for this long gets nothing new,
and what it has not taken goes to others. Being wrong costs a row that is worked on twice.
"""

FROZEN_S = 20.0
"""A worker that said something each half second or two and then nothing for this long is frozen."""


AWAY_S, LEAST_GRACE_S = 25.0, 5.0
"""A worker of another host of which nothing was heard for so long has lost what it held, however
late the end of its stream was noticed; but it has at least the second time to come back.
"""


class _Away(NamedTuple):
    """A worker whose stream has ended, and what is its own within the grace."""

    incarnation: str
    held: list[RolloutRecord]
    until: float


class Workers:
    """The workers of a service."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        rollouts: Rollouts,
        commits: Commits,
        preemption: Preemption,
        clock: Clock,
    ) -> None:
        self._state, self._journal, self._rollouts = state, journal, rollouts
        self._commits, self._preemption, self._clock = commits, preemption, clock
        self._lives: dict[str, str] = {}
        """Last incarnation of each name, the one that came longest ago first; of those that are not
        here at most `REMEMBERED_LIVES`.
        """
        self._superseded: dict[str, None] = {}
        """Earlier ones, oldest first."""
        self._away: dict[str, _Away] = {}
        """What workers that may come back held when their streams ended."""
        self._came_at: float | None = None
        """When the last hello was heard."""

    @property
    def num_away(self) -> int:
        """How many may still come back to what they held."""
        return len(self._away)

    @property
    def num_remembered(self) -> int:
        """Of how many names the last life is known."""
        return len(self._lives)

    def all_came(self, quiet_s: float) -> bool:
        """Whether workers have come, and none for so long.

        After a restart all come together, as fast as machine and network allow.
        """
        return self._came_at is not None and self._clock() - self._came_at >= quiet_s

    def hello(self, session: int, row: ControlRow) -> WorkerRecord:
        """A worker has come, or come back.

        Raises UserError for one that we cannot speak with, FencedError for an earlier life of a
        name that has a later one.
        """
        said = row.read_hello("a worker's hello")
        _check_role(said)
        worker = self._record(session, said)
        self._check_life(worker)
        self._came_at = self._clock()
        earlier = self._state.workers.get(worker.name)
        self._state.workers[worker.name] = worker
        welcome = self._take_over(worker, earlier, said)
        self._welcome(worker, ControlRow.of(welcome, re=row.seq))
        self._preemption.came(worker, said.suspended)
        return worker

    def _take_over(
        self, worker: WorkerRecord, earlier: WorkerRecord | None, said: Hello
    ) -> Welcome:
        """Settle what a worker holds and claims, and what its earlier life held."""
        refused = self._claim(worker, said.held)
        adopted, elsewhere = self._adopt(worker, said.claims)
        if earlier is not None:
            self._replace(earlier, worker)
        self._not_claimed(worker)
        worker.endpoints = self._state.endpoints_of(worker)
        return Welcome(
            worker=worker.name,
            endpoints=worker.endpoints,
            refused=tuple(refused),
            adopted=tuple(adopted),
            elsewhere=tuple(elsewhere),
        )

    def _record(self, session: int, said: Hello) -> WorkerRecord:
        return WorkerRecord(
            name=said.worker,
            session=session,
            incarnation=said.incarnation,
            role=said.role,
            node=said.node,
            pid=said.pid,
            location=said.location,
            slots=said.slots,
            seen_at=self._clock(),
            remote=said.remote,
            leaving=said.leaving,
            resumes=said.resumes,
            images=told(said.images),
            home=said.home,
        )

    def _welcome(self, worker: WorkerRecord, welcome: ControlRow) -> None:
        """Tell a worker that it is known, and the versions; the store gets a snapshot as well."""
        self._journal.send(worker, welcome)
        for run in self._state.open.values():
            self._journal.send(worker, messages.version_row(run))
        if worker.role == "store":
            self._journal.snapshot(worker)
        self._tell_endpoints()

    def _not_claimed(self, worker: WorkerRecord) -> None:
        """It has come back without these: nobody needs to wait for them much longer.

        The same life may have handed them on meanwhile to a worker that comes back later: a moment
        on this host, and from afar each stream waits for its own connection. A lease that it never
        took was lost on the way to it, which is nobody's fault.
        """
        away = self._away.pop(worker.name, None)
        grace_s = REMOTE_GRACE_S if worker.remote else CLAIM_GRACE_S
        for record in away.held if away else ():
            if record.holders or record.life.state not in IN_HAND:
                continue
            if away and away.incarnation != worker.incarnation:
                self._rollouts.lost(record)
            else:
                end = EventKind.LOST if record.taken else EventKind.RETURN
                self._rollouts.await_claim(record, grace_s, end, sooner=True)

    def _claim(self, worker: WorkerRecord, held: Iterable[AttemptKey]) -> list[AttemptKey]:
        refused: list[AttemptKey] = []
        for key in held:
            record = self._rollouts.find(key.run_id, key.rollout_id)
            if record is None or record.key != key or record.life.state not in IN_HAND:
                refused.append(key)
            elif worker.role == "store":
                self._commits.reserve(worker, [key])
            else:
                self._rollouts.started(worker, record, key.attempt, worker.role)
        return refused

    def _adopt(
        self, worker: WorkerRecord, claims: Iterable[Claim]
    ) -> tuple[list[Claim], list[AttemptKey]]:
        """Attempts of an earlier life that go on here, and those that somebody else runs.

        Nobody else runs the first: they go on in a new life.
        """
        adopted, elsewhere = list[Claim](), list[AttemptKey]()
        for claim in claims:
            record = self._rollouts.find(claim.run_id, claim.rollout_id)
            if record is None:
                continue
            if any(self._runs(other, worker) for other in record.holders):
                if record.key == claim.key:
                    elsewhere.append(claim.key)
                continue
            event = Event(kind=EventKind.ADOPT, attempt=claim.attempt, epoch=claim.epoch)
            if self._rollouts.apply(record, event):
                self._rollouts.started(worker, record, claim.attempt, worker.role)
                adopted.append(claim._replace(epoch=record.life.epoch))
        return adopted, elsewhere

    @staticmethod
    def _runs(holder: WorkerRecord, claimant: WorkerRecord) -> bool:
        return holder.role == claimant.role and holder.name != claimant.name

    def _check_life(self, worker: WorkerRecord) -> None:
        """A frozen process may wake up and dial again after a later life of its name has come."""
        if worker.incarnation in self._superseded:
            raise FencedError(f"another life of worker {worker.name!r} has taken its place")
        last = self._lives.pop(worker.name, worker.incarnation)
        if last != worker.incarnation:
            self._superseded[last] = None
            while len(self._superseded) > REMEMBERED_LIVES:
                del self._superseded[next(iter(self._superseded))]
        self._lives[worker.name] = worker.incarnation
        if len(self._lives) > REMEMBERED_LIVES:
            absent = (name for name in self._lives if name not in self._state.workers)
            for name in list(islice(absent, len(self._lives) - REMEMBERED_LIVES)):
                if name != worker.name:
                    del self._lives[name]

    def current(self, worker: WorkerRecord) -> bool:
        """Whether this session is its worker's present one: no other can change anything."""
        return self._state.workers.get(worker.name) is worker

    def _replace(self, earlier: WorkerRecord, worker: WorkerRecord) -> None:
        """Who comes back before its broken stream was noticed was away, too."""
        same_life, held = earlier.incarnation == worker.incarnation, list(earlier.held)
        if same_life:
            self._away[worker.name] = _Away(worker.incarnation, held, self._clock())
        for record in held:
            self._rollouts.leave(record, earlier, CLAIM_GRACE_S if same_life else 0.0)

    def gone(self, worker: WorkerRecord) -> None:
        """Its control stream has ended: everything that only it held is lost.

        At once or, where only the network may have failed, unless it comes back within its grace.
        """
        if not self.current(worker):
            return
        del self._state.workers[worker.name]
        held, grace_s = list(worker.held), self._grace_s(worker)
        if grace_s:
            until = self._clock() + grace_s
            self._away[worker.name] = _Away(worker.incarnation, held, until)
        for record in held:
            self._rollouts.leave(record, worker, grace_s)
        self._tell_endpoints()

    def _grace_s(self, worker: WorkerRecord) -> float:
        """A host that is cut off says nothing, and its streams end long after."""
        if not worker.remote:
            return worker.grace_s
        unheard_s = self._clock() - worker.seen_at
        return min(worker.grace_s, max(LEAST_GRACE_S, AWAY_S - unheard_s))

    def forget(self) -> None:
        """What those held whose grace is over is their own no more."""
        now = self._clock()
        for name in [name for name, away in self._away.items() if away.until < now]:
            del self._away[name]

    def drain(self, node: str, deadline_s: float | None, reason: str) -> list[WorkerRecord]:
        """Ask every worker of a node to leave, again if need be; who they are.

        Raises NotFoundError for a node of which no worker is there.
        """
        asked = [w for w in self._state.workers.values() if w.node == node and w.role != "store"]
        if not asked:
            known = sorted({w.node for w in self._state.workers.values() if w.role != "store"})
            raise NotFoundError(f"no node {node!r} works here; those that do: {', '.join(known)}")
        for worker in asked:
            worker.leaving = True
            row = ControlRow.of(Drain(deadline_s=deadline_s, reason=reason))
            self._journal.send(worker, row)
        self._journal.urgent = True
        return asked

    def silent(self) -> list[WorkerRecord]:
        """Workers that used to speak and do not any more."""
        now = self._clock()
        return [w for w in self._state.workers.values() if w.stats and now - w.seen_at > FROZEN_S]

    def hushed(self, passed_s: float) -> list[WorkerRecord]:
        """Workers of this host that are silent, `passed_s` after the last call; each once a second.

        The time in which we listened counts, not the clock's: when we were stopped ourselves, the
        silence of others says nothing. Of another host a blip of the network says nothing either.
        """
        found = []
        for worker in self._state.workers.values():
            if worker.stats and not worker.remote:
                before, worker.quiet_s = worker.quiet_s, worker.quiet_s + passed_s
                if worker.quiet_s >= HUSHED_S and int(before) < int(worker.quiet_s):
                    found.append(worker)
        return found

    def _tell_endpoints(self) -> None:
        """Tell each worker whose upstreams have changed.

        To tell everybody everything grows with the square of the nodes.
        """
        for worker in self._state.workers.values():
            endpoints = self._state.endpoints_of(worker)
            if endpoints != worker.endpoints:
                worker.endpoints = endpoints
                self._journal.send(worker, ControlRow.of(Endpoints(locations=endpoints)))
        self._journal.urgent = True


def _check_role(said: Hello) -> None:
    """Raises UserError for a worker without a name, or with a role that is none."""
    if said.role not in ROLES or not said.worker:
        raise UserError(
            f"hello of {said.worker!r} with role {said.role!r}",
            f"a name and one of {', '.join(ROLES)}",
        )
